"""Ranks that are killed, at a random moment of each phase of training: what the others do, and what is left behind.

A run is right if the surviving rank ends with an error that says that a rank is gone, within the timeout of the process
group and some seconds, if no process that a rank has started outlives it by ``ORPHAN_S`` seconds, if the newest
checkpoint loads, in plain PyTorch, with the weights of its step, and if each file of the report is whole.
"""

import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from filelock import FileLock
from torch import Tensor, optim

from examples import checkpoints
from simplefsdp import BucketPlan, measure, simple_fsdp
from simplefsdp.hardware.cache import cache_path
from simplefsdp.hardware.profile import load_profile
from tests.models import PROFILE
from tests.ranks import METHOD, be_frugal
from tests.soak.differences import WIDTH, net

TIMEOUT_S = 10
"""Timeout of the process group."""
LIMIT_S = 5 * TIMEOUT_S + 15
"""Seconds after which a survivor must have ended: gloo waits five timeouts for a rank that dies as they connect."""
CALIBRATION_S = 150
"""Seconds that a survivor may take longer where it measures the machine after the other rank's death."""
ORPHAN_S = 15
STEPS = 4
"""Steps of the optimizer in one life."""
CLEAR = r"peer|\brank \d|[Tt]imed? ?out"
MARK = "SIMPLEFSDP_SOAK"
"""Environment variable by which processes that a rank has started are found."""


class Kill(NamedTuple):
    phase: str
    signal: int
    odd: int
    """The rank that is killed."""
    is_compiled: bool
    share: float
    """The moment, as a part of the phase's duration."""


class _Ways(NamedTuple):
    is_compiled: tuple[bool, ...]


PHASES = {
    "wrap": _Ways((False, True)),
    "load": _Ways((False, True)),
    "compile": _Ways((True,)),
    "forward": _Ways((False, True)),
    "backward": _Ways((False, True)),
    "reduction": _Ways((False,)),
    "step": _Ways((False, True)),
    "save": _Ways((False, True)),
    "report": _Ways((True,)),
    "calibrate": _Ways((True,)),
}


def kills() -> Iterator[Kill]:
    """Yield all kills, without end: each phase in its turn, calibration in every fifth turn as it takes a minute."""
    moments = random.Random(0)
    turn = 0
    while True:
        for phase, (ways,) in PHASES.items():
            if phase != "calibrate" or turn % 5 == 0:
                number = (signal.SIGKILL, signal.SIGTERM)[turn % 2]
                yield Kill(phase, number, turn // 2 % 2, ways[turn % len(ways)], moments.random())
        turn += 1


class _Life:
    """One rank's training, and its death if it is this rank that is killed."""

    def __init__(self, kill: Kill | None, durations: dict[str, float]):
        self.kill = kill if kill is not None and kill.odd == dist.get_rank() else None
        self.durations = durations
        """Seconds of each phase; of a training in which nobody is killed, if this one is."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self.kill is not None and self.kill.phase == name:
            threading.Timer(self.kill.share * self.durations[name], self.die).start()
        began = time.monotonic()
        yield
        if self.kill is None:
            self.durations[name] = time.monotonic() - began

    def die(self, *_: Any) -> None:
        if self.kill is not None:
            os.kill(os.getpid(), self.kill.signal)


def _live(
    rank: int, store: str, folder: Path, kill: Kill | None, is_compiled: bool, durations: dict[str, float], pipe: Any
) -> None:
    be_frugal()
    os.environ |= {MARK: store, "LOCAL_WORLD_SIZE": "2", "XDG_CACHE_HOME": str(folder / "cache")}
    timeout = timedelta(seconds=TIMEOUT_S)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
        life = _Life(kill, durations)
        _train(life, folder, is_compiled, calibrates=kill is not None and kill.phase == "calibrate")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        sys.exit(1)
    pipe.send(life.durations)


def _train(life: _Life, folder: Path, is_compiled: bool, calibrates: bool) -> None:
    with life.phase("wrap"):
        model = simple_fsdp(net())
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    with life.phase("load"):
        path = checkpoints.newest(folder)
        done = checkpoints.load(path, model, optimizer) if path else 0
    forward = model
    if is_compiled:
        options: Any = {"lower_with": "aot_eager", "plan": "auto", "report_dir": folder / "report"}
        if not calibrates:
            options["profile"] = PROFILE
        forward = torch.compile(model, backend="simplefsdp", options=options)
        with life.phase("calibrate"), life.phase("compile"):
            forward(_batch(0)).sum().backward()
        optimizer.zero_grad()
    if life.kill is not None and life.kill.phase == "reduction":
        params = [*model.parameters()]
        params[int(life.kill.share * len(params))].register_post_accumulate_grad_hook(life.die)
    for step in range(done, done + STEPS):
        with life.phase("forward"):
            loss = forward(_batch(step)).square().mean()
        with life.phase("backward"):
            loss.backward()
        with life.phase("step"):
            optimizer.step()
        optimizer.zero_grad()
        with life.phase("save"):
            checkpoints.save(folder, model, optimizer, step + 1)
    if is_compiled:
        with life.phase("report"):
            measure(lambda: forward(_batch(0)).sum().backward(), steps=3)
    if life.kill is not None:
        time.sleep(60)  # the phase took less time than when nobody was killed
    dist.barrier()


def _batch(step: int) -> Tensor:
    """Return the same batch on each rank, (4, ``WIDTH``)."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


class _Outcome(NamedTuple):
    said: list[Any]
    """By rank: its error, its durations, or ``None`` of a rank that could not say anything."""
    codes: list[int | None]
    seconds: float
    orphans: list[str]


def _run(folder: Path, kill: Kill | None, is_compiled: bool, durations: dict[str, float]) -> _Outcome:
    context: Any = multiprocessing.get_context(METHOD)
    limit = LIMIT_S + (CALIBRATION_S if kill is not None and kill.phase == "calibrate" else 0)
    with tempfile.TemporaryDirectory() as temporary:
        store = os.path.join(temporary, "store")
        pipes: list[Connection] = []
        processes = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_live, args=(rank, store, folder, kill, is_compiled, dict(durations), theirs), daemon=False
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        if kill is not None:
            processes[kill.odd].join(120)
        began = time.monotonic()
        for process in processes:
            process.join(max(0.0, began + limit - time.monotonic()))
        seconds = time.monotonic() - began
        codes = [process.exitcode for process in processes]
        said = [_said(pipe) for pipe in pipes]
        for process in processes:
            process.kill()
            process.join()
        leave = time.monotonic() + ORPHAN_S
        while (orphans := _started_by(store)) and time.monotonic() < leave:
            time.sleep(0.2)
    return _Outcome(said, codes, seconds, orphans)


def _said(pipe: Connection) -> Any:
    try:
        return pipe.recv() if pipe.poll() else None
    except EOFError:
        return None


def _started_by(store: str) -> list[str]:
    """Return the command lines of processes that ranks of this store have started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={store}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended, or is another user's
            pass
    return found


def _judge(kill: Kill, outcome: _Outcome, folder: Path) -> str:
    """Return what is wrong after a kill; empty if nothing is."""
    other = 1 - kill.odd
    if outcome.codes[kill.odd] != -kill.signal:
        return f"not killed: the process ended with {outcome.codes[kill.odd]}, {outcome.said[kill.odd]}"
    if outcome.codes[other] is None:
        return "hangs: the survivor has not ended"
    text = outcome.said[other]
    if not isinstance(text, str) or not re.search(CLEAR, text):
        return f"unclear: the survivor ended with {outcome.codes[other]} and said {text}"
    if outcome.orphans:
        return f"orphans: {outcome.orphans}"
    return _broken_file(folder)


def _broken_file(folder: Path) -> str:
    try:
        if path := checkpoints.newest(folder):
            _check_checkpoint(path)
        for file in (folder / "report").rglob("*.json"):
            json.loads(file.read_text())
        for file in (folder / "report").rglob("plan.json"):
            BucketPlan.load(file)
        for file in (folder / "cache").rglob("profile*.json"):
            load_profile(file)
        for file in (folder / "cache").rglob("*.lock"):
            with FileLock(file, timeout=0):
                pass
    except Exception as error:
        return f"broken file: {type(error).__name__}: {error}"
    return ""


def _check_checkpoint(path: Path) -> None:
    """Raise unless the checkpoint has the weights of its step, as one process computes them without this library."""
    model, expected = net(seed=1), net()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    step = checkpoints.load(path, model, optimizer)
    if path.name != f"checkpoint_{step}":
        raise AssertionError(f"{path.name} is of step {step}")
    trains = optim.SGD(expected.parameters(), lr=0.01)
    for number in range(step):
        expected(_batch(number)).square().mean().backward()
        trains.step()
        trains.zero_grad()
    for (name, found), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        difference = (found - wanted).abs().max().item()
        if not difference < 1e-4:
            raise AssertionError(f"{path.name}: {name} differs by {difference:.1e}")


def campaign(count: int) -> dict[str, Any]:
    """Kill ``count`` times; return how many runs were wrong, in which way, and how long survivors took to end."""
    wrong, seconds = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        durations: dict[bool, dict[str, float]] = {}
        for is_compiled in (False, True):
            said = _run(folder, None, is_compiled, {}).said
            assert isinstance(said[0], dict), said
            durations[is_compiled] = said[0]
        durations[True]["calibrate"] = 20.0
        for kill, _ in zip(kills(), range(count), strict=False):
            if kill.phase == "calibrate":  # the profile of a calibration before this one
                (folder / "cache" / "simplefsdp" / cache_path(torch.device("cpu"), 2).name).unlink(missing_ok=True)
            outcome = _run(folder, kill, kill.is_compiled, durations[kill.is_compiled])
            problem = _judge(kill, outcome, folder)
            print(f"{kill}: {outcome.seconds:.1f} s: {problem or outcome.said[1 - kill.odd][:150]}", flush=True)
            if kill.phase != "calibrate":
                seconds.append(outcome.seconds)
            if problem:
                wrong.append({**kill._asdict(), "problem": problem})
    return {
        "runs": count,
        "phases": len(PHASES),
        "wrong": dict(Counter(each["problem"].partition(":")[0] for each in wrong)),
        "longest_s": max(seconds, default=0.0),
        "median_s": sorted(seconds)[len(seconds) // 2] if seconds else 0.0,
        "failures": wrong,
    }

"""Real ranks for tests: processes with a gloo group that live as long as a test module."""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from simplefsdp.hardware.cache import cache_path
from simplefsdp.hardware.profile import save
from tests.models import PROFILE

DEADLINE_S = 240
METHOD = "forkserver"
"""Processes start from one that has imported what all need, and done nothing with it."""
multiprocessing.set_forkserver_preload(
    ["simplefsdp.compile.backend", "simplefsdp.analysis.measuring", "torch.distributed.checkpoint"]
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def be_frugal() -> None:
    """Leave the other core to others, and look for garbage seldom: tracing makes many objects and little garbage."""
    torch.set_num_threads(1)
    gc.set_threshold(50_000, 20, 20)


def run(command: list[str]) -> str:
    """Run a command and return what it prints. ``plan="auto"`` finds ``PROFILE``, instead of measuring for a minute."""
    with _profiles() as cache:
        environment = os.environ | {"XDG_CACHE_HOME": cache}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def torchrun(*arguments: str, ranks: int = 2) -> str:
    """Run ``torchrun --standalone --nproc-per-node ranks *arguments``; return what each rank prints, in rank order.

    The agent and the ranks are torchrun's own, but start with everything imported, as those of ``Ranks`` do. A rank
    that fails, or 300 seconds, raise ``AssertionError`` with what the ranks wrote to standard error.
    """
    with _profiles() as cache, tempfile.TemporaryDirectory() as logs:
        agent = mp.get_context(METHOD).Process(target=_agent, args=(arguments, ranks, logs, cache))
        agent.start()
        agent.join(300)
        hangs = agent.is_alive()
        agent.terminate()  # The agent ends its ranks.
        agent.join()
        printed = {name: [file.read_text() for file in sorted(Path(logs).rglob(name))] for name in _STREAMS}
    assert agent.exitcode == 0, f"{'hangs: ' if hangs else ''}{''.join(printed['stderr.log'])[-5000:]}"
    return "".join(printed["stdout.log"])


_STREAMS = ("stdout.log", "stderr.log")


def _agent(arguments: tuple[str, ...], ranks: int, logs: str, cache: str) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method=METHOD,
        logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.ALL),
    )
    elastic_launch(config, _as_main)(arguments, cache)


def _as_main(arguments: tuple[str, ...], cache: str) -> None:
    """Run ``-m module *arguments`` or ``script *arguments`` as the main program of this rank."""
    os.environ["XDG_CACHE_HOME"] = cache
    if arguments[0] == "-m":
        sys.argv = [*arguments[1:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*arguments]
        runpy.run_path(arguments[0], run_name="__main__")


@contextmanager
def _profiles() -> Iterator[str]:
    """A cache folder in which ``PROFILE`` is kept for the CPU with 2 and with 4 ranks."""
    with tempfile.TemporaryDirectory() as cache:
        folder = Path(cache, "simplefsdp")
        folder.mkdir()
        for ranks in (2, 4):
            save(PROFILE, folder / cache_path(torch.device("cpu"), ranks).name)
        yield cache


class Ranks:
    """``size`` processes; ``run(fn, *args)`` calls ``fn`` on all of them and returns their results in rank order."""

    def __init__(self, size: int, deadline_s: float = DEADLINE_S):
        self.size = size
        self.deadline_s = deadline_s
        self._start()

    def _start(self) -> None:
        context = mp.get_context(METHOD)
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            args = (rank, self.size, os.path.join(self._folder.name, "store"), theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Raises ``AssertionError`` with the traceback of the first rank that failed, or at the deadline."""
        for pipe in self._pipes:
            pipe.send((fn, args))
        results: dict[int, Any] = {}
        deadline = self.deadline_s
        while len(results) < self.size:
            pending = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
            ready: list[Any] = wait(pending, timeout=deadline)
            if not ready:
                failure = next((r for r in results.values() if isinstance(r, _Failure)), None)
                missing = [rank for rank in range(self.size) if rank not in results]
                self.close()
                self._start()
                raise AssertionError(failure.text if failure else f"ranks {missing} hang in {fn.__name__}")
            for pipe in ready:
                try:
                    results[pending[pipe]] = pipe.recv()
                except EOFError:
                    results[pending[pipe]] = _Failure(f"rank {pending[pipe]} died in {fn.__name__}")
                if isinstance(results[pending[pipe]], _Failure):
                    deadline = 10.0  # the others may wait for it in a collective
        for result in results.values():
            if isinstance(result, _Failure):
                raise AssertionError(result.text)
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


class _Failure:
    def __init__(self, text: str):
        self.text = text


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    be_frugal()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            return
        torch._dynamo.reset()
        torch.manual_seed(0)  # models that are not seeded are the same on all ranks
        try:
            result = fn(*args)
        except BaseException:
            result = _Failure(f"rank {rank}: {traceback.format_exc()}")
        pipe.send(result)


@contextmanager
def fake_group(size: int, rank: int = 0) -> Iterator[None]:
    """This process as one rank of ``size`` whose collectives return at once, with meaningless values."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()

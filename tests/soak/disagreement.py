"""Ranks that do different things: each kind of difference, planted on one rank, in fresh processes.

A run is right if every rank raises or logs an error of this library's that names a rank and the first difference,
within ``LIMIT_S`` seconds and before its optimizer has stepped. Where nobody can know before the timeout of the process
group (a rank that skips a step and goes on), the ranks that wait must end with an error.
"""

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import Ranks
from tests.soak.differences import DIFFERENCES, Trial

LIMIT_S = 10.0
TIMEOUT_S = 8.0
"""Timeout of the process groups of a run."""
DEADLINE_S = 40.0
"""Seconds after which a rank that has not come back hangs."""
MESHES = {"2 ranks": ("fully_shard", (2,)), "4 ranks": ("fully_shard", (4,)), "2 x 2 ranks": ("hybrid_shard", (2, 2))}


class Run(NamedTuple):
    """A run of the campaign."""

    difference: str
    is_compiled: bool
    mesh: str
    odd: int
    """The rank that differs."""


class Told(NamedTuple):
    """The message that one rank got, if any, and when."""

    text: str
    seconds: float
    """Since this rank reached the difference."""
    steps: int
    """Steps of its optimizer since."""
    raises: bool
    """Whether it was raised, now or later, and not only logged."""


class _Errors(logging.Handler):
    def __init__(self, level: int):
        super().__init__(level)
        self.found: list[tuple[str, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.getMessage(), time.monotonic()))


def runs() -> Iterator[Run]:
    """Yield all runs, without end: each difference on each mesh, eager and compiled, on one rank after the other."""
    turn = 0
    while True:
        for mesh, (_, shape) in MESHES.items():
            size = math.prod(shape)
            for name, difference in DIFFERENCES.items():
                for way in difference.ways:
                    yield Run(name, way == "c", mesh, (size - 1 + turn) % size)
        turn += 1


def _on_rank(run: Run) -> Told:
    mode, shape = MESHES[run.mesh]
    names = ("replicate", "shard") if len(shape) > 1 else None
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for group in {dist.group.WORLD, *mesh.get_all_groups()}:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), group)
    trial = Trial(mesh, mode, dist.get_rank() == run.odd, run.is_compiled)
    difference = DIFFERENCES[run.difference]
    errors = _Errors(logging.ERROR)
    logging.getLogger("simplefsdp").addHandler(errors)
    raised = ""
    try:
        difference.plant(trial)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    assert trial.planted_at is not None, raised
    told = raised, time.monotonic()
    while not (raised or errors.found or difference.at_timeout) and time.monotonic() < trial.planted_at + LIMIT_S:
        time.sleep(0.1)  # a rank that goes on is told while it does
    text, at = next(iter(errors.found), told)
    return Told(text, at - trial.planted_at, trial.steps, bool(raised))


def judge(run: Run, told: list[Told]) -> str:
    """Return what is wrong with a run; empty if nothing is."""
    difference = DIFFERENCES[run.difference]
    if difference.at_timeout:
        return "" if any(one.text for one in told) else "silent: no rank was told"
    for rank, one in enumerate(told):
        if not one.text:
            return f"silent: rank {rank} was told nothing"
        if one.steps > (run.is_compiled and difference.steps_when_compiled):
            return f"a wrong step: rank {rank} was told after {one.steps} steps: {one.text}"
        if not re.search(difference.told, one.text) or not re.search(r"\brank \d", one.text):
            return f"told in others' words: rank {rank}: {one.text}"
        if one.seconds > LIMIT_S:
            return f"late: rank {rank} was told after {one.seconds:.1f} s"
    return ""


def perform(run: Run) -> tuple[str, float]:
    """Return what is wrong with a run, and after how many seconds the last rank was told."""
    ranks = Ranks(math.prod(MESHES[run.mesh][1]), deadline_s=DEADLINE_S)
    try:
        told = ranks.run(_on_rank, run)
    except AssertionError as error:
        return f"{'dies' if 'died' in str(error) else 'hangs'}: {error}", DEADLINE_S
    finally:
        ranks.close()
    return judge(run, told), max(one.seconds for one in told)


def campaign(count: int) -> dict[str, Any]:
    """Perform ``count`` runs; return how many were wrong, in which way, and how long telling took."""
    wrong, seconds = [], []
    for run, _ in zip(runs(), range(count), strict=False):
        problem, took = perform(run)
        print(f"{run}: {took:.1f} s", flush=True)
        seconds.append(took)
        if problem:
            wrong.append({**run._asdict(), "problem": problem})
            print(f"{run}: {problem}", flush=True)
    return {
        "runs": count,
        "kinds": len(DIFFERENCES),
        "wrong": dict(Counter(each["problem"].partition(":")[0] for each in wrong)),
        "longest_s": max(seconds),
        "median_s": sorted(seconds)[len(seconds) // 2],
        "failures": wrong,
    }

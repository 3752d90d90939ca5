"""Gradient accumulation: a step of several micro-batches, as one rank of a rehearsed cluster, for several systems.

    python -m benchmarks.accumulation                       # four micro-batches, two networks, four minutes

Systems step in turn, forwards in one round and backwards in the next. Printed are medians, and the median over rounds
of a system's step divided by that of ``auto`` in the same round. ``switched late`` is ``auto`` where
``set_requires_gradient_sync(True)`` comes after the last forward: what was added up is then reduced at the end of the
last backward, all at once, with nothing to hide under.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.overlap import SCENARIOS, prepared
from simplefsdp.rehearsal.systems import SYSTEMS
from simplefsdp.rehearsal.timing import RecordedStep, TrainingRun, fresh_compile_cache

OURS, LATE = "auto", "switched late"
ALL = {OURS: "auto", LATE: "auto", "block": "block", "fsdp2": "fsdp2", "fsdp2-compile": "fsdp2-compile"}


def run(name: str, micro_batches: int, rounds: int) -> None:
    with prepared(SCENARIOS[name]) as (world, workload, _), fresh_compile_cache():
        accumulating = replace(workload, micro_batches=micro_batches)
        runs = [TrainingRun(each, SYSTEMS[ALL[each]], accumulating, world, ends_late=each == LATE) for each in ALL]
        found: dict[str, list[RecordedStep]] = {training_run.name: [] for training_run in runs}
        for i in range(rounds + 2):  # the first compiles
            for training_run in runs if i % 2 else runs[::-1]:
                found[training_run.name].append(training_run.step(SCENARIOS[name].network))
    print(f"\n{name}, {micro_batches} micro-batches\n")
    print("| system | step / ours | step, ms | exposed, ms | of communication |\n|---|---|---|---|---|")
    for each, steps in found.items():
        print(f"| {each} | {row(steps[2:], found[OURS][2:])} |")


def row(steps: Sequence[RecordedStep], ours: Sequence[RecordedStep]) -> str:
    def median_ms(of: Any) -> str:
        return f"{1e3 * statistics.median(map(of, steps)):.1f}"

    ratio = statistics.median(step.seconds / mine.seconds for step, mine in zip(steps, ours, strict=True))
    exposed = median_ms(lambda step: sum(c.blocked for c in step.collectives))
    moved = median_ms(lambda step: sum(c.finished - c.started for c in step.collectives))
    return f"{ratio:.2f} | {median_ms(lambda step: step.seconds)} | {exposed} | {moved}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.accumulation", description=__doc__.splitlines()[0])
    parser.add_argument("--scenarios", default="bandwidth,compute", help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    for name in args.scenarios.split(","):
        run(name, args.micro_batches, args.rounds)


if __name__ == "__main__":
    main()

"""Costs of a report: the first step, which compiles from an empty cache, and those after it, with one and without.

    python -m benchmarks.reports        # 2 minutes

One rank of 8 in a rehearsal, a Llama of 6 blocks under ``plan="block"`` with a profile, so that predictions are part of
the report. Both are done in turn; printed are medians, and the median over rounds of one divided by the other.
"""

import argparse
import platform
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

from simplefsdp import rehearsal, simple_fsdp
from simplefsdp.models.llama import build


def measured(folder: str | None, steps: int) -> tuple[float, float]:
    """Seconds of the first step, and the median of the others."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = simple_fsdp(build("debug", layers=6))
    options: dict[str, Any] = {"plan": "block", "profile": "h100/h100-1-node", "report_dir": folder}
    forward = torch.compile(model, backend="simplefsdp", options=options)
    tokens = torch.zeros((4, 256), dtype=torch.int64)
    seconds = []
    with fresh_cache():
        for _ in range(1 + steps):
            began = time.perf_counter()
            forward(tokens, tokens).backward()
            seconds.append(time.perf_counter() - began)
    return seconds[0], statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.reports", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with rehearsal.world(8, "cpu-bandwidth"):
        with tempfile.TemporaryDirectory() as folder:
            measured(folder, 1)  # what is done once in a process
        for _ in range(args.rounds):
            for reports in random.sample([True, False], 2):
                with tempfile.TemporaryDirectory() as folder:
                    found[reports].append(measured(folder if reports else None, args.steps))
    print(f"torch {torch.__version__}, {platform.machine()}\n\n| | with, s | without, s | ratio |\n|{'---|' * 4}")
    for i, what in enumerate(("first step", "later steps")):
        both = [[times[i] for times in found[reports]] for reports in (True, False)]
        ratio = statistics.median(one / other for one, other in zip(*both, strict=True))
        print(f"| {what} | {statistics.median(both[0]):.3f} | {statistics.median(both[1]):.3f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()

"""The cost of the checks that are on by default: time in them as a part of a step, eager and compiled.

``python -m benchmarks.checks [--parameters 200 1000]``: 2 gloo ranks on this machine train square layers. What the
ranks note of collectives and graphs, and the comparison before each step of the optimizer, is timed where it is called.
Of each step the rank counts that spent less time so: the other one waited for it, as it would in the next collective.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from inductor_passes.runtime import agreement
from simplefsdp import simple_fsdp
from simplefsdp.frontend import eager_order
from simplefsdp.text.tables import markdown_table

WIDTH = 256
ROWS = 512
STEPS = 12
SYSTEMS: dict[str, dict[str, Any] | None] = {"eager": None, "compiled": {"plan": "block", "lower_with": "aot_eager"}}


class _Clock:
    """Seconds in functions that it has wrapped, without those in which one calls another."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_inside = False

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside, began = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began
                self._is_inside = False

        return timed


def _train(rank: int, port: int, parameters: int, options: dict[str, Any] | None, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    clock = _Clock()
    for name in ("_note", "_groups_of", "history", "compare_order"):
        setattr(eager_order, name, clock.wrap(getattr(eager_order, name)))
    agreement.history = clock.wrap(agreement.history)
    torch.manual_seed(0)
    model: Any = simple_fsdp(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(parameters))))
    forward: Any = model if options is None else torch.compile(model, backend="simplefsdp", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    checks, steps = [], []
    for number in range(STEPS):
        clock.seconds, began = 0.0, time.perf_counter()
        forward(torch.ones(ROWS, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number > 1:
            steps.append(time.perf_counter() - began)
            checks.append(clock.seconds)
    fastest = torch.tensor(checks)
    dist.all_reduce(fastest, dist.ReduceOp.MIN)
    if rank == 0:
        results.put((statistics.median(steps), fastest.median().item()))
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parameters", type=int, nargs="+", default=[200, 1000])
    args = parser.parse_args()
    rows = []
    for parameters in args.parameters:
        for name, options in SYSTEMS.items():
            results = mp.get_context("spawn").SimpleQueue()
            port = dist.TCPStore("localhost", 0, 1, is_master=True).port
            mp.spawn(_train, (port, parameters, options, results), nprocs=2)
            step, checks = results.get()
            share = f"{100 * checks / step:.2f}"
            rows.append([name, str(parameters), f"{1e3 * step:.0f}", f"{1e6 * checks:.0f}", share])
    print(f"torch {torch.__version__}, 2 ranks, layers of {WIDTH} x {WIDTH}, {ROWS} rows, {STEPS - 2} steps")
    print(markdown_table(["system", "parameters", "step, ms", "in checks, us", "%"], rows))


if __name__ == "__main__":
    main()

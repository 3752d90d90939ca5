"""Host time of clipping and an optimizer's step on many small shards: ours and torch's, in turns.

One rank of eight whose collectives return at once: only the time of the calls is seen, which is what counts where a
GPU waits for the calls.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from simplefsdp import clip_grad_norm_, simple_fsdp, step_on_shards

WAYS: dict[str, dict[str, Any]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}


def in_turns_ms(rounds: int, *calls: Callable[[], Any]) -> list[float]:
    """The median of each, ms; the first two rounds do not count."""
    took: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 2):
        for call, times in zip(calls, took, strict=True):
            started = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - started))
    return [statistics.median(times[2:]) for times in took]


def model_of(parameters: int) -> nn.Module:
    model = simple_fsdp(nn.Sequential(*(nn.Linear(64, 64) for _ in range(parameters // 2))))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.after_backward", description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    print("| ms | torch | simplefsdp | ratio |\n|---|---|---|---|")
    for parameters in args.parameters:
        model = model_of(parameters)
        calls = {
            f"clipping {parameters} parameters": (
                lambda model=model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
                lambda model=model: clip_grad_norm_(model.parameters(), 1.0),
            )
        }
        for name, options in WAYS.items():
            plain, ours = (torch.optim.AdamW(model_of(parameters).parameters(), **options) for _ in range(2))
            calls[f"AdamW {name}, {parameters} parameters"] = plain.step, step_on_shards(ours).step
        for what, pair in calls.items():
            theirs, here = in_turns_ms(args.rounds, *pair)
            print(f"| {what} | {theirs:.1f} | {here:.1f} | {theirs / here:.1f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

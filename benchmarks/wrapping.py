"""How long ``simple_fsdp`` takes to shard a model of many parameters, beside FSDP2.

``python -m benchmarks.wrapping [--parameters 10000]``: one process as rank 0 of 8 (a fake group; sharding communicates
nothing). Seconds are the median of several runs on fresh models.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from simplefsdp import simple_fsdp

RANKS = 8


def build(parameters: int) -> nn.Module:
    """Blocks of 10 parameters, 16 x 16 and 16."""
    blocks = [nn.Sequential(*[nn.Linear(16, 16) for _ in range(5)]) for _ in range(parameters // 10)]
    return nn.Sequential(*blocks)


def fsdp2(model: nn.Module) -> nn.Module:
    for module in (*model.children(), model):
        fully_shard(module)
    return model


def seconds(shard: Callable[[nn.Module], nn.Module], parameters: int) -> float:
    model = build(parameters)
    start = time.perf_counter()
    shard(model)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parameters", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    found: dict[str, list[float]] = {"simple_fsdp": [], "FSDP2": []}
    for _ in range(args.rounds):
        found["simple_fsdp"].append(seconds(simple_fsdp, args.parameters))
        found["FSDP2"].append(seconds(fsdp2, args.parameters))
    ours, theirs = (statistics.median(times) for times in found.values())
    print(f"torch {torch.__version__}, {platform.machine()}; {args.parameters} parameters, one of {RANKS} ranks")
    print(f"simple_fsdp {ours:.2f} s, FSDP2 {theirs:.2f} s, ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()

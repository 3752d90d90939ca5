"""How long the first step takes, which compiles, of a Llama of more and more blocks, with cold and with warm caches.

    python -m benchmarks.first_step                                  # 8, 16 and 32 blocks
    python -m benchmarks.first_step --blocks 8,126 --systems block,fsdp2

Each first step is taken in a process of its own, as one rank of two whose collectives do nothing: with empty caches of
torch, and once more with the caches that it left. Printed are medians: seconds of the main thread, which traces and
generates code, and of the clock, which also counts the C++ compiler; loss and peak memory are not the subject here.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.first_light import fsdp2_compiled
from simplefsdp import simple_fsdp
from simplefsdp.models import llama

SHAPE = {"dim": 256, "heads": 8, "kv_heads": 4, "ffn_dim": 512, "vocab_size": 512, "max_seq_len": 128}
PROFILE = "h200/h100-8-nodes"


def as_regions(model: nn.Module) -> nn.Module:
    llama.Block.forward = torch.compiler.nested_compile_region(llama.Block.forward)  # type: ignore[method-assign]
    return model


def ours(model: nn.Module, **options: Any) -> Callable[..., Tensor]:
    return torch.compile(simple_fsdp(model), backend="simplefsdp", options=options)


SYSTEMS: dict[str, Callable[[Any], Callable[..., Tensor]]] = {
    "block": lambda model: ours(model, plan="block"),
    "auto": lambda model: ours(model, plan="auto", profile=PROFILE),
    "block with regions": lambda model: ours(as_regions(model), plan="block"),
    "block without compile_once": lambda model: ours(model, plan="block", compile_once=False),
    "stock": torch.compile,
    "fsdp2": fsdp2_compiled,
}
"""``with regions``: blocks are marked by ``torch.compiler.nested_compile_region``, so that Dynamo traces one of them.
``stock``: the whole model, not sharded, through TorchInductor as it is. ``fsdp2`` compiles one block."""


def first_step(system: str, blocks: int) -> tuple[float, float]:
    """Return seconds of the main thread and of the clock."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.manual_seed(0)
    step = SYSTEMS[system](llama.build("debug", layers=blocks, **SHAPE))
    window = torch.randint(SHAPE["vocab_size"], (2, SHAPE["max_seq_len"] + 1))
    clock, thread = time.perf_counter(), time.thread_time()
    step(window[:, :-1], window[:, 1:]).backward()
    return time.thread_time() - thread, time.perf_counter() - clock


def measure(system: str, blocks: int, runs: int) -> dict[str, tuple[float, float]]:
    """Return the medians for cold and for warm caches."""
    seconds: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": []}
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
            for found in seconds.values():
                command = [sys.executable, "-m", "benchmarks.first_step", "--one", system, "--blocks", str(blocks)]
                output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
                found.append(json.loads(output.splitlines()[-1]))
    return {
        caches: (statistics.median(main for main, _ in found), statistics.median(clock for _, clock in found))
        for caches, found in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.first_step", description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", default="8,16,32")
    parser.add_argument("--systems", default="block,auto,stock,fsdp2", help=f"of {', '.join(map(repr, SYSTEMS))}")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--one", metavar="SYSTEM", help=argparse.SUPPRESS)
    args = parser.parse_args()
    blocks = [int(count) for count in args.blocks.split(",")]
    if args.one:
        print(json.dumps(first_step(args.one, *blocks)))
        return
    print("| system | blocks | cold: main thread, s | clock, s | warm: main thread, s | clock, s |\n|" + "---|" * 6)
    for system in args.systems.split(","):
        for count in blocks:
            found = measure(system.strip(), count, args.runs)
            numbers = (f"{number:.1f}" for caches in ("cold", "warm") for number in found[caches])
            print(f"| {system} | {count} | {' | '.join(numbers)} |", flush=True)


if __name__ == "__main__":
    main()

"""Two gloo ranks on this machine: simplefsdp against FSDP2, eager and compiled, and against no sharding at all.

    python -m benchmarks.first_light

Every system trains the same Llama on the same data in the same processes. Steps are taken in turn, in a new order
each round, so that what else the machine does meets all of them; what is printed are medians, and the median over
rounds of this library's time divided by the other's in the same round. Peak memory is counted from the allocator's own
events in one step, plus what lives before it (parameters, optimizer state); it does not include compiler or runtime.
The first step compiles, from an empty cache.
"""

import argparse
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from simplefsdp import simple_fsdp
from simplefsdp.models.llama import Llama, build
from simplefsdp.rehearsal.timing import profiled_peak_bytes

OURS = "simplefsdp block"
RANKS = 2


def simplefsdp_block(model: Llama) -> Callable[..., Tensor]:
    return torch.compile(simple_fsdp(model), backend="simplefsdp", options={"plan": "block"})


def fsdp2_eager(model: Llama) -> Callable[..., Tensor]:
    """The groups of the block plan: what precedes the blocks, each block, what follows them."""
    fully_shard(model.tok_embeddings)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard([model.norm, model.output])
    fully_shard(model)
    return model


def fsdp2_compiled(model: Llama) -> Callable[..., Tensor]:
    for layer in model.layers:
        layer.compile()
    return fsdp2_eager(model)


def unsharded_compiled(model: Llama) -> Callable[..., Tensor]:
    return torch.compile(model)


SYSTEMS: dict[str, Callable[[Llama], Callable[..., Tensor]]] = {
    OURS: simplefsdp_block,
    "FSDP2 eager": fsdp2_eager,
    "FSDP2, blocks compiled": fsdp2_compiled,
    "single process, compiled": unsharded_compiled,
}


class System:
    """A model with its optimizer, and what was measured of it."""

    def __init__(self, make: Callable[[Llama], Callable[..., Tensor]], args: argparse.Namespace):
        torch.manual_seed(0)
        self.model = build("debug", dim=args.dim, layers=args.layers, ffn_dim=3 * args.dim)
        self.forward = make(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.loss = 0.0
        self.seconds: list[float] = []

    def step(self, tokens: Tensor) -> None:
        loss = self.forward(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.item()

    def timed_step(self, tokens: Tensor) -> float:
        """Seconds until the last rank is done."""
        dist.barrier()
        start = time.perf_counter()
        self.step(tokens)
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    def resident_bytes(self) -> int:
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *(v for v in state if isinstance(v, Tensor))]
        storages = [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def peak_bytes(system: System, tokens: Tensor) -> int:
    """Most bytes alive at a time in one step, from the allocator's events."""
    return system.resident_bytes() + profiled_peak_bytes(lambda: system.step(tokens))


def measure(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    generator = torch.Generator().manual_seed(rank)
    batches = torch.randint(256, (args.rounds + 4, args.batch_size, args.seq_len + 1), generator=generator)

    systems, first, peaks = {}, {}, {}
    torch.compile(torch.neg)(torch.ones(2))  # imports and what else only the first compilation in a process pays
    for i, (name, make) in enumerate(SYSTEMS.items()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache{i}"
        torch._dynamo.reset()
        systems[name] = System(make, args)
        first[name] = systems[name].timed_step(batches[0])
        systems[name].step(batches[1])  # optimizer state exists from here on
        peaks[name] = peak_bytes(systems[name], batches[2])
        systems[name].step(batches[3])
    order = random.Random(0)
    for batch in batches[4:]:
        for name in order.sample(list(systems), len(systems)):
            systems[name].seconds.append(systems[name].timed_step(batch))
    if rank == 0:
        report(systems, first, peaks, args)
    dist.destroy_process_group()


def report(
    systems: dict[str, System], first: dict[str, float], peaks: dict[str, int], args: argparse.Namespace
) -> None:
    parameters = sum(p.numel() for p in systems[OURS].model.parameters())
    print(
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {RANKS} gloo ranks of one thread; "
        f"Llama of {parameters:,} parameters in {args.layers} blocks, fp32, {args.batch_size} x {args.seq_len} "
        f"tokens a rank; {args.rounds} rounds\n"
    )
    print("| system | step, s | ours / its step | peak, MiB | ours / its peak | first step, s | last loss |")
    print("|---|---|---|---|---|---|---|")
    ours = systems[OURS].seconds
    for name, system in systems.items():
        ratio = statistics.median(a / b for a, b in zip(ours, system.seconds, strict=True))
        print(
            f"| {name} | {statistics.median(system.seconds):.3f} | {ratio:.2f} | {peaks[name] / 2**20:.1f} | "
            f"{peaks[OURS] / peaks[name]:.2f} | {first[name]:.1f} | {system.loss:.4f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.first_light", description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(measure, (args, folder), nprocs=RANKS, start_method="spawn")


if __name__ == "__main__":
    main()

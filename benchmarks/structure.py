"""Requests of a training step to a GPU under several systems: kernels, copies, collectives, waits, peak memory.

    python -m simplefsdp.null_gpu --device h100 -m benchmarks.structure --layers 32 --ranks 64

Needs a CUDA build of torch and gcc, and no GPU: the null GPU runs torch's own CUDA, Triton and NCCL code, and kernels
that return at once. Counts, order and the allocator's peak are those of a GPU; times are not known.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from simplefsdp.hardware.catalog import built_in, smallest_network
from simplefsdp.null_gpu.launch import null_device
from simplefsdp.null_gpu.log import Collective, Event, Kernel, Matmul, Wait, communications, host_waits
from simplefsdp.null_gpu.rank import null_rank
from simplefsdp.rehearsal.systems import SYSTEMS, Parallelism, cross_entropy
from simplefsdp.rehearsal.workload import MODELS, model_factory
from simplefsdp.text.tables import markdown_table

COPY_IN = ("chunk_cat", "multi_tensor_apply", "CatArray", "direct_copy")
COPY_OUT = ("split_with_sizes_copy",)


class Asked(NamedTuple):
    """Requests of one step to the GPU."""

    system: str
    peak_bytes: int
    """The most bytes that torch's allocator had given away at one time."""
    kernels: tuple[int, int]
    """Kernels of forward and of backward."""
    copies: int
    """Kernels that only copy members of a bucket into its buffer or out of it."""
    copied_bytes: int
    """Bytes that these kernels write."""
    collectives: int
    stream_waits: int
    """How often a stream was told to wait for another."""
    host_waits: int
    first_step_s: float
    """Seconds of the first step on this machine: of compilation."""


def copied(events: Sequence[Event]) -> Iterable[int]:
    """Yield the bytes that each copy into or out of a bucket writes."""
    gathers = [c for c in communications(events) if c.calls[0].operation == "all_gather"]
    awaited = {wait.at: sum(call.nbytes for call in each.calls) for each in gathers for wait in each.waits}
    packing, gathered = 0, 0
    for at, (*_, what) in enumerate(events):
        if isinstance(what, Kernel) and any(name in what.name for name in COPY_OUT):
            yield gathered
        elif isinstance(what, Kernel) and any(name in what.name for name in COPY_IN):
            packing += 1
        elif isinstance(what, Collective) and packing:
            whole = what.nbytes // what.ranks if what.operation == "all_gather" else what.nbytes
            yield from (whole // packing for _ in range(packing))
            packing = 0
        elif isinstance(what, Wait) and at in awaited:
            gathered = awaited[at]


def step_of(name: str, args: argparse.Namespace) -> Asked:
    """Train three steps of a system, and return what the third asked for."""
    torch._dynamo.reset()
    system = SYSTEMS[name]
    with null_rank(args.ranks) as recorder:
        mesh = init_device_mesh("cuda", (args.ranks,), mesh_dim_names=("shard",))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        profile = built_in(f"{null_device()}/{smallest_network(args.ranks)}")
        with torch.device("meta"):
            model: nn.Module = model_factory(args.model, seq=args.seq, layers=args.layers)()
        forward = system.wrap(model, Parallelism(mesh, policy, True, profile))
        model.to_empty(device="cuda")
        loss_of: Callable[..., Tensor] = torch.compile(cross_entropy) if system.compiled else cross_entropy
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(1, args.seq, dtype=torch.int64, device="cuda")

        def step() -> tuple[list[Event], list[Event], list[Event]]:
            loss = loss_of(forward(tokens), tokens)
            first = recorder.take()
            loss.backward()
            second = recorder.take()
            optimizer.step()
            optimizer.zero_grad()
            return first, second, recorder.take()

        began = time.perf_counter()
        step()
        first_step_s = time.perf_counter() - began
        step()
        torch.cuda.reset_peak_memory_stats()
        with recorder.recording():
            first, second, rest = step()
        peak = torch.cuda.max_memory_allocated()
    copies = [*copied(first), *copied(second)]
    return Asked(
        name,
        peak,
        (_kernels(first), _kernels(second)),
        len(copies),
        sum(copies),
        sum(isinstance(event.what, Collective) for event in (*first, *second)),
        sum(isinstance(event.what, Wait) for event in (*first, *second)),
        len(host_waits([*first, *second, *rest])),
        first_step_s,
    )


def _kernels(events: Iterable[Event]) -> int:
    return sum(isinstance(event.what, Kernel | Matmul) for event in events)


def table(found: Iterable[Asked]) -> str:
    """In Markdown: one row for each system."""
    columns = "system", "peak, GiB", "kernels forward / backward", "copies of buckets", "copied, GiB", "collectives"
    return markdown_table(
        [*columns, "stream waits", "host waits", "first step, s"],
        [
            [
                each.system,
                f"{each.peak_bytes / 2**30:.3f}",
                f"{each.kernels[0]} / {each.kernels[1]}",
                str(each.copies),
                f"{each.copied_bytes / 2**30:.2f}",
                str(each.collectives),
                str(each.stream_waits),
                str(each.host_waits),
                f"{each.first_step_s:.1f}",
            ]
            for each in found
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.structure", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama3-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seq", type=int, default=2048, help="tokens; more than 3072 loop in eager FSDP2's embedding")
    parser.add_argument("--systems", default="fsdp2,fsdp2-compile,block,auto,auto-kept")
    parser.add_argument("--out", type=Path, help="folder for the table")
    args = parser.parse_args()
    found = [step_of(name, args) for name in args.systems.split(",")]
    heading = (
        f"{args.model}, {args.layers} layers, rank 0 of {args.ranks}, 1 x {args.seq} tokens, bf16, fp32 reductions, "
        f"fused AdamW; structure on a null GPU ({torch.cuda.get_device_name()}), torch {torch.__version__}"
    )
    text = f"{heading}\n\n{table(found)}\n"
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"structure-{args.ranks}-ranks.md").write_text(text)


if __name__ == "__main__":
    main()

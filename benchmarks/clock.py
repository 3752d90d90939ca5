"""A training step under several systems on a GPU that does nothing: requests to the GPU, peak memory, simulated time.

    python -m simplefsdp.null_gpu --device h100 -m benchmarks.clock --layers 32 --ranks 64 --seq 2048

Needs a CUDA build of torch and gcc, and no GPU: the null GPU runs torch's own CUDA, Triton and NCCL code, and kernels
that return at once. Counts, order and the allocator's peak are those of a GPU; times are those of the built-in profile
(``simplefsdp/null_gpu/clock.py``). ``fsdp2-titan`` is FSDP2 as torchtitan wraps and compiles it.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from inductor_passes.torch_compat.distributed import GROUPING_NCCL
from simplefsdp.frontend.embedding_lookup import LOOKUPS
from simplefsdp.hardware.catalog import built_in, smallest_network
from simplefsdp.models import llama
from simplefsdp.null_gpu.clock import SimulatedStep, Sizes, noting_triton_bytes, simulate
from simplefsdp.null_gpu.launch import null_device
from simplefsdp.null_gpu.log import Collective, Event, Kernel, Matmul, Note, Wait, host_waits
from simplefsdp.null_gpu.rank import null_rank
from simplefsdp.rehearsal.systems import SYSTEMS, Parallelism, System, cross_entropy, simplefsdp_system
from simplefsdp.text.tables import markdown_table
from simplefsdp.text.units import parse_bytes

COPIES = ("chunk_cat", "multi_tensor_apply", "CatArray", "direct_copy", "split_with_sizes_copy")
STEPS = 3


class Measured(NamedTuple):
    """Requests of one step to the GPU, and what they take."""

    system: str
    peak_bytes: int
    """The most bytes that torch's allocator had given away at one time."""
    kernels: int
    copies: int
    """Kernels that only copy members of a bucket into its buffer or out of it."""
    collectives: int
    """Collectives; an all-to-all, which NCCL is asked for in sends and receives, is one."""
    stream_waits: int
    """How often a stream was told to wait for another."""
    host_waits: int
    simulated: SimulatedStep


class _Embedding(torch.autograd.Function):
    """An embedding whose backward does not ask memory of the device how often to loop, as torch's own does."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape = weight.shape
        return weight[tokens]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (gradient,) = gradients
        out = gradient.new_zeros(ctx.shape)
        return None, out.index_add_(0, ctx.saved_tensors[0].flatten(), gradient.flatten(0, -2))


def _fsdp2_titan(model: nn.Module, parallelism: Parallelism) -> Callable[[Tensor], Any]:
    """Shard by FSDP2 as torchtitan does: ``fsdp2-compile``, with an embedding that a null GPU can run."""
    assert isinstance(model, llama.Llama)
    embeddings = model.tok_embeddings
    embeddings.forward = lambda tokens: _Embedding.apply(tokens, embeddings.weight)  # type: ignore
    return SYSTEMS["fsdp2-compile"].wrap(model, parallelism)


def _read_weights_in_float8(model: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, fqn: fqn != "output")


def _precompute_scales(model: nn.Module) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def system_of(name: str) -> System:
    """Return a system by name; ``"auto:13GiB"`` is ``auto`` with a memory budget."""
    plan, _, budget = name.partition(":")
    if budget:
        return simplefsdp_system(plan, budget=parse_bytes(budget))
    return System(_fsdp2_titan, compiled=True) if name == "fsdp2-titan" else SYSTEMS[name]


def step_of(name: str, args: argparse.Namespace) -> Measured:
    """Train some steps of a system and return the last."""
    torch._dynamo.reset()
    system = system_of(name)
    profile = built_in(f"{null_device()}/{smallest_network(args.ranks)}")
    config = llama.CONFIGS[args.model]
    changes = {"layers": args.layers, "max_seq_len": args.seq, "activation_checkpointing": args.checkpointing}
    with null_rank(args.ranks, GROUPING_NCCL) as recorder:
        mesh = init_device_mesh("cuda", (args.ranks,), mesh_dim_names=("shard",))
        policy = MixedPrecisionPolicy(None if args.autocast else torch.bfloat16, torch.float32)
        with torch.device("meta"):
            model: nn.Module = llama.build(args.model, **changes)
        if args.float8:
            _read_weights_in_float8(model)
        forward = system.wrap(model, Parallelism(mesh, policy, True, profile, args.embedding_lookup))
        model.to_empty(device="cuda")
        loss_of: Callable[..., Tensor] = torch.compile(cross_entropy) if system.compiled else cross_entropy
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(1, args.seq, dtype=torch.int64, device="cuda")

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16, enabled=args.autocast):
                logits = forward(tokens)
            loss_of(logits, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            if args.float8:
                _precompute_scales(model)

        step()
        step()
        torch.cuda.reset_peak_memory_stats()
        recorder.take()
        with recorder.recording(), noting_triton_bytes(recorder):
            for _ in range(STEPS):
                recorder.note("step")
                step()
            recorder.note("step")
        events = recorder.take()
        peak = torch.cuda.max_memory_allocated()
        local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    head_dim = config.dim // config.heads
    sizes = Sizes(1, args.seq, config.dim, config.heads, head_dim, config.vocab_size, local)
    return _measured(name, peak, events, simulate(events, profile, sizes, host_factor=args.host))


def _measured(name: str, peak: int, events: Sequence[Event], simulated: SimulatedStep) -> Measured:
    first, last = [i for i, event in enumerate(events) if event.what == Note("step")][-2:]
    step = events[first:last]
    kernels = [event.what for event in step if isinstance(event.what, Kernel | Matmul)]
    collectives = [event.what for event in step if isinstance(event.what, Collective)]
    exchanged = [call for call in collectives if call.operation in ("send", "receive")]
    return Measured(
        name,
        peak,
        len(kernels),
        sum(isinstance(what, Kernel) and any(copy in what.name for copy in COPIES) for what in kernels),
        len(collectives) - len(exchanged) + len({call.group for call in exchanged}),
        sum(isinstance(event.what, Wait) for event in step),
        len(host_waits(step)),
        simulated,
    )


def table(found: Sequence[Measured]) -> str:
    """Return a table in Markdown with one row for each system; ratios are to the first."""
    first = found[0]
    times = "step, ms", "to the first", "exposed, ms", "compute, ms", "copies of buckets, ms", "channel, ms", "host, ms"
    counts = "kernels", "copies", "collectives", "stream waits", "host waits"
    return markdown_table(
        ["system", *times, "peak, GiB", "to the first", *counts],
        [
            [
                each.system,
                f"{1e3 * each.simulated.step_s:.1f}",
                f"{each.simulated.step_s / first.simulated.step_s:.3f}x",
                f"{1e3 * each.simulated.exposed_s:.1f}",
                f"{1e3 * each.simulated.compute_s:.1f}",
                f"{1e3 * sum(each.simulated.kernels_s.get(copy, 0.0) for copy in ('copy in', 'copy out')):.1f}",
                f"{1e3 * each.simulated.communication_s:.1f}",
                f"{1e3 * each.simulated.host_s:.1f}",
                f"{each.peak_bytes / 2**30:.2f}",
                f"{each.peak_bytes / first.peak_bytes:.3f}x",
                str(each.kernels),
                str(each.copies),
                str(each.collectives),
                str(each.stream_waits),
                str(each.host_waits),
            ]
            for each in found
        ],
    )


def _unknown(found: Iterable[Measured]) -> str:
    counts = {each.system: each.simulated.unknown for each in found if each.simulated.unknown}
    return "\n".join(f"{system}: kernels of unknown size: {dict(count)}" for system, count in counts.items())


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.clock", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=llama.CONFIGS, default="8B")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a rank")
    parser.add_argument("--checkpointing", default="none", help="activation checkpointing of the model")
    parser.add_argument("--embedding-lookup", choices=LOOKUPS, default="gather", help="of this library's systems")
    parser.add_argument("--float8", action="store_true", help="linear layers of blocks in float8, by torchao")
    parser.add_argument("--autocast", action="store_true", help="bf16 by torch.autocast, and not by a policy")
    parser.add_argument(
        "--host", type=float, default=0.5, help="CPU time of a GPU's host for each second of this machine's"
    )
    parser.add_argument("--systems", default="fsdp2-titan,block,auto", help="auto:13GiB: with a memory budget")
    parser.add_argument("--out", type=Path, help="folder for the table")
    args = parser.parse_args()
    inductor_config.benchmark_kernel = True  # kernels carry the bytes that they move
    found, refused = [], []
    for name in args.systems.split(","):
        try:
            found.append(step_of(name, args))
        except torch._dynamo.exc.BackendCompilerFailed as error:  # a memory budget that cannot be met
            refused.append(f"{name}: refused: {error.inner_exception}")
    numbers = "bf16" + " by autocast" * args.autocast + ", float8 in blocks" * args.float8
    heading = (
        f"Llama 3 {args.model}, {args.layers} layers, checkpointing {args.checkpointing}, rank 0 of {args.ranks}, 1 x "
        f"{args.seq} tokens, embedding lookup {args.embedding_lookup}, {numbers}, fp32 reductions, "
        "fused AdamW; simulated: "
        f"structure of torch's own CUDA calls on a null GPU ({torch.cuda.get_device_name()}), times of the built-in "
        f"profile, CPU times of this host times {args.host:g}; torch {torch.__version__}"
    )
    text = "\n\n".join(filter(None, [heading, table(found) if found else "", _unknown(found), *refused])) + "\n"
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        name = f"clock-{args.model}-{args.layers}-layers-{args.ranks}-ranks-{args.seq}-tokens.md"
        (args.out / name).write_text(text)


if __name__ == "__main__":
    main()

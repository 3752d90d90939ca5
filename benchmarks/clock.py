"""A training step under several systems on a GPU that does nothing, also under autocast and in float8.

    python -m simplefsdp.null_gpu --device h100 -m benchmarks.clock --layers 32 --ranks 64 --seq 2048

Llama 3 by ``simplefsdp rehearse --simulate``, which has what is the same for all systems, with what that command has
not: autocast, torchao's float8, and a memory budget for each system.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.off_profile import planned_off_profile
from inductor_passes.torch_compat.distributed import GROUPING_NCCL
from simplefsdp.analysis.simulated import SimulatedResult, simulate_system, simulated_table
from simplefsdp.frontend.embedding_lookup import LOOKUPS
from simplefsdp.hardware.catalog import built_in, smallest_network
from simplefsdp.models import llama
from simplefsdp.null_gpu.launch import null_device
from simplefsdp.null_gpu.rank import null_rank
from simplefsdp.rehearsal.systems import SYSTEMS, Parallelism, System, simplefsdp_system
from simplefsdp.rehearsal.workload import Workload
from simplefsdp.text.units import parse_bytes


def system_of(name: str) -> System:
    """Return a system by name; ``"auto:13GiB"`` is ``auto`` with a memory budget, for ``@`` see ``off_profile``."""
    within = name.partition("@")[0]
    plan, _, budget = within.partition(":")
    system = simplefsdp_system(plan, budget=parse_bytes(budget)) if budget else SYSTEMS[plan]
    return planned_off_profile(name, {within: system})


def step_of(name: str, args: argparse.Namespace) -> SimulatedResult:
    """Train some steps of a system and return the last."""
    profile = built_in(f"{null_device()}/{smallest_network(args.ranks)}")
    changes: dict[str, Any] = {"layers": args.layers, "max_seq_len": args.seq}

    def build() -> nn.Module:
        model = llama.build(args.model, **changes, activation_checkpointing=args.checkpointing)
        if args.float8:
            _read_weights_in_float8(model)
        return model

    with null_rank(args.ranks, GROUPING_NCCL) as recorder:
        mesh = init_device_mesh("cuda", (args.ranks,), mesh_dim_names=("shard",))
        policy = MixedPrecisionPolicy(None if args.autocast else torch.bfloat16, torch.float32)
        parallelism = Parallelism(mesh, policy, True, profile, args.embedding_lookup)
        vocab_size = llama.CONFIGS[args.model].vocab_size
        return simulate_system(
            name,
            system_of(name),
            Workload(build, 1, args.seq, vocab_size, torch.device("cuda", 0), parallelism),
            recorder,
            profile,
            host_factor=args.host,
            forward_context=lambda: torch.autocast("cuda", torch.bfloat16, enabled=args.autocast),
            after_step=_precompute_scales if args.float8 else lambda _: None,
        )


def _read_weights_in_float8(model: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, fqn: fqn != "output")


def _precompute_scales(model: nn.Module) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


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
    parser.add_argument(
        "--systems",
        default="fsdp2-compile,block,auto",
        help="auto:13GiB: with a memory budget; @compute=0.85: off profile",
    )
    parser.add_argument("--out", type=Path, help="folder for the table")
    args = parser.parse_args()
    inductor_config.benchmark_combo_kernel = True  # kernels carry the bytes that they move
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
    text = "\n\n".join(filter(None, [heading, simulated_table(found) if found else "", *refused])) + "\n"
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        name = f"clock-{args.model}-{args.layers}-layers-{args.ranks}-ranks-{args.seq}-tokens.md"
        (args.out / name).write_text(text)


if __name__ == "__main__":
    main()

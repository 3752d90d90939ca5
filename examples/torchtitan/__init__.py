"""torchtitan's trainer, with simplefsdp in the place of its own data parallelism.

    torchrun --standalone --nproc-per-node 8 -m torchtitan.train --module examples.torchtitan --config llama3_debugmodel

``--module`` is how torchtitan finds configurations outside of itself, and ``parallelize_fn`` of a model's specification
how it leaves the parallelism of a model to others. Nothing of torchtitan is patched; its data loading, optimizers,
checkpoints and command line stay. A loss in chunks becomes the loss of the whole sequence. Written for torchtitan
0.3.0, whose trainer needs a GPU and a newer torch than 2.13 (``torch.distributed.set_timeout``; 2.15 has it).
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, MemoryBudgetAC
from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy
from torchtitan.models.common.decoder import Decoder
from torchtitan.trainer import Trainer

from simplefsdp import simple_fsdp


@dataclass(kw_only=True, slots=True)
class SimpleFSDPCompileConfig(CompileConfig):
    """``--compile.*``: torchtitan's, where ``backend`` is what simplefsdp lowers with ("inductor" or "aot_eager"), and
    the backend's own options."""

    enable: bool = True
    components: list[str] = field(default_factory=lambda: ["model"])
    plan: str = "auto"
    profile: str | None = None
    memory_budget: str | None = None
    report_dir: str | None = None

    def options(self) -> dict[str, str | None]:
        names = ("plan", "profile", "memory_budget", "report_dir")
        return {"lower_with": self.backend, **{name: getattr(self, name) for name in names}}


def with_simple_fsdp(config: Trainer.Config) -> Trainer.Config:
    """A configuration of one of torchtitan's dense decoders, to be trained with simplefsdp."""
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        config.loss = config.loss.loss_fn  # it would call lm_head outside of the model, and so of the compiled graph
    # Pipeline stages are not supported here; torchtitan says so where there is no pipelining_fn.
    config.model_spec = replace(config.model_spec, parallelize_fn=parallelize, pipelining_fn=None)
    config.parallelism.spmd_backend = "partial_dtensor"  # tensor-parallel parameters are DTensors
    config.training.disable_cuda_graphs = True
    config.compile = SimpleFSDPCompileConfig()
    return config


def parallelize(
    model: Decoder,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: SimpleFSDPCompileConfig,
    ac_config: ActivationCheckpointing.Config | None,
    dump_folder: str,
) -> nn.Module:
    """Do what torchtitan's ``parallelize_llama`` does, with ``simple_fsdp`` for ``fully_shard``.

    The order is the same; the whole model is compiled after sharding instead of each block before it.
    """
    refuse(parallel_dims, training, parallelism, compile_config, ac_config)
    if parallel_dims.tp_enabled:
        model.parallelize(parallel_dims)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    mesh, mode = data_parallel_mesh(parallel_dims)
    simple_fsdp(
        model,
        mesh,
        mode=mode,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
        reshard_after_forward=reshard_after_forward(model, parallelism.fsdp_reshard_after_forward),
        gradient_divide_factor=1.0,  # the loss of a rank is divided by the number of tokens of all ranks
    )
    if compile_config.enable and "model" in compile_config.components:
        model.compile(backend="simplefsdp", options=compile_config.options())
    return model


def data_parallel_mesh(parallel_dims: ParallelDims) -> tuple[DeviceMesh, str]:
    """The part of the mesh that parameters are sharded over, and how."""
    if not parallel_dims.dp_replicate_enabled:
        return parallel_dims.get_mesh("fsdp"), "fully_shard"
    if parallel_dims.dp_shard_enabled:
        return parallel_dims.get_mesh(["dp_replicate", "fsdp"]), "hybrid_shard"
    return parallel_dims.get_mesh("dp_replicate"), "replicate"


def reshard_after_forward(model: Decoder, policy: str) -> dict[str, bool | Literal["auto"]]:
    """Apply torchtitan's policy, by which the last layers stay unsharded by default: backward starts with them."""
    reshard: dict[str, bool | Literal["auto"]] = {"*": get_fsdp_reshard_after_forward_policy(policy, pp_enabled=False)}
    head = "tok_embeddings.*" if model.enable_weight_tying else "lm_head.*"
    return reshard | dict.fromkeys(["norm.*", head], policy == "always")


def refuse(
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointing.Config | None,
) -> None:
    """Raise for what torchtitan can be asked for and is not done here."""
    asked = {
        "parallelism.spmd_backend other than 'partial_dtensor'": parallelism.spmd_backend != "partial_dtensor",
        "context parallelism": parallel_dims.cp_enabled,
        "expert parallelism": parallel_dims.ep_enabled,
        "parallelism.enable_fsdp_symm_mem": parallelism.enable_fsdp_symm_mem,
        "training.enable_cpu_offload": training.enable_cpu_offload,
        "compile.enable_async_tensor_parallel": compile_config.enable_async_tensor_parallel,
        "activation checkpointing by a memory budget": isinstance(ac_config, MemoryBudgetAC.Config),
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise NotImplementedError(f"{what}: not supported with simplefsdp")

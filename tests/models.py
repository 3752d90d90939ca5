"""Small models and steps that several tests use."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from simplefsdp import BucketPlan, HardwareProfile
from simplefsdp.hardware.profile import flat
from simplefsdp.models import llama

ONE = ((1.0, 1e9),)
PROFILE = HardwareProfile(
    "test",
    "made up",
    matmul={"float32": ONE},
    attention={"float32": ONE},
    memory=((1.0, 1e10),),
    launch_s=1e-6,
    collective_launch_s=1e-5,
    contention=0.0,
    network=flat("test", 8, alpha_s=1e-4, bandwidth_bytes_per_s=1e8),
)
"""A profile of a device on which a collective takes as long as a block of ``tiny_llama``, so that some are merged."""


def tiny_llama(**changes: Any) -> llama.Llama:
    """A Llama of 3 blocks with uneven shards (rows divisible by 2, not all by 4), the same on every rank."""
    torch.manual_seed(0)
    shape = {"dim": 36, "layers": 3, "heads": 6, "kv_heads": 2, "ffn_dim": 50, "vocab_size": 30, "max_seq_len": 32}
    return llama.build("debug", **(shape | changes))


def fsdp2(model: llama.Llama, policy: MixedPrecisionPolicy, **kwargs: Any) -> llama.Llama:
    """FSDP2 with the groups of the block plan: what precedes the blocks, each block, what follows them."""
    for group in (model.tok_embeddings, *model.layers, [model.norm, model.output], model):
        fully_shard(group, mp_policy=policy, **kwargs)
    return model


def in_groups(plan: BucketPlan) -> BucketPlan:
    """``plan`` with all buckets grouped."""
    forward, backward, reductions = (
        tuple(bucket._replace(form="grouped") for bucket in buckets)
        for buckets in (plan.forward, plan.backward, plan.reductions)
    )
    return replace(plan, forward=forward, backward=backward, reductions=reductions)


def batch(step: int, rank: int, vocab_size: int = 30, seq_len: int = 16) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a rank and a step, (2, seq_len) each."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    window = torch.randint(vocab_size, (2, seq_len + 1), generator=generator)
    return window[:, :-1], window[:, 1:]


def train(
    model: nn.Module,
    forward: Callable[..., Tensor],
    steps: int,
    rank: int,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, first gradients and final values (of this rank's shards) after ``steps`` steps."""
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses, gradients = [], {}
    for step in range(steps):
        loss = forward(*batch(step, rank))
        loss.backward()
        losses.append(loss.detach())
        if step == 0:
            gradients = {name: local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {name: local(p).clone() for name, p in model.named_parameters()}


def local(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole_weights_saved(model: nn.Module, forward: Callable[..., Tensor], *inputs: Tensor) -> list[tuple[int, ...]]:
    """Shapes of whole matrices of ``model`` among what autograd saves in a forward, transposed or not."""
    whole = {tuple(sorted(p.shape)) for p in model.parameters() if p.ndim == 2}
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(*inputs)
    assert shapes
    return [shape for shape in shapes if len(shape) == 2 and tuple(sorted(shape)) in whole]

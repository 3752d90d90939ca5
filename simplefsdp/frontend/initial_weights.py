"""Ranks compare the values that they have sharded, before they train on a mixture of several models.

``simple_fsdp`` runs no collective: each rank keeps its own part of the values that it had. Ranks with different values,
by a seed of their own or by another checkpoint, would gather weights that no rank ever had. So ``simple_fsdp`` takes a
digest of each whole parameter before it is sharded, and the first forward with gradients compares these digests through
the store, once, without a collective.
"""

import hashlib
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from inductor_passes.runtime.agreement import Subject, compare
from simplefsdp.frontend.sharding import Group, ShardedModel

CheckInitialWeights = bool | Literal["exact"]

_SAMPLES = 64
"""Elements of a parameter that are compared, at equal distances."""

_SUBJECT = Subject(
    differ="have sharded different initial weights, and would train on a mixture of them",
    awaited="the first forward of a model",
    late="with gradients, before which initial weights are compared",
    remedy="Set one seed on all ranks, or load one checkpoint, before simple_fsdp(). simple_fsdp(..., "
    "check_initial_weights=False) takes them as they are",
    every_time=True,
)


@torch.no_grad()
def sample(value: Tensor, check: CheckInitialWeights) -> Tensor | None:
    """Return bytes that stand for a parameter, in storage of their own; ``None`` if it is not compared.

    Args:
        value: the parameter before it is sharded: the whole one, or this rank's part of a tensor-parallel one.
        check: ``True`` takes 64 elements, ``"exact"`` a digest of all, ``False`` nothing.
    """
    if not check or value.is_meta:
        return None
    flat = value.detach().reshape(-1)
    if check == "exact":
        return torch.frombuffer(bytearray(_sha256(flat.contiguous().view(torch.uint8).cpu())), dtype=torch.uint8)
    return flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].clone().view(torch.uint8)


def digests(
    samples: Mapping[str, Tensor | None], groups: tuple[Group, ...]
) -> dict[str, tuple[str, tuple[Group, ...]]]:
    """Return digest and groups of each parameter that is compared, by FQN (``ShardedModel.initial_weights``).

    Args:
        samples: ``sample`` of each parameter, by FQN.
        groups: process groups over which the parameters are sharded or replicated.
    """
    compared = {fqn: part for fqn, part in samples.items() if part is not None}
    contents = zip(compared, _on_cpu([*compared.values()]), strict=True)
    return {fqn: (_sha256(content).hex()[:16], groups) for fqn, content in contents}


@torch.compiler.disable
def compare_initial_weights(model: ShardedModel) -> None:
    """Raise ``RuntimeError`` on all ranks if they have sharded different values; it names the first that differs."""
    lines: dict[str, list[str]] = {}
    for fqn, (digest, groups) in model.initial_weights.items():
        for group in groups:
            lines.setdefault(group.name, []).append(f"initial value of {fqn}: {digest}")
    compare(lines, subject=_SUBJECT)
    model.initial_weights.clear()


def _sha256(content: Tensor) -> bytes:
    return hashlib.sha256(content.numpy().data).digest()


def _on_cpu(parts: list[Tensor]) -> list[Tensor]:
    """Copy tensors of bytes to CPU, those of one device by one copy."""
    copied: list[Tensor] = [*parts]
    for device in {part.device for part in parts if part.device.type != "cpu"}:
        there = [i for i, part in enumerate(parts) if part.device == device]
        whole = torch.cat([parts[i] for i in there]).cpu()
        for i, part in zip(there, whole.split([parts[i].numel() for i in there]), strict=True):
            copied[i] = part
    return copied

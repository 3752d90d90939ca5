"""Ranks compare what they have sharded, and how, before they train on a mixture of several models.

``simple_fsdp`` runs no collective: each rank keeps its own part of the values that it had. Ranks with different values,
by a seed of their own or by another checkpoint, would gather weights that no rank ever had; ranks with other shapes,
policies or frozen parameters would read each other's bytes as something else, or wait for ever. So ``simple_fsdp``
takes a digest of each whole parameter before it is sharded, and the first forward with gradients compares these digests
and how each parameter communicates through the store, once, without a collective.
"""

import hashlib
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from inductor_passes.runtime import stall_watch
from inductor_passes.runtime.agreement import Subject, compare
from inductor_passes.torch_compat.distributed import is_single_process_group
from simplefsdp.frontend.gather_hooks import has_hooks, inner_tensors
from simplefsdp.frontend.sharding import Communication, ShardedModel, ShardedParameter, Uncompared

CheckInitialWeights = bool | Literal["exact"]

_SAMPLES = 64
"""Elements of a parameter that are compared, at equal distances."""

_SUBJECT = Subject(
    differ="have sharded different models, and would train on a mixture of them",
    awaited="the first forward of a model",
    late="with gradients, before which ranks compare what they have sharded",
    remedy="Before simple_fsdp(), set one seed on all ranks or load one checkpoint (simple_fsdp(..., "
    "check_initial_weights=False) takes values as they are); give all ranks the same shapes, arguments and frozen "
    "parameters",
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
    if has_hooks(type(value)):
        samples = [part for tensor in inner_tensors(value) if (part := sample(tensor, check)) is not None]
        return torch.cat(samples) if samples else None
    flat = value.detach().reshape(-1)
    if check == "exact":
        return torch.frombuffer(bytearray(_sha256(flat.contiguous().view(torch.uint8).cpu())), dtype=torch.uint8)
    return flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].clone().view(torch.uint8)


def facts(
    infos: Mapping[str, ShardedParameter], dtypes: Mapping[str, torch.dtype], samples: Mapping[str, Tensor | None]
) -> dict[str, Uncompared]:
    """Return what ranks are to compare of each parameter, by FQN (``ShardedModel.uncompared``).

    Args:
        dtypes: the dtype of each parameter, by FQN.
        samples: ``sample`` of each parameter, by FQN.
    """
    compared = {fqn: part for fqn, part in samples.items() if part is not None}
    contents = zip(compared, _on_cpu([*compared.values()]), strict=True)
    values = {fqn: _sha256(content).hex()[:16] for fqn, content in contents}
    return {
        fqn: Uncompared(f"{_described(comm)}, dtype={dtypes[fqn]}", values.get(fqn), tuple(comm.groups))
        for fqn, comm in ((fqn, info.communication) for fqn, info in infos.items())
    }


def _described(communication: Communication) -> str:
    """Return what a parameter's collectives depend on, but for the names of process groups and what this rank pins."""
    found = communication._asdict()
    for name in ("shard_group", "replica_group", "two_steps", "pinned", "hooks_group"):
        del found[name]
    found["with_hooks"] = (communication.hooks_group is not None) or None
    found["between_nodes"] = communication.two_steps and communication.two_steps.between_format
    found["error_feedback"] = communication.feeds_back or None
    return ", ".join(f"{name}={value}" for name, value in found.items() if value is not None)


@torch.compiler.disable
def compare_sharding(model: ShardedModel, module: nn.Module | None) -> None:
    """Raise ``RuntimeError`` on all ranks if they have sharded different models; it names the first difference.

    Args:
        module: the model, of which ranks also compare which parameters are frozen; ``None``: it is being compiled, and
            the records of its graphs say so.
    """
    trained = {
        info.fqn: param.requires_grad
        for param in (module.parameters() if module is not None else ())
        if (info := getattr(param, "simple_fsdp_info", None)) is not None
    }
    lines: dict[str, list[str]] = {}
    for fqn, (sharding, digest, groups) in model.uncompared.items():
        about = [f"sharding of {fqn}: {sharding}"]
        about += [f"initial value of {fqn}: {digest}"] if digest is not None else []
        about += [f"{fqn} is {'trained' if trained[fqn] else 'frozen'}"] if fqn in trained else []
        for group in groups:
            lines.setdefault(group.name, []).extend(about)
    compare(lines, subject=_SUBJECT)
    model.uncompared.clear()
    if any(not is_single_process_group(group) for group in lines):
        stall_watch.start()


def _sha256(content: Tensor) -> bytes:
    return hashlib.sha256(content.numpy().data).digest()


def _on_cpu(parts: list[Tensor]) -> list[Tensor]:
    """Copy tensors of bytes to CPU, those of one device by one copy."""
    copied: list[Tensor] = [*parts]
    for device in {part.device for part in parts if part.device.type != "cpu"}:
        indices = [i for i, part in enumerate(parts) if part.device == device]
        whole = torch.cat([parts[i] for i in indices]).cpu()
        for i, part in zip(indices, whole.split([parts[i].numel() for i in indices]), strict=True):
            copied[i] = part
    return copied

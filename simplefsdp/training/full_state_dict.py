"""``full_state_dict``: the whole weights of a sharded model on one rank, for tools that know nothing of shards."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from inductor_passes.runtime.agreement import Subject, compare
from inductor_passes.torch_compat.dtensor import dtensor
from simplefsdp.frontend.gather_hooks import has_hooks, part_of_subclass
from simplefsdp.frontend.sharding import all_gather, is_float8

_SUBJECT = Subject(
    differ="do not gather the same whole weights",
    awaited="full_state_dict()",
    late="for which all ranks gather weights together",
    remedy="Call full_state_dict(model) on all ranks; the first one gets the weights",
    every_time=True,
)


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of ``model`` with whole tensors on CPU, on the first of its ranks; an empty dict elsewhere.

    The names are those of the original model, also where ``model`` is compiled, and tied parameters are one tensor, as
    ``save_pretrained``, ``torch.save`` and ``load_state_dict`` of a model that is not sharded take them. Weights are
    gathered one after the other: beside the shards a rank holds one whole weight at a time, and the first rank all of
    them in the memory of its CPU. All ranks call it together; they meet at the store first, so that a rank that does
    not come is named.

    Args:
        model: a model whose parameters ``simple_fsdp``, ``fully_shard`` or ``parallelize_module`` made; buffers and
            parameters that are whole on every rank are those of the first rank.

    Raises:
        TypeError: ``model`` is no module.
        RuntimeError: a weight is on ``meta``; the ranks call it for different models, or one does not come.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    state = getattr(model, "_orig_mod", model).state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise RuntimeError(
                f"full_state_dict: {name} is on meta: it has no values yet; see sharded_init and to_empty"
            )
    me = dist.get_rank() if dist.is_initialized() else 0
    first, lines = me, dict[str, list[str]]()
    for name, value in state.items():
        if isinstance(value, DTensor):
            first = min(first, int(value.device_mesh.mesh.min()))
            for group in value.device_mesh.get_all_groups():
                lines.setdefault(group.group_name, []).append(f"{name}: {tuple(value.shape)} {value.dtype}")
    compare(lines, subject=_SUBJECT)
    is_first = me == first
    gathered: dict[int, Any] = {}
    for value in state.values():
        if id(value) not in gathered:
            whole = _whole(value) if isinstance(value, DTensor) else value
            gathered[id(value)] = _on_cpu(whole) if is_first else None
            del whole
    return {name: gathered[id(value)] for name, value in state.items()} if is_first else {}


def _whole(value: DTensor) -> Tensor:
    """Return the whole tensor, gathered on the device of the mesh, where offloaded shards are copied first."""
    if has_hooks(type(value._local_tensor)) and (info := getattr(value, "simple_fsdp_info", None)) is not None:
        return all_gather(value._local_tensor, info.communication._replace(param_dtype=None))
    on_mesh: Any = value.detach()
    if on_mesh.device.type != value.device_mesh.device_type:
        on_mesh = on_mesh.to(value.device_mesh.device_type)
    if is_float8(value.dtype):
        as_bytes = on_mesh._local_tensor.view(torch.uint8)
        on_mesh = dtensor(as_bytes, value.device_mesh, value.placements, value.shape)
    whole: Tensor = on_mesh.full_tensor()
    return whole.view(value.dtype)


def _on_cpu(value: Any) -> Any:
    """Return a copy of a tensor in the memory of the CPU; anything else as it is."""
    if has_hooks(type(value)):
        return part_of_subclass(value.cpu(), 1, 0, 0)
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value

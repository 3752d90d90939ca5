"""Parameters that are tensor subclasses with FSDP2's hooks around the gather: quantized weights, weights of quantized
matmuls.

::

    shard - fsdp_pre_all_gather -> tensors - all_gather - wait -> tensors of all ranks - fsdp_post_all_gather -> weight

Each tensor has an all-gather of its own, which passes mark and merge as that of any parameter. Source of the hooks:
``FSDPParam.all_gather_inputs`` and ``init_unsharded_param`` (``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``).
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

_BEFORE, _AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_meshes: dict[str, DeviceMesh] = {}
"""The mesh that hooks are given, of ranks that hold different shards, by the name of its process group."""


def has_hooks(kind: type) -> bool:
    """Return whether tensors of this class say themselves what is gathered of them."""
    return hasattr(kind, _BEFORE) and hasattr(kind, _AFTER)


def add_mesh(mesh: DeviceMesh) -> str:
    """Let hooks have a mesh of one dimension; return the name of its process group, by which they find it."""
    name: str = mesh.get_group().group_name
    _meshes[name] = mesh
    return name


def part_of_subclass(whole: Tensor, ranks: int, rank: int, dim: int) -> Tensor:
    """Return a rank's part of a tensor with hooks, made by the operators that FSDP2 asks such classes for."""
    parts = torch.chunk(whole.detach(), ranks, dim)
    if rank >= len(parts):
        return whole.new_zeros((*whole.shape[:dim], 0, *whole.shape[dim + 1 :]))
    return whole.new_zeros(parts[rank].shape).copy_(parts[rank])


def plain_stand_in(shard: Tensor) -> Tensor:
    """Return a shard; in place of one with hooks a plain tensor of its shape, dtype and device, without its memory."""
    if not has_hooks(type(shard)):
        return shard
    return torch.empty((), dtype=shard.dtype, device=shard.device).expand(shard.shape)


def inner_tensors(value: Any) -> list[Tensor]:
    """Return the plain tensors that a tensor is made of; none of a subclass that does not tell."""
    if type(value) in (Tensor, torch.nn.Parameter):
        return [value]
    if not hasattr(value, "__tensor_flatten__"):
        return []
    return [tensor for name in value.__tensor_flatten__()[0] for tensor in inner_tensors(getattr(value, name))]


def gather_with_hooks(
    shard: Any,
    mesh_name: str,
    shape: tuple[int, ...],
    policy: MixedPrecisionPolicy,
    all_gather: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the weight that the hooks of ``shard`` make of all ranks' shards.

    Hooks that take a module are given ``None``.

    Args:
        shape: of the weight.
        all_gather: returns all ranks' tensors of some shape, one behind the other along dim 0.

    Raises:
        RuntimeError: the hooks make something else than a weight of that shape.
    """
    mesh = _meshes[mesh_name]
    hook = getattr(shard, _BEFORE)
    stride = torch.empty(shape, device="meta").stride()
    given = [mesh, torch.Size(shape), stride, None, policy]
    inputs, metadata = hook(*given[: len(inspect.signature(hook).parameters)])
    gathered = tuple(all_gather(tensor.reshape(tensor.shape or (1,)).contiguous()) for tensor in inputs)
    weight, _ = getattr(shard, _AFTER)(gathered, metadata, policy.param_dtype or shard.dtype)
    if tuple(weight.shape) != shape:
        raise RuntimeError(
            f"{type(shard).__name__}.{_AFTER}: made a weight of shape {tuple(weight.shape)}, expected {shape}"
        )
    return weight

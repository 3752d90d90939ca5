"""Clipping gradients by their norm: on this rank's parts, with one all-reduce for each dimension of their meshes."""

import functools
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.nn.utils import get_total_norm

from inductor_passes.torch_compat.dtensor import local_tensor
from simplefsdp.frontend.gradient_accumulation import check_reduced

_Groups = tuple[dist.ProcessGroup, ...]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients of a sharded model in place, so that their norm as one vector is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, for parameters on one mesh or several. Parameters may be on meshes of
    different dimensions, some tensor parallel, some not; plain parameters are taken to be the same on every rank. Every
    rank calls this function with the same parameters, whichever of them have a gradient.

    Args:
        parameters: several parameters, or one. A parameter without a gradient counts as zero.
        max_norm: the largest norm of all gradients, at least 0.
        norm_type: a positive number; infinity for the largest absolute value.
        error_if_nonfinite: raise if the norm is not finite, before anything is scaled, on every rank.
        foreach: one kernel for many gradients; ``None``: where the device has such kernels.

    Returns:
        The norm before scaling: a 0-dim float32 tensor, the same on every rank.

    Raises:
        TypeError: an argument is of another type.
        ValueError: ``max_norm`` is negative, ``norm_type`` is not positive, or a gradient is a sum that was not reduced
            (``Partial``).
        RuntimeError: a gradient was added up and has not been reduced (``set_requires_gradient_sync(False)``);
            ``error_if_nonfinite``, and the norm is not finite; ``foreach``, and the device has no such kernels.
    """
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not hasattr(value, "__float__"):
            raise TypeError(f"{name}: expected a number, found {value!r}")
    if not (max_norm := float(max_norm)) >= 0:
        raise ValueError(f"max_norm: expected a number of at least 0, found {max_norm}")
    if not (norm_type := float(norm_type)) > 0:
        raise ValueError(f"norm_type: expected a positive number or infinity, found {norm_type}")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for param in parameters:
        if not isinstance(param, Tensor):
            raise TypeError(
                f"parameters: expected those of a model, model.parameters(), found a {type(param).__name__}"
            )
    if not parameters:
        return torch.tensor(0.0)
    check_reduced(parameters)
    layout = functools.cache(_sharded_over)  # the same few for all
    found: dict[_Groups, list[Tensor]] = defaultdict(list)
    for param in parameters:
        gradient = param.grad
        # Also of those without a gradient here: what is reduced must not depend on the rank.
        placed: Any = param if gradient is None else gradient
        mine = found[layout(placed.device_mesh, placed.placements) if isinstance(placed, DTensor) else ()]
        if gradient is not None:
            mine.append(local_tensor(gradient))
    total = _norm(found, norm_type, foreach, _device(parameters))
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"error_if_nonfinite: the norm of order {norm_type} of all gradients is {total.item()}; nothing was scaled"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in (gradient for gradients in found.values() for gradient in gradients):
        by_device[gradient.device].append(gradient)
    for device, gradients in by_device.items():
        on_device = factor.to(device)
        if foreach is not False:
            torch._foreach_mul_(gradients, on_device)
            continue
        for gradient in gradients:
            gradient.mul_(on_device)
    return total


def _norm(found: dict[_Groups, list[Tensor]], order: float, foreach: bool | None, device: torch.device) -> Tensor:
    """Return the norm of all parts on all ranks; ``found``: this rank's, by the groups that they are sharded over."""
    largest = math.isinf(order)
    sums: dict[_Groups, Tensor] = {}
    for groups, gradients in found.items():
        parts = [gradient for gradient in gradients if gradient.numel()]
        norm = get_total_norm(parts, order, foreach=foreach) if parts else torch.zeros(())
        norm = norm.to(device, torch.float32)
        sums[groups] = norm if largest else norm**order
    # A rank knows the groups of one mesh in the order of its dimensions, and those of several in that of parameters.
    for group in dict.fromkeys(group for groups in sums for group in groups):
        here = [groups for groups in sums if group in groups]
        vector = torch.stack([sums[groups] for groups in here])
        dist.all_reduce(vector, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group)
        sums |= dict(zip(here, vector.unbind(), strict=True))
    every = torch.stack(list(sums.values()))
    return every.max() if largest else every.sum() ** (1 / order)


def _device(parameters: list[Tensor]) -> torch.device:
    """The device on which the process groups of these parameters reduce."""
    param = next((param for param in parameters if isinstance(param, DTensor)), parameters[0])
    reduces_on = param.device_mesh.device_type if isinstance(param, DTensor) else param.device.type
    return param.device if reduces_on == param.device.type else torch.device(reduces_on)


def _sharded_over(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> _Groups:
    """Groups of ranks that hold different parts."""
    if any(isinstance(placement, Partial) for placement in placements):
        raise ValueError(f"parameters: a gradient is placed as {placements}: a sum that was not reduced")
    return tuple(mesh.get_group(i) for i in range(mesh.ndim) if not isinstance(placements[i], Replicate))

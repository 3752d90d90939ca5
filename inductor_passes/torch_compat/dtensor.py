"""DTensor: construction, local shards and meshes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard  # noqa: F401

from inductor_passes.torch_compat.version import VERSION

REDUCES_IN_OWN_DTYPE = VERSION >= (2, 15)
"""Whether ``MixedPrecisionPolicy.reduce_dtype=None`` is the dtype of the parameter; before, that of the gradient."""


def dtensor(local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> DTensor:
    """Return ``DTensor.from_local(local, mesh, placements, shape=shape)``, detached, in a tenth of the time."""
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


@contextmanager
def meshes_pickled_without_hash() -> Iterator[None]:
    """Let a ``DeviceMesh`` be pickled meanwhile as it is in every process.

    Keys of torch's compile caches are hashes of pickled inputs, among them the meshes of DTensors that a graph takes. A
    mesh keeps its ``hash()``, which has another value in each process because that of a string has.
    """
    get_state = DeviceMesh.__getstate__

    def without_hash(mesh: DeviceMesh) -> dict[str, Any]:
        return {**get_state(mesh), "_hash": None}

    DeviceMesh.__getstate__ = without_hash  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        DeviceMesh.__getstate__ = get_state  # type: ignore[method-assign]


def local_tensor(value: Any) -> Any:
    """Return this rank's part of a ``DTensor``, the same memory, not differentiable; any other value as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def concatenate_meshes(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """Return the mesh with the dimensions of two meshes that are parts of one.

    Raises:
        RuntimeError: they are not parts of one mesh.
    """
    return DeviceMesh._concatenate([outer, inner])


def to_local(param: DTensor) -> Tensor:
    """Return ``param.to_local()``, without its effects on gradients.

    Torch moves the gradient of ``to_local`` to the mesh's device. Before torch 2.12 the gradient has no gradient
    itself, is zeros where there is none, and has strides that differ between ranks with uneven shards, for which
    autograd then gathers on some of them.
    """
    return cast(Tensor, _Local.apply(param))


def as_global(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Return the ``DTensor`` of which ``local`` is this rank's part: the gradient of ``to_local``."""
    return cast(DTensor, _Global.apply(local, spec))


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx, param):
        ctx.spec = param._spec
        ctx.set_materialize_grads(False)
        return param._local_tensor.view_as(param._local_tensor)

    @staticmethod
    def backward(ctx, grad):
        return None if grad is None else _Global.apply(grad, ctx.spec)


class _Global(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local, spec):
        ctx.spec, ctx.device = spec, local.device
        return DTensor(local, spec, requires_grad=False)

    @staticmethod
    def backward(ctx, grad):
        local = _Local.apply(grad.redistribute(ctx.spec.mesh, ctx.spec.placements))
        return local.to(ctx.device), None

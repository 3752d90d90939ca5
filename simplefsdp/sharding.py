"""A parameter as a shard: what is known about it, and the two collectives that it causes.

::

    shard - [pad] - cast - all_gather - wait - [slice] -> full weight     (forward, and again in backward)
    full gradient - cast - [pad] - reduce_scatter - wait - [slice] - cast -> gradient of the shard

The order of casts, reduction and division is FSDP2's (``foreach_all_gather`` and ``foreach_reduce`` in
``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``), so that both train to the same bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True, eq=False)
class ShardedModel:
    """A model given to ``simple_fsdp``, or a deep copy: the FQNs of its parameters, in registration order."""

    fqns: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """What one parameter needs to be gathered and reduced."""

    fqn: str
    """Name in the model given to ``simple_fsdp``; the first one for a tied parameter."""
    model: ShardedModel
    group_name: str
    """Process group of the mesh dimension that the parameter is sharded over, as functional collectives name it."""
    group_size: int
    param_dtype: torch.dtype | None
    """Dtype of the gathered weight; ``None``: that of the shard."""
    reduce_dtype: torch.dtype | None
    """Dtype of the gradient reduction; ``None``: that of the gradient."""
    reshard_after_forward: bool
    """Whether the full weight is dropped after forward and gathered again in backward."""


def shard(param: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's part of ``param`` along dim 0, as a ``DTensor`` parameter of the same global shape.

    Rows are dealt as ``torch.chunk`` does it: ``ceil(rows / ranks)`` to each rank, the last ones may hold
    fewer or none. No communication: every rank must hold the same full values (as with FSDP2). Python attributes
    set on ``param`` are kept.
    """
    rows = -(-param.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * rows, param.shape[0])
    local = param.detach().narrow(0, start, min(rows, param.shape[0] - start))
    # A copy: a view would keep the full weight's storage alive.
    local = local.clone(memory_format=torch.contiguous_format)
    stride = torch.empty(param.shape, device="meta").stride()
    dtensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=param.shape, stride=stride)
    sharded = nn.Parameter(dtensor, requires_grad=param.requires_grad)
    sharded.__dict__.update(param.__dict__)
    return sharded


def unshard(param: Tensor, info: ShardedParameter) -> Tensor:
    """The full weight of a sharded parameter, in ``param_dtype``; its gradient returns averaged over the ranks."""
    assert isinstance(param, DTensor)
    return _Unshard.apply(
        param.to_local(),
        param.shape[0],
        info.param_dtype,
        info.reduce_dtype,
        info.group_name,
        info.group_size,
        not info.reshard_after_forward,
    )


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local, rows, param_dtype, reduce_dtype, group_name, group_size, _keep):
        # Whether to keep the full weight is the backend's business. Computing an argument from it makes Dynamo guard
        # compiled code by it: otherwise a model with another setting would be given the code of the first.
        ctx.constants = (local.shape[0], local.dtype, reduce_dtype, group_name, group_size)
        local = _pad_rows(local, -(-rows // group_size))
        if param_dtype is not None:
            local = local.to(param_dtype)
        full = _c10d.wait_tensor(_c10d.all_gather_into_tensor(local, group_size, group_name))
        return full if full.shape[0] == rows else full[:rows]

    @staticmethod
    def backward(ctx, grad):
        local_rows, dtype, reduce_dtype, group_name, group_size = ctx.constants
        if reduce_dtype is not None:
            grad = grad.to(reduce_dtype)
        op, predivide, postdivide = _division(grad.dtype, group_size)
        grad = _pad_rows(grad, -(-grad.shape[0] // group_size) * group_size).contiguous()
        if predivide != 1:
            grad = grad / predivide
        local = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(grad, op, group_size, group_name))
        if postdivide != 1:
            local = local / postdivide
        if local.shape[0] != local_rows:
            local = local[:local_rows]
        return local.to(dtype), None, None, None, None, None, None


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x
    return nn.functional.pad(x, [0, 0] * (x.ndim - 1) + [0, rows - x.shape[0]])


def _division(dtype: torch.dtype, group_size: int) -> tuple[str, float, float]:
    """Reduction operator and the factors to divide by before and after it (FSDP2's ``_get_gradient_divide_factors``).

    float16 is divided by about sqrt(ranks) on each side of a sum, against overflow and underflow; wider
    types leave the division to the collective.
    """
    if dtype != torch.float16:
        return ("avg" if group_size > 1 else "sum"), 1, 1  # NCCL's average may be wrong on one rank
    before = 1
    while group_size % before == 0 and group_size / before > before:
        before *= 2
    return "sum", before, group_size / before

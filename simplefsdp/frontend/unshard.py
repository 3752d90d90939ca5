"""A full weight in the autograd graph: what makes it of a shard, and where its gradient goes.

::

    shard - all_gather -> full weight                     (``sharding.all_gather``, and again in backward)
    full gradient -> reduced                              (``sharding.reduce``; of one read, or of all in a call)
                  -> added up, and reduced later          (``gradient_accumulation.py``)
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from inductor_passes.ops.accumulate import ACCUMULATE, ADD_UP
from inductor_passes.ops.call import call
from inductor_passes.torch_compat.autograd import keep_gradient_dtype, temporarily_clear_interpreter_stack
from inductor_passes.torch_compat.dtensor import as_global, local_tensor, to_local
from simplefsdp.frontend.gather_hooks import has_hooks, plain_stand_in
from simplefsdp.frontend.sharding import WITHOUT_VALUES, Communication, all_gather, decode, reduce, sum_dtype


def _all_gather(local: Tensor, comm: Communication) -> Tensor:
    if 0 in comm.shape or comm.dim is None or comm.shard_group is None or comm.hooks_group is not None:
        return all_gather(local, comm)  # may be a view of the shard, or take more than a tensor
    return call(lambda local: all_gather(local, comm), ("all_gather", comm), local)


class _UnshardedProxy(torch.autograd.Function):
    """Represents the full weight in the autograd graph, without its memory; its gradient is reduced, once."""

    @staticmethod
    def forward(ctx, param, comm, adds_up):
        ctx.comm, ctx.local, ctx.spec, ctx.adds_up = comm, plain_stand_in(local_tensor(param)), param._spec, adds_up
        keep_gradient_dtype(ctx)
        return ctx.local.new_empty((), dtype=comm.param_dtype, device=comm.device).expand(comm.shape)

    @staticmethod
    def backward(ctx, grad):
        if ctx.adds_up is not None:
            grad = ADD_UP(grad, ctx.adds_up)
        return as_global(_Reduce.apply(grad, ctx.comm, ctx.local), ctx.spec), None, None


class _Reduce(torch.autograd.Function):
    """``reduce``, and what a second derivative needs: the loss is a mean over the ranks, also of what it does with
    gradients that are a mean over the ranks already, so the average has the gradient of a gather."""

    @staticmethod
    def forward(ctx, grad, comm, local):
        dtype = None if grad.dtype == local.dtype else grad.dtype
        ctx.comm = comm._replace(param_dtype=dtype, gather_format=None)
        if 0 in comm.shape or not comm.groups or comm.hooks_group is not None:
            return reduce(grad, comm, local)
        return call(lambda grad, local: reduce(grad, comm, local), ("reduce", comm), grad, local)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return _all_gather(grad, ctx.comm), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, _proxy, local, comm):
        keep_gradient_dtype(ctx)
        return _all_gather(local, comm)

    @staticmethod
    def backward(_ctx, grad):
        return grad, None, None


class _GatherAndAccumulate(torch.autograd.Function):
    """``_Gather`` in compiled code: its gradient is added to a sum as soon as it is there."""

    @staticmethod
    def forward(ctx, receiver, local, comm):
        ctx.receiver, ctx.dtype = receiver.detach(), sum_dtype(comm, local.dtype)
        keep_gradient_dtype(ctx)
        return _all_gather(local, comm)

    @staticmethod
    def backward(ctx, grad):
        return ACCUMULATE(grad, ctx.receiver, ctx.dtype), None, None


class _GatherAndReduce(torch.autograd.Function):
    """``to_local``, ``_UnshardedProxy`` and ``_Gather`` in one, where one read is one gather and one reduction.

    Tracing takes most of its time for the operators around collectives.
    """

    @staticmethod
    def forward(ctx, param, comm):
        local = local_tensor(param)
        ctx.comm, ctx.local, ctx.spec = comm, plain_stand_in(local), param._spec
        keep_gradient_dtype(ctx)
        return _all_gather(local, comm)

    @staticmethod
    def backward(ctx, grad):
        return as_global(_Reduce.apply(grad, ctx.comm, ctx.local), ctx.spec), None


def _local(param: DTensor) -> Tensor:
    """Return the shard; with the gradient of ``to_local``, unless it is a tensor subclass."""
    local = local_tensor(param)
    return local if has_hooks(type(local)) else to_local(param)


def unsharded_proxy(param: DTensor, comm: Communication, adds_up: Tensor | None = None) -> Tensor:
    """Return the proxy that ``gather`` takes for all reads of a parameter: their gradients are reduced together.

    Args:
        adds_up: the accumulated gradient that is added to the sum (``inductor_passes/ops/accumulate.py``).
    """
    return _UnshardedProxy.apply(param, comm, adds_up)


def gather(param: DTensor, comm: Communication, proxy: Tensor) -> Tensor:
    """The full weight of a sharded parameter, in ``param_dtype``; its gradient flows to ``proxy``."""
    return _Gather.apply(proxy, _local(param), comm)


@torch.compiler.allow_in_graph
def unshard(
    param: DTensor, key: str, proxy: Tensor | None = None, ends: bool = False, receiver: Tensor | None = None
) -> Tensor:
    """The full weight of a sharded parameter, in ``param_dtype``; its gradient returns averaged over the ranks.

    In an accumulation the gradient is added to the sum that ``receiver`` stands for, or flows to ``proxy`` as it is,
    or, if it ``ends``, returns averaged with what has flowed there.

    One node of Dynamo's graph, whatever torch's version makes of the functions inside. ``key``: the parameter's
    ``Communication``, encoded.
    """
    comm = decode(key)
    if param.device.type == "meta":
        raise RuntimeError(WITHOUT_VALUES.format(f"a parameter of shape {tuple(param.shape)}"))
    with temporarily_clear_interpreter_stack():
        if receiver is not None:
            return _GatherAndAccumulate.apply(receiver, _local(param), comm)
        if proxy is None:
            return _GatherAndReduce.apply(param, comm)
        return gather(param, comm, unsharded_proxy(param, comm, proxy) if ends else proxy)

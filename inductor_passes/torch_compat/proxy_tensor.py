"""Tracing a function by itself while torch compiles the graph that it is part of."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.fx import GraphModule
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes.torch_compat.autograd import without_dispatch_modes


def fake_like(tensors: Iterable[Tensor], *, requires_grad: bool = False) -> list[Tensor]:
    """Return fake tensors like those of the graph that is compiled: of the same sizes, without symbols, and strides.

    Args:
        tensors: what they are like.
        requires_grad: whether they require gradients where ``tensors`` do.
    """
    fake_mode = TracingContext.get().fake_mode
    assert fake_mode is not None
    with without_dispatch_modes(), fake_mode:
        return [
            torch.empty_strided(
                x.shape, x.stride(), dtype=x.dtype, device=x.device, requires_grad=requires_grad and x.requires_grad
            )
            for x in tensors
        ]


def is_traced() -> bool:
    """Return whether operators become nodes of a graph, and not only the shapes of results are computed."""
    return proxy_tensor._CURRENT_MAKE_FX_TRACER is not None


def trace(function: Callable[..., Any], operands: Iterable[Tensor]) -> GraphModule:
    """Return the graph of ``function``, with the decompositions of the graph that torch traces now, if any.

    Args:
        function: returns a tuple of tensors and writes to none of its arguments.
        operands: tensors like those that the graph is for, whose values do not count.
    """
    tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER
    examples = fake_like(operands)
    with without_dispatch_modes():
        return make_fx(function, decomposition_table=dict(tracer.decomposition_table) if tracer else {})(*examples)

"""Tracing a function by itself while torch traces another one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes.torch_compat.autograd import without_dispatch_modes


def is_traced() -> bool:
    """Return whether operators become nodes of a graph, and not only the shapes of results are computed."""
    return proxy_tensor._CURRENT_MAKE_FX_TRACER is not None


def trace(function: Callable[..., Any], operands: Sequence[Tensor]) -> GraphModule:
    """Return the graph of ``function``, with the decompositions of the graph that torch traces now, if any.

    Args:
        function: returns a tuple of tensors and writes to none of its arguments.
        operands: tensors like those that the graph is for, whose values do not count.
    """
    tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER
    fake_mode = torch._guards.TracingContext.get().fake_mode
    assert fake_mode is not None
    with without_dispatch_modes(), fake_mode:
        examples = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in operands]
    with without_dispatch_modes():
        return make_fx(function, decomposition_table=dict(tracer.decomposition_table) if tracer else {})(*examples)

"""The autograd engine: which backward runs on this thread, hooks on saved tensors, dispatch modes."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes

KEEPS_GRADIENT_DTYPE = hasattr(torch.autograd.function.FunctionCtx, "set_output_grad_dtype")
"""Whether a function can get its gradient in the gradient's own dtype, as FSDP2's do from torch 2.15 on."""


def keep_gradient_dtype(ctx: Any) -> None:
    """Let an autograd function with one output get its gradient in the gradient's own dtype, where FSDP2 does.

    Before torch 2.15 the gradient is always cast to the dtype of the output.
    """
    if KEEPS_GRADIENT_DTYPE:
        ctx.set_output_grad_dtype(None)


class _NotedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, noted, number):
        ctx.noted, ctx.number = noted, number
        keep_gradient_dtype(ctx)
        return value

    @staticmethod
    def backward(ctx, grad):
        ctx.noted[ctx.number] = grad.dtype
        return grad, None, None


def note_gradient_dtype(value: Tensor, noted: dict[int, torch.dtype], number: int) -> Tensor:
    """Return a view of ``value``, the dtype of whose gradient is noted before autograd casts it to ``value``'s."""
    return _NotedGradient.apply(value, noted, number)


def in_backward() -> bool:
    """Return whether autograd runs a backward on this thread."""
    return current_backward() != -1


def current_backward() -> int:
    """Return the number of the backward that autograd runs on this thread; -1: none."""
    return torch._C._current_graph_task_id()


def is_nested() -> bool:
    """Return whether the backward that runs on this thread was begun in another one, as by a reentrant checkpoint."""
    begin = torch.autograd.graph._engine_run_backward.__code__
    # Autograd's own threads, of which there is one for each GPU, run what another thread has begun.
    begun_here = 0 if isinstance(threading.current_thread(), threading._DummyThread) else 1
    begun, frame = 0, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        begun += frame.f_code is begin
    return begun > begun_here


def is_due(leaf: Tensor, backward: int) -> bool:
    """Return whether the backward of this number, which runs on this thread, is asked for the gradient of ``leaf``."""
    assert backward == current_backward() != -1
    # Inside of an operator autograd may be left out.
    with_autograd = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with without_dispatch_modes(), torch.enable_grad(), with_autograd:
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    return torch._C._will_engine_execute_node(node)


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the backward that runs, which may be nested in another."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def saved_tensors_hooks() -> tuple[Any, Any] | None:
    """Return the ``torch.autograd.graph.saved_tensors_hooks`` in force: the pack and the unpack hook."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def push_saved_tensors_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Enter ``torch.autograd.graph.saved_tensors_hooks`` without the context manager, at whose frame Dynamo stops."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensors_hooks() -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()


def dispatch_modes() -> int:
    """Return how many ``TorchDispatchMode`` are in force."""
    return torch._C._len_torch_dispatch_stack()

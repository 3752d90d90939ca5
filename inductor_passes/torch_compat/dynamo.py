"""Dynamo: whether it traces the caller, which frames it leaves alone, and its structured trace."""

from collections.abc import Callable

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback as get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code as skip_code
from torch._guards import CompileContext


def inside_torch_compile() -> bool:
    """Return whether the caller is being traced, or runs between the graphs of a compiled function."""
    return torch.compiler.is_compiling() or callable(get_eval_frame_callback())


def trace_artifact(name: str, json: Callable[[], str]) -> None:
    """Add a file to torch's own structured trace (``TORCH_TRACE``, which tlparse shows), if there is one."""
    torch._logging.trace_structured("artifact", lambda: {"name": name, "encoding": "json"}, payload_fn=json)


def compile_id() -> str:
    """Return Dynamo's id of the graph that is being compiled, ``frame_attempt``, as in torch's own logs."""
    return str(CompileContext.current_compile_id()).replace("/", "_")

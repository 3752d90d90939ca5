"""Dynamo: whether it traces the caller, which frames it leaves alone, and its structured trace."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback as get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code as skip_code
from torch._guards import CompileContext


def inside_torch_compile() -> bool:
    """Return whether the caller is being traced, or runs between the graphs of a compiled function."""
    return torch.compiler.is_compiling() or callable(get_eval_frame_callback())


def compiled_for_each_shape(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, compiled by TorchInductor for each shape of its arguments, however many shapes there are."""
    compiled = torch.compile(function, dynamic=False, fullgraph=True)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        # Dynamo takes more than a few for a mistake, and its limit is that of the process.
        with torch._dynamo.config.patch(recompile_limit=sys.maxsize, accumulated_recompile_limit=sys.maxsize):
            return compiled(*args)

    return call


def trace_artifact(name: str, json: Callable[[], str]) -> None:
    """Add a file to torch's own structured trace (``TORCH_TRACE``, which tlparse shows), if there is one."""
    torch._logging.trace_structured("artifact", lambda: {"name": name, "encoding": "json"}, payload_fn=json)


def compile_id() -> str:
    """Return Dynamo's id of the graph that is being compiled, ``frame_attempt``, as in torch's own logs."""
    return str(CompileContext.current_compile_id()).replace("/", "_")

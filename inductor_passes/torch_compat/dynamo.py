"""Dynamo: whether it traces the caller, which frames it leaves alone or evaluates, and its structured trace."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


@contextmanager
def frames_evaluated_by_python() -> Iterator[None]:
    """Let Python evaluate frames by itself meanwhile, and not by Dynamo (PEP 523).

    While Dynamo or a backend compiles, every call of a Python function goes through Dynamo, and Python inlines none.
    Code that is little but calls takes up to twice as long. Where something is called meanwhile that Dynamo has
    compiled, Dynamo evaluates frames from there on. Where Python does not export what this needs, nothing changes.
    """
    python, pointer = ctypes.PyDLL(None), ctypes.c_void_p
    try:
        interpreter = ctypes.PYFUNCTYPE(pointer)(("PyInterpreterState_Get", python))()
        evaluator = ctypes.PYFUNCTYPE(pointer, pointer)(("_PyInterpreterState_GetEvalFrameFunc", python))
        evaluate = ctypes.PYFUNCTYPE(None, pointer, pointer)(("_PyInterpreterState_SetEvalFrameFunc", python))
        by_python = ctypes.cast(python._PyEval_EvalFrameDefault, pointer)
    except AttributeError:
        evaluate = None
    if evaluate is None:
        yield
        return
    before = evaluator(interpreter)
    evaluate(interpreter, by_python)
    try:
        yield
    finally:
        evaluate(interpreter, before)

"""Whether Python evaluates frames by itself, or Dynamo does."""

import ctypes


def python_evaluates_frames() -> bool:
    """Return whether Python evaluates them by itself."""
    python = ctypes.PyDLL(None)
    python.PyInterpreterState_Get.restype = ctypes.c_void_p
    python._PyInterpreterState_GetEvalFrameFunc.restype = ctypes.c_void_p
    found = python._PyInterpreterState_GetEvalFrameFunc(ctypes.c_void_p(python.PyInterpreterState_Get()))
    return bool(found == ctypes.cast(python._PyEval_EvalFrameDefault, ctypes.c_void_p).value)

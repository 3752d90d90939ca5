"""Space for the frames of Python functions, which CPython keeps in chunks of 16 KiB.

A call whose frame does not fit into the chunk gets a new one from the operating system, and its return gives that back
(``_PyThreadState_PushFrame`` of CPython 3.11 to 3.13). Code that calls functions at such a depth takes up to thirty
times as long as at any other, and which depth that is depends on all callers: a compilation is deep, and meets it.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_WORDS = 2**17
"""Size of a frame for which CPython makes a chunk of 2 MiB; the frame's half of it is never written to."""


def with_stack_space(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` with space for the frames of some thousand calls within."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_WORDS)
    return functools.update_wrapper(call, function)

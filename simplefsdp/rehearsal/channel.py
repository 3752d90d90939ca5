"""Channels: what carries the collectives of one process group, one after the other, in modelled time.

On CPU a thread of its own (``channel.cpp``), which Python's lock cannot hold up; on CUDA a stream of its own, on which
a kernel waits, so that nothing blocks the host. Both read inputs and write outputs when the modelled time is over.
"""

import ctypes
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from inductor_passes.torch_compat.inductor import load_cpp

_TYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
]
"""Dtypes that ``channel.cpp`` can multiply, in its order."""


class Move(NamedTuple):
    """A move of data: ``out[i] = factor * source`` for each part of ``out`` that has the size of ``source``."""

    out: Tensor
    source: Tensor
    factor: float = 1

    @property
    def in_place(self) -> bool:
        """Whether there is nothing to move."""
        return self.factor == 1 and (self.out.data_ptr(), self.out.nbytes) == (
            self.source.data_ptr(),
            self.source.nbytes,
        )


class Times(NamedTuple):
    """Times of a collective, in seconds of ``time.perf_counter()``."""

    issued: float
    started: float
    finished: float
    moved: float
    """When the data had moved; ``finished`` is the time of the model."""


class Job(Protocol):
    """A collective on its channel."""

    waited: float | None
    """When a wait for the collective first began."""
    blocked: float
    """Seconds that the wait took."""

    def wait(self) -> None:
        """Let what follows, on this thread (CPU) or stream (CUDA), wait for the collective."""

    def done(self) -> bool: ...

    def future(self, outputs: list[Tensor]) -> torch.futures.Future:
        """Return a future of ``outputs``, set when the data has moved (DDP asks for one)."""

    def times(self) -> Times: ...


class _Copy(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        ("out", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("times", ctypes.c_int64),
        ("factor", ctypes.c_double),
        ("type", ctypes.c_int64),
    ]


@functools.cache
def _library() -> Any:
    library = load_cpp(Path(__file__).with_name("channel.cpp").read_text())
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    for name, result, *arguments in (
        ("channel_open", pointer),
        ("channel_close", None, pointer),
        ("channel_issue", pointer, pointer, integer, pointer, integer),
        ("job_done", ctypes.c_bool, pointer),
        ("job_wait", integer, pointer),
        ("job_times", None, pointer, pointer),
        ("job_free", None, pointer),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class CpuChannel:
    """A thread that moves data at the end of each collective's time; it starts with the first one."""

    def __init__(self) -> None:
        self._library = _library()
        self._handle = self._library.channel_open()
        self._under_way: deque[CpuJob] = deque()
        self.close = weakref.finalize(self, self._library.channel_close, self._handle)

    def issue(self, seconds: float, moves: Sequence[Move]) -> "CpuJob":
        if not self.close.alive:
            raise RuntimeError("rehearsal: this world has ended")
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
        copies = [copy for move in moves for copy in _copies(move)]
        array = (_Copy * len(copies))(*copies)
        handle = self._library.channel_issue(self._handle, round(seconds * 1e9), array, len(copies))
        job = CpuJob(self._library, handle, moves)
        self._under_way.append(job)  # keeps the tensors until the thread is done with them, wait or no wait
        return job


def _copies(move: Move) -> list[_Copy]:
    out, source, factor = move
    if source.numel() == 0 or move.in_place:
        return []
    kind = 0
    if factor != 1:
        real = source.dtype.to_real() if source.dtype.is_complex else source.dtype
        if real not in _TYPES:
            raise NotImplementedError(f"rehearsal: sums of {source.dtype} on cpu")
        kind = _TYPES.index(real)
    times = out.numel() // source.numel()
    return [_Copy(out.data_ptr(), source.data_ptr(), source.nbytes, times, factor, kind)]


class CpuJob:
    def __init__(self, library: Any, handle: int, moves: Sequence[Move]):
        self._library, self._handle, self._moves = library, handle, moves
        self.waited: float | None = None
        self.blocked = 0.0

    def __del__(self) -> None:
        self._library.job_free(self._handle)

    def done(self) -> bool:
        return self._library.job_done(self._handle)

    def wait(self) -> None:
        if self.waited is None:
            self.waited = time.perf_counter()
            self.blocked = self._library.job_wait(self._handle) / 1e9
            self._moves = ()
        else:
            self._library.job_wait(self._handle)

    def future(self, outputs: list[Tensor]) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()

        def complete() -> None:
            self._library.job_wait(self._handle)
            self._moves = ()
            future.set_result(outputs)

        threading.Thread(target=complete, daemon=True).start()
        return future

    def times(self) -> Times:
        times = (ctypes.c_int64 * 4)()
        self._library.job_times(self._handle, times)
        return Times(*(nanoseconds / 1e9 for nanoseconds in times))

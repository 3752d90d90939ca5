"""A channel on CUDA: a stream on which a kernel waits the modelled time, then copies. Nothing blocks the host.

The kernel holds one block of 1024 threads on each of ``multiprocessors`` of them, as NCCL's kernels do while they run.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from .channel import Move, Times


@triton.jit
def _begin(start):
    tl.store(start, globaltimer())


@triton.jit
def _hold(start, nanoseconds):
    """Return ``nanoseconds`` after ``start``."""
    end = tl.load(start) + nanoseconds
    now = globaltimer()
    while now < end:
        now = globaltimer()


class CudaChannel:
    """A stream that moves data at the end of each collective's time."""

    def __init__(self, device: torch.device, multiprocessors: int):
        self._device, self._multiprocessors = device, multiprocessors
        self._stream = torch.cuda.Stream(device)
        self._start = torch.zeros(1, dtype=torch.int64, device=device)
        self._seconds_per_byte = _copy_seconds_per_byte(device)

    def issue(self, seconds: float, moves: Sequence[Move]) -> "CudaJob":
        job = CudaJob(self._stream, moves)
        job.issued.record()
        self._stream.wait_event(job.issued)
        moved = sum(move.out.nbytes for move in moves if not move.in_place)
        with torch.cuda.stream(self._stream):
            job.started.record()
            if seconds > 0:
                _begin[(1,)](self._start, num_warps=1)
                self._hold(seconds - moved * self._seconds_per_byte)
            for move in moves:
                _carry(move)
            if seconds > 0:
                self._hold(seconds)
            job.finished.record()
        return job

    def _hold(self, seconds: float) -> None:
        _hold[(self._multiprocessors,)](self._start, max(0, round(seconds * 1e9)), num_warps=32)

    def close(self) -> None:
        self._stream.synchronize()


def _carry(move: Move) -> None:
    out, source, factor = move
    if source.numel() == 0 or move.in_place:
        return
    if factor != 1:
        torch.mul(source, factor, out=out.view(source.shape))
    else:
        out.view(-1, source.numel()).copy_(source.view(1, -1).expand(out.numel() // source.numel(), -1))


def _copy_seconds_per_byte(device: torch.device) -> float:
    """Measured: how long the copies of this file take, per byte written."""
    out, source = (torch.empty(n, dtype=torch.int8, device=device) for n in (2**28, 2**25))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        begin.record()
        _carry(Move(out, source))
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / out.nbytes


class CudaJob:
    def __init__(self, stream: torch.cuda.Stream, moves: Sequence[Move]):
        self._stream = stream
        self._moves: Sequence[Move] = moves  # kept until somebody's stream waits, as NCCL keeps them
        self.issued, self.started, self.finished = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        self._before, self._after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._waited = False

    def wait(self) -> None:
        stream = torch.cuda.current_stream(self._stream.device)
        if self._waited:
            stream.wait_event(self.finished)
            return
        self._waited = True
        self._before.record(stream)
        stream.wait_event(self.finished)
        self._after.record(stream)
        self._moves = ()

    def done(self) -> bool:
        return self.finished.query()

    def future(self, outputs: list[Tensor]) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future(devices=[self._stream.device])
        with torch.cuda.stream(self._stream):
            future.set_result(outputs)
        return future

    @property
    def waited(self) -> float | None:
        return clock(self._before) if self._waited else None

    @property
    def blocked(self) -> float:
        return self._before.elapsed_time(self._after) * 1e-3 if self._waited else 0.0

    def times(self) -> Times:
        finished = clock(self.finished)
        return Times(clock(self.issued), clock(self.started), finished, finished)


_origin: list[Any] = []


def clock(event: torch.cuda.Event) -> float:
    """When ``event`` happened, as ``time.perf_counter()``, to a few microseconds."""
    if not _origin:
        origin = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        origin.record()
        origin.synchronize()
        _origin[:] = [origin, time.perf_counter()]
    origin, seconds = _origin
    return seconds + origin.elapsed_time(event) * 1e-3

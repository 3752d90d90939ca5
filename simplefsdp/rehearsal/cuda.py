"""A channel on CUDA: a stream on which a kernel waits the modelled time, then copies. Nothing blocks the host.

The kernel that waits holds a block of 1024 threads on each of ``multiprocessors`` of them, about what NCCL's do while
they run, or one warp, if it is one. Where GPUs have clusters (compute capability 9 and later), blocks are launched in
clusters of four, spread over the GPU, as NCCL's are (``cgaClusterSize`` of ``ncclConfig_t``): where they lie says which
multiprocessors are left in clusters for matmuls. All members of a group are copied by one kernel, on as many
multiprocessors as NCCL's take, so that a copy takes little from compute, and is not held up by compute between two
members.
"""

import functools
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from simplefsdp.rehearsal.channel import Move, Times


@triton.jit
def _sleep_until(end):
    """Return when the GPU's clock shows ``end``.

    Warps sleep between two looks at the clock: small kernels have blocks on the same multiprocessors, and warps that
    spin would take most of their time, where NCCL's wait for memory or at a barrier.
    """
    now = globaltimer()
    while now < end:
        tl.inline_asm_elementwise("nanosleep.u32 500; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)
        now = globaltimer()


@triton.jit(do_not_specialize=["nanoseconds"])
def _hold(start, nanoseconds, scratch, begins: tl.constexpr, size: tl.constexpr):
    """Return ``nanoseconds`` after ``start``, which is now and is written if the kernel ``begins``.

    ``scratch`` is written, since Triton has no cluster without a block.
    """
    if begins:
        began = globaltimer()
        tl.store(start, began, tl.program_id(0) == 0)
    else:
        began = tl.load(start)
    _sleep_until(began + nanoseconds)
    place = tl.arange(0, size)
    tl.store(scratch + place, place)


@triton.jit(do_not_specialize=["nanoseconds"])
def repeat_kernel(table, count, start, nanoseconds, block: tl.constexpr):
    """Write each source into its output as often as it fits; return ``nanoseconds`` after ``start``, if it is given.

    Rows of ``table``: the addresses of the output and the source, the words of the source, and how often it fits.
    """
    for move in range(count):
        out = tl.load(table + 4 * move).to(tl.pointer_type(tl.int32))
        source = tl.load(table + 4 * move + 1).to(tl.pointer_type(tl.int32))
        words, times = tl.load(table + 4 * move + 2), tl.load(table + 4 * move + 3)
        for first in range(tl.program_id(0) * block, words, tl.num_programs(0) * block):
            place = first + tl.arange(0, block)
            mask = place < words
            x = tl.load(source + place, mask)
            for part in range(times):
                tl.store(out + part * words + place, x, mask)
    if start is not None:
        _sleep_until(tl.load(start) + nanoseconds)


class HeldMultiprocessors:
    """Multiprocessors that kernels on the current stream hold, as blocks of a collective of NCCL do.

    ``cluster``: blocks of a cluster; by default NCCL's, where the GPU has clusters and they fit.
    """

    def __init__(self, device: torch.device, multiprocessors: int, cluster: int | None = None):
        if cluster is None:
            has_clusters = torch.cuda.get_device_capability(device)[0] >= 9
            cluster = _CLUSTER if has_clusters and multiprocessors % _CLUSTER == 0 else 1
        self._multiprocessors, self._cluster = multiprocessors, cluster
        self.start = torch.zeros(1, dtype=torch.int64, device=device)
        """When the kernel began that began last, in nanoseconds of the GPU's clock."""
        self._scratch = torch.zeros(_CLUSTER, dtype=torch.int32, device=device)

    def hold(self, seconds: float, *, begins: bool = True) -> None:
        """Hold them for so many seconds, since now or, if this does not begin, since the last call that began."""
        _hold[(self._multiprocessors // self._cluster,)](
            self.start,
            _nanoseconds(seconds),
            self._scratch,
            begins,
            _CLUSTER,
            num_warps=1 if self._multiprocessors == 1 else 32,
            num_ctas=self._cluster,
        )


class CudaChannel:
    """A stream that moves data at the end of each collective's time."""

    def __init__(self, device: torch.device, multiprocessors: int):
        self._stream = torch.cuda.Stream(device, priority=-1)  # or it would queue behind compute
        self._held = HeldMultiprocessors(device, multiprocessors)
        self._programs = max(multiprocessors, _NCCLS)
        self._seconds_per_byte = _copy_seconds_per_byte(device, self._programs)
        self._under_way: deque[CudaJob] = deque()
        self.close = weakref.finalize(self, self._stream.synchronize)

    def issue(self, seconds: float, moves: Sequence[Move]) -> "CudaJob":
        if not self.close.alive:
            raise RuntimeError("rehearsal: this world has ended")
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
        job = CudaJob(self._stream, seconds, moves)
        job.issued.record()
        self._stream.wait_event(job.issued)
        moves = [move for move in moves if not move.in_place]
        moved = sum(move.out.nbytes for move in moves)
        with torch.cuda.stream(self._stream):
            job.started.record()
            self._held.hold(seconds - moved * self._seconds_per_byte)
            if moved and not carry(moves, self._programs, self._held.start, seconds):
                self._held.hold(seconds, begins=False)
            job.finished.record()
        self._under_way.append(job)  # keeps the tensors until the stream is done with them, wait or no wait
        return job


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


@torch.no_grad()
def carry(moves: Sequence[Move], programs: int, start: Tensor | None = None, seconds: float = 0.0) -> bool:
    """Carry out moves on the current stream: by one kernel of so many ``programs`` what is copied word by word.

    With ``start``, that kernel ends ``seconds`` after it. Return whether there is such a kernel.
    """
    rows = []
    for out, source, factor in moves:
        if source.numel() == 0:
            continue
        if factor != 1:
            torch.mul(source, factor, out=out.view(source.shape))
        elif (out.data_ptr() | source.data_ptr() | source.nbytes) % 4:
            out.view(-1, source.numel()).copy_(source.view(1, -1).expand(out.numel() // source.numel(), -1))
        else:
            rows.append((out.data_ptr(), source.data_ptr(), source.nbytes // 4, out.nbytes // source.nbytes))
    if rows:
        table = torch.tensor(rows, dtype=torch.int64)
        if moves[0].out.is_cuda:
            table = table.pin_memory().to(moves[0].out.device, non_blocking=True)
        repeat_kernel[(programs,)](table, len(rows), start, _nanoseconds(seconds), 4096, num_warps=32)
    return bool(rows)


@functools.cache
def _copy_seconds_per_byte(device: torch.device, programs: int) -> float:
    """Measure how long the copies of this file take, in seconds per byte written."""
    out, source = (torch.empty(n, dtype=torch.bfloat16, device=device) for n in (2**27, 2**24))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        begin.record()
        carry([Move(out, source)], programs)
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / out.nbytes


_NCCLS = 16
"""Number of multiprocessors that a collective of NCCL keeps busy by default."""

_CLUSTER = 4
"""Number of blocks in a cluster of NCCL's by default."""


class CudaJob:
    def __init__(self, stream: torch.cuda.Stream, seconds: float, moves: Sequence[Move]):
        self._stream, self._seconds = stream, seconds
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
        if self._waited:
            self._after.synchronize()  # on another stream, it may come after what it waited for
        started = clock(self.started)
        return Times(clock(self.issued), started, started + self._seconds, clock(self.finished))


_origin: list[Any] = []


def restart_clock() -> None:
    origin = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    origin.record()
    origin.synchronize()
    _origin[:] = [origin, time.perf_counter()]


def clock(event: torch.cuda.Event) -> float:
    """Return when ``event`` happened (``time.perf_counter()``), to a microsecond if ``restart_clock`` was recent.

    CUDA tells the time between two events in single precision.
    """
    if not _origin:
        restart_clock()
    origin, seconds = _origin
    return seconds + origin.elapsed_time(event) * 1e-3

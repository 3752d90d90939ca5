"""The log of a null GPU: what a process launched, issued, recorded, awaited and copied, as data.

``Recorder`` takes the log of this process; ``communications`` finds when each collective was issued and awaited.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

DTYPE_BYTES = {
    "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip
"""Bytes of an element, by the names that the log has for NCCL's dtypes."""

DEFAULT_STREAM = 0
"""The stream on which torch computes unless told otherwise."""


class Kernel(NamedTuple):
    """A kernel that was launched; of CUDA's libraries, of torch or of Triton."""

    stream: int
    blocks: int
    threads: int
    elements: int
    """Elements that a kernel of torch's works on one by one; -1: not known."""
    name: str
    """Name of the kernel; a mangled one if the kernel is C++."""


class Matmul(NamedTuple):
    """A matrix multiplication by cuBLAS: (m, k) x (k, n), ``batch`` times."""

    stream: int
    m: int
    n: int
    k: int
    batch: int
    dtype: str
    """Dtype of the first factor."""


class Collective(NamedTuple):
    """A call of NCCL."""

    stream: int
    operation: str
    """``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"broadcast"``, ``"send"`` or ``"receive"``."""
    ranks: int
    communicator: int
    dtype: str
    elements: int
    """Elements, as NCCL counts them: of the part that a rank sends to a gather or receives from a reduce-scatter."""
    op: int
    """NCCL's number of the reduction, -1 if nothing is reduced."""
    send: int
    receive: int
    """Addresses of the memory that is sent and received into."""
    group: int
    """Number of the NCCL group that the call is part of; 0: none."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor: of a gather's output, of a reduction's input."""
        parts = self.ranks if self.operation in ("all_gather", "reduce_scatter") else 1
        return self.elements * DTYPE_BYTES[self.dtype] * parts

    @property
    def buffers(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Address ranges, begin and end, of what the call reads and of what it writes."""
        part = self.elements * DTYPE_BYTES[self.dtype]
        read = self.nbytes if self.operation != "all_gather" else part
        written = self.nbytes if self.operation != "reduce_scatter" else part
        return (self.send, self.send + read), (self.receive, self.receive + written)


class Record(NamedTuple):
    """An event that was recorded on a stream."""

    stream: int
    event: int


class Wait(NamedTuple):
    """A stream that was told to wait for an event."""

    stream: int
    event: int


class Copy(NamedTuple):
    """A ``cudaMemcpy``."""

    stream: int
    direction: int
    """``cudaMemcpyKind``: 1 to the device, 2 to the host, 3 within the device."""
    nbytes: int
    blocking: bool
    """Whether the host waits until the copy is done: a synchronous call, or one to memory that is not pinned."""


class Fill(NamedTuple):
    """A ``cudaMemset``."""

    stream: int
    nbytes: int


class Sync(NamedTuple):
    """The host waits for an event, a stream or the device."""

    what: str
    handle: int


class Malloc(NamedTuple):
    """A ``cudaMalloc``; torch's allocator asks for a segment."""

    nbytes: int


class Module(NamedTuple):
    """A kernel that was loaded from a cubin, as Triton's are."""

    registers: int
    local_bytes: int
    """Bytes of a thread's stack frame; ptxas spills registers to it."""
    name: str


class Note(NamedTuple):
    """A text that ``Recorder.note`` put into the log."""

    text: str


What = Kernel | Matmul | Collective | Record | Wait | Copy | Fill | Sync | Malloc | Module | Note


class Event(NamedTuple):
    """A line of the log."""

    thread: int
    """The kernel's id of the thread."""
    cpu_s: float
    """CPU time of that thread, in seconds."""
    time_us: float
    """Time of day, in microseconds since 1970."""
    what: What


_KINDS: dict[str, type] = {
    kind.__name__.lower(): kind
    for kind in (Kernel, Matmul, Collective, Record, Wait, Copy, Fill, Sync, Malloc, Module, Note)
}
_TEXT = {"name", "dtype", "operation", "what", "text"}
_RENAMED = {"bytes": "nbytes"}


def parse_log(text: str) -> list[Event]:
    """Return the events of a log."""
    return [_parse(line) for line in text.splitlines()]


def _parse(line: str) -> Event:
    thread, cpu_ns, unix_ns, rest = line.split(" ", 3)
    kind, *pairs = rest.split("\t")
    fields = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        name = _RENAMED.get(name, name)
        fields[name] = value if name in _TEXT else bool(int(value)) if name == "blocking" else int(value)
    return Event(int(thread), int(cpu_ns) * 1e-9, int(unix_ns) * 1e-3, _KINDS[kind](**fields))


class Recorder:
    """The log of this process, which runs under the null GPU."""

    def __init__(self) -> None:
        self._stub = ctypes.CDLL("libcuda.so.1")
        self._stub.null_gpu_take.restype = ctypes.c_size_t

    @contextmanager
    def recording(self, pending: bool = True) -> Iterator[None]:
        """Log what this process asks of the GPU.

        Args:
            pending: meanwhile no event has happened yet, whoever asks. Torch leaves out waits for what has happened;
                but what times kernels (Triton's autotuning) needs events that happen.
        """
        self._stub.null_gpu_pending(int(pending))
        self._stub.null_gpu_log(1)
        try:
            yield
        finally:
            self._stub.null_gpu_log(0)
            self._stub.null_gpu_pending(0)

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        size = self._stub.null_gpu_take(None, ctypes.c_size_t(0))
        into = ctypes.create_string_buffer(size + 1)
        self._stub.null_gpu_take(into, ctypes.c_size_t(size + 1))
        return parse_log(into.raw[:size].decode(errors="replace"))

    def expect_split(self, ranks: int) -> None:
        """Say how many ranks the parts of the next ``ncclCommSplit`` have; this rank is the first of its part."""
        self._stub.null_gpu_split(ranks)

    def note(self, text: str) -> None:
        """Add a ``Note``."""
        self._stub.null_gpu_note(text.encode())


class Awaited(NamedTuple):
    """A wait for a collective."""

    stream: int
    at: int
    """Position among the events."""


class Communication(NamedTuple):
    """A collective, or the collectives of one NCCL group, from issue to wait."""

    calls: tuple[Collective, ...]
    issued_at: int
    """Position of the first call among the events."""
    waits: tuple[Awaited, ...]


def communications(events: Sequence[Event]) -> list[Communication]:
    """Return the collectives among ``events`` with the waits for them, in the order of their issue.

    ``ProcessGroupNCCL`` records an event on a collective's stream directly after it; whoever waits for the collective
    waits for this event.
    """
    found: list[Communication] = []
    unrecorded: dict[int, int] = {}  # the communication on each stream whose end no event has marked yet
    marked: dict[int, int] = {}  # the communication whose end each event marks
    for at, (*_, what) in enumerate(events):
        if isinstance(what, Collective):
            last = unrecorded.get(what.stream)
            if last is not None and what.group and found[last].calls[-1].group == what.group:
                found[last] = found[last]._replace(calls=(*found[last].calls, what))
            else:
                unrecorded[what.stream] = len(found)
                found.append(Communication((what,), at, ()))
        elif isinstance(what, Record):
            marked.pop(what.event, None)
            if what.stream in unrecorded:
                marked[what.event] = unrecorded.pop(what.stream)
        elif isinstance(what, Wait) and what.event in marked:
            communication = found[marked[what.event]]
            found[marked[what.event]] = communication._replace(waits=(*communication.waits, Awaited(what.stream, at)))
    return found


def host_waits(events: Sequence[Event]) -> list[Sync | Copy]:
    """Return the events for which the host waited."""
    return [e.what for e in events if isinstance(e.what, Sync) or (isinstance(e.what, Copy) and e.what.blocking)]

"""A clock for the null GPU: what a logged step would take on a GPU, by the rates of a profile.

The log has what a process asked of the GPU, in order, and the CPU time of its threads. ``simulate`` replays it: the
host needs its CPU time, a stream carries out one kernel after the other and waits for events, and a communicator
carries out one collective or group after the other. Kernels take what their sizes cost on the profile's curves,
collectives what its network says. The same log and profile give the same result, to the bit.

Structure, order, streams and sizes are those of torch's own CUDA calls; the times are the profile's. Not modelled: what
NCCL does beside the network's constants, memory bandwidth that it shares with kernels beyond ``contention``, clocks
that drop, and gaps between kernels.
"""

import re
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from inductor_passes.scheduling.cost_graph import beside_collectives
from simplefsdp.hardware.profile import HardwareProfile
from simplefsdp.null_gpu.log import (
    DEFAULT_STREAM,
    DTYPE_BYTES,
    Collective,
    Copy,
    Event,
    Fill,
    Kernel,
    Matmul,
    Note,
    Record,
    Recorder,
    Sync,
    Wait,
)

SHORTEST_KERNEL_S = 2e-6
UNKNOWN_KERNEL_S = 3e-6
"""Seconds of a kernel whose size is not known; ``SimulatedStep.unknown`` counts them by name."""
HOST_LINK_BYTES_PER_S = 50e9
"""Bytes per second between the device and the host's memory (PCIe 5.0 x16, of whose 63 GB/s copies reach about 50)."""
BUCKET_COPIES = ("chunk_cat", "multi_tensor_apply", "CatArray", "direct_copy", "split_with_sizes_copy")
"""Kernels of torch's that copy members of a bucket into its buffer or out of it, by parts of their names."""
_TRITON_BYTES = "triton bytes "
_FORMAT_BYTES = "format bytes "
_FORMATS = ("encode_kernel", "decode_kernel", "decode_sum_kernel", "encode_sum_kernel")
"""Kernels of wire formats, which ``noting_triton_bytes`` notes."""


class Sizes(NamedTuple):
    """Sizes of a training step, for kernels whose log does not show them."""

    batch: int
    seq: int
    dim: int
    heads: int
    head_dim: int
    vocab_size: int
    local_parameters: int
    """Elements of this rank's shards, which the optimizer updates."""

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


class Span(NamedTuple):
    """A kernel, a collective or a wait of a simulated step; times in seconds since the step's begin."""

    track: str
    """``"stream 0"``, which computes, and others; ``"communicator 1"`` and others; ``"waits"`` of stream 0."""
    name: str
    kind: str
    """Kinds of ``SimulatedStep.kernels_s``; of a collective its operation; of a wait ``"exposed"``."""
    start_s: float
    end_s: float
    nbytes: int
    """Bytes of a collective's whole tensors; 0 for others."""


class SimulatedStep(NamedTuple):
    """A simulated step; times in seconds."""

    step_s: float
    host_s: float
    """CPU time of the host's threads, which launch one after the other."""
    compute_s: float
    """Time of the kernels, on all streams."""
    communication_s: float
    """Time that the communicators are busy."""
    exposed_s: float
    """Time in which the stream of compute waits for another stream."""
    host_bound_s: float
    """Time in which the stream of compute has nothing to do, because the host has not launched it."""
    kernels_s: dict[str, float]
    """Time of kernels by what they do: ``"matmul"``, ``"attention"``, ``"triton"``, ``"copy out"``, ..."""
    copied_bytes: int
    """Bytes that members of buckets have, which are copied into a bucket's buffer or out of it."""
    unknown: Counter[str]
    spans: tuple[Span, ...]
    reached_s: tuple[float, ...]
    """For each event of the step, when the stream of compute is there: has done what was asked for before. From the
    begin of the step."""


@contextmanager
def noting_triton_bytes(recorder: Recorder) -> Iterator[None]:
    """Log, before each kernel of Triton's, the bytes that it reads and writes.

    Those of TorchInductor's are its estimates, which it writes into kernels that are compiled while
    ``benchmark_combo_kernel`` is on; those of wire formats are their tensors'.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    from inductor_passes.ops import wire_formats_triton

    run = CachingAutotuner.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        gigabytes = self.inductor_meta.get("kernel_num_gb") or 0.0
        recorder.note(f"{_TRITON_BYTES}{round(1e9 * gigabytes)}")
        return run(self, *args, **kwargs)

    def noting(operator: Callable[..., None]) -> Callable[..., None]:
        def noted_operator(read: Sequence[Tensor], written: Sequence[Tensor], *args: Any) -> None:
            kernels = -(-len(read) // wire_formats_triton.MEMBERS)
            recorder.note(f"{_FORMAT_BYTES}{sum(each.nbytes for each in (*read, *written)) // kernels}")
            operator(read, written, *args)

        return noted_operator

    operators = {name: getattr(wire_formats_triton, name) for name in ("encode", "decode", "decode_sum", "encode_sum")}
    CachingAutotuner.run = noted  # type: ignore[method-assign]
    for name, operator in operators.items():
        setattr(wire_formats_triton, name, noting(operator))
    try:
        yield
    finally:
        CachingAutotuner.run = run  # type: ignore[method-assign]
        for name, operator in operators.items():
            setattr(wire_formats_triton, name, operator)


def simulate(
    events: Sequence[Event],
    profile: HardwareProfile,
    sizes: Sizes,
    *,
    host_factor: float = 1.0,
    groups: Mapping[int, Sequence[int]] | None = None,
) -> SimulatedStep:
    """Return what the last step of a log takes.

    Args:
        events: of several steps, with a ``Note`` ``"step"`` before each and one behind the last.
        profile: rates of the device, and the network between ranks.
        sizes: of the step.
        host_factor: how much longer the GPU's host takes than this machine.
        groups: the ranks of each communicator; one that is not there has the first ranks.

    Raises:
        ValueError: the log has fewer than two such notes.
    """
    first, last = last_step(events)
    clock = _Clock(events, profile, sizes, host_factor, groups or {})
    for i in range(first):
        clock.advance(i)
    before = clock.snapshot()
    begin = clock.free[DEFAULT_STREAM]
    clock.spans.clear()
    clock.copied, reached = 0, []
    for i in range(first, last):
        reached.append(max(clock.now, clock.free[DEFAULT_STREAM]) - begin)
        clock.advance(i)
    after = clock.snapshot()
    step, host, communication, exposed, host_bound = (b - a for a, b in zip(before[0], after[0], strict=True))
    kernels = {kind: seconds - before[1].get(kind, 0.0) for kind, seconds in after[1].items()}
    return SimulatedStep(
        step_s=step,
        host_s=host,
        compute_s=sum(kernels.values()),
        communication_s=communication,
        exposed_s=exposed,
        host_bound_s=host_bound,
        kernels_s=kernels,
        copied_bytes=clock.copied,
        unknown=after[2] - before[2],
        spans=tuple(span._replace(start_s=span.start_s - begin, end_s=span.end_s - begin) for span in clock.spans),
        reached_s=tuple(reached),
    )


def last_step(events: Sequence[Event]) -> tuple[int, int]:
    """Return the positions of the notes ``"step"`` before and behind the last step of a log.

    Raises:
        ValueError: there are fewer than two such notes.
    """
    marks = [i for i, event in enumerate(events) if event.what == Note("step")]
    if len(marks) < 2:
        raise ValueError(f"events: expected a note 'step' before and behind a step, found {len(marks)}")
    return marks[-2], marks[-1]


@dataclass
class _Clock:
    """The state of host, streams and communicators while a log is replayed; times in seconds since its begin."""

    events: Sequence[Event]
    profile: HardwareProfile
    sizes: Sizes
    host_factor: float
    groups: Mapping[int, Sequence[int]]
    now: float = 0.0
    """Time of the host, which asks for kernels one by one."""
    cpu: dict[int, float] = field(default_factory=dict)
    """CPU time of each thread of the host, when it last asked for something."""
    free: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Time at which each stream has done all that it was asked for."""
    communicator: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    recorded: dict[int, float] = field(default_factory=dict)
    """Time at which each CUDA event happens."""
    gathered: dict[int, int] = field(default_factory=dict)
    """Bytes of the gather that each event marks the end of."""
    last_gather: dict[int, int] = field(default_factory=dict)
    """Bytes of the last gather of each stream; 0 if the last collective was another."""
    awaited_bytes: int = 0
    """Bytes of the gather that the stream of compute last awaited: what a copy out copies."""
    triton_bytes: int | None = None
    format_bytes: int = 0
    under_way: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=8))
    """Begin and end of the last collectives."""
    communication: float = 0.0
    exposed: float = 0.0
    host_bound: float = 0.0
    kernels: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    unknown: Counter[str] = field(default_factory=Counter)
    copied: int = 0
    spans: list[Span] = field(default_factory=list)
    """Kernels, collectives and waits so far; times since the log's begin."""

    def __post_init__(self) -> None:
        collectives = [(i, e.what) for i, e in enumerate(self.events) if isinstance(e.what, Collective)]
        self._of: dict[str, tuple[list[int], list[Collective]]] = {}
        for operation in ("all_gather", "reduce_scatter"):
            of = [(i, what) for i, what in collectives if what.operation == operation]
            self._of[operation] = [i for i, _ in of], [what for _, what in of]
        self._copies = _copies_before_gathers(self.events)
        steps = sum(event.what == Note("step") for event in self.events) - 1
        updates = sum(isinstance(e.what, Kernel) and "fused_adam" in e.what.name for e in self.events)
        self._updates = max(1, updates / max(1, steps))

    def snapshot(self) -> tuple[tuple[float, ...], dict[str, float], Counter[str]]:
        times = (self.free[DEFAULT_STREAM], self.now, self.communication, self.exposed, self.host_bound)
        return times, dict(self.kernels), self.unknown.copy()

    def advance(self, i: int) -> None:
        """Carry out event ``i`` of the log."""
        thread, cpu_s, _, what = self.events[i]
        self.now += (cpu_s - self.cpu.get(thread, cpu_s)) * self.host_factor
        self.cpu[thread] = cpu_s
        match what:
            case Note(text) if text.startswith(_TRITON_BYTES):
                self.triton_bytes = int(text.removeprefix(_TRITON_BYTES))
            case Note(text) if text.startswith(_FORMAT_BYTES):
                self.format_bytes = int(text.removeprefix(_FORMAT_BYTES))
            case Kernel() | Matmul():
                elements = what.m * what.n * what.batch if isinstance(what, Matmul) else 0
                name = f"{what.m} x {what.k} x {what.n}" if isinstance(what, Matmul) else what.name
                self._launch(what.stream, name, *self._kernel(i, what), elements)
            case Fill(stream, nbytes):
                self._launch(stream, "cudaMemset", "fill", self.profile.memory_s(nbytes))
            case Copy(stream, direction, nbytes, blocking):
                seconds = self.profile.memory_s(2 * nbytes) if direction == 3 else nbytes / HOST_LINK_BYTES_PER_S
                self._launch(stream, "cudaMemcpy", "copy", seconds)
                if blocking:
                    self.now = max(self.now, self.free[stream])
            case Collective():
                self._collective(i, what)
            case Record(stream, event):
                self.recorded[event] = self.free[stream]
                self.gathered[event] = self.last_gather.get(stream, 0)
            case Wait(stream, event):
                self._wait(stream, event)
            case Sync(of, handle):
                happens = {"event": self.recorded.get(handle, 0.0), "stream": self.free[handle]}
                self.now = max(self.now, happens.get(of, max(self.free.values(), default=0.0)))

    def _launch(self, stream: int, name: str, kind: str, seconds: float, elements: int = 0) -> None:
        ready = self.free[stream]
        start = max(self.now, ready)
        if stream == DEFAULT_STREAM:
            self.host_bound += start - ready
        seconds = max(seconds, SHORTEST_KERNEL_S)
        end = self._end(start, seconds, self.profile.contention_of(kind, elements))
        self.free[stream] = end
        self.kernels[kind] += end - start
        self.spans.append(Span(f"stream {stream}", name, kind, start, end, 0))

    def _end(self, at: float, seconds: float, contention: float) -> float:
        """Return when a kernel ends that begins at ``at`` and is slower while a collective is under way."""
        for begin, end in sorted(self.under_way):
            if end <= at:
                continue
            alone = max(0.0, begin - at)
            if seconds <= alone:
                break
            at, seconds = beside_collectives(at + alone, seconds - alone, end, contention)
        return at + seconds

    def _collective(self, i: int, first: Collective) -> None:
        """Carry out a collective; a group is carried out with its first call. Sends and receives are an all-to-all."""
        group = [first]
        if first.group:
            if i and _in_group(self.events[i - 1].what, first.group):
                return
            while i + 1 < len(self.events) and _in_group(following := self.events[i + 1].what, first.group):
                group.append(following)
                i += 1
        exchanges = first.operation in ("send", "receive")
        nbytes = sum(call.nbytes for call in group if call.operation != "receive")
        network, kind = self.profile.network, "all_to_all" if exchanges else first.operation
        seconds = network.seconds(kind, self.groups.get(first.communicator, range(first.ranks)), nbytes)
        if not exchanges:
            seconds += (len(group) - 1) * (network.member_s or 0.0)
        start = max(self.now, self.free[first.stream], self.communicator[first.communicator])
        self.free[first.stream] = self.communicator[first.communicator] = start + seconds
        self.under_way.append((start, start + seconds))
        self.communication += seconds
        name = f"{kind} of {len(group)}" if len(group) > 1 and not exchanges else kind
        self.spans.append(Span(f"communicator {first.communicator}", name, kind, start, start + seconds, nbytes))
        self.last_gather[first.stream] = nbytes if kind == "all_gather" else 0

    def _wait(self, stream: int, event: int) -> None:
        happens = self.recorded.get(event, 0.0)
        if stream == DEFAULT_STREAM:
            ready = max(self.free[stream], self.now)
            if happens > ready:
                self.exposed += happens - ready
                self.spans.append(Span("waits", "wait", "exposed", ready, happens, 0))
            self.awaited_bytes = self.gathered.get(event) or self.awaited_bytes
        self.free[stream] = max(self.free[stream], happens)

    def _kernel(self, i: int, what: Kernel | Matmul) -> tuple[str, float]:
        """Return what a kernel does and what it takes."""
        if isinstance(what, Matmul):
            flops = 2.0 * what.m * what.n * what.k * what.batch
            size = DTYPE_BYTES.get(what.dtype, 2) * what.batch
            moved = size * (what.m * what.n + what.n * what.k + what.m * what.k)
            compute = self.profile.compute_s("matmul", getattr(torch, what.dtype), flops)
            return "matmul", max(compute, self.profile.memory_s(moved))
        if what.name.startswith("triton_") and self.triton_bytes is not None:
            nbytes, self.triton_bytes = self.triton_bytes, None
            return "triton", self.profile.memory_s(max(1, nbytes))
        if what.name in _FORMATS and self.format_bytes:
            return "format", self.profile.memory_s(self.format_bytes)
        for kind, name, seconds in _KERNELS:
            if name in what.name:
                return kind, seconds(self, i)
        if what.elements >= 0:
            nbytes = what.elements * _element_bytes(what.name)
            if "direct_copy" in what.name:
                self.copied += nbytes // 2
            return "elementwise", self.profile.memory_s(max(1, nbytes))
        self.unknown[what.name[:90]] += 1
        return "unknown", UNKNOWN_KERNEL_S

    def next_bytes(self, i: int, operation: str) -> list[int]:
        """Return the bytes of the whole tensors of the next collective of a kind, or of all that are in its group."""
        at, calls = self._of[operation]
        place = bisect_left(at, i)
        if place == len(at):
            return [0]
        first = calls[place]
        return [c.nbytes for c in calls[place:] if c is first or (c.group and c.group == first.group)]

    def attention(self, widths: int) -> float:
        """Return the seconds of attention with ``widths`` products of all queries and keys (cost_model.py)."""
        batch, seq, _, heads, head_dim, *_ = self.sizes
        flops = 2.0 * batch * heads * seq**2 * head_dim * widths
        return self.profile.compute_s("attention", torch.bfloat16, flops)

    def copy(self, nbytes: float, moved: float) -> float:
        """Count bytes that are copied, and return the seconds of memory that moves so many times as much."""
        self.copied += round(nbytes)
        return self.moved(moved * nbytes)

    def moved(self, nbytes: float) -> float:
        return self.profile.memory_s(max(1.0, nbytes))


def _in_group(what: object, group: int) -> TypeGuard[Collective]:
    return isinstance(what, Collective) and what.group == group


def _per_token(width: Callable[[Sizes], int], nbytes: int) -> Callable[[_Clock, int], float]:
    return lambda clock, _: clock.moved(clock.sizes.tokens * width(clock.sizes) * nbytes)


_KERNELS: Sequence[tuple[str, str, Callable[[_Clock, int], float]]] = (
    ("attention", "flash_fwd", lambda clock, _: clock.attention(2)),
    ("attention", "flash_bwd_dq_dk_dv", lambda clock, _: clock.attention(5)),
    ("attention", "flash_bwd", _per_token(lambda sizes: sizes.dim, 6)),
    ("optimizer", "fused_adam", lambda clock, _: clock.moved(28 * clock.sizes.local_parameters / clock._updates)),
    ("copy out", "split_with_sizes_copy", lambda clock, _: clock.copy(clock.awaited_bytes, 2)),
    ("copy out", "CatArray", lambda clock, _: clock.copy(clock.awaited_bytes, 2)),
    ("copy in", "chunk_cat", lambda clock, i: clock.copy(clock.next_bytes(i, "reduce_scatter")[-1], 1.5)),
    ("copy in", "multi_tensor_apply", lambda clock, i: clock.copy(_shards(clock, i), 3)),
    ("norm", "layer_norm_grad_input", _per_token(lambda sizes: sizes.dim, 6)),
    ("norm", "GammaBeta", _per_token(lambda sizes: sizes.dim, 4)),
    ("norm", "layer_norm_kernel", _per_token(lambda sizes: sizes.dim, 4)),
    ("loss", "SoftMaxBackward", _per_token(lambda sizes: sizes.vocab_size, 12)),
    ("loss", "cunn_SoftMax", _per_token(lambda sizes: sizes.vocab_size, 8)),
    ("loss", "softmax_warp_backward", _per_token(lambda sizes: sizes.vocab_size, 12)),
    ("loss", "softmax_warp_forward", _per_token(lambda sizes: sizes.vocab_size, 8)),
    ("loss", "nll_loss", _per_token(lambda _: 1, 8)),
    ("embedding", "embedding", _per_token(lambda sizes: sizes.dim, 6)),
    ("embedding", "indexFunc", _per_token(lambda sizes: sizes.dim, 6)),
    ("embedding", "tma_scatter", _per_token(lambda sizes: sizes.dim, 6)),
    ("embedding", "vectorized_gather", _per_token(lambda sizes: sizes.dim, 6)),
    ("reduce", "reduce_kernel", _per_token(lambda sizes: sizes.dim, 4)),
)
"""For kernels of torch's, by part of their name: what they do and how their seconds follow from sizes.

In a group of reductions only the last may be of packed gradients (``inductor_passes/bucket.py``)."""


def _shards(clock: _Clock, i: int) -> float:
    """Return the bytes of this rank's shards that one kernel copies for the next gather."""
    at, calls = clock._of["all_gather"]
    place = bisect_left(at, i)
    if place == len(at):
        return 0.0
    return sum(clock.next_bytes(i, "all_gather")) / calls[place].ranks / clock._copies[at[place]]


def _copies_before_gathers(events: Sequence[Event]) -> Counter[int]:
    """Return by how many kernels shards are copied for each gather: torch copies lists of tensors piece by piece."""
    found: Counter[int] = Counter()
    copies = 0
    for i, (*_, what) in enumerate(events):
        if isinstance(what, Kernel) and "multi_tensor_apply" in what.name and "fused_adam" not in what.name:
            copies += 1
        elif isinstance(what, Collective):
            found[i], copies = max(1, copies), 0
    return found


def _element_bytes(name: str) -> int:
    """Return the bytes that an elementwise kernel of torch's moves for each element, by its mangled name."""
    arrays = int(found[1]) if (found := re.search(r"St5arrayIPcLm(\d+)E", name)) else 2
    if "converting_copy" in name:
        return 6
    if "FillFunctor" in name:
        return 4
    if "BinaryFunctorIfff" in name:
        return 12
    return (2 if "BFloat16" in name or "Silu" in name else 4) * arrays

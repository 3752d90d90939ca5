"""``measure``: a training step as it went, its collectives mapped back to the buckets of the plan.

Every compiled graph begins with an operator that holds its record (``inductor_passes/record.py``): which collectives it
issues and awaits, in which order, and of which parameters. What happens on its thread behind that operator is matched
with it: by torch's profiler, or, in a rehearsal, by the rehearsal's own record.
"""

import itertools
import json
import math
import statistics
import tempfile
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from inductor_passes.runtime.agreement import graph_observers
from inductor_passes.runtime.graph_dump import active_report
from inductor_passes.runtime.record import Record
from simplefsdp.analysis.measurement import GraphRun, MeasuredCollective, Measurement
from simplefsdp.analysis.timeline_trace import add_measured_tracks

_C10D = "_c10d_functional::"
_OF_SHARDS = "simplefsdp::all_gather_into_tensor"
_WAIT = "wait_tensor"
_AGREE = "simplefsdp::agree"
_STEP = "simplefsdp.measure"


def measure(step_fn: Callable[[], Any], steps: int = 3) -> Measurement:
    """Run ``step_fn``, which makes one training step, ``steps`` times, and return the times of its collectives.

    Compilation counts as part of a step, so run ``step_fn`` once before. Where a graph has a report
    (``options={"report_dir": ...}``), the measurement is written there: ``measurement.json``, and a track beside the
    predicted one in ``timeline.json``; ``simplefsdp explain`` then compares both. All ranks call ``measure`` together,
    as they do with any step.

    Raises:
        TypeError: ``step_fn`` is no function.
        ValueError: ``steps`` is not positive.
        RuntimeError: no graph that ran was compiled with ``backend="simplefsdp"``, or a graph did not issue its
            collectives in the order of its record: with ``plan="none"`` torch's own passes may have moved them.
    """
    if not callable(step_fn):
        raise TypeError(f"step_fn: expected a function that makes one training step, found {step_fn!r}")
    if steps < 1:
        raise ValueError(f"steps: expected a positive number, found {steps}")
    made = [_rehearsed(step_fn) if _is_rehearsal() else _profiled(step_fn) for _ in range(steps)]
    if not made[0][1]:
        raise RuntimeError("measure: no graph compiled with backend='simplefsdp' has run in step_fn")
    seconds = tuple(one for one, _ in made)
    runs = made[seconds.index(statistics.median_low(seconds))][1]
    found = Measurement(seconds, tuple(runs))
    for key in dict.fromkeys(run.report for run in runs):
        if key is not None and (report := active_report(key)) is not None:
            own = Measurement(found.steps_s, tuple(run for run in runs if run.report == key))
            report.write_text("measurement.json", own.to_json())
            if (timeline := report.text("timeline.json")) is not None:
                report.write_text("timeline.json", add_measured_tracks(timeline, own.runs))
    return found


def _is_rehearsal() -> bool:
    return dist.is_initialized() and dist.get_backend() == "rehearsal"


@contextmanager
def _records(mark: Callable[[], Any]) -> Iterator[list[tuple[Record, Any]]]:
    """Collect the records of graphs that run meanwhile, each with the value of ``mark()`` when the graph begins."""
    found: list[tuple[Record, Any]] = []

    def note(record: Record) -> None:
        found.append((record, mark()))

    graph_observers.append(note)
    try:
        yield found
    finally:
        graph_observers.remove(note)


def _rehearsed(step_fn: Callable[[], Any]) -> tuple[float, list[GraphRun]]:
    from simplefsdp.rehearsal.group import current_world
    from simplefsdp.rehearsal.timing import finish, mark, start_clock

    world = current_world()
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    earlier = len(world.collectives())
    start_clock(device)
    with _records(lambda: mark(device)) as records:
        began = mark(device)
        step_fn()
        ended = mark(device)
    finish(device)
    first, starts = began(), [start() for _, start in records]
    collectives = world.collectives()[earlier:]
    runs = []
    for (record, _), start, end in zip(records, starts, [*starts[1:], math.inf], strict=True):
        left = iter(one for one in collectives if start <= one.issued < end)
        measured = []
        for one in record.issued:
            went = next((w for w in left if (w.group, w.nbytes) == (one.group, one.nbytes)), None)
            if went is None:
                raise RuntimeError(_OTHER_ORDER.format(record.direction, one))
            awaited = math.inf if went.waited is None else went.waited
            times = (when - start for when in (went.issued, went.started, went.finished, awaited))
            measured.append(MeasuredCollective(one.name, one.fqns, one.group, one.nbytes, *times))
        runs.append(_run(record, start - first, measured))
    return ended() - first, runs


_OTHER_ORDER = "measure: the {} graph did not issue, in the order that it was compiled with, {}"


class Event(NamedTuple):
    """An event that the profiler saw on the host; times in seconds."""

    name: str
    thread: int
    start: float
    end: float


class Kernel(NamedTuple):
    """An event that the profiler saw on a GPU: a kernel, a copy or a fill; times in seconds."""

    stream: int
    launched: float
    """When the host launched the kernel."""
    start: float
    end: float


def _profiled(step_fn: Callable[[], Any]) -> tuple[float, list[GraphRun]]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    cuda = torch.cuda.is_available()
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with _records(lambda: None) as records, torch.profiler.profile(activities=activities, acc_events=True) as profile:
        started = time.perf_counter()
        with torch.profiler.record_function(_STEP):
            step_fn()
            if cuda:
                torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        seen = seen_in(json.loads(path.read_text(errors="replace"))["traceEvents"])
    return seconds, runs_of([record for record, _ in records], *seen)


def seen_in(trace_events: Iterable[dict[str, Any]]) -> tuple[list[Event], list[Kernel]]:
    """Return the host's and the GPU's events of a trace in Chrome's format, as torch's profiler writes it.

    An event on a GPU carries, as ``correlation``, the number of the CUDA runtime's call that launched it.
    """
    complete = [event for event in trace_events if event.get("ph") == "X"]
    launched: dict[int, float] = {}
    events, gpu = [], []
    for event in complete:
        category, number = event.get("cat"), event.get("args", {}).get("correlation")
        start = event["ts"] / 1e6
        if category in ("cuda_runtime", "cuda_driver"):
            launched[number] = start
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            gpu.append((number, event["args"]["stream"], start, start + event["dur"] / 1e6))
        elif category in ("cpu_op", "user_annotation"):
            events.append(Event(event["name"], event["tid"], start, start + event["dur"] / 1e6))
    return events, [Kernel(stream, launched.get(number, start), start, end) for number, stream, start, end in gpu]


def runs_of(records: Sequence[Record], events: Sequence[Event], kernels: Sequence[Kernel] = ()) -> list[GraphRun]:
    """Return the runs of graphs with these records, in the order of running, from the events of a step."""
    events = sorted(events, key=lambda event: event.start)
    (began,) = (event.start for event in events if event.name == _STEP)
    agreements = [event for event in events if event.name == _AGREE]
    carriers = _Gloo(event for event in events if event.name.startswith("gloo:")), _Device(kernels)
    if len(agreements) != len(records):
        raise RuntimeError(f"measure: {len(records)} graphs ran, and the profiler saw {len(agreements)}")
    runs = []
    for i, (record, agreement) in enumerate(zip(records, agreements, strict=True)):
        later = (other.start for other in agreements[i + 1 :] if other.thread == agreement.thread)
        end = next(later, math.inf)
        steps = _outermost(e for e in events if e.thread == agreement.thread and agreement.end <= e.start < end)
        start = carriers[1].reached(agreement.start)
        runs.append(_run(record, start - began, _matched(record, start, steps, *carriers)))
    return runs


def _outermost(events: Iterator[Event]) -> Iterator[Event]:
    """Yield those functional collectives and waits of one thread that no other one has issued."""
    end = -math.inf
    for event in events:
        if event.name.startswith((_C10D, _OF_SHARDS)) and event.start >= end:
            end = event.end
            yield event


class _Gloo:
    """Collectives that the threads of gloo's process groups carried out, one thread each (``gloo.py``), in order."""

    def __init__(self, events: Iterable[Event]):
        self._of_thread: dict[int, deque[Event]] = {}
        self._thread: dict[str, int] = {}
        for event in events:
            self._of_thread.setdefault(event.thread, deque()).append(event)

    def take(self, group: str, since: float) -> Event | None:
        """Return the next collective of ``group`` that began after ``since``, when it was issued; drop earlier ones."""
        for left in self._of_thread.values():
            while left and left[0].start < since:
                left.popleft()
        if group not in self._thread:  # which thread is whose is not known, but nothing waited before
            free = [left for thread, left in self._of_thread.items() if left and thread not in self._thread.values()]
            if not free:
                return None
            self._thread[group] = min(free, key=lambda left: left[0].start)[0].thread
        left = self._of_thread[self._thread[group]]
        return left.popleft() if left else None


class _Device:
    """Events of a GPU. The stream with the most events is that of compute, the others are those of NCCL's groups."""

    def __init__(self, kernels: Iterable[Kernel]):
        kernels = sorted(kernels, key=lambda kernel: kernel.launched)
        self._compute = statistics.mode(kernel.stream for kernel in kernels) if kernels else None
        compute = [kernel for kernel in kernels if kernel.stream == self._compute]
        self._launched = [kernel.launched for kernel in compute]
        self._done = list(itertools.accumulate((kernel.end for kernel in compute), max))
        self._others = [kernel for kernel in kernels if kernel.stream != self._compute]

    def reached(self, when: float) -> float:
        """Return when the stream of compute had done all that was launched by ``when``: not before ``when``."""
        earlier = bisect_left(self._launched, when)
        return max(when, self._done[earlier - 1]) if earlier else when

    def carried(self, issue: Event) -> Kernel | None:
        """Return the kernels that ``issue`` launched on another stream, as one event."""
        own = [kernel for kernel in self._others if issue.start <= kernel.launched <= issue.end]
        return own[0]._replace(end=max(kernel.end for kernel in own)) if own else None


def _matched(
    record: Record, began: float, steps: Iterator[Event], gloo: _Gloo, device: _Device
) -> list[MeasuredCollective]:
    issues: list[Event] = []
    waits: dict[int, Event] = {}
    for number in record.order:
        event = next(steps, None)
        name = _WAIT if number < 0 else record.issued[number].name
        if event is None or event.name.split("::")[1].removesuffix("_") != name:
            raise RuntimeError(_OTHER_ORDER.format(record.direction, record.issued[number if number >= 0 else ~number]))
        if number < 0:
            waits.setdefault(~number, event)
        else:
            issues.append(event)
    measured = []
    for i, (one, event) in enumerate(zip(record.issued, issues, strict=True)):
        wait = waits.get(i)
        awaited = device.reached(wait.start) if wait else math.inf
        carried = device.carried(event) or gloo.take(one.group, event.start)
        if isinstance(carried, Kernel):
            started, finished = carried.start, carried.end
        elif carried is not None:
            # gloo's thread notes the end when it comes to it: maybe long after somebody had waited for it.
            started, finished = carried.start, max(carried.start, min(carried.end, wait.end if wait else math.inf))
        else:  # of another backend only what is between issuing and having waited is known
            started, finished = event.start, wait.end if wait else event.end
        times = (when - began for when in (device.reached(event.start), started, finished, awaited))
        measured.append(MeasuredCollective(one.name, one.fqns, one.group, one.nbytes, *times))
    return measured


def _run(record: Record, began_s: float, measured: Sequence[MeasuredCollective]) -> GraphRun:
    return GraphRun(record.direction, began_s, tuple(measured), record.report["key"] if record.report else None)

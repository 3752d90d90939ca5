"""Why a collective of a schedule is where it is: what the model says of the same schedule with one thing changed."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Literal, NamedTuple

from inductor_passes.scheduling.cost_graph import CostGraph, Gather, Reduction
from inductor_passes.scheduling.issue_points import Schedule, ScheduledBucket
from inductor_passes.scheduling.replay import CollectiveSpan, Timeline, replay

Cause = Literal["nothing", "dependency", "channel", "memory", "compute", "plan"]

_NEGLIGIBLE = 1e-4
"""Schedules whose times differ by less than this part of the graph's time count as equally fast."""


class Diagnosis(NamedTuple):
    """Diagnosis of one bucket: what hides or exposes its collectives, and what would change that."""

    spans: tuple[CollectiveSpan, ...]
    """Collectives of the bucket, in the order in which they are awaited."""
    bound: Cause
    """Reason why the bucket's collectives are exposed.

    ``"dependency"``: the graph begins or ends there. ``"channel"``: the process group is busy at the issue.
    ``"memory"``: an earlier issue, or a later wait, does not fit. ``"compute"``: an earlier issue would not be faster;
    ``"plan"``: it would be. ``"nothing"``: the collectives are hidden.
    """
    where: str
    """The reason in words."""
    closed: str
    """Reason why the next bucket is not part of this one, in words."""

    @property
    def exposed(self) -> float:
        """Seconds that compute waits for the bucket."""
        return sum(span.exposed for span in self.spans)


class _Change(NamedTuple):
    """Difference between another schedule and the one at hand, in seconds and bytes."""

    seconds: float
    over: float
    """Bytes above the memory limit."""


def diagnose(graph: CostGraph, schedule: Schedule, memory_limit: float) -> tuple[list[Diagnosis], list[Diagnosis]]:
    """Return a diagnosis for each bucket of gathers, and for each bucket of reductions.

    Args:
        memory_limit: bytes that the graph may need at most.
    """
    replayed = replay(graph, schedule)

    def change(other: Schedule) -> _Change:
        timeline = replay(graph, other)
        seconds = timeline.seconds - replayed.seconds
        return _Change(seconds if abs(seconds) > _NEGLIGIBLE * replayed.seconds else 0.0, timeline.peak - memory_limit)

    gathers = []
    for i, scheduled in enumerate(schedule.gathers):
        spans = _spans(replayed, graph.gathers, scheduled, "gather")
        earlier = _earlier(graph, schedule, i) if _exposed(spans) else None
        bound, where = _bound(spans, change(earlier) if earlier else None, "issued earlier")
        joins = _may_share_a_collective(graph.gathers, schedule.gathers[i : i + 2])
        closed = _closed(change(schedule.with_gathers_merged(i))) if joins else _ALONE[joins]
        gathers.append(Diagnosis(spans, bound, where, closed))
    reductions = []
    for i, scheduled in enumerate(schedule.reductions):
        spans = _spans(replayed, graph.reductions, scheduled, "reduce", "all-reduce", "between nodes")
        later = _later(graph, schedule, i) if _exposed(spans) else None
        bound, where = _bound(spans, change(later) if later else None, "awaited later")
        joins = _may_share_a_collective(graph.reductions, schedule.reductions[i : i + 2])
        closed = _closed(change(schedule.with_reductions_merged(i))) if joins else _ALONE[joins]
        reductions.append(Diagnosis(spans, bound, where, closed))
    return gathers, reductions


def _spans(
    replayed: Timeline, of: Sequence[Gather | Reduction], scheduled: ScheduledBucket, *what: str
) -> tuple[CollectiveSpan, ...]:
    fqns = {of[k].fqn for k in scheduled.members}
    return tuple(span for span in replayed.spans if span.what in what and span.fqns[0] in fqns)


def _exposed(spans: Sequence[CollectiveSpan]) -> bool:
    return any(span.exposed for span in spans)


def _earlier(graph: CostGraph, schedule: Schedule, i: int) -> Schedule | None:
    """Return the schedule with gather ``i`` issued one use of a weight earlier; ``None``: it is issued at the start."""
    uses = sorted({0, *(gather.first_use_slot for gather in graph.gathers)})
    place = bisect_left(uses, schedule.gathers[i].issue_slot)
    if not place:
        return None
    moved = [
        scheduled._replace(issue_slot=min(scheduled.issue_slot, uses[place - 1]))
        for scheduled in schedule.gathers[: i + 1]
    ]
    return schedule._replace(gathers=(*moved, *schedule.gathers[i + 1 :]))


def _later(graph: CostGraph, schedule: Schedule, i: int) -> Schedule | None:
    """Return the schedule with reduction ``i`` awaited one reduction later; ``None``: it is awaited at the end."""
    scheduled, end = schedule.reductions[i], len(graph.seconds)
    issues = sorted({end + 1, *(other.issue_slot for other in schedule.reductions)})
    if scheduled.wait_slot >= end:
        return None
    moved = scheduled._replace(wait_slot=issues[bisect_right(issues, scheduled.wait_slot)])
    return schedule._replace(reductions=(*schedule.reductions[:i], moved, *schedule.reductions[i + 1 :]))


def _may_share_a_collective(of: Sequence[Gather | Reduction], pair: Sequence[ScheduledBucket]) -> bool | None:
    """Return whether members of both buckets could share a collective; ``None``: there is only one bucket."""
    kinds = [{of[k].kind for k in scheduled.members} for scheduled in pair]
    return not kinds[0].isdisjoint(kinds[1]) if len(kinds) == 2 else None


_ALONE = {None: "it is the last", False: "the next is of another process group or dtype"}


def _bound(spans: Sequence[CollectiveSpan], moved: _Change | None, how: str) -> tuple[Cause, str]:
    queued = sum(span.started - span.issued for span in spans)
    if not _exposed(spans):
        return "nothing", f"in time, by {_ms(min(span.awaited - span.finished for span in spans))}"
    if moved is not None and moved.seconds < 0:
        if moved.over > 0:
            return "memory", f"{how}, the step would be {_ms(-moved.seconds)} shorter and {_mib(moved.over)} too large"
        return "plan", f"{how}, the step would be {_ms(-moved.seconds)} shorter"
    if queued > 0:
        return "channel", f"its process group is busy for {_ms(queued)} when it is issued"
    if moved is None:
        return "dependency", "there is nothing before it" if how == "issued earlier" else "there is nothing behind it"
    return (
        "compute",
        f"{how}, the step would be as long"
        if not moved.seconds
        else f"{how}, the step would be {_ms(moved.seconds)} longer",
    )


def _closed(merged: _Change) -> str:
    if merged.over > 0:
        return f"with the next, {_mib(merged.over)} too large"
    if merged.seconds > 0:
        return f"with the next, {_ms(merged.seconds)} longer"
    return f"with the next, {_ms(-merged.seconds)} shorter" if merged.seconds else "with the next, as long"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.2f} MiB"

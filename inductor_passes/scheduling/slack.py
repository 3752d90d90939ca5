"""Slack for what a prediction cannot know: reductions awaited later, and gathers issued earlier, where memory allows.

A gather that would only queue behind others is issued later.

Nobody needs a reduction's result before the optimizer, so awaiting it earlier buys memory and nothing else; and a wait
that sits where the reduction is predicted to end holds compute up as soon as compute is faster than predicted. A gather
that is issued just in time does the same where the network is slower than predicted. But where several collectives wait
for the network, issuing one more gains nothing: the gather holds memory, and the host is held up, which at the start
of a step has launched no compute yet.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

from inductor_passes.scheduling import issue_points
from inductor_passes.scheduling.cost_graph import CostGraph
from inductor_passes.scheduling.issue_points import Schedule, ScheduledBucket
from inductor_passes.scheduling.replay import Timeline, replay

_WAITS = 4
"""Number of later slots that are tried for each wait."""
_EARLIER = (8, 4, 2, 1)
"""Numbers of slots by which a gather may be issued earlier; the largest that fits in memory counts."""
_QUEUED = 2
"""Number of collectives that are in front of a gather, queued or under way, where it is issued later."""
_ROUNDING = 1e-9
"""The part of a predicted time by which sums of the same seconds may differ."""


def with_slack(graph: CostGraph, schedule: Schedule, peak: float) -> Schedule:
    """Return ``schedule`` with its reductions awaited later and its gathers issued earlier, at the same predicted time.

    Gathers behind a queue are issued later.

    Buckets, and the order in which gathers and reductions are issued, stay as they are.

    Args:
        graph: the graph of the schedule.
        schedule: its slots are among those that a plan can name.
        peak: bytes that may be in use, at least those of ``schedule``.
    """
    best = replay(graph, schedule)
    limit = best.seconds * (1 + _ROUNDING)

    def fits(timeline: Timeline) -> bool:
        return timeline.seconds <= limit and timeline.peak <= peak

    waits = issue_points.reduction_wait_slots(schedule, len(graph.seconds))
    for i in reversed(range(len(schedule.reductions))):
        schedule = _first_that_fits(graph, schedule, _later_waits(schedule, i, waits), fits)
    issues = issue_points.gather_issue_slots(graph)
    for i in range(len(schedule.gathers)):
        schedule = _first_that_fits(graph, schedule, _earlier_issues(schedule, i, issues), fits)
    for i in reversed(range(len(schedule.gathers))):
        later = _later_issues(graph, schedule, i, issues, replay(graph, schedule))
        schedule = _first_that_fits(graph, schedule, later, fits)
    return schedule


def _first_that_fits(
    graph: CostGraph, schedule: Schedule, changed: Iterator[Schedule], fits: Callable[[Timeline], bool]
) -> Schedule:
    return next((other for other in changed if fits(replay(graph, other))), schedule)


def _later_waits(schedule: Schedule, i: int, waits: list[int]) -> Iterator[Schedule]:
    """Yield the schedule with reduction ``i`` awaited in a later slot, the latest first, then half as far, ..."""
    reduction = schedule.reductions[i]
    later = waits[bisect_right(waits, reduction.wait_slot) :]
    for _ in range(_WAITS):
        if later:
            moved = reduction._replace(wait_slot=later[-1])
            yield schedule._replace(reductions=_with(schedule.reductions, i, moved))
            later = later[: len(later) // 2]


def _earlier_issues(schedule: Schedule, i: int, issues: list[int]) -> Iterator[Schedule]:
    """Yield the schedule with gather ``i`` issued in an earlier slot, not before the gather in front of it."""
    gather = schedule.gathers[i]
    first = schedule.gathers[i - 1].issue_slot if i else 0
    slots = [slot for slot in issues if first <= slot < gather.issue_slot]
    for places in dict.fromkeys(min(earlier, len(slots)) for earlier in _EARLIER if slots):
        moved = gather._replace(issue_slot=slots[-places])
        yield schedule._replace(gathers=_with(schedule.gathers, i, moved))


def _later_issues(
    graph: CostGraph, schedule: Schedule, i: int, issues: list[int], timeline: Timeline
) -> Iterator[Schedule]:
    """Yield the schedule with gather ``i`` issued in a later slot, the latest first, not behind the next gather.

    Args:
        timeline: the replay of ``schedule``; there, ``_QUEUED`` collectives are in front of the gather in these slots.
    """
    gather = schedule.gathers[i]
    following = schedule.gathers[i + 1].issue_slot if i + 1 < len(schedule.gathers) else len(graph.seconds)
    fqn = graph.gathers[gather.members[0]].fqn
    own = next(span for span in timeline.spans if span.what == "gather" and fqn in span.fqns)
    started = sorted(span.started for span in timeline.spans if span.kind.channel == own.kind.channel)
    in_front = started[: bisect_left(started, own.started)]
    if len(in_front) < _QUEUED:
        return
    come_to = [0.0, *(start + seconds for start, seconds in zip(timeline.starts, graph.seconds, strict=False))]
    for slot in reversed(issues):
        if gather.issue_slot < slot <= min(following, gather.wait_slot) and come_to[slot] <= in_front[-_QUEUED]:
            yield schedule._replace(gathers=_with(schedule.gathers, i, gather._replace(issue_slot=slot)))


def _with(buckets: tuple[ScheduledBucket, ...], i: int, new: ScheduledBucket) -> tuple[ScheduledBucket, ...]:
    return (*buckets[:i], new, *buckets[i + 1 :])

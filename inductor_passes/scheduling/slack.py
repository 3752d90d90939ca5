"""Slack for what a prediction cannot know: reductions awaited later, and gathers issued earlier, where memory allows.

A gather that would only queue behind others is issued later.

Nobody needs a reduction's result before the optimizer, so awaiting it earlier buys memory and nothing else; and a wait
that sits where the reduction is predicted to end holds compute up as soon as compute is faster than predicted. A gather
that is issued just in time does the same where the network is slower than predicted. But where several collectives wait
for the network, issuing one more gains nothing: the gather holds memory, and the host is held up, which at the start
of a step has launched no compute yet.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from inductor_passes.scheduling import issue_points
from inductor_passes.scheduling.cost_graph import CostGraph
from inductor_passes.scheduling.deviations import Deviation, deviating
from inductor_passes.scheduling.issue_points import Schedule, ScheduledBucket
from inductor_passes.scheduling.replay import CollectiveSpan, Timeline, replay, seconds_and_peak

_TRIED = 4
"""Number of slots that are tried for a bucket, each half as far away as the one before."""
_EARLIER = (8, 4, 2, 1)
"""Numbers of slots by which a gather may be issued earlier."""
_QUEUED = 2
"""Number of collectives that are in front of a gather, queued or under way, where it is issued later."""
_LOSS = 0.001
"""The part of the predicted time that slack may cost: a gather that is issued earlier may slow other matmuls down."""
_WORK = 50_000
"""Number of collectives that are replayed, about, for each kind of move."""


def with_slack(graph: CostGraph, schedule: Schedule, peak: float, deviations: Sequence[Deviation] = ()) -> Schedule:
    """Return ``schedule`` with its reductions awaited later and its gathers issued earlier.

    Gathers behind a queue are issued later. A thousandth of the predicted time may be lost; with deviations, nothing of
    the mean over these and the prediction.

    Buckets, and the order in which gathers and reductions are issued, stay as they are.

    Args:
        graph: the graph of the schedule.
        schedule: its slots are among those that a plan can name.
        peak: bytes that may be in use, at least those of ``schedule``.
        deviations: what counts beside the prediction.
    """
    return _Slack(graph, schedule, peak, deviations).schedule


class _Move(NamedTuple):
    """A bucket in another slot."""

    schedule: Schedule
    begin: int
    """The first slot in which another number of bytes is in use."""
    end: int
    """The slot behind the last one."""
    nbytes: int
    """Bytes that are in use there, besides; negative: that are free."""


class _Slack:
    """A schedule whose buckets are moved, one kind of move after the other, while time and memory allow."""

    def __init__(self, graph: CostGraph, schedule: Schedule, peak: float, deviations: Sequence[Deviation]):
        self._graph, self._peak = graph, peak
        self._deviating = [deviating(graph, each) for each in deviations]
        self._work = 0
        """Number of schedules that may still be replayed for this kind of move."""
        timeline = replay(graph, schedule)
        self._longest = timeline.seconds * (1 + _LOSS)
        self._take(schedule, timeline, self._summed(schedule, timeline))
        self._issues = issue_points.gather_issue_slots(graph)
        self._waits = issue_points.reduction_wait_slots(schedule, len(graph.seconds))
        reductions, gathers = range(len(schedule.reductions)), range(len(schedule.gathers))
        moves = (
            (self._later_waits, reductions[::-1]),
            (self._earlier_issues, gathers),
            (self._later_issues, gathers[::-1]),
        )
        for kind, buckets in moves:
            self._work = _WORK // (len(reductions) + len(gathers) + 1)
            self._move(kind, buckets)

    def _move(self, moves: Callable[[Schedule, int], Iterator[_Move]], buckets: Sequence[int]) -> None:
        """Move buckets, all of them at once if that fits, or else one half of them after the other."""
        memory = list(self._timeline.memory)
        together = self.schedule
        for i in buckets:
            for move in moves(together, i):
                slots = slice(move.begin, move.end)
                if max(memory[slots], default=0) + move.nbytes <= self._peak:
                    together = move.schedule
                    memory[slots] = [used + move.nbytes for used in memory[slots]]
                    break
        if together == self.schedule or self._work <= 0 or self._fits(together):
            return
        if len(buckets) == 1:
            any(self._fits(move.schedule) for move in moves(self.schedule, buckets[0]))
            return
        middle = len(buckets) // 2
        self._move(moves, buckets[:middle])
        self._move(moves, buckets[middle:])

    def _fits(self, schedule: Schedule) -> bool:
        """Take ``schedule`` if it is as fast and has a peak that is low enough; return whether it is."""
        self._work -= 1
        timeline = replay(self._graph, schedule)
        if timeline.seconds > self._longest or timeline.peak > self._peak:
            return False
        if (seconds := self._summed(schedule, timeline)) > self._seconds:
            return False
        self._take(schedule, timeline, seconds)
        return True

    def _summed(self, schedule: Schedule, timeline: Timeline) -> float:
        """Return the seconds that count in sum: as predicted, and with each deviation; 0 without deviations."""
        if not self._deviating:
            return 0.0
        self._work -= len(self._deviating)
        return timeline.seconds + sum(seconds_and_peak(graph, schedule)[0] for graph in self._deviating)

    def _take(self, schedule: Schedule, timeline: Timeline, seconds: float) -> None:
        self.schedule, self._timeline, self._seconds = schedule, timeline, seconds
        self._gathers: dict[str, CollectiveSpan] = {}
        self._reductions: dict[str, CollectiveSpan] = {}
        """The last collective of each parameter's reduction."""
        self._started: defaultdict[str, list[float]] = defaultdict(list)
        """When the collectives of each channel begin, one after the other."""
        for span in timeline.spans:
            (self._gathers if span.what == "gather" else self._reductions).update(dict.fromkeys(span.fqns, span))
            self._started[span.kind.channel].append(span.started)
        for started in self._started.values():
            started.sort()
        self._come_to = [0.0, *timeline.ends]
        """When compute comes to each slot."""

    def _later_waits(self, schedule: Schedule, i: int) -> Iterator[_Move]:
        """Yield moves of a reduction's wait to later slots, the latest first, then half as far, ..."""
        reduction = schedule.reductions[i]
        later = self._waits[bisect_right(self._waits, reduction.wait_slot) :]
        if later:
            freed = self._reductions[self._graph.reductions[reduction.members[0]].fqn].freed
        for slot in _ever_nearer(later):
            reductions = _with(schedule.reductions, i, reduction._replace(wait_slot=slot))
            yield _Move(schedule._replace(reductions=reductions), reduction.wait_slot, slot, freed)

    def _earlier_issues(self, schedule: Schedule, i: int) -> Iterator[_Move]:
        """Yield moves of a gather to earlier slots, not before the gather in front of it, the earliest first."""
        gather = schedule.gathers[i]
        first = schedule.gathers[i - 1].issue_slot if i else 0
        slots = [slot for slot in self._issues if first <= slot < gather.issue_slot]
        for places in dict.fromkeys(min(earlier, len(slots)) for earlier in _EARLIER if slots):
            yield self._issued(schedule, i, slots[-places])

    def _later_issues(self, schedule: Schedule, i: int) -> Iterator[_Move]:
        """Yield moves of a gather to later slots with as many collectives in front, not behind the next gather."""
        gather = schedule.gathers[i]
        following = schedule.gathers[i + 1].issue_slot if i + 1 < len(schedule.gathers) else len(self._graph.seconds)
        own = self._gathers[self._graph.gathers[gather.members[0]].fqn]
        started = self._started[own.kind.channel]
        in_front = bisect_left(started, own.started)
        if in_front < _QUEUED:
            return
        last = min(following, gather.wait_slot)
        slots = self._issues[bisect_right(self._issues, gather.issue_slot) : bisect_right(self._issues, last)]
        for slot in _ever_nearer([slot for slot in slots if self._come_to[slot] <= started[in_front - _QUEUED]]):
            yield self._issued(schedule, i, slot)

    def _issued(self, schedule: Schedule, i: int, slot: int) -> _Move:
        """Return the move of gather ``i`` to another slot."""
        gather = schedule.gathers[i]
        span = self._gathers[self._graph.gathers[gather.members[0]].fqn]
        nbytes = span.held + span.kind.sent(span.nbytes)
        moved = schedule._replace(gathers=_with(schedule.gathers, i, gather._replace(issue_slot=slot)))
        if slot < gather.issue_slot:
            return _Move(moved, slot, gather.issue_slot, nbytes)
        return _Move(moved, gather.issue_slot, slot, -nbytes)


def _ever_nearer(slots: list[int]) -> Iterator[int]:
    """Yield the last slot, then the one half as far, ..."""
    for _ in range(_TRIED):
        if slots:
            yield slots[-1]
            slots = slots[: len(slots) // 2]


def _with(buckets: tuple[ScheduledBucket, ...], i: int, new: ScheduledBucket) -> tuple[ScheduledBucket, ...]:
    return (*buckets[:i], new, *buckets[i + 1 :])

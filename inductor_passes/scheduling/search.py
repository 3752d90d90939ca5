"""Search for the schedule of a graph: which collectives are merged, and when each is issued and awaited.

``auto`` looks for the shortest predicted time (``replay.py``) under a memory limit, or for the shortest mean of that
and of the times where a device and its network deviate from their profile (``deviations.py``):

1. *Cut.* Parameters in the order of their use are cut into buckets (``bucket_boundaries.py``), for several speeds of
   communication and sizes of buckets.
2. *Arrange.* A gather is issued as late as keeps this gather and all later ones in time, a reduction when it is
   complete (``arrange.py``). Under a memory limit gathers leave more or less memory free, by bisection.
3. *Improve.* These arrangements, the best of them arranged in several ways, and the schedules that the caller proposes
   are replayed. From the best ones on, buckets are merged and split, issued and awaited a slot earlier or later, while
   one such step or a few of them help.
4. *Choose.* Where deviations count, buckets are also arranged for a slow network, and all schedules are replayed with
   each deviation. From the one with the shortest mean on, steps are followed once more.

The search is deterministic: how much is tried depends on the size of the graph, never on the clock.

``greedy`` is the auto-wrapping of the SimpleFSDP paper (arXiv 2411.00284), as far as the paper and its authors' code
specify it: see ``greedy_schedule``.
"""

import functools
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, product
from typing import NamedTuple

from inductor_passes.scheduling import issue_points
from inductor_passes.scheduling.arrange import Choice, arrange
from inductor_passes.scheduling.bucket_boundaries import Chains, even_buckets, one_bucket_each
from inductor_passes.scheduling.cost_graph import CostGraph
from inductor_passes.scheduling.deviations import SLOW_NETWORK, Deviation, deviating
from inductor_passes.scheduling.issue_points import Schedule, ScheduledBucket
from inductor_passes.scheduling.replay import seconds_and_peak

TIME_TOLERANCE = 0.005
"""The part of the predicted time that is given up for less memory without a limit: less than predictions err by."""

_MARGINS = (0.5, 2.0)
"""How much earlier than necessary a gather is issued, in parts of its time; tried besides as early as memory allows."""
_STEPS = 5
"""Number of changes at once that are tried of the best schedule in the end."""
_STARTS = 8
"""Number of schedules of which small changes are tried, each with the same work: the best one need not become the best.

Under a memory limit schedules of Llama 3 8B on 64 H100s that began 1 % behind the best ended 1 % before it.
"""
_PRUNED = 0.01
"""A change that costs more than this part of the predicted time is not replayed with deviations."""


class Effort(NamedTuple):
    """The amount of work of a search."""

    speeds: tuple[float, ...] = (1.0, 3.0)
    """Factors by which communication counts as slower when buckets are cut: it shares its channel, and may be late."""
    parts: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Numbers of even buckets that are tried; a bucket is also limited to such parts of the whole or of the budget."""
    best: int = 3
    """Number of sets of buckets that are arranged in all ways."""
    work: int = 60_000
    """Number of collectives that are replayed, about, to improve schedules."""


THOROUGH = Effort()
QUICK = Effort(speeds=(1.0,), parts=(16,), best=0, work=2_000)
"""Effort for comparing graphs: a fraction of the time."""


class ReplayedSchedule(NamedTuple):
    schedule: Schedule
    predicted_s: float
    """Seconds as predicted."""
    peak: int
    """The most bytes in use at any time."""
    seconds: float
    """The mean of the times as predicted and with each deviation that counts."""


class Tried:
    """Arrangements and replays of searches on one graph, so that none does them again."""

    def __init__(self, graph: CostGraph):
        self.graph = graph
        self._arranged: dict[Choice, ReplayedSchedule] = {}
        self._replayed: dict[Schedule, ReplayedSchedule] = {}

    @functools.cached_property
    def chains(self) -> Chains:
        return Chains(self.graph)

    def arranged(self, choice: Choice) -> ReplayedSchedule:
        """Return the arrangement of a choice, replayed as predicted."""
        if (found := self._arranged.get(choice)) is None:
            found = self._arranged[choice] = self.replayed(arrange(self.graph, choice))
        return found

    def replayed(self, schedule: Schedule) -> ReplayedSchedule:
        """Return a schedule, replayed as predicted."""
        if (found := self._replayed.get(schedule)) is None:
            found = self._replayed[schedule] = _as_predicted(self.graph, schedule)
        return found


def search_schedule(
    graph: CostGraph,
    budget: float = math.inf,
    proposals: Iterable[Schedule] = (),
    *,
    effort: Effort = THOROUGH,
    deviations: Sequence[Deviation] = (),
    tried: Tried | None = None,
) -> ReplayedSchedule | None:
    """Return the fastest schedule with a peak of at most ``budget`` bytes; ``None`` if none is found.

    The result is never slower than any of ``proposals`` that is within the budget: in the mean over ``deviations`` and
    the prediction.

    Args:
        effort: the amount of work.
        deviations: what counts beside the prediction.
        tried: what earlier searches on this graph have tried.
    """
    tried = tried or Tried(graph)
    least = _least_memory_schedule(graph, effort.work)
    given = [least, *map(tried.replayed, proposals)]
    arranged = _candidates(tried, budget, least.peak, effort)
    candidates = sorted(
        (found for found in (*given, *arranged) if found.peak <= budget), key=lambda found: found.seconds
    )
    if not candidates:
        return None

    def faster(found: ReplayedSchedule) -> tuple[float, float] | None:
        return (found.seconds, found.peak) if found.peak <= budget else None

    fastest = _improve(tried, candidates, faster, effort.work)
    if not deviations:
        return fastest
    slowed = _candidates(Tried(deviating(graph, SLOW_NETWORK)), budget, least.peak, effort)
    schedules = dict.fromkeys(found.schedule for found in (fastest, *candidates, *slowed))
    return _fastest_in_the_mean(tried, [*schedules], budget, effort.work, deviations)


def _as_predicted(graph: CostGraph, schedule: Schedule) -> ReplayedSchedule:
    seconds, peak = seconds_and_peak(graph, schedule)
    return ReplayedSchedule(schedule, seconds, peak, seconds)


def _fastest_in_the_mean(
    tried: Tried, schedules: Iterable[Schedule], budget: float, work: int, deviations: Sequence[Deviation]
) -> ReplayedSchedule:
    """Return the best of ``schedules``, or what small changes make of it; one of them is within the budget."""
    deviated = [deviating(tried.graph, each) for each in deviations]

    @functools.cache
    def mean(schedule: Schedule) -> float:
        others = (seconds_and_peak(each, schedule)[0] for each in deviated)
        return statistics.fmean((tried.replayed(schedule).predicted_s, *others))

    replayed = map(tried.replayed, schedules)
    best = min(
        (found._replace(seconds=mean(found.schedule)) for found in replayed if found.peak <= budget),
        key=lambda found: (found.seconds, found.peak),
    )
    longest = best.predicted_s * (1 + _PRUNED)

    def faster(found: ReplayedSchedule) -> tuple[float, float] | None:
        if found.peak > budget or found.predicted_s > longest:
            return None
        return mean(found.schedule), found.peak

    work = _replays(tried.graph, work) // (1 + len(deviated))
    best, _ = _descend(tried, best, faster, work, steps=2)
    return best._replace(seconds=mean(best.schedule))


def greedy_schedule(graph: CostGraph, memory_limit: float = math.inf) -> ReplayedSchedule:
    """Return the schedule of auto-wrapping by the rule of the SimpleFSDP paper.

    Gathers are taken in the order of use. A gather joins the open bucket if both hold: the bucket's gather and the
    reduction of the gradients made meanwhile hide under the compute of the step before, the one that uses the previous
    bucket; and twice the bucket, which a copy unpacks, fits beside the most memory that this step needs. The first
    bucket has nothing to hide under, and one member. A gather is issued before the wait for the previous one.

    Gradients are reduced together when the step ends that makes them, or, towards the end, once five times their
    reduction is more than the compute to come. A reduction is awaited before the next is issued.

    Args:
        memory_limit: bytes in use at most, beside what is not in the graph.
    """
    at = list(accumulate(graph.seconds, initial=0.0))
    boundaries: list[list[int]] = []
    starts: list[int] = []
    hides = 0.0
    for i, gather in enumerate(graph.gathers):
        if boundaries:
            nbytes = sum(graph.gathers[k].nbytes for k in (*boundaries[-1], i))
            before = starts[-2] if len(starts) > 1 else starts[-1]
            most = max(graph.live_bytes_in_step[before : starts[-1] + 1], default=0)
            if gather.kind.seconds(nbytes) <= hides and most + 2 * nbytes <= memory_limit:
                boundaries[-1].append(i)
                continue
            hides = at[gather.first_use_slot] - at[starts[-1]]
            made = [r for r in graph.reductions if starts[-1] < r.ready_slot <= gather.first_use_slot]
            hides -= made[0].kind.seconds(sum(r.nbytes for r in made)) if made else 0.0
        boundaries.append([i])
        starts.append(gather.first_use_slot)
    gathers = [
        ScheduledBucket(tuple(members), starts[max(0, n - 1)], starts[n]) for n, members in enumerate(boundaries)
    ]
    flushed: list[tuple[tuple[int, ...], int]] = []
    pending: list[int] = []
    for i, reduction in enumerate(graph.reductions):
        pending.append(i)
        seconds = reduction.kind.seconds(sum(graph.reductions[k].nbytes for k in pending))
        following = graph.reductions[i + 1].ready_slot if i + 1 < len(graph.reductions) else math.inf
        step = bisect_left(starts, reduction.ready_slot)
        if bisect_left(starts, following) > step or 5 * seconds > at[-1] - at[reduction.ready_slot]:
            flushed.append((tuple(pending), reduction.ready_slot))
            pending = []
    points = [slot for _, slot in flushed] + [len(graph.seconds) + 1]
    reductions = [
        ScheduledBucket(members, slot, points[n + 1], points[n + 1] if graph.has_all_reduce(members) else -1)
        for n, (members, slot) in enumerate(flushed)
    ]
    return _as_predicted(graph, Schedule(tuple(gathers), tuple(reductions)))


def least_memory_schedule(graph: CostGraph) -> ReplayedSchedule:
    """Return the schedule that needs the least memory.

    Nothing is merged or issued ahead, and everything is awaited at once, except where small changes save memory.
    """
    return _least_memory_schedule(graph, THOROUGH.work)


@functools.lru_cache(maxsize=8)
def _least_memory_schedule(graph: CostGraph, work: int) -> ReplayedSchedule:
    schedule = Schedule(
        tuple(
            ScheduledBucket((i,), gather.first_use_slot, gather.first_use_slot)
            for i, gather in enumerate(graph.gathers)
        ),
        tuple(
            ScheduledBucket((i,), r.ready_slot, r.ready_slot, r.ready_slot if r.kind.all_reduce_after else -1)
            for i, r in enumerate(graph.reductions)
        ),
    )
    tried = Tried(graph)
    least = tried.replayed(schedule)
    return _descend(tried, least, lambda found: (found.peak, 0.0), _replays(graph, work), steps=2)[0]


def _replays(graph: CostGraph, work: int) -> int:
    """Return how often a graph is replayed for a number of collectives."""
    return work // (len(graph.gathers) + len(graph.reductions) + 1)


def _candidates(tried: Tried, budget: float, least: int, effort: Effort) -> list[ReplayedSchedule]:
    """Return arrangements within the budget: of all sets of buckets in one way, of the best of them in all ways.

    ``least``: the lowest peak there is.
    """
    graph = tried.graph
    whole = sum(member.nbytes for member in (graph.gathers or graph.reductions))
    spare = min(budget - least, whole)
    ways = [(speed, math.inf) for speed in effort.speeds]
    ways += [(1.0, part / n) for part in dict.fromkeys((whole, spare)) for n in effort.parts]
    boundaries = [(one_bucket_each(graph.gathers), one_bucket_each(graph.reductions))]
    boundaries += zip(tried.chains.gathers(ways), tried.chains.reductions(ways), strict=True)
    boundaries += [
        (even_buckets(graph.gathers, parts), even_buckets(graph.reductions, parts)) for parts in effort.parts
    ]
    found = {
        choice: _arrange_within_budget(tried, choice, budget)
        for choice in (Choice(*boundary_set) for boundary_set in dict.fromkeys(boundaries))
    }
    best = sorted(found, key=lambda choice: f.seconds if (f := found[choice]) else math.inf)[: effort.best]
    for choice, margin, gathers_first in product(best, _MARGINS, (False, True)):
        other = choice._replace(margin=margin, gathers_first=gathers_first)
        if graph.reductions or not gathers_first:
            found[other] = _arrange_within_budget(tried, other, budget)
    return [f for f in found.values() if f is not None]


def _arrange_within_budget(tried: Tried, choice: Choice, budget: float) -> ReplayedSchedule | None:
    """Return the arrangement of a choice that gives gathers the most memory within the budget, or ``None``."""
    found = tried.arranged(choice)
    if found.peak <= budget:
        return found
    best, low, high = None, 0.0, float(budget)
    for memory_limit in (high, low, *[math.nan] * 4):
        memory_limit = (low + high) / 2 if math.isnan(memory_limit) else memory_limit
        found = tried.arranged(choice._replace(memory_limit=memory_limit))
        if found.peak <= budget:
            best, low = found, memory_limit
        elif memory_limit == 0:
            return None
        else:
            high = memory_limit
        if low == high:
            break
    return best


_Rank = Callable[[ReplayedSchedule], tuple[float, float] | None]
"""Rank of a schedule, the lower the better; ``None``: the schedule is not allowed."""


def _improve(tried: Tried, starts: Sequence[ReplayedSchedule], rank: _Rank, work: int) -> ReplayedSchedule:
    """Return the best schedule that small changes make of ``starts``: a few of each, and more of what is best then."""
    work = _replays(tried.graph, work)
    distinct = [*{start.schedule: start for start in starts}.values()][:_STARTS]
    share = work // (2 * len(distinct))
    improved = []
    for start in distinct:
        found, left = _descend(tried, start, rank, share, steps=2)
        improved.append(found)
        work -= share - left
    best = min(improved, key=lambda found: rank(found) or (math.inf, math.inf))
    best, work = _descend(tried, best, rank, work, steps=2)
    return _descend(tried, best, rank, work, steps=_STEPS)[0]


def _descend(tried: Tried, best: ReplayedSchedule, rank: _Rank, work: int, steps: int) -> tuple[ReplayedSchedule, int]:
    """Follow the next better schedule within ``steps`` changes, and on from there, until ``work`` are replayed."""
    improved = True
    while improved:
        improved = False
        for schedule in _schedules_around(tried.graph, best.schedule, steps):
            if work <= 0:
                return best, work
            work -= 1
            found = tried.replayed(schedule)
            ranks = rank(found), rank(best)
            if ranks[0] is not None and ranks[1] is not None and ranks[0] < ranks[1]:
                best, improved = found, True
                break
    return best, work


def _schedules_around(graph: CostGraph, schedule: Schedule, steps: int) -> Iterator[Schedule]:
    """Yield each schedule that up to ``steps`` changes make of a schedule, once, fewer changes first."""
    seen, ring = {schedule}, [schedule]
    for _ in range(steps):
        reached = ring
        ring = []
        for one in reached:
            for other in _neighbours(graph, one):
                other = issue_points.with_waits_at_issues(other, len(graph.seconds))
                if other not in seen:
                    seen.add(other)
                    ring.append(other)
                    yield other


def _neighbours(graph: CostGraph, schedule: Schedule) -> Iterator[Schedule]:
    gathers, reductions = schedule
    uses = issue_points.gather_issue_slots(graph)
    gradients = issue_points.reduction_issue_slots(graph)
    issues = issue_points.reduction_wait_slots(schedule, len(graph.seconds))
    for i, scheduled in enumerate(gathers):
        first = gathers[i - 1].issue_slot if i else 0
        last = gathers[i + 1].issue_slot if i + 1 < len(gathers) else scheduled.wait_slot
        for slot in _beside(uses, scheduled.issue_slot):
            if first <= slot <= min(last, scheduled.wait_slot):
                yield Schedule(_put(gathers, i, scheduled._replace(issue_slot=slot)), reductions)
        if scheduled.issue_slot > first:  # with all behind it
            early = tuple(later._replace(issue_slot=first) for later in gathers[i:])
            yield Schedule((*gathers[:i], *early), reductions)
            # with all that are issued in the same slot
            slot = max(first, uses[bisect_left(uses, scheduled.issue_slot) - 1])
            same = sum(later.issue_slot == scheduled.issue_slot for later in gathers[i:])
            early = tuple(later._replace(issue_slot=slot) for later in gathers[i : i + same])
            yield Schedule((*gathers[:i], *early, *gathers[i + same :]), reductions)
        for at in range(1, len(scheduled.members)):
            one, other = scheduled.members[:at], scheduled.members[at:]
            parts = (
                ScheduledBucket(part, scheduled.issue_slot, min(graph.gathers[k].first_use_slot for k in part))
                for part in (one, other)
            )
            yield Schedule(_put(gathers, i, *parts), reductions)
    for i in range(len(gathers) - 1):
        yield schedule.with_gathers_merged(i)
    for i, scheduled in enumerate(reductions):
        previous = reductions[i - 1].issue_slot if i else 0
        first = max(previous, *(graph.reductions[k].ready_slot for k in scheduled.members))
        last = reductions[i + 1].issue_slot if i + 1 < len(reductions) else len(graph.seconds)
        if scheduled.all_reduce_slot >= 0:
            for slot in _beside(issues, scheduled.all_reduce_slot):
                if scheduled.issue_slot <= slot <= scheduled.wait_slot:
                    yield Schedule(gathers, _put(reductions, i, scheduled._replace(all_reduce_slot=slot)))
        for slot in _beside(gradients, scheduled.issue_slot):
            if first <= slot <= last:
                all_reduce = max(scheduled.all_reduce_slot, slot) if scheduled.all_reduce_slot >= 0 else -1
                moved = ScheduledBucket(scheduled.members, slot, max(scheduled.wait_slot, slot), all_reduce)
                yield Schedule(gathers, _put(reductions, i, moved))
        for slot in _beside(issues, scheduled.wait_slot):
            if slot >= max(scheduled.issue_slot, scheduled.all_reduce_slot):
                yield Schedule(gathers, _put(reductions, i, scheduled._replace(wait_slot=slot)))
        for at in range(1, len(scheduled.members)):
            one, other = scheduled.members[:at], scheduled.members[at:]
            issue = max(previous, *(graph.reductions[k].ready_slot for k in one))
            split = [scheduled._replace(members=one, issue_slot=issue), scheduled._replace(members=other)]
            split = [
                part if graph.has_all_reduce(part.members) else part._replace(all_reduce_slot=-1) for part in split
            ]
            yield Schedule(gathers, _put(reductions, i, *split))
    for i in range(len(reductions) - 1):
        yield schedule.with_reductions_merged(i)


def _beside(slots: Sequence[int], slot: int) -> list[int]:
    place = bisect_left(slots, slot)
    return [*slots[max(0, place - 1) : place], *slots[place + 1 : place + 2]]


def _put(buckets: tuple[ScheduledBucket, ...], i: int, *new: ScheduledBucket) -> tuple[ScheduledBucket, ...]:
    return (*buckets[:i], *new, *buckets[i + 1 :])

"""Search for the schedules of a step, whose graphs run one after the other: their times add up, their peaks do not.

The peak of a step is the highest peak of its graphs. Where some time may be given up for less memory, it buys nothing
in a graph that is below that peak already. So one memory limit for all graphs is lowered, by bisection, while the
fastest schedules within the limit take at most that much longer together.
"""

import math
from collections.abc import Sequence

from inductor_passes.scheduling.cost_graph import CostGraph
from inductor_passes.scheduling.deviations import Deviation, seconds_with_deviations
from inductor_passes.scheduling.issue_points import Schedule
from inductor_passes.scheduling.search import (
    QUICK,
    THOROUGH,
    Effort,
    ReplayedSchedule,
    Tried,
    least_memory_schedule,
    search_schedule,
)

WORTH_MORE_MEMORY = 0.02
"""The part of a step's time that more memory than ``modest_peak`` must save."""
_BISECTIONS = 5
"""Number of memory limits that are tried between the least that the step needs and the peak of the fastest one."""

Found = list[ReplayedSchedule]
"""A schedule for each graph."""


def search_step(
    graphs: Sequence[CostGraph],
    budget: float = math.inf,
    proposals: Sequence[Sequence[Schedule]] = (),
    *,
    tolerance: float = 0.0,
    modest_peak: float = math.inf,
    deviations: Sequence[Deviation] = (),
) -> Found | None:
    """Return the fastest schedules with a peak of at most ``budget`` bytes each; ``None`` if a graph has none.

    Together they are never slower than any of ``proposals`` that is within the budget, but for ``tolerance``: in the
    mean over ``deviations`` and the prediction.

    Args:
        proposals: a schedule for each graph, of each proposal.
        tolerance: the part of the time of the step that may be given up for a lower peak.
        modest_peak: bytes that the peak exceeds only where that saves ``WORTH_MORE_MEMORY`` of the time; of no account
            without ``tolerance``.
        deviations: what counts beside the prediction.
    """
    tried = [Tried(graph) for graph in graphs]
    if not tolerance:
        return _within(tried, budget, proposals, THOROUGH, deviations)
    fastest = _within(tried, budget, proposals, THOROUGH)
    if fastest is None:
        return None
    proposed = [[one.replayed(schedule) for one, schedule in zip(tried, each, strict=True)] for each in proposals]
    allowed = [each for each in proposed if _peak(each) <= budget]
    longest = min([_seconds(fastest) * (1 + tolerance), *map(_seconds, allowed)])
    found = fastest
    least = max(least_memory_schedule(graph).peak for graph in graphs)
    for _ in range(_BISECTIONS):
        limit = (least + _peak(found)) / 2
        within = _within(tried, limit, proposals, QUICK)
        if within is not None and _seconds(within) <= longest:
            found = within
        else:
            least = math.ceil(limit)
    proposals = [*proposals, [one.schedule for one in found]]
    lean = _within(tried, _peak(found), proposals, THOROUGH, deviations)
    assert lean is not None
    faster = [
        _peak(each)
        for each in allowed
        if _mean(graphs, [one.schedule for one in each], deviations) * (1 + tolerance) < _seconds(lean)
    ]
    if faster:
        lean = _within(tried, max(faster), proposals, THOROUGH, deviations)
        assert lean is not None
    if _peak(lean) <= modest_peak:
        return lean
    modest = _within(tried, modest_peak, proposals, THOROUGH, deviations)
    longest = (1 + WORTH_MORE_MEMORY) * _seconds(lean)
    return modest if modest is not None and _seconds(modest) <= longest else lean


def quick_seconds(graphs: Sequence[CostGraph], limit: float, deviations: Sequence[Deviation]) -> float:
    """Return about how long these graphs take with peaks of at most ``limit`` bytes; infinite: they do not fit."""
    found = _within([Tried(graph) for graph in graphs], limit, (), QUICK, deviations)
    return math.inf if found is None else _seconds(found)


def _within(
    tried: Sequence[Tried],
    limit: float,
    proposals: Sequence[Sequence[Schedule]],
    effort: Effort,
    deviations: Sequence[Deviation] = (),
) -> Found | None:
    found = [
        search_schedule(
            one.graph, limit, [each[i] for each in proposals], effort=effort, deviations=deviations, tried=one
        )
        for i, one in enumerate(tried)
    ]
    return [one for one in found if one is not None] if all(found) else None


def _mean(graphs: Sequence[CostGraph], schedules: Sequence[Schedule], deviations: Sequence[Deviation]) -> float:
    seconds = seconds_with_deviations(graphs, schedules, deviations)
    return sum(seconds) / len(seconds)


def _seconds(found: Found) -> float:
    return sum(one.seconds for one in found)


def _peak(found: Found) -> int:
    return max(one.peak for one in found)

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
from inductor_passes.scheduling.replay import replay
from inductor_passes.scheduling.search import (
    QUICK,
    THOROUGH,
    Effort,
    ReplayedSchedule,
    least_memory_schedule,
    search_schedule,
)

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
    deviations: Sequence[Deviation] = (),
) -> Found | None:
    """Return the fastest schedules with a peak of at most ``budget`` bytes each; ``None`` if a graph has none.

    Together they are never slower than any of ``proposals`` that is within the budget, but for ``tolerance``: in the
    mean over ``deviations`` and the prediction.

    Args:
        proposals: a schedule for each graph, of each proposal.
        tolerance: the part of the time of the step that may be given up for a lower peak.
        deviations: what counts beside the prediction.
    """
    if not tolerance:
        return _within(graphs, budget, proposals, THOROUGH, deviations)
    fastest = _within(graphs, budget, proposals, THOROUGH)
    if fastest is None:
        return None
    replayed = [[replay(graph, one) for graph, one in zip(graphs, each, strict=True)] for each in proposals]
    allowed = [
        (each, timelines)
        for each, timelines in zip(proposals, replayed, strict=True)
        if all(timeline.peak <= budget for timeline in timelines)
    ]
    proposed = [sum(timeline.seconds for timeline in timelines) for _, timelines in allowed]
    longest = min([_seconds(fastest) * (1 + tolerance), *proposed])
    found = fastest
    least = max(least_memory_schedule(graph).timeline.peak for graph in graphs)
    for _ in range(_BISECTIONS):
        limit = (least + _peak(found)) / 2
        tried = _within(graphs, limit, proposals, QUICK)
        if tried is not None and _seconds(tried) <= longest:
            found = tried
        else:
            least = math.ceil(limit)
    if found is fastest and not deviations:
        return fastest
    proposals = [*proposals, [one.schedule for one in found]]
    lean = _within(graphs, _peak(found), proposals, THOROUGH, deviations)
    assert lean is not None
    faster = [
        max(timeline.peak for timeline in timelines)
        for each, timelines in allowed
        if _mean(graphs, each, deviations) * (1 + tolerance) < _seconds(lean)
    ]
    return _within(graphs, max(faster), proposals, THOROUGH, deviations) if faster else lean


def quick_seconds(graphs: Sequence[CostGraph], limit: float, deviations: Sequence[Deviation]) -> float:
    """Return about how long these graphs take with peaks of at most ``limit`` bytes; infinite: they do not fit."""
    found = _within(graphs, limit, (), QUICK, deviations)
    return math.inf if found is None else _seconds(found)


def _within(
    graphs: Sequence[CostGraph],
    limit: float,
    proposals: Sequence[Sequence[Schedule]],
    effort: Effort,
    deviations: Sequence[Deviation] = (),
) -> Found | None:
    found = [
        search_schedule(graph, limit, [each[i] for each in proposals], effort=effort, deviations=deviations)
        for i, graph in enumerate(graphs)
    ]
    return [one for one in found if one is not None] if all(found) else None


def _mean(graphs: Sequence[CostGraph], schedules: Sequence[Schedule], deviations: Sequence[Deviation]) -> float:
    seconds = seconds_with_deviations(graphs, schedules, deviations)
    return sum(seconds) / len(seconds)


def _seconds(found: Found) -> float:
    return sum(one.seconds for one in found)


def _peak(found: Found) -> int:
    return max(one.timeline.peak for one in found)

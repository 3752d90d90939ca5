"""Deviations of a device and its network from their profile: what a schedule should be fast in spite of.

No prediction is right to the percent. A schedule that is the fastest where everything takes what the profile says may
be bad where something takes a little more or less: many small collectives where the latency is twice as long, a
collective that hides to the microsecond where compute is faster. A search that takes the mean over deviations finds the
schedule that loses little in all of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from inductor_passes.scheduling.issue_points import Schedule
from inductor_passes.scheduling.replay import seconds_and_peak


class Deviation(NamedTuple):
    """How a device and its network deviate from their profile."""

    compute: float = 1.0
    """Factor of the time of compute."""
    bandwidth: float = 1.0
    """Factor of the bytes that the network moves in a second."""
    latency: float = 1.0
    """Factor of a collective's latency, and of the time that each further member of a group takes."""


DEVIATIONS = (
    Deviation(compute=0.9),
    Deviation(compute=1.1),
    Deviation(bandwidth=0.8),
    Deviation(bandwidth=1.2),
    Deviation(latency=0.5),
    Deviation(latency=2.0),
)
SLOW_NETWORK = Deviation(bandwidth=0.8, latency=2.0)
"""Where schedules with fewer and larger collectives are found."""


def deviating(graph: CostGraph, deviation: Deviation) -> CostGraph:
    """Return ``graph`` with the times of a device and a network that deviate."""

    def kind(given: CollectiveKind) -> CollectiveKind:
        return given._replace(
            alpha_s=given.alpha_s * deviation.latency,
            s_per_byte=given.s_per_byte / deviation.bandwidth,
            member_s=None if given.member_s is None else given.member_s * deviation.latency,
            all_reduce_after=given.all_reduce_after and kind(given.all_reduce_after),
            plain=given.plain and kind(given.plain),
        )

    members: list[Gather | Reduction] = [*graph.gathers, *graph.reductions]
    kinds = {member.kind: kind(member.kind) for member in members}
    return graph._replace(
        seconds=tuple(seconds * deviation.compute for seconds in graph.seconds),
        gathers=tuple(gather._replace(kind=kinds[gather.kind]) for gather in graph.gathers),
        reductions=tuple(reduction._replace(kind=kinds[reduction.kind]) for reduction in graph.reductions),
    )


def seconds_with_deviations(
    graphs: Sequence[CostGraph], schedules: Sequence[Schedule], deviations: Sequence[Deviation] = DEVIATIONS
) -> list[float]:
    """Return the seconds of these graphs together, a schedule for each: as predicted, and with each deviation."""
    return [
        sum(seconds_and_peak(deviating(graph, each), one)[0] for graph, one in zip(graphs, schedules, strict=True))
        for each in (Deviation(), *deviations)
    ]

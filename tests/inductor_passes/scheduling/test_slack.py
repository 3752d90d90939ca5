"""Reductions are awaited as late, and gathers issued as early, as memory allows, at about the same predicted time.

Gathers behind a queue are issued later.
"""

import hypothesis.strategies as st
from hypothesis import given, settings

from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from inductor_passes.scheduling.issue_points import Schedule, ScheduledBucket, buckets_of, schedule_of
from inductor_passes.scheduling.replay import Timeline, replay
from inductor_passes.scheduling.search import search_schedule
from inductor_passes.scheduling.slack import with_slack
from tests.inductor_passes.scheduling.chains import cost_graphs

KIND = CollectiveKind("shard", alpha_s=0.5, s_per_byte=0.0)


def backward(live: tuple[int, ...]) -> CostGraph:
    """Four steps of a second, each of which makes a gradient of 10 bytes."""
    reductions = tuple(Reduction(fqn, KIND, 10, i + 1) for i, fqn in enumerate("abcd"))
    return CostGraph((1.0,) * 4, live, (*live, 0), (), reductions)


def waits(schedule: Schedule) -> list[int]:
    return [reduction.wait_slot for reduction in schedule.reductions]


def test_reductions_are_awaited_at_the_end_where_memory_is_free() -> None:
    graph = backward((100, 0, 0, 0))
    just_in_time = Schedule((), tuple(ScheduledBucket((i,), i + 1, min(5, i + 2)) for i in range(4)))
    assert replay(graph, just_in_time).peak == 110
    assert waits(with_slack(graph, just_in_time, 110)) == [5, 5, 5, 5]


def test_reductions_are_awaited_before_the_peak_that_they_would_raise() -> None:
    graph = backward((0, 0, 0, 100))
    just_in_time = Schedule((), tuple(ScheduledBucket((i,), i + 1, min(5, i + 2)) for i in range(4)))
    peak = replay(graph, just_in_time).peak
    slack = with_slack(graph, just_in_time, peak)
    assert replay(graph, slack).peak == peak
    assert waits(slack)[:2] == [3, 3]
    assert waits(with_slack(graph, just_in_time, peak + 10))[:2] != [3, 3]


def test_gathers_are_issued_earlier_where_memory_is_free_and_not_past_each_other() -> None:
    gathers = tuple(Gather(fqn, KIND, 10, i, i) for i, fqn in enumerate("abcd"))
    graph = CostGraph((1.0,) * 4, (100, 0, 0, 0), (100, 0, 0, 0, 0), gathers, ())
    at_once = Schedule(tuple(ScheduledBucket((i,), max(0, i - 1), i) for i in range(4)), ())
    slack = with_slack(graph, at_once, replay(graph, at_once).peak)
    assert [gather.issue_slot for gather in slack.gathers] == [0, 0, 1, 1]
    assert [gather.issue_slot for gather in with_slack(graph, at_once, 1000).gathers] == [0, 0, 0, 0]


def in_front(timeline: Timeline, graph: CostGraph, gather: ScheduledBucket) -> int:
    """Return how many collectives are queued or under way in front of a gather when it is issued."""
    fqn = graph.gathers[gather.members[0]].fqn
    own = next(span for span in timeline.spans if span.what == "gather" and fqn in span.fqns)
    return sum(
        span.started < own.started and span.finished >= own.issued
        for span in timeline.spans
        if span.kind.channel == own.kind.channel
    )


def test_a_gather_is_issued_when_two_collectives_are_left_in_front_of_it() -> None:
    slow = KIND._replace(alpha_s=2.0)
    gathers = tuple(Gather(fqn, slow, 10, i, i) for i, fqn in enumerate("abcdef"))
    graph = CostGraph((1.0,) * 6, (100,) + (0,) * 5, (100,) + (0,) * 6, gathers, ())
    at_once = Schedule(tuple(ScheduledBucket((i,), 0, i) for i in range(6)), ())
    slack = with_slack(graph, at_once, 1000)
    assert [gather.issue_slot for gather in slack.gathers] == [0, 0, 0, 0, 1, 2]
    assert replay(graph, slack).seconds == replay(graph, at_once).seconds


@settings(max_examples=60, deadline=None)
@given(cost_graphs(5, 5, channels=2), st.integers(0, 40))
def test_slack_costs_a_thousandth_of_the_time_at_most_and_no_more_memory_than_there_is(
    graph: CostGraph, more: int
) -> None:
    found = search_schedule(graph)
    assert found is not None
    peak = found.peak + more
    slack = with_slack(graph, found.schedule, peak)
    timeline = replay(graph, slack)
    assert timeline.seconds <= found.predicted_s * 1.001
    assert timeline.peak <= peak
    for before, after in zip(found.schedule.reductions, slack.reductions, strict=True):
        assert after._replace(wait_slot=before.wait_slot) == before
        assert after.wait_slot >= before.wait_slot
    for before, after in zip(found.schedule.gathers, slack.gathers, strict=True):
        assert after._replace(issue_slot=before.issue_slot) == before
        assert after.issue_slot <= before.issue_slot or in_front(timeline, graph, after) >= 2
    position = {fqn: i for i, fqn in enumerate(member.fqn for member in (*graph.gathers, *graph.reductions))}
    said = schedule_of(graph, *buckets_of(graph, slack, position))
    assert [s[1:4] for s in said.reductions] == [s[1:4] for s in slack.reductions]
    assert [s[1:3] for s in said.gathers] == [s[1:3] for s in slack.gathers]

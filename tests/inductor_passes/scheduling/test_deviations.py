"""Schedules that are fast although a device and its network deviate from their profile."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from inductor_passes.scheduling import search
from inductor_passes.scheduling import search_step as search_step_module
from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from inductor_passes.scheduling.deviations import DEVIATIONS, Deviation, deviating, seconds_with_deviations
from inductor_passes.scheduling.issue_points import Schedule
from inductor_passes.scheduling.replay import replay
from inductor_passes.scheduling.search import (
    THOROUGH,
    ReplayedSchedule,
    greedy_schedule,
    least_memory_schedule,
    search_schedule,
)
from inductor_passes.scheduling.search_step import search_step
from inductor_passes.scheduling.slack import with_slack
from tests.inductor_passes.scheduling.chains import cost_graphs
from tests.inductor_passes.scheduling.test_search import NETWORK, transformer

KIND = CollectiveKind("shard", alpha_s=1.0, s_per_byte=0.1, member_s=0.25)


def mean(graph: CostGraph, schedule: Schedule) -> float:
    seconds = seconds_with_deviations([graph], [schedule])
    return sum(seconds) / len(seconds)


def test_a_deviation_changes_compute_bandwidth_and_latency_of_every_kind() -> None:
    reduced = KIND._replace(name="r", plain=KIND, all_reduce_after=CollectiveKind("replicas", 2.0, 0.4))
    gathers, reductions = (Gather("a", KIND, 10, 0, 0),), (Reduction("a", reduced, 10, 2),)
    graph = CostGraph((1.0, 3.0), (5, 5), (5, 5, 5), gathers, reductions)
    changed = deviating(graph, Deviation(compute=2.0, bandwidth=0.5, latency=3.0))
    kind = KIND._replace(alpha_s=3.0, s_per_byte=0.2, member_s=0.75)
    assert changed.seconds == (2.0, 6.0)
    assert changed.gathers == (Gather("a", kind, 10, 0, 0),)
    assert changed.reductions[0].kind == kind._replace(
        name="r", plain=kind, all_reduce_after=CollectiveKind("replicas", 6.0, 0.8)
    )
    assert deviating(graph, Deviation()) == graph


def test_the_times_are_those_of_the_graphs_together_as_predicted_first() -> None:
    graph = CostGraph((2.0,), (0,), (0, 0), (Gather("a", KIND, 10, 0, 0),), ())
    schedule = least_memory_schedule(graph).schedule
    found = seconds_with_deviations([graph, graph], [schedule, schedule])
    assert found == pytest.approx([2 * one for one in (4.0, 3.8, 4.2, 4.25, 4 - 1 / 6, 3.5, 5.0)])


@settings(max_examples=60, deadline=None)
@given(cost_graphs(5, 5, channels=2), st.integers(0, 20))
def test_with_deviations_the_mean_is_no_longer_than_that_of_the_fastest_as_predicted(
    graph: CostGraph, spare: int
) -> None:
    budget = least_memory_schedule(graph).peak + spare
    greedy = greedy_schedule(graph)
    predicted, chosen = (
        search_schedule(graph, budget, [greedy.schedule], deviations=each) for each in ((), DEVIATIONS)
    )
    assert predicted is not None
    assert chosen is not None
    timeline = replay(graph, chosen.schedule)
    assert (chosen.predicted_s, chosen.peak) == (timeline.seconds, timeline.peak)
    assert chosen.peak <= budget
    assert chosen.seconds == pytest.approx(mean(graph, chosen.schedule))
    assert chosen.seconds <= mean(graph, predicted.schedule) + 1e-9
    if greedy.peak <= budget:
        assert chosen.seconds <= mean(graph, greedy.schedule) + 1e-9
    slack = with_slack(graph, chosen.schedule, budget, DEVIATIONS)
    assert mean(graph, slack) <= chosen.seconds + 1e-9
    assert replay(graph, slack).peak <= budget


@settings(max_examples=25, deadline=None)
@given(cost_graphs(4, 0), cost_graphs(4, 4), st.sampled_from([0.0, 0.05]))
def test_a_step_is_no_slower_in_the_mean_than_proposed_but_for_the_tolerance(
    forward: CostGraph, backward: CostGraph, tolerance: float
) -> None:
    graphs = [forward, backward]
    proposal = [greedy_schedule(graph).schedule for graph in graphs]
    found = search_step(graphs, proposals=[proposal], tolerance=tolerance, deviations=DEVIATIONS)
    assert found is not None
    proposed = seconds_with_deviations(graphs, proposal)
    assert sum(one.seconds for one in found) <= (1 + tolerance) * sum(proposed) / len(proposed) + 1e-9


def test_collectives_that_just_hide_are_merged_where_twice_the_latency_would_expose_them() -> None:
    """Each gather just hides under a step alone; two together leave time to spare, and expose a little at the start."""
    kind = CollectiveKind("shard", alpha_s=0.45, s_per_byte=0.05)
    gathers = tuple(Gather(f"w{i}", kind, 10, i, i) for i in range(24))
    graph = CostGraph((1.0,) * 24, (0,) * 24, (0,) * 25, gathers, ())
    budget = 60
    predicted, chosen = (search_schedule(graph, budget, deviations=each) for each in ((), DEVIATIONS))
    assert predicted is not None
    assert chosen is not None
    slow = deviating(graph, Deviation(latency=2.0))
    assert replay(slow, chosen.schedule).seconds < 0.85 * replay(slow, predicted.schedule).seconds
    assert chosen.predicted_s <= 1.1 * predicted.predicted_s
    assert len(chosen.schedule.gathers) < len(predicted.schedule.gathers)


def test_schedules_for_a_slow_network_and_small_changes_of_the_best_bring_a_better_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = transformer(8, 10e-3, NETWORK._replace(alpha_s=2e-3))
    budget, effort = between(graph, 0.4), THOROUGH._replace(work=20_000)
    chosen = search_schedule(graph, budget, effort=effort, deviations=DEVIATIONS)
    assert chosen is not None
    with monkeypatch.context() as without:
        without.setattr(search, "SLOW_NETWORK", Deviation())
        arranged_as_predicted = search_schedule(graph, budget, effort=effort, deviations=DEVIATIONS)
    assert arranged_as_predicted is not None
    assert chosen.seconds < 0.9 * arranged_as_predicted.seconds
    monkeypatch.setattr(search, "_PRUNED", -1.0)  # no change is replayed with deviations
    unchanged = search_schedule(graph, budget, effort=effort, deviations=DEVIATIONS)
    assert unchanged is not None
    assert chosen.seconds < 0.95 * unchanged.seconds


def test_slack_that_costs_nothing_as_predicted_is_left_out_where_it_costs_with_deviations() -> None:
    graph = transformer(8, 20e-3, NETWORK._replace(alpha_s=2e-3))
    chosen = search_schedule(graph, between(graph, 0.6), deviations=DEVIATIONS)
    assert chosen is not None
    peak = chosen.peak
    assert mean(graph, with_slack(graph, chosen.schedule, peak)) > 1.001 * chosen.seconds
    assert mean(graph, with_slack(graph, chosen.schedule, peak, DEVIATIONS)) <= chosen.seconds


def test_a_step_gets_the_memory_of_a_proposal_that_is_faster_in_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = transformer(4, 5e-3)
    proposal = greedy_schedule(graph)
    limits: list[float] = []

    def slow_at_first(graph: CostGraph, limit: float, *given: Any, **options: Any) -> ReplayedSchedule | None:
        found = search_schedule(graph, limit, *given, **options)
        if options["deviations"]:
            limits.append(limit)
        slower = 10.0 if options["deviations"] and len(limits) == 1 else 0.0
        return found and found._replace(seconds=found.seconds + slower)

    monkeypatch.setattr(search_step_module, "search_schedule", slow_at_first)
    found = search_step([graph], proposals=[[proposal.schedule]], tolerance=0.05, deviations=DEVIATIONS)
    assert found is not None
    assert limits[1:] == [proposal.peak]
    assert found[0].seconds <= mean(graph, proposal.schedule)


def between(graph: CostGraph, part: float) -> float:
    """Return a budget between the least peak and that of the fastest schedule."""
    least, fastest = least_memory_schedule(graph).peak, search_schedule(graph)
    assert fastest is not None
    return least + part * (fastest.peak - least)

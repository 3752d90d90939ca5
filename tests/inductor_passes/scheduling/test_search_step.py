"""Schedules of several graphs that run one after the other, under one limit of memory."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.scheduling import search
from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather
from inductor_passes.scheduling.deviations import DEVIATIONS
from inductor_passes.scheduling.replay import lower_bound, replay
from inductor_passes.scheduling.search import QUICK, THOROUGH, greedy_schedule, least_memory_schedule, search_schedule
from inductor_passes.scheduling.search_step import Found, search_step
from tests.inductor_passes.scheduling.chains import cost_graphs
from tests.inductor_passes.scheduling.test_search import transformer


def seconds(found: Found) -> float:
    return sum(one.predicted_s for one in found)


def peak(found: Found) -> int:
    return max(one.peak for one in found)


@given(cost_graphs(gathers=5, reductions=0), cost_graphs(gathers=5, reductions=5), st.integers(0, 20))
@settings(max_examples=40, deadline=None)
@pytest.mark.slow
def test_a_step_is_no_slower_than_proposed_and_gives_no_more_time_than_it_may(
    forward: CostGraph, backward: CostGraph, spare: int
) -> None:
    graphs = forward, backward
    budget = spare + max(least_memory_schedule(graph).peak for graph in graphs)
    greedy = [greedy_schedule(graph) for graph in graphs]
    proposals = [[one.schedule for one in greedy]]
    exact, lean = (search_step(graphs, budget, proposals, tolerance=tolerance) for tolerance in (0.0, 0.05))
    assert exact is not None
    assert lean is not None
    for found in (exact, lean):
        assert peak(found) <= budget
        assert peak(greedy) > budget or seconds(found) <= seconds(greedy) + 1e-9
        replayed = [replay(graph, one.schedule) for graph, one in zip(graphs, found, strict=True)]
        assert [(one.predicted_s, one.peak) for one in found] == [(each.seconds, each.peak) for each in replayed]
    assert seconds(lean) <= 1.05 * seconds(exact) + 1e-9
    assert peak(lean) <= peak(exact)


def test_a_budget_that_one_graph_cannot_keep_has_no_step() -> None:
    graph = transformer(2, 20e-3)
    least = least_memory_schedule(graph).peak
    assert search_step([graph._replace(reductions=()), graph], least - 1) is None


KIND = CollectiveKind("shard", alpha_s=0.0, s_per_byte=0.1)


def gathers(seconds_of_a_step: float, held: int, kind: CollectiveKind = KIND) -> CostGraph:
    """Six gathers of 10 bytes, a second each, of which the compute beside them needs ``held`` bytes."""
    return CostGraph(
        (seconds_of_a_step,) * 6,
        (held,) * 6,
        (held,) * 7,
        tuple(Gather(f"w{i}", kind, 10, i, i) for i in range(6)),
        (),
    )


def test_no_time_is_given_up_where_another_graph_needs_the_memory_anyway() -> None:
    """The first graph is faster if it gathers ahead; the second one needs more memory than that, however arranged."""
    graphs = gathers(0.5, 0), gathers(2.0, 1000)
    fastest = search_schedule(graphs[0])
    found = search_step(graphs, tolerance=0.5)
    assert fastest is not None
    assert found is not None
    assert found[0].predicted_s == pytest.approx(fastest.predicted_s)
    assert found[1].peak == least_memory_schedule(graphs[1]).peak
    alone = search_step(graphs[:1], tolerance=0.5)
    assert alone is not None
    assert alone[0].peak < found[0].peak


@pytest.mark.parametrize(("gather_s", "peak"), [(0.04, 10), (0.06, 20)])
def test_more_memory_than_a_modest_peak_must_save_time_besides(gather_s: float, peak: int) -> None:
    """Gathered one ahead, only the first gather is exposed: 20 bytes save 1.7 % or 2.5 % of 12 s."""
    graph = gathers(2.0, 0, KIND._replace(s_per_byte=gather_s / 10))
    for modest_peak, least in ((9, 20), (10, peak), (19, peak), (20, 20)):
        found = search_step([graph], tolerance=0.005, modest_peak=modest_peak)
        assert found is not None
        assert found[0].peak == least
        assert found[0].predicted_s == pytest.approx(12 + gather_s * (6 if least == 10 else 1))


def test_where_compute_hides_everything_little_is_gathered_ahead() -> None:
    graph = transformer(32, 20e-3)
    lean = search_step([graph], tolerance=0.005)
    assert lean is not None
    assert lean[0].predicted_s < 1.01 * lower_bound(graph)
    assert lean[0].peak < 10**9 + 6 * 1.2e8 + sum(r.result for r in graph.reductions)


def test_nothing_is_arranged_or_replayed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = transformer(8, 10e-3)
    for effort in (QUICK, THOROUGH):
        search_schedule(graph, effort=effort)  # the schedules with the least memory, which are kept
    done: Counter[Any] = Counter()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def count(on: CostGraph, what: Any) -> Any:
            done[function, on, what] += 1
            return function(on, what)

        return count

    for name in ("arrange", "seconds_and_peak"):
        monkeypatch.setattr(search, name, counted(getattr(search, name)))
    search_step([graph], tolerance=0.05, deviations=DEVIATIONS)
    assert len(done) > 100
    assert set(done.values()) == {1}

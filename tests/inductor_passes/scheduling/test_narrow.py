"""Which weights and gradients travel in their wire format: none that hides, and enough to be as fast as all of them."""

import math

import hypothesis.strategies as st
from hypothesis import given, settings

from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from inductor_passes.scheduling.narrow import Narrowed, all_narrowed, choose_narrowed, narrowed
from inductor_passes.scheduling.search import QUICK, TIME_TOLERANCE, search_schedule
from tests.inductor_passes.scheduling.chains import cost_graphs

NOTHING = Narrowed(frozenset(), frozenset())


def encoded(kind: CollectiveKind, wire: float = 0.25) -> CollectiveKind:
    """``kind`` in a format that sends a part of the bytes."""
    return kind._replace(s_per_byte=kind.s_per_byte * wire, member_s=None, wire_format="int8", wire=wire, plain=kind)


def with_formats(graph: CostGraph) -> CostGraph:
    return graph._replace(
        gathers=tuple(gather._replace(kind=encoded(gather.kind)) for gather in graph.gathers),
        reductions=tuple(reduction._replace(kind=encoded(reduction.kind)) for reduction in graph.reductions),
    )


def pair(s_per_byte: float, weights: int = 8) -> tuple[CostGraph, CostGraph]:
    """A step of compute a second for each weight of 10 bytes, forward and backward, where it has a gradient too."""
    kind = CollectiveKind("shard", alpha_s=0.01, s_per_byte=s_per_byte)
    seconds, nothing = (1.0,) * weights, (0,) * (weights + 1)
    forward = tuple(Gather(f"w{i}", kind, 10, i, i) for i in range(weights))
    backward = tuple(Gather(f"w{weights - 1 - i}", kind, 10, i, i) for i in range(weights))
    reductions = tuple(Reduction(f"w{weights - 1 - i}", kind._replace(name="r"), 10, i + 1) for i in range(weights))
    return (
        with_formats(CostGraph(seconds, nothing[1:], nothing, forward, ())),
        with_formats(CostGraph(seconds, nothing[1:], nothing, backward, reductions)),
    )


def seconds(graphs: tuple[CostGraph, CostGraph], chosen: Narrowed) -> float:
    found = [search_schedule(narrowed(graph, chosen), effort=QUICK) for graph in graphs]
    return sum(each.timeline.seconds for each in found if each)


def test_what_hides_travels_as_it_is() -> None:
    graphs = pair(s_per_byte=0.0001)
    assert choose_narrowed(graphs) == NOTHING


def test_all_travels_narrow_where_all_is_communication() -> None:
    graphs = pair(s_per_byte=10.0)
    assert choose_narrowed(graphs) == all_narrowed(graphs)


def test_a_part_is_enough_where_a_part_is_exposed() -> None:
    graphs = pair(s_per_byte=0.06)  # 0.6 s a transfer: hidden in forward, and not in backward, where there are two
    chosen = choose_narrowed(graphs)
    count = len(chosen.gathers) + len(chosen.reductions)
    assert 0 < count < 16
    assert seconds(graphs, chosen) < seconds(graphs, NOTHING)


@settings(max_examples=40, deadline=None)
@given(cost_graphs(gathers=4, reductions=0), cost_graphs(gathers=3, reductions=4))
def test_the_choice_is_about_as_fast_as_any_that_is_tried(forward: CostGraph, backward: CostGraph) -> None:
    graphs = with_formats(forward), with_formats(backward)
    chosen = choose_narrowed(graphs)
    limit = (1 + TIME_TOLERANCE) * min(seconds(graphs, NOTHING), seconds(graphs, all_narrowed(graphs)))
    assert seconds(graphs, chosen) <= limit * (1 + 1e-9)
    assert choose_narrowed(graphs) == chosen


@settings(max_examples=40, deadline=None)
@given(cost_graphs(gathers=4, reductions=4), st.data())
def test_only_what_is_chosen_keeps_its_format(graph: CostGraph, data: st.DataObject) -> None:
    both = with_formats(graph)
    allowed = all_narrowed([both])
    drawn = Narrowed(*(frozenset(data.draw(st.sets(st.sampled_from(sorted(s))))) if s else s for s in allowed))
    found = narrowed(both, drawn)
    assert all_narrowed([found]) == drawn
    assert narrowed(both, NOTHING) == graph
    assert narrowed(both, allowed) == both


def test_where_nothing_meets_the_budget_nothing_is_narrowed() -> None:
    graphs = pair(s_per_byte=0.06)
    assert choose_narrowed(graphs, 0.0) == NOTHING
    assert choose_narrowed(graphs, math.inf) == choose_narrowed(graphs) != NOTHING

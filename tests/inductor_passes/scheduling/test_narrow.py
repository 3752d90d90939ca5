"""Which weights and gradients travel in their wire format: none that hides, and enough to be as fast as all of them."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from inductor_passes.ops.wire_formats import REDUCE_FORMATS
from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from inductor_passes.scheduling.narrow import NOTHING, Narrowed, all_narrowed, choose_narrowed, levels, narrowed
from inductor_passes.scheduling.search import QUICK, TIME_TOLERANCE, search_schedule
from tests.inductor_passes.scheduling.chains import cost_graphs


def with_formats(graph: CostGraph, gather: str = "int8", reduce: str = "int8") -> CostGraph:
    """Return the graph with float32 weights and gradients in formats."""

    def encoded(kind: CollectiveKind, wire_format: str) -> CollectiveKind:
        return kind.in_format(wire_format, torch.float32, kind)

    return graph._replace(
        gathers=tuple(each._replace(kind=encoded(each.kind, gather)) for each in graph.gathers),
        reductions=tuple(each._replace(kind=encoded(each.kind, reduce)) for each in graph.reductions),
    )


def pair(s_per_byte: float, weights: int = 8, reduce: str = "int8", ends: int = 0) -> tuple[CostGraph, CostGraph]:
    """A step of compute a second for each weight of 10 bytes, forward and backward, where it has a gradient too.

    ``ends`` more steps before the first and behind the last have no weight.
    """
    kind = CollectiveKind("shard", alpha_s=0.01, s_per_byte=s_per_byte)
    steps, at = weights + 2 * ends, [*enumerate(range(ends, ends + weights))]
    seconds, nothing = (1.0,) * steps, (0,) * (steps + 1)
    forward = tuple(Gather(f"w{i}", kind, 10, slot, slot) for i, slot in at)
    backward = tuple(Gather(f"w{weights - 1 - i}", kind, 10, slot, slot) for i, slot in at)
    reductions = tuple(Reduction(f"w{weights - 1 - i}", kind._replace(name="r"), 10, slot + 1) for i, slot in at)
    return (
        with_formats(CostGraph(seconds, nothing[1:], nothing, forward, ()), reduce=reduce),
        with_formats(CostGraph(seconds, nothing[1:], nothing, backward, reductions), reduce=reduce),
    )


def seconds(graphs: tuple[CostGraph, CostGraph], chosen: Narrowed) -> float:
    found = [search_schedule(narrowed(graph, chosen), effort=QUICK) for graph in graphs]
    return sum(each.predicted_s for each in found if each)


def test_what_hides_travels_as_it_is() -> None:
    graphs = pair(s_per_byte=0.0001)
    assert choose_narrowed(graphs) == NOTHING


def test_all_travels_narrow_where_all_is_communication() -> None:
    graphs = pair(s_per_byte=10.0, reduce="int4-hadamard")
    assert choose_narrowed(graphs) == all_narrowed(graphs)
    assert {*choose_narrowed(graphs).reductions.values()} == {("int4-hadamard",)}


@pytest.mark.parametrize(("s_per_byte", "format_of"), [(0.08, "bf16-fp32sum"), (0.2, "int8-hadamard")])
def test_a_milder_format_is_taken_where_it_is_as_fast(s_per_byte: float, format_of: str) -> None:
    """In backward two transfers of 0.8 s and of 2 s hide under a second of compute with half and an eighth of it."""
    graphs = pair(s_per_byte, reduce="int4-hadamard", ends=2)
    chosen = choose_narrowed(graphs)
    assert {*chosen.reductions.values()} == {(format_of,)}
    assert seconds(graphs, chosen) <= (1 + TIME_TOLERANCE) * seconds(graphs, all_narrowed(graphs))


def test_a_format_that_does_not_narrow_its_dtype_is_left_out() -> None:
    kind = CollectiveKind("shard", 0.0, 1.0)
    gather = Gather("w", kind.in_format("int8", torch.bfloat16, kind), 10, 0, 0, dtype="torch.bfloat16")
    graph = CostGraph((1.0,), (0,), (0, 0), (gather,), ())
    assert [level.gathers for level in levels([graph])] == [{}, {"w": ("int8",)}, {"w": ("int8",)}]


@given(st.sampled_from(sorted(REDUCE_FORMATS)), st.sampled_from(sorted(REDUCE_FORMATS)), st.sampled_from([2, 4]))
def test_a_kind_in_another_format_is_the_kind_that_was_made_for_it(one: str, other: str, itemsize: int) -> None:
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    plain = CollectiveKind("all", 1.0, 0.5, 0.1, 0.25, 0.5, 0.125)
    second = plain._replace(channel="between", alpha_s=2.0)

    def kind(name: str) -> CollectiveKind:
        return plain._replace(all_reduce_after=second.in_format(name, dtype, second)).in_format(name, dtype, plain)

    found, expected = kind(one).with_formats(other, other), kind(other)
    for step, exact in ((found, expected), (found.all_reduce_after, expected.all_reduce_after)):
        assert step is not None
        assert exact is not None
        assert step.wire_formats == exact.wire_formats
        assert [*step[:7], step.wire] == pytest.approx([*exact[:7], exact.wire])
    assert kind(one).with_formats() == plain


def test_a_part_is_enough_where_a_part_is_exposed() -> None:
    graphs = pair(s_per_byte=0.06)  # 0.6 s a transfer: hidden in forward, and not in backward, where there are two
    chosen = choose_narrowed(graphs)
    count = len(chosen.gathers) + len(chosen.reductions)
    assert 0 < count < 16
    assert seconds(graphs, chosen) < seconds(graphs, NOTHING)


@pytest.mark.slow
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
    gathers, reductions = (
        {fqn: found[fqn] for fqn in data.draw(st.sets(st.sampled_from(sorted(found))))} if found else {}
        for found in allowed
    )
    drawn = Narrowed(gathers, reductions)
    found = narrowed(both, drawn)
    assert all_narrowed([found]) == drawn
    assert narrowed(both, NOTHING) == graph
    assert narrowed(both, allowed) == both


def test_where_nothing_meets_the_budget_nothing_is_narrowed() -> None:
    graphs = pair(s_per_byte=0.06)
    assert choose_narrowed(graphs, 0.0) == NOTHING
    assert choose_narrowed(graphs, math.inf) == choose_narrowed(graphs) != NOTHING

"""Weights that stay unsharded: the graphs that they leave, and which are chosen."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from inductor_passes.scheduling.cost_model import cost_graph_of
from inductor_passes.scheduling.keep_unsharded import choose_unsharded, keep_unsharded
from inductor_passes.scheduling.search import least_memory_schedule, search_schedule
from simplefsdp import simple_fsdp
from tests.graphs import capture
from tests.inductor_passes.scheduling.chains import cost_graphs
from tests.inductor_passes.scheduling.test_cost_model import Rates
from tests.models import batch, tiny_llama

KIND = CollectiveKind("shard", alpha_s=1.0, s_per_byte=0.1)


def pair(kind: CollectiveKind = KIND, weights: int = 4, nbytes: int = 10) -> tuple[CostGraph, CostGraph]:
    """A step of compute a second for each weight, which backward uses in reverse order."""
    forward = tuple(Gather(f"w{i}", kind, nbytes, i, i) for i in range(weights))
    backward = tuple(Gather(f"w{weights - 1 - i}", kind, nbytes, i, i) for i in range(weights))
    seconds, nothing = (1.0,) * weights, (0,) * (weights + 1)
    return CostGraph(seconds, nothing[1:], nothing, forward, ()), CostGraph(seconds, nothing[1:], nothing, backward, ())


def test_an_exchange_stays_a_step_of_its_own() -> None:
    forward, backward = pair()
    (_, found) = keep_unsharded(forward, backward._replace(exchanges=(2,)), ["w0", "w1", "w2"])
    assert found.seconds == (2.0, 1.0, 1.0)
    assert found.exchanges == (1,)


def test_a_gradient_waits_for_its_cast_in_as_many_steps_as_are_left() -> None:
    forward, backward = pair()
    reductions = tuple(Reduction(f"w{i}", KIND, 20, 4, copied_from=10, waiting_steps=i) for i in range(4))
    (_, found) = keep_unsharded(forward, backward._replace(reductions=reductions), ["w0", "w1"])
    assert found.seconds == (1.0, 3.0)
    assert [reduction.waiting_steps for reduction in found.reductions] == [0, 0, 0, 1]


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_graphs_predicted_for_unsharded_weights_are_those_that_torch_makes() -> None:
    def graphs(**reshard: bool) -> tuple[CostGraph, CostGraph]:
        choice: dict[str, Any] = {"*": True} | {
            name.replace("_", ".") + ".*": chosen for name, chosen in reshard.items()
        }
        model = simple_fsdp(tiny_llama(layers=3), reshard_after_forward=choice)
        captured = capture(model, *batch(0, 0))
        given = {node.name for node in captured.forward.find_nodes(op="placeholder")}
        return cost_graph_of(captured.forward, Rates(), given), cost_graph_of(captured.backward, Rates(), given)

    resharded, real = graphs(), graphs(layers_1=False)
    unsharded = {gather.fqn for gather in resharded[1].gathers if gather.fqn.startswith("layers.1.")}
    assert len(unsharded) > 5
    supposed = keep_unsharded(*resharded, unsharded)
    for one, other in zip(supposed, real, strict=True):
        assert [g.fqn for g in one.gathers] == [g.fqn for g in other.gathers]
        assert one.seconds == pytest.approx(other.seconds)
        assert [r.ready_slot for r in one.reductions] == [r.ready_slot for r in other.reductions]
        assert least_memory_schedule(one).predicted_s == pytest.approx(least_memory_schedule(other).predicted_s)
        assert least_memory_schedule(one).peak == least_memory_schedule(other).peak
    assert least_memory_schedule(supposed[1]).peak > least_memory_schedule(resharded[1]).peak


def test_all_is_kept_where_nothing_hides_and_memory_is_free() -> None:
    slow = pair(KIND._replace(alpha_s=10.0))
    assert choose_unsharded(*slow, ["w0", "w1", "w2", "w3"]) == {"w0", "w1", "w2", "w3"}
    assert choose_unsharded(*slow, ["w1", "w3"]) == {"w1", "w3"}
    assert choose_unsharded(*slow, []) == frozenset()


def test_weights_that_backward_needs_first_are_kept_unsharded_where_the_rest_hides() -> None:
    fast = KIND._replace(alpha_s=0.0, s_per_byte=0.09)
    assert choose_unsharded(*pair(fast, weights=16), [f"w{i}" for i in range(16)]) == {"w15"}


def test_nothing_is_kept_that_gains_nothing() -> None:
    free = KIND._replace(alpha_s=0.0, s_per_byte=1e-5)
    assert choose_unsharded(*pair(free), ["w0", "w1", "w2", "w3"]) == frozenset()


def test_a_budget_is_kept_and_used() -> None:
    slow = pair(KIND._replace(alpha_s=10.0))
    chosen = [choose_unsharded(*slow, ["w0", "w1", "w2", "w3"], budget) for budget in (9, 10, 20, 30, 40)]
    assert chosen == [frozenset(), {"w3"}, {"w3", "w2"}, {"w3", "w2", "w1"}, {"w3", "w2", "w1", "w0"}]


@given(cost_graphs(gathers=5, reductions=0), cost_graphs(gathers=5, reductions=3), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_the_choice_is_not_slower_than_to_keep_nothing_and_fits(
    forward: CostGraph, backward: CostGraph, spare: int
) -> None:
    forward, backward = keep_unsharded(forward, backward, ())  # a step ends where something is needed or made
    least = max(least_memory_schedule(forward).peak, least_memory_schedule(backward).peak)
    unsharded = choose_unsharded(forward, backward, [g.fqn for g in backward.gathers], least + spare)
    found = [search_schedule(graph, least + spare) for graph in keep_unsharded(forward, backward, unsharded)]
    assert all(found)
    before = [search_schedule(graph, least + spare) for graph in (forward, backward)]
    seconds, seconds_before = (sum(each.predicted_s for each in both if each) for both in (found, before))
    assert seconds <= 1.005 * seconds_before


def test_a_large_head_is_kept_alone_where_there_is_room_for_no_more() -> None:
    forward, backward = pair(KIND._replace(alpha_s=10.0))
    (first, *rest), (*before, last) = backward.gathers, forward.gathers
    backward = backward._replace(gathers=(first._replace(nbytes=30), *rest))
    forward = forward._replace(gathers=(*before, last._replace(nbytes=30)))
    assert choose_unsharded(forward, backward, ["w0", "w1", "w2", "w3"], 30) == {"w3"}

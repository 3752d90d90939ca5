"""Which gradients matmuls cast: where that is faster, and where there is memory for it."""

import math
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch.fx import Graph, GraphModule

from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from inductor_passes.scheduling.issue_points import Schedule, ScheduledBucket, buckets_of
from simplefsdp import BucketPlan
from simplefsdp.compile.choose_casts import (
    casts_that_raise_no_peak,
    most_bytes_of_a_block,
    worth_casting_in_matmuls,
)
from simplefsdp.compile.context import compilation_context
from simplefsdp.compile.options import parse_options
from simplefsdp.compile.passes import Passes
from tests.models import PROFILE


def test_a_block_has_the_bytes_of_its_gathers_and_reductions_and_what_is_in_no_block_does_not_count() -> None:
    kind = CollectiveKind("shard", alpha_s=0.0, s_per_byte=1.0)
    gathers = tuple(
        Gather(fqn, kind, nbytes, 0, 0)
        for fqn, nbytes in (("embedding", 1000), ("layers.0.up", 1), ("layers.1.up", 10), ("layers.1.down", 20))
    )
    graph = CostGraph((1.0,), (0,), (0, 0), gathers, (Reduction("layers.1.up", kind, 40, 1),))
    assert most_bytes_of_a_block(graph) == 10 + 20 + 40
    assert most_bytes_of_a_block(graph._replace(gathers=gathers[:1], reductions=())) == 0


def test_a_matmul_casts_a_gradient_where_that_is_faster_and_raises_no_peak() -> None:
    """Three gradients of 10 bytes, 20 once cast; 100 bytes are in use where the second is made, 90 elsewhere."""
    kind = CollectiveKind("shard", 0.0, 0.0, copy_s_per_byte=1.0, member_s=19.0)
    gradients = tuple(
        Reduction(f"layers.{i}.w", kind, 20, slot, copied_from=10, waiting_steps=waiting)
        for i, (slot, waiting) in enumerate(((1, 0), (4, 1), (5, 0)))
    )
    graph = CostGraph((1.0,) * 5, (90, 90, 100, 90, 90), (0,) * 6, (), gradients)
    block = 4 * 20  # what four blocks reduce
    assert worth_casting_in_matmuls(graph, 1000) == {"layers.0.w", "layers.2.w"}
    assert worth_casting_in_matmuls(graph, 100 + block) == {"layers.0.w", "layers.2.w"}
    assert not worth_casting_in_matmuls(graph, 99 + block)
    assert not worth_casting_in_matmuls(with_kind(graph, kind._replace(member_s=20.0)), 1000)
    assert not worth_casting_in_matmuls(with_kind(graph, kind._replace(member_s=None)), 1000)
    encoded = with_kind(graph, kind._replace(member_s=None, plain=kind))
    assert not worth_casting_in_matmuls(encoded, 1000)
    assert worth_casting_in_matmuls(encoded, 1000, narrows=True) == {"layers.0.w", "layers.2.w"}


def with_kind(graph: CostGraph, kind: CollectiveKind) -> CostGraph:
    return graph._replace(reductions=tuple(reduction._replace(kind=kind) for reduction in graph.reductions))


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize(("seconds", "cast"), [((1.0, 2.0), {"a"}), ((2.0, 1.0), {"a", "b"})])
def test_where_memory_may_be_short_for_gradients_that_matmuls_cast_both_ways_are_planned(
    seconds: tuple[float, float], cast: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs are tried as copies, each with its gradients cast, and the faster way is carried out."""
    module = GraphModule({}, Graph())
    graph = module.graph
    carried_out: list[tuple[Graph, frozenset[str]]] = []

    def worth(_: CostGraph, limit: float, **__: bool) -> frozenset[str]:
        return frozenset("a" if limit < math.inf else "ab")

    def cast_in_matmuls(graph: Graph, is_allowed: Callable[[Any], bool]) -> None:
        found = frozenset(fqn for fqn in "abc" if is_allowed(SimpleNamespace(fqns=(fqn,))))
        carried_out.append((graph, found))

    times = iter(seconds)
    for name, changed in (("worth_casting_in_matmuls", worth), ("cast_in_matmuls", cast_in_matmuls)):
        monkeypatch.setattr(f"simplefsdp.compile.passes.{name}", changed)
    monkeypatch.setattr("simplefsdp.compile.passes.quick_seconds", lambda *_: next(times))
    for name, costs in (("cost_graphs", [None, None]), ("_cost_graph", None)):
        monkeypatch.setattr(Passes, name, lambda *_, costs=costs: costs)
    passes = Passes(compilation_context([], parse_options({"profile": PROFILE})))
    passes.cast_in_matmuls(graph, graph, 100.0)
    assert [found for _, found in carried_out] == [{"a"}, {"a", "b"}, cast]
    assert [tried is graph for tried, _ in carried_out] == [False, False, True]
    carried_out.clear()
    passes.cast_in_matmuls(graph, graph, math.inf)
    assert carried_out == [(module.graph, {"a", "b"})]


@pytest.mark.parametrize(
    ("first", "forward", "cast"),
    [(100, 0, "c"), (129, 0, "c"), (130, 0, "bc"), (139, 0, "bc"), (140, 0, "abc"), (0, 140, "abc"), (0, 139, "bc")],
)
def test_matmuls_cast_as_many_gradients_as_raise_no_peak_of_a_plan_that_a_rule_makes(
    first: int, forward: int, cast: str
) -> None:
    """Each step but the first makes a gradient of 10 bytes, 20 once cast; all wait for one reduction at the end.

    Without casts the third step needs 100 + 20 bytes, the first or another graph perhaps more. If matmuls cast ``a``
    and ``b``, the third step needs 140 bytes.
    """

    def casts_of(fqns: Collection[str]) -> list[CostGraph]:
        made = [10 * (fqn not in fqns) for fqn in "abc"]  # counted here until it is complete
        gradients = tuple(
            Reduction(fqn, kind, 20, i + 2, copied_from=None if fqn in fqns else 10) for i, fqn in enumerate("abc")
        )
        in_step = first, made[0], 100 + made[1], made[2]
        return [CostGraph((1.0,), (forward,), (0, 0), (), ()), CostGraph((1.0,) * 4, in_step, (0,) * 5, (), gradients)]

    kind = CollectiveKind("shard", 0.0, 0.0)
    found = casts_that_raise_no_peak(frozenset("abc"), _reduced_at_the_end, casts_of)
    assert found == set(cast)


def test_where_memory_grows_before_any_gradient_is_cast_no_matmul_casts() -> None:
    def casts_of(fqns: Collection[str]) -> list[CostGraph]:
        gradient = Reduction("a", CollectiveKind("shard", 0.0, 0.0), 20, 2)
        backward = CostGraph((1.0, 1.0), (100 + len(fqns), 0), (0, 0, 0), (), (gradient,))
        return [CostGraph((1.0,), (0,), (0, 0), (), ()), backward]

    assert casts_that_raise_no_peak(frozenset("a"), _reduced_at_the_end, casts_of) == frozenset()


def _reduced_at_the_end(graphs: Sequence[CostGraph]) -> BucketPlan:
    backward = graphs[1]
    steps, fqns = len(backward.seconds), [reduction.fqn for reduction in backward.reductions]
    schedule = Schedule((), (ScheduledBucket((*range(len(fqns)),), steps, steps + 1),))
    _, reductions = buckets_of(backward, schedule, {fqn: i for i, fqn in enumerate(fqns)})
    return BucketPlan((), (), reductions, (), tuple((fqn, (1,)) for fqn in fqns))

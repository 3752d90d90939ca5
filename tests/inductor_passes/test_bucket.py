"""Merging keeps values, packs in order, and merges what may be merged."""

from typing import Any

import expecttest
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node

from inductor_passes.bucket import bucket
from inductor_passes.collectives import MARK, gathers, reductions
from inductor_passes.report import render
from simplefsdp import simple_fsdp
from tests.graphs import ALL_GATHER, REDUCE_SCATTER, WAIT, capture, fqns
from tests.models import batch, tiny_llama

RANKS = 3


class SameOnEveryRank(Interpreter):
    """Runs a graph as rank 0 of ``RANKS`` ranks that all hold the same values."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is ALL_GATHER:
            return torch.cat([args[0]] * args[1])
        if target is REDUCE_SCATTER:
            scattered = args[0].chunk(args[2])[0].clone()
            return scattered * args[2] if args[1] == "sum" else scattered
        if target is WAIT:
            return args[0]
        return super().call_function(target, args, kwargs)


def chains(specs: list[tuple[str, list[int], torch.dtype, str]]) -> tuple[Graph, list[torch.Tensor]]:
    """A graph with a collective per ``(kind or operator, local shape, dtype, group)``, each used right behind its
    wait, and inputs for it. Collective i carries the FQN ``p<i>``."""
    graph, inputs, outputs = Graph(), [], []
    for i, (kind, shape, _, _) in enumerate(specs):
        shape = [shape[0] * (1 if kind == "gather" else RANKS), *shape[1:]]
        inputs.append(torch.arange(float(torch.Size(shape).numel())).view(shape) + 1000 * i)
    with FakeTensorMode() as mode:
        placeholders = [graph.placeholder(f"x{i}") for i in range(len(specs))]
        for i, (kind, _, dtype, group) in enumerate(specs):
            placeholders[i].meta["val"] = mode.from_tensor(inputs[i])
            cast = call(graph, torch.ops.aten._to_copy.default, placeholders[i], dtype=dtype)
            if kind == "gather":
                collective = call(graph, ALL_GATHER, cast, RANKS, group)
            else:
                collective = call(graph, REDUCE_SCATTER, cast, kind, RANKS, group)
            collective.meta[MARK] = (f"p{i}",)
            outputs.append(call(graph, torch.ops.aten.neg.default, call(graph, WAIT, collective)))
        graph.output(tuple(outputs))
    return graph, inputs


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*(a.meta["val"] if isinstance(a, Node) else a for a in args), **kwargs)
    return node


def run(graph: Graph, inputs: list[torch.Tensor]) -> Any:
    return SameOnEveryRank(GraphModule(nn.Module(), graph)).run(*inputs)


SPEC = st.tuples(
    st.sampled_from(["gather", "avg", "sum"]),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from(["0", "1"]),
)


@pytest.mark.usefixtures("one_of_four")
@settings(max_examples=60, deadline=None)
@given(specs=st.lists(SPEC, min_size=1, max_size=7), data=st.data())
def test_any_buckets_give_the_same_values(specs, data):
    graph, inputs = chains(specs)
    expected = run(graph, inputs)
    order = data.draw(st.permutations([f"p{i}" for i in range(len(specs))]))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(specs)))))
    buckets = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    bucket(graph, buckets)
    torch.testing.assert_close(run(graph, inputs), expected, rtol=0, atol=0)

    merged = [set(c.fqns) for c in [*gathers(graph), *reductions(graph)]]
    for group in buckets:
        alike = {}
        for fqn in group:
            kind, _, dtype, process_group = specs[int(fqn[1:])]
            alike.setdefault((kind, dtype, process_group), set()).add(fqn)
        assert all(members in merged for members in alike.values())
    assert sum(map(len, merged)) == len(specs)


@pytest.mark.usefixtures("one_of_four")
def test_a_bucket_packs_in_its_own_order_and_skips_what_is_not_there():
    graph, _ = chains([("gather", [1], torch.float32, "0")] * 3)
    bucket(graph, [["p2", "absent", "p0"], ["p1"]])
    assert sorted(fqns(graph, ALL_GATHER)) == [("p1",), ("p2", "p0")]


@pytest.mark.usefixtures("one_of_four")
def test_buckets_of_one_leave_the_graph_as_it_is():
    graph, _ = chains([("gather", [2, 2], torch.float32, "0"), ("avg", [2], torch.float32, "0")])
    before = render(graph)
    bucket(graph, [["p0"], ["p1"]])
    assert render(graph) == before


@pytest.mark.usefixtures("one_of_four")
def test_gathers_are_issued_where_the_first_was_and_reductions_where_the_last_was():
    model = simple_fsdp(tiny_llama(layers=2))
    captured = capture(model, *batch(0, 0), plan="block")
    order = [node for node in captured.forward.nodes if node.target in (ALL_GATHER, torch.ops.aten.mm.default)]
    kinds = "".join("G" if node.target is ALL_GATHER else "m" for node in order)
    assert kinds == "GGmmmmmmmGmmmmmmmGm"
    order = [node for node in captured.backward.nodes if node.target in (REDUCE_SCATTER, torch.ops.aten.mm.default)]
    kinds = "".join("R" if node.target is REDUCE_SCATTER else "m" for node in order)
    # two matmuls for each matrix; those of a block before its reduction
    assert kinds.startswith("mmR" + 14 * "m" + "R" + 14 * "m" + "R")


@pytest.mark.usefixtures("one_of_four")
class TestGraphs(expecttest.TestCase):
    def test_merged_gathers(self):
        graph, _ = chains([("gather", [2, 3], torch.float64, "0"), ("gather", [4], torch.float64, "0")])
        bucket(graph, [["p0", "p1"]])
        self.assertExpectedInline(
            render(graph),
            """\
x0: float32[2, 3] = input
x1: float32[4] = input
_to_copy_default: float64[2, 3] = torch.ops.aten._to_copy.default(x0, dtype=torch.float64)
_to_copy_default_1: float64[4] = torch.ops.aten._to_copy.default(x1, dtype=torch.float64)
view_default: float64[6] = torch.ops.aten.view.default(_to_copy_default, [6])
view_default_1: float64[4] = torch.ops.aten.view.default(_to_copy_default_1, [4])
cat_default: float64[10] = torch.ops.aten.cat.default([view_default, view_default_1])
all_gather_into_tensor_default_2: float64[30] = torch.ops._c10d_functional.all_gather_into_tensor.default(cat_default, 3, 0)  # p0, p1
wait_tensor_default_2: float64[30] = torch.ops._c10d_functional.wait_tensor.default(all_gather_into_tensor_default_2)
view_default_2: float64[3, 10] = torch.ops.aten.view.default(wait_tensor_default_2, [3, 10])
slice_tensor: float64[3, 6] = torch.ops.aten.slice.Tensor(view_default_2, -1, 0, 6)
slice_tensor_1: float64[3, 4] = torch.ops.aten.slice.Tensor(view_default_2, -1, 6, 10)
clone_default: float64[3, 6] = torch.ops.aten.clone.default(slice_tensor, memory_format=torch.contiguous_format)
clone_default_1: float64[3, 4] = torch.ops.aten.clone.default(slice_tensor_1, memory_format=torch.contiguous_format)
view_default_3: float64[6, 3] = torch.ops.aten.view.default(clone_default, [6, 3])
view_default_4: float64[12] = torch.ops.aten.view.default(clone_default_1, [12])
neg_default: float64[6, 3] = torch.ops.aten.neg.default(view_default_3)
neg_default_1: float64[12] = torch.ops.aten.neg.default(view_default_4)
return (neg_default, neg_default_1)
""",
        )

    def test_merged_reductions(self):
        graph, _ = chains([("avg", [2, 3], torch.float64, "0"), ("avg", [4], torch.float64, "0")])
        bucket(graph, [["p0", "p1"]])
        self.assertExpectedInline(
            render(graph),
            """\
x0: float32[6, 3] = input
x1: float32[12] = input
_to_copy_default: float64[6, 3] = torch.ops.aten._to_copy.default(x0, dtype=torch.float64)
_to_copy_default_1: float64[12] = torch.ops.aten._to_copy.default(x1, dtype=torch.float64)
view_default: float64[3, 6] = torch.ops.aten.view.default(_to_copy_default, [3, 6])
view_default_1: float64[3, 4] = torch.ops.aten.view.default(_to_copy_default_1, [3, 4])
cat_default: float64[3, 10] = torch.ops.aten.cat.default([view_default, view_default_1], 1)
view_default_2: float64[30] = torch.ops.aten.view.default(cat_default, [30])
reduce_scatter_tensor_default_2: float64[10] = torch.ops._c10d_functional.reduce_scatter_tensor.default(view_default_2, avg, 3, 0)  # p0, p1
wait_tensor_default_2: float64[10] = torch.ops._c10d_functional.wait_tensor.default(reduce_scatter_tensor_default_2)
slice_tensor: float64[6] = torch.ops.aten.slice.Tensor(wait_tensor_default_2, -1, 0, 6)
slice_tensor_1: float64[4] = torch.ops.aten.slice.Tensor(wait_tensor_default_2, -1, 6, 10)
view_default_3: float64[2, 3] = torch.ops.aten.view.default(slice_tensor, [2, 3])
neg_default: float64[2, 3] = torch.ops.aten.neg.default(view_default_3)
view_default_4: float64[4] = torch.ops.aten.view.default(slice_tensor_1, [4])
neg_default_1: float64[4] = torch.ops.aten.neg.default(view_default_4)
return (neg_default, neg_default_1)
""",
        )

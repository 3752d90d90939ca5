"""Operators that one kernel computes are put next to each other; values, random numbers and written inputs stay."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.fx import Graph, GraphModule, Interpreter, Node

from inductor_passes.collectives import FQNS
from inductor_passes.fusion import adds_rows, fused_regions, is_view
from inductor_passes.fusion_order import put_fused_together
from tests.graphs import ALL_GATHER, REDUCE_SCATTER, WAIT
from tests.inductor_passes.test_bucket import call

aten = torch.ops.aten
SIDE = 4


def square(graph: Graph, name: str) -> Node:
    node = graph.placeholder(name)
    node.meta["val"] = torch.full((SIDE, SIDE), 2.0)
    return node


def compute(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def over_one_rank(graph: Graph, target: Any, source: Node, *args: Any) -> Node:
    """Issue a parameter's collective over a group of one rank, and await it."""
    issued = graph.call_function(target, (source, *args, 1, "0"))
    issued.meta["val"] = source.meta["val"]
    issued.meta[FQNS] = (f"{source.name}.weight",)
    awaited = graph.call_function(WAIT, (issued,))
    awaited.meta["val"] = issued.meta["val"]
    return awaited


def reduced(graph: Graph, gradient: Node) -> Node:
    return over_one_rank(graph, REDUCE_SCATTER, gradient, "avg")


def test_what_is_fused_moves_to_its_last_input_and_what_reads_it_follows() -> None:
    """The backward of a product with a gate."""
    graph = Graph()
    gate, up, weight, error = (square(graph, name) for name in ("gate", "up", "weight", "error"))
    opened = call(graph, aten.sigmoid.default, gate)
    of_product = call(graph, aten.mm.default, error, weight)
    of_up = call(graph, aten.mul.Tensor, of_product, opened)
    turned = call(graph, aten.t.default, of_up)
    of_weight = call(graph, aten.mm.default, turned, error)
    of_opened = call(graph, aten.mul.Tensor, of_product, up)
    of_gate = call(graph, aten.mul.Tensor, of_opened, opened)
    graph.output((of_weight, of_gate))
    put_fused_together(graph)
    assert compute(graph) == [of_product, opened, of_up, turned, of_opened, of_gate, of_weight]


def test_a_gradient_comes_last_in_its_kernel() -> None:
    """A norm's gradients: where that of the weight is complete, so is that of the input."""
    graph = Graph()
    x, error, weight = (square(graph, name) for name in ("x", "error", "weight"))
    product = call(graph, aten.mm.default, error, error)
    of_output = call(graph, aten.neg.default, product)
    scaled = call(graph, aten.mul.Tensor, of_output, x)
    summed = call(graph, aten.sum.dim_IntList, scaled, [0], True)
    of_weight = call(graph, aten.view.default, summed, [SIDE])
    awaited = reduced(graph, of_weight)
    of_input = call(graph, aten.mul.Tensor, of_output, weight)
    further = call(graph, aten.mm.default, of_input, weight)
    graph.output((awaited, further))
    put_fused_together(graph)
    issued = awaited.all_input_nodes[0]
    assert compute(graph) == [product, of_output, of_input, scaled, summed, of_weight, issued, awaited, further]


def rows_added_to_a_table(graph: Graph, put: Any = aten._unsafe_index_put) -> None:
    """Make a graph of a kernel behind a matmul that makes two things: a scale's gradient, and rows of a table's."""
    x, error, numbers = square(graph, "x"), square(graph, "error"), graph.placeholder("numbers")
    numbers.meta["val"] = torch.arange(SIDE)
    rows = call(graph, aten.neg.default, call(graph, aten.mm.default, error, error))
    of_scale = reduced(graph, call(graph, aten.sum.dim_IntList, call(graph, aten.mul.Tensor, rows, x), [0], True))
    further = call(graph, aten.mm.default, x, x)
    zeros = graph.call_function(aten.full.default, ([8 * SIDE, SIDE], 0.0))
    zeros.meta["val"] = torch.zeros(8 * SIDE, SIDE)
    of_table = reduced(graph, call(graph, put.default, zeros, [numbers], rows, True))
    graph.output((of_scale, of_table, further))


@pytest.mark.parametrize("put", [aten._unsafe_index_put, aten.index_put])
def test_rows_are_added_to_zeros_that_are_filled_behind_the_kernel_that_makes_the_rows(put: Any) -> None:
    graph = Graph()
    rows_added_to_a_table(graph, put)
    put_fused_together(graph)
    names = [node.target._overloadpacket.__name__ for node in compute(graph) if node.target is not WAIT]
    scatter = "reduce_scatter_tensor"
    assert names == ["mm", "neg", "mul", "sum", scatter, "mm", "full", put.__name__, scatter]
    regions = fused_regions(graph)
    (zeros,) = graph.find_nodes(op="call_function", target=aten.full.default)
    (added,) = graph.find_nodes(op="call_function", target=put.default)
    assert regions[added] is regions[zeros] is zeros


def test_rows_that_are_put_in_the_place_of_others_are_not_added() -> None:
    graph = Graph()
    x, numbers = square(graph, "x"), graph.placeholder("numbers")
    numbers.meta["val"] = torch.arange(SIDE)
    for accumulate in ((), (False,), (True,)):
        put = call(graph, aten.index_put.default, x, [numbers], x, *accumulate)
        assert adds_rows(put) == (accumulate == (True,))


def test_what_reads_a_table_to_which_rows_were_added_is_another_kernel() -> None:
    graph = Graph()
    rows, table, numbers = square(graph, "rows"), square(graph, "table"), graph.placeholder("numbers")
    numbers.meta["val"] = torch.arange(SIDE)
    put = call(graph, aten._unsafe_index_put.default, call(graph, aten.exp.default, table), [numbers], rows, True)
    read = call(graph, aten.neg.default, put)
    graph.output(read)
    regions = fused_regions(graph)
    assert len({regions[node] for node in compute(graph)}) == 3 == len(compute(graph))


def test_a_gradient_that_its_kernel_reads_again_comes_before_its_reader() -> None:
    graph = Graph()
    x = square(graph, "x")
    gradient = call(graph, aten.neg.default, x)
    read = call(graph, aten.exp.default, gradient)
    awaited = reduced(graph, gradient)
    graph.output((awaited, read))
    put_fused_together(graph)
    assert compute(graph) == [gradient, read, *awaited.all_input_nodes, awaited]


def test_weights_have_no_part_in_the_order_and_come_before_their_first_reader() -> None:
    """A kernel also computes what is made of a weight alone: it comes first there."""
    graph = Graph()
    x, shard = square(graph, "x"), square(graph, "shard")
    cast = graph.call_function(aten._to_copy.default, (shard,), {"dtype": torch.float32})
    cast.meta["val"] = shard.meta["val"]
    gathered = over_one_rank(graph, ALL_GATHER, cast)
    factor, scale = call(graph, aten.neg.default, gathered), call(graph, aten.exp.default, gathered)
    other = call(graph, aten.sin.default, x)
    product = call(graph, aten.mm.default, x, factor)
    scaled = call(graph, aten.mul.Tensor, product, scale)
    graph.output((other, scaled))
    put_fused_together(graph)
    assert compute(graph) == [other, cast, *gathered.all_input_nodes, gathered, factor, product, scale, scaled]


def test_kernels_that_need_each_other_are_left_alone() -> None:
    """A sum of a gradient and of its reduction."""
    graph = Graph()
    x = square(graph, "x")
    one = call(graph, aten.neg.default, x)
    other = call(graph, aten.add.Tensor, one, reduced(graph, one))
    graph.output((other,))
    before = compute(graph)
    assert fused_regions(graph)[other] is one
    put_fused_together(graph)
    assert compute(graph) == before


def test_what_is_behind_an_operator_that_writes_to_its_input_stays() -> None:
    graph = Graph()
    x, y = square(graph, "x"), square(graph, "y")
    one = call(graph, aten.neg.default, x)
    product = call(graph, aten.mm.default, y, y)
    graph.call_function(aten.copy_.default, (y, product)).meta["val"] = product.meta["val"]
    other = call(graph, aten.mm.default, x, y)
    graph.output((call(graph, aten.add.Tensor, one, other),))
    before = compute(graph)
    assert fused_regions(graph)[one] is one
    put_fused_together(graph)
    assert compute(graph) == before


OPERATORS: list[tuple[Callable[..., Any], int]] = [
    (aten.add.Tensor, 2),
    (aten.mul.Tensor, 2),
    (aten.neg.default, 1),
    (aten.t.default, 1),
    (aten.mm.default, 2),
    (aten.rand_like.default, 1),
]
"""Operators and the number of their inputs."""


def random_graph(steps: list[tuple[int, int, int]]) -> Graph:
    """A graph in which each step is the number of an operator and, counted from the last value, of its inputs."""
    graph = Graph()
    values = [square(graph, "x"), square(graph, "y")]
    for operator, *chosen in steps:
        target, inputs = OPERATORS[operator]
        values.append(call(graph, target, *(values[-1 - i % len(values)] for i in chosen[:inputs])))
    graph.output(tuple(values[2:]))
    return graph


@given(st.lists(st.tuples(st.integers(0, len(OPERATORS) - 1), st.integers(0, 6), st.integers(0, 6)), max_size=25))
def test_values_stay_and_kernels_are_whole(steps: list[tuple[int, int, int]]) -> None:
    graph = random_graph(steps)
    inputs = [torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)]
    torch.manual_seed(0)
    expected = Interpreter(GraphModule({}, graph)).run(*inputs)
    nodes = compute(graph)
    random = [node for node in nodes if node.target is aten.rand_like.default]
    put_fused_together(graph)
    torch.manual_seed(0)
    found = Interpreter(GraphModule({}, graph)).run(*inputs)
    assert all(map(torch.equal, found, expected))
    ordered = compute(graph)
    assert [node for node in ordered if node.target is aten.rand_like.default] == random
    regions = fused_regions(graph)
    entered = [regions.get(node, node) for node in ordered if not is_view(node)]
    changes = [one for i, one in enumerate(entered) if not i or entered[i - 1] is not one]
    assert len(changes) == len({*changes}) or ordered == nodes
    put_fused_together(graph)
    assert compute(graph) == ordered

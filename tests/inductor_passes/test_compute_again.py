"""Values that kernels compute again: which ones, that they stay the same, and that less is stored."""

from collections.abc import Callable
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node

from inductor_passes import compute_again as module
from inductor_passes.compute_again import compute_again
from inductor_passes.fusion import fused_regions
from inductor_passes.scheduling.cost_model import node_costs
from tests.graphs import ALL_GATHER
from tests.inductor_passes.test_bucket import call
from tests.inductor_passes.test_fusion_order import OPERATORS, compute, over_one_rank, random_graph
from tests.models import PROFILE

aten = torch.ops.aten


def square(graph: Graph, name: str, device: str = "cuda", side: int = 1024) -> Node:
    node = graph.placeholder(name)
    node.meta["val"] = torch.empty(side, side, dtype=torch.bfloat16, device=device)
    return node


def cast(graph: Graph, source: Node, dtype: torch.dtype = torch.float32) -> Node:
    return call(graph, torch.ops.prims.convert_element_type.default, source, dtype)


def names(nodes: list[Node]) -> list[str]:
    return [node.target._overloadpacket.__name__ for node in nodes]


def test_a_gradient_s_kernel_computes_again_what_a_gated_product_is_made_of() -> None:
    """A gate in bfloat16, of which the gradient's kernel also needs the value in float32."""
    graph = Graph()
    with FakeTensorMode():
        x, up, weight = (square(graph, name) for name in ("x", "up", "weight"))
        gate = cast(graph, call(graph, aten.mm.default, x, weight))
        opened = cast(graph, call(graph, aten.sigmoid.default, gate), torch.bfloat16)
        product = call(graph, aten.mm.default, call(graph, aten.mul.Tensor, opened, up), weight)
        of_up = call(graph, aten.mul.Tensor, call(graph, aten.mm.default, product, weight), opened)
        of_gate = call(graph, aten.mul.Tensor, of_up, gate)
        graph.output((call(graph, aten.mm.default, of_gate, weight),))
        assert compute_again(graph) == 2
    graph.lint()
    nodes = compute(graph)
    opens = ["convert_element_type", "sigmoid", "convert_element_type", "mul"]
    assert names(nodes) == ["mm", *opens, "mm", "mm", *opens, "mul", "mm"]
    regions = fused_regions(graph)
    assert [regions.get(node) for node in nodes[7:12]] == [nodes[7]] * 5
    stored = {node for node, nbytes in node_costs(graph, PROFILE).stored.items() if nbytes}
    assert stored == {nodes[i] for i in (0, 4, 5, 6, 11, 12)}


def read_by_kernels(
    value_of: Callable[[Graph, Node], Node], *, further: int = 1, device: str = "cuda", side: int = 1024
) -> Graph:
    """Make a value of a product, which the product's kernel reads and ``further`` ones behind matmuls."""
    graph = Graph()
    x = square(graph, "x", device, side)
    product = call(graph, aten.mm.default, x, x)
    value = value_of(graph, product)
    for _ in range(1 + further):
        x = call(graph, aten.mm.default, cast(graph, call(graph, aten.mul.Tensor, value, x), torch.bfloat16), x)
    graph.output((x,))
    return graph


def exponential(graph: Graph, product: Node) -> Node:
    return call(graph, aten.exp.default, product)


def less_its_mean(graph: Graph, product: Node) -> Node:
    value = cast(graph, product)
    return call(graph, aten.sub.Tensor, value, call(graph, aten.mean.dim, value, [-1], True))


def less_its_stored_mean(graph: Graph, product: Node) -> Node:
    value = less_its_mean(graph, product)
    call(graph, aten.mm.default, call(graph, aten.expand.default, value.all_input_nodes[1], [1024, 1024]), value)
    return value


def read_by_a_matmul(graph: Graph, product: Node) -> Node:
    value = cast(graph, product)
    call(graph, aten.mm.default, value, value)
    return value


def of_two(graph: Graph, product: Node) -> Node:
    return cast(graph, call(graph, aten.add.Tensor, product, call(graph, aten.mm.default, product, product)))


def of_a_sum(graph: Graph, product: Node) -> Node:
    return cast(graph, call(graph, aten.add.Tensor, product, square(graph, "bias")))


def of_a_weight(graph: Graph, _: Node) -> Node:
    return cast(graph, over_one_rank(graph, ALL_GATHER, square(graph, "shard")))


def written_to(graph: Graph, product: Node) -> Node:
    value = cast(graph, product)
    graph.call_function(aten.copy_.default, (product, product)).meta["val"] = product.meta["val"]
    return value


def written_to_by_a_view(graph: Graph, product: Node) -> Node:
    value = cast(graph, product)
    view = call(graph, aten.view.default, product, [-1])
    graph.call_function(aten.zero_.default, (view,)).meta["val"] = view.meta["val"]
    return value


def many_operators(count: int) -> Callable[[Graph, Node], Node]:
    def value_of(graph: Graph, product: Node) -> Node:
        value = cast(graph, product)
        for _ in range(count - 1):
            value = call(graph, aten.neg.default, value)
        return value

    return value_of


@pytest.mark.parametrize(
    ("value_of", "found"),
    [
        (cast, 1),
        (exponential, 0),  # of as many bytes as the product, which nothing else needs
        (less_its_mean, 0),  # a reduction
        (read_by_a_matmul, 0),  # stored anyhow
        (of_two, 0),
        (of_a_sum, 0),
        (of_a_weight, 0),  # a plan says how long a weight is in memory
        (written_to, 0),
        (written_to_by_a_view, 0),
        (many_operators(30), 1),
        (many_operators(31), 0),
    ],
)
def test_what_is_cheap_and_takes_less_memory_so_is_computed_again(
    value_of: Callable[[Graph, Node], Node], found: int
) -> None:
    with FakeTensorMode():
        graph = read_by_kernels(value_of)
        before = names(compute(graph))
        assert compute_again(graph) == found
    graph.lint()
    assert (names(compute(graph)) == before) == (not found)


@pytest.mark.parametrize(
    ("further", "device", "side", "found"),
    [(4, "cuda", 1024, 1), (5, "cuda", 1024, 0), (1, "cpu", 1024, 0), (1, "cuda", 511, 0), (1, "cuda", 512, 1)],
)
def test_large_values_on_a_gpu_are_computed_again_in_a_few_kernels(
    further: int, device: str, side: int, found: int
) -> None:
    with FakeTensorMode():
        graph = read_by_kernels(cast, further=further, device=device, side=side)
        assert compute_again(graph) == found
    assert len(graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default)) == (
        2 + further + found * further
    )


@given(st.lists(st.tuples(st.integers(0, len(OPERATORS) - 1), st.integers(0, 6), st.integers(0, 6)), max_size=25))
def test_values_stay_and_less_is_stored(steps: list[tuple[int, int, int]]) -> None:
    graph = random_graph(steps)
    output = graph.output_node()
    output.args = (tuple(node for node in output.all_input_nodes if len(node.users) == 1),)
    inputs = [torch.rand(4, 4), torch.rand(4, 4)]
    torch.manual_seed(0)
    expected = Interpreter(GraphModule({}, graph)).run(*inputs)
    stored = sum(node_costs(graph, PROFILE).stored.values())
    with mock.patch.multiple(module, _LEAST_BYTES=1, _DEVICE="cpu"):
        found = compute_again(graph)
    graph.lint()
    torch.manual_seed(0)
    assert all(map(torch.equal, Interpreter(GraphModule({}, graph)).run(*inputs), expected))
    less = sum(node_costs(graph, PROFILE).stored.values())
    assert less < stored if found else less == stored

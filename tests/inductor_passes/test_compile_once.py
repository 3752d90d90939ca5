"""Compute that repeats becomes calls of one body; values, collectives and their order stay as they are."""

import operator
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph, GraphModule, Node

from inductor_passes.bodies import INVOKE
from inductor_passes.bucket import assign
from inductor_passes.collectives import FQNS
from inductor_passes.compile_once import Bodies, compile_once
from inductor_passes.order import order_graph
from inductor_passes.runtime.record import is_step, record_graph
from inductor_passes.scheduling.issue_points import Bucket
from inductor_passes.torch_compat.version import VERSION
from simplefsdp import manual_plan, simple_fsdp
from simplefsdp.compile import passes as compilation
from tests.graphs import ALL_GATHER, WAIT, capture
from tests.inductor_passes.test_bucket import RANKS, SameOnEveryRank, call, run
from tests.models import PROFILE, batch, tiny_llama

pytestmark = pytest.mark.compile

aten = torch.ops.aten
BLOCKS = 5


def calls(graph: Graph) -> Counter[str]:
    """The number of calls of each body."""
    return Counter(str(node.args[1]) for node in graph.find_nodes(op="call_function", target=INVOKE))


def steps(graph: Graph) -> tuple[Any, Any]:
    """Return the collectives and the waits of a graph, each in order."""
    record = record_graph("forward", (), (), filter(is_step, graph.nodes))
    return record.issued, record.order


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[Bodies]:
    """The bodies of each graph of the models that a test compiles."""
    made: list[Bodies] = []

    def noted(graph: Graph) -> Bodies:
        made.append(compile_once(graph))
        return made[-1]

    monkeypatch.setattr(compilation, "compile_once", noted)
    return made


@pytest.mark.usefixtures("one_of_four")
def test_equal_blocks_are_calls_of_one_body_between_the_same_collectives() -> None:
    flat, repeated = (
        capture(simple_fsdp(tiny_llama(layers=BLOCKS)), *batch(0, 0), plan="block", compile_once=shares)
        for shares in (False, True)
    )
    for direction in ("forward", "backward"):
        assert steps(getattr(repeated, direction)) == steps(getattr(flat, direction))
        assert not calls(getattr(flat, direction))
    # The first block finds what is read by all blocks; the gradient of the last is made beside that of the output.
    assert sorted(calls(repeated.forward).values()) == [BLOCKS - 1]
    assert sorted(calls(repeated.backward).values()) == [BLOCKS - 1]


@pytest.mark.usefixtures("one_of_four")
def test_a_block_more_is_few_nodes_more_beside_its_calls() -> None:
    found = []
    for layers in (4, 5):
        captured = capture(simple_fsdp(tiny_llama(layers=layers)), *batch(0, 0), plan="block", compile_once=True)
        graphs = captured.forward, captured.backward
        found.append([Counter(str(node.target) for node in graph.nodes) for graph in graphs])
    forward, backward = (more - fewer for fewer, more in zip(*found, strict=True))
    gather = {
        "simplefsdp.all_gather_into_tensor.default": 1,
        "simplefsdp.unpack_weights.default": 1,
    }
    assert {target: count for target, count in forward.items() if "." in target} == {
        **gather,
        "_c10d_functional.wait_tensor.default": 1,
        "aten.detach.default": 2,  # TorchInductor's passes remove it
    }
    assert {target: count for target, count in backward.items() if "." in target} == {
        **gather,
        "simplefsdp.pack_gradients.default": 1,
        "_c10d_functional.reduce_scatter_tensor.default": 1,
        "_c10d_functional.wait_tensor.default": 2,
        "aten.as_strided.default": 9,
        # Views of results, most of which TorchInductor's passes remove, and the gradient of a weight, which is a result
        # of the block before.
        "aten.t.default": 15,
        "aten.view.default": 4,
        "aten.mm.default": 1,
    }


def hybrid(model: nn.Module) -> nn.Module:
    return simple_fsdp(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


HALVES = manual_plan(["layers.*.attention*", "layers.*.f*", ["tok_embeddings", "norm", "output"]])
CASES: dict[str, tuple[dict[str, Any], Any, dict[str, Any], list[int], list[int]]] = {
    # model, wrapped how, options -> calls of each body: forward, backward
    "all in one bucket": ({}, simple_fsdp, {"plan": manual_plan([["*"]])}, [4], [4]),
    "buckets that end in mid-block": ({}, simple_fsdp, {"plan": HALVES}, [5], [4, 5, 5, 5]),
    "searched": ({}, simple_fsdp, {"plan": "auto", "profile": PROFILE}, [2, 5], [4, 4, 4]),
    "tied weights": ({"tie_embeddings": True}, simple_fsdp, {}, [4], [4]),
    "hybrid shards": ({}, hybrid, {}, [4], [4]),
    "unsharded weights": ({}, lambda model: simple_fsdp(model, reshard_after_forward=False), {}, [4], [3]),
    "selective checkpointing": ({"activation_checkpointing": "selective"}, simple_fsdp, {}, [4], [5]),
    # Before 2.15 a checkpoint's attention keeps the state of the random generator, and cuts a block in two.
    "checkpointed blocks": (
        {"activation_checkpointing": "block"},
        simple_fsdp,
        {},
        *(([4], [4]) if VERSION >= (2, 15) else ([4, 5], [4, 5])),
    ),
}


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize("name", CASES)
def test_what_plans_and_models_leave_alike_is_shared(bodies: list[Bodies], name: str) -> None:
    changes, wrap, options, forward, backward = CASES[name]
    capture(
        wrap(tiny_llama(layers=BLOCKS, **changes)), *batch(0, 0), **{"plan": "block", "compile_once": True, **options}
    )
    found = [sorted(body.calls for body in made.bodies) for made in bodies]
    assert found == [forward, backward]


class Mlp(nn.Module):
    """Residual blocks with dropout."""

    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 8))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = (x + layer(x).sin()).cos() * 2
        return x.sum()


@pytest.mark.usefixtures("one_of_four")
def test_blocks_with_random_numbers_are_shared(bodies: list[Bodies]) -> None:
    capture(simple_fsdp(Mlp()), torch.randn(4, 8), plan="block", compile_once=True)
    assert [body.calls for body in bodies[0].bodies] == [3]


@pytest.mark.usefixtures("one_of_four")
def test_dynamic_shapes_are_not_shared_and_say_why(bodies: list[Bodies]) -> None:
    x = torch.randn(6, 8)
    torch._dynamo.mark_dynamic(x, 0)
    capture(simple_fsdp(Mlp()), x, plan="block", compile_once=True)
    assert [made.bodies for made in bodies] == [(), ()]
    assert "with symbolic sizes" in str(bodies[0])


@pytest.mark.usefixtures("one_of_four")
def test_a_graph_in_which_nothing_repeats_keeps_its_order(bodies: list[Bodies]) -> None:
    flat, repeated = (
        capture(simple_fsdp(tiny_llama(layers=1)), *batch(0, 0), plan="none", compile_once=shares)
        for shares in (False, True)
    )
    assert not bodies  # without a plan there is no order in which runs are known
    before = [node.name for node in repeated.forward.nodes]
    assert before == [node.name for node in flat.forward.nodes]
    assign(
        repeated.forward,
        buckets := [Bucket((fqn,), None, None) for (fqn,) in sorted(_gathered(repeated.forward))],
        buckets,
    )
    assert compile_once(repeated.forward).bodies == ()
    assert [node.name for node in repeated.forward.nodes] == before


def _gathered(graph: Graph) -> set[tuple[str, ...]]:
    return {node.meta[FQNS] for node in graph.nodes if FQNS in node.meta}


OPERATORS = {
    "neg": 1,
    "add": 1,
    "mul": 1,
    "mm": 1,
    "view": 0,
    "transpose": 0,
    "split": 1,
    "topk": 1,
    "sum": 2,
    "weight": 1,
}
"""Parts of blocks, and how many operators each is, views not counted."""


def blocks_of(
    pattern: list[tuple[str, int]], other: dict[int, int], outputs: list[tuple[int, int]]
) -> tuple[Graph, list[Tensor]]:
    """A graph of blocks that compute ``pattern`` with a weight of their own, and inputs for it.

    Args:
        pattern: an operator and how far back in the block the second thing that it reads is.
        other: by block, the constant that its additions add; 1 in others.
        outputs: block and place in the pattern of what the graph returns beside the last result.
    """
    graph = Graph()
    inputs = [torch.linspace(0, 1, 16).view(4, 4), *(torch.linspace(-1, i, 16).view(4, 4) for i in range(4))]
    made: list[list[Node]] = []
    with FakeTensorMode() as mode:
        placeholders = [graph.placeholder(f"x{i}") for i in range(len(inputs))]
        for node, tensor in zip(placeholders, inputs, strict=True):
            node.meta["val"] = mode.from_tensor(tensor)
        value, *shards = placeholders
        for block, shard in enumerate(shards):
            gather = call(graph, ALL_GATHER, shard, RANKS, "0")
            gather.meta[FQNS] = (f"layers.{block}.weight",)
            weight = call(graph, aten.slice.Tensor, call(graph, WAIT, gather), 0, 0, 4)
            results = [call(graph, aten.mm.default, value, weight)]
            for name, back in pattern:
                results.append(
                    _operator(graph, name, results[-1], results[-1 - back % len(results)], weight, other.get(block, 1))
                )
            made.append(results)
            value = call(graph, aten.tanh.default, results[-1])
        graph.output((value, *dict.fromkeys(made[block][place % len(made[block])] for block, place in outputs)))
    return graph, inputs


def _operator(graph: Graph, name: str, x: Node, y: Node, weight: Node, constant: int) -> Node:
    match name:
        case "neg":
            return call(graph, aten.neg.default, x)
        case "add":
            return call(graph, aten.add.Tensor, x, constant)
        case "mul":
            return call(graph, aten.mul.Tensor, x, y)
        case "mm":
            return call(graph, aten.mm.default, x, y)
        case "view":
            flat = call(graph, aten.reshape.default, x, [16])
            return call(graph, aten.view.default, flat, [4, 4])
        case "transpose":
            return call(graph, aten.permute.default, x, [1, 0])
        case "split":
            both = graph.call_function(aten.split.Tensor, (x, 2))
            both.meta["val"] = aten.split.Tensor(x.meta["val"], 2)
            parts = [call(graph, operator.getitem, both, i) for i in (1, 0)]
            joined = graph.call_function(aten.cat.default, (parts,))
            joined.meta["val"] = aten.cat.default([part.meta["val"] for part in parts])
            return joined
        case "sum":
            total = call(graph, aten.sum.dim_IntList, x, [0], True)
            return call(graph, aten.add.Tensor, y, total)
        case "weight":
            return call(graph, aten.mul.Tensor, x, weight)
        case _:
            both = graph.call_function(aten.topk.default, (x, 4))
            both.meta["val"] = aten.topk.default(x.meta["val"], 4)
            return call(graph, operator.getitem, both, 0)


@settings(max_examples=150, deadline=None)
@given(
    pattern=st.lists(st.tuples(st.sampled_from([*OPERATORS]), st.integers(0, 3)), min_size=1, max_size=12),
    other=st.dictionaries(st.integers(0, 3), st.integers(2, 3), max_size=2),
    outputs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=5),
    ahead=st.integers(0, 2),
)
def test_any_graph_computes_the_same_values(pattern, other, outputs, ahead):
    graph, inputs = blocks_of(pattern, other, outputs)
    fqns = [f"layers.{block}.weight" for block in range(4)]
    buckets = [Bucket((fqn,), fqns[max(i - ahead, 0)], None, position=i) for i, fqn in enumerate(fqns)]
    assign(graph, buckets, [])
    expected = run(graph, inputs)
    module = GraphModule(nn.Module(), graph)
    for node, old in zip(module.graph.nodes, graph.nodes, strict=True):
        node.meta = dict(old.meta)
    order_graph(module.graph)
    ordered = steps(module.graph)
    made = compile_once(module.graph)
    assert steps(module.graph) == ordered
    module.recompile()
    ranks = [SameOnEveryRank(module) for _ in range(RANKS)]
    torch.testing.assert_close([rank.run(*inputs) for rank in ranks], expected, rtol=0, atol=0)
    for name in calls(module.graph):
        _assert_that_results_are_memory_of_their_own(getattr(module, name))
    if not other and not outputs and sum(OPERATORS[name] for name, _ in pattern) >= 6:  # and mm and tanh
        # What the first block reads may have other strides than what the others read.
        assert [body.calls for body in made.bodies] in ([3], [4])


def _assert_that_results_are_memory_of_their_own(body: GraphModule) -> None:
    inputs = [torch.randn(node.meta["val"].shape) for node in body.graph.find_nodes(op="placeholder")]
    memory = [value.untyped_storage().data_ptr() for value in (*inputs, *body(*inputs))]
    assert len(set(memory)) == len(memory)

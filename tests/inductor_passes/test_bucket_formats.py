"""Members in wire formats: encoded alone or together they have the same values, and each kind is one transfer."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.fx import Graph

from inductor_passes.bucket import assign, bucket, choose_formats
from inductor_passes.collectives import ALL_TO_ALL, FQNS, TWO_STEPS, WIRE_FORMAT, TwoSteps, gathers, reductions
from inductor_passes.ops.encode import DECODE_SUMS, DECODE_WEIGHTS, ENCODE_GRADIENTS, ENCODE_SHARDS
from inductor_passes.ops.gather_shards import GATHER_SHARDS
from inductor_passes.ops.pack import PACK_GRADIENTS
from inductor_passes.ops.wire_formats import DTYPES, GATHER_FORMATS, REDUCE_FORMATS
from inductor_passes.scheduling.issue_points import Bucket
from inductor_passes.scheduling.order_items import graph_items
from tests.graphs import GATHERS, REDUCE_SCATTER, copy, nodes
from tests.inductor_passes.test_bucket import SPEC, chains, run

pytestmark = pytest.mark.usefixtures("one_of_four")


def carried_out(graph: Graph, buckets: list[list[str]]) -> Graph:
    planned = [Bucket(tuple(group), None, None, position=i) for i, group in enumerate(buckets)]
    assign(graph, planned, planned)
    bucket(graph)
    return graph


def with_formats(specs: list[Any], data: st.DataObject) -> tuple[Graph, list[torch.Tensor], dict[str, str | None]]:
    """The graph of ``chains``, in which some collectives are to get a format."""
    graph, inputs = chains(specs)
    forms: dict[str, str | None] = {}
    for collective in [*gathers(graph), *reductions(graph)]:
        kind, _, dtype, *_ = specs[int(collective.fqns[0][1:])]
        names = list(GATHER_FORMATS if kind == "gather" else REDUCE_FORMATS)
        form = data.draw(st.sampled_from([None, *names[:3]])) if dtype in DTYPES else None
        forms[collective.fqns[0]] = form
        if form is not None:
            collective.node.meta[WIRE_FORMAT] = form
    return graph, inputs, forms


@settings(max_examples=60, deadline=None)
@given(specs=st.lists(SPEC, min_size=1, max_size=6), data=st.data())
def test_any_buckets_give_the_values_of_members_alone(specs, data):
    graph, inputs, forms = with_formats(specs, data)
    fqns = [f"p{i}" for i in range(len(specs))]
    alone = run(carried_out(copy(graph), [[fqn] for fqn in fqns]), inputs)
    order = data.draw(st.permutations(fqns))
    boundaries = sorted(data.draw(st.sets(st.integers(1, len(specs)))))
    buckets = [order[a:b] for a, b in zip([0, *boundaries], [*boundaries, len(order)], strict=True)]
    together = carried_out(graph, buckets)
    torch.testing.assert_close(run(together, inputs), alone, rtol=0, atol=0)

    carried = {node.meta[FQNS]: node for node in nodes(graph, *GATHERS, REDUCE_SCATTER, ALL_TO_ALL)}
    assert sorted(fqn for members in carried for fqn in members) == sorted(fqns)
    for members, node in carried.items():
        kinds = {(forms[fqn], *(specs[int(fqn[1:])][i] for i in (0, 3))) for fqn in members}
        assert len(kinds) == 1
        ((form, kind, _),) = kinds
        encoder = ENCODE_SHARDS if kind == "gather" else ENCODE_GRADIENTS
        assert (node.all_input_nodes[0].target is encoder) == (form is not None)
        assert (node.target is ALL_TO_ALL) == (form is not None and kind != "gather")
    for encoded in [*nodes(graph, ENCODE_SHARDS), *nodes(graph, ENCODE_GRADIENTS)]:
        assert all(node.op == "placeholder" for node in encoded.args[0]), "casts and pads are part of the encoding"


@settings(max_examples=30, deadline=None)
@given(specs=st.lists(SPEC, min_size=1, max_size=6), data=st.data())
def test_dropped_formats_leave_the_graph_of_none(specs, data):
    graph, inputs, forms = with_formats(specs, data)
    choose_formats(graph, {}, {})
    assert not [node for node in graph.nodes if WIRE_FORMAT in node.meta]
    carried_out(graph, [list(forms)])
    plain, _ = chains(specs)
    expected = run(carried_out(plain, [list(forms)]), inputs)
    torch.testing.assert_close(run(graph, inputs), expected, rtol=0, atol=0)
    for operator in (ENCODE_SHARDS, ENCODE_GRADIENTS, DECODE_WEIGHTS, DECODE_SUMS):
        assert not nodes(graph, operator)


def test_other_formats_can_be_chosen_for_each_step():
    graph, _ = chains([(kind, [2, 3], torch.float32, "0", 0) for kind in ("gather", "avg", "avg")])
    (gathered,), (one_step, two_steps) = gathers(graph), reductions(graph)
    for collective in (gathered, one_step, two_steps):
        collective.node.meta[WIRE_FORMAT] = "int8"
    two_steps.node.meta[TWO_STEPS] = TwoSteps("0", 2, "0", 1, "int4")
    choose_formats(graph, {"p0": ("bf16",)}, {"p1": ("fp8",), "p2": ("bf16-fp32sum", "int8")})
    assert [each.wire_format for each in (gathered, one_step, two_steps)] == ["bf16", "fp8", "bf16-fp32sum"]
    assert two_steps.two_steps == TwoSteps("0", 2, "0", 1, "int8")
    assert one_step.two_steps is None


def test_roles_in_communication_are_those_of_packed_buckets():
    roles = []
    for form in (None, "int8"):
        specs = [("gather", [2, 3], torch.float32, "0", 0)] * 2 + [("avg", [2, 3], torch.float32, "0", 0)] * 2
        graph, _ = chains(specs)
        for collective in [*gathers(graph), *reductions(graph)]:
            if form is not None:
                collective.node.meta[WIRE_FORMAT] = form
        carried_out(graph, [["p0", "p1"], ["p2", "p3"]])
        found, items = graph_items(graph)
        assert bool(nodes(graph, GATHER_SHARDS, PACK_GRADIENTS)) == (form is None)
        roles.append([(item.kind, item.fqns, item.weights) for item in items if item.kind != "compute" or item.weights])
        packs = [item for item in items if item.kind == "pack"]
        assert [[fqn for _, fqn in item.gradients] for item in packs] == [["p2", "p3"]]
        assert len(found) == len(items)
    assert roles[0] == roles[1]

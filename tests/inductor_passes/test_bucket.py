"""Merging keeps values, packs in order, and merges what may be merged."""

from typing import Any
from unittest import mock

import expecttest
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from inductor_passes import bucket as bucket_pass
from inductor_passes.bucket import assign, bucket
from inductor_passes.collectives import (
    ALL_TO_ALL,
    FQNS,
    REDUCE_SCATTER_GROUP,
    gathers,
    gathers_of_shards,
    groups,
    reductions,
)
from inductor_passes.ops import gather_shards
from inductor_passes.ops.gather_shards import GATHER_SHARDS, GATHER_SHARDS_GROUP
from inductor_passes.ops.pack import PACK_GRADIENTS
from inductor_passes.runtime.graph_dump import render_graph
from inductor_passes.runtime.record import record_graph, recorded_sequence
from inductor_passes.scheduling.issue_points import Bucket, Form, PlanError
from inductor_passes.scheduling.order_items import parts_of
from simplefsdp import simple_fsdp
from tests.graphs import ALL_GATHER, GATHERS, REDUCE_SCATTER, WAIT, capture, fqns, nodes
from tests.models import batch, tiny_llama

RANKS = 3
GATHER = ("gather", [1], torch.float32, "0", 0)


class SameOnEveryRank(Interpreter):
    """Runs a graph as one of ``RANKS`` ranks that all hold the same values."""

    rank = 0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is ALL_GATHER:
            return torch.cat([args[0]] * args[1])
        if target is REDUCE_SCATTER:
            assert args[0].is_contiguous()
            scattered = args[0].chunk(args[2])[self.rank].clone()
            return scattered * args[2] if args[1] == "sum" else scattered
        if target is ALL_TO_ALL:
            source, received, sent, _ = args
            assert received == sent == [source.numel() // RANKS] * RANKS
            return torch.cat([source.chunk(RANKS)[self.rank]] * RANKS)
        if target is REDUCE_SCATTER_GROUP:
            return [self.call_function(REDUCE_SCATTER, (each, *args[1:]), kwargs) for each in args[0]]
        if target in (GATHER_SHARDS, GATHER_SHARDS_GROUP):
            with mock.patch.multiple(gather_shards, gather_into=self.gather_into, rank_in=lambda _: self.rank):
                return super().call_function(target, args, kwargs)
        if target is WAIT:
            return args[0]
        return super().call_function(target, args, kwargs)

    def gather_into(self, gathered: list[torch.Tensor], sent: list[torch.Tensor], _group: str) -> None:
        for whole, part in zip(gathered, sent, strict=True):
            start = whole.storage_offset() + self.rank * part.numel()
            assert part.untyped_storage()._cdata != whole.untyped_storage()._cdata or part.storage_offset() == start
            whole.view(RANKS, -1).copy_(part.clone().flatten())


Spec = tuple[str, list[int], torch.dtype, str, int]


def chains(specs: list[Spec], device: str = "cpu") -> tuple[Graph, list[torch.Tensor]]:
    """A graph with a collective per ``(kind or operator, local shape, dtype, group, missing rows)``, each used right
    behind its wait, and inputs for it. Collective i carries the FQN ``p<i>``."""
    graph, inputs, outputs = Graph(), [], []
    for i, (kind, shape, _, _, missing) in enumerate(specs):
        shape = [shape[0] * (1 if kind == "gather" else RANKS) - missing, *shape[1:]]
        inputs.append(torch.arange(float(torch.Size(shape).numel())).view(shape) + 1000 * i)
    with FakeTensorMode() as mode:
        placeholders = [graph.placeholder(f"x{i}") for i in range(len(specs))]
        for i, (kind, shape, dtype, group, missing) in enumerate(specs):
            placeholders[i].meta["val"] = torch.empty_like(mode.from_tensor(inputs[i]), device=device)
            node = placeholders[i]
            if missing:
                node = call(
                    graph, torch.ops.aten.constant_pad_nd.default, node, [0, 0] * (len(shape) - 1) + [0, missing]
                )
            if dtype is not torch.float32:
                node = call(graph, torch.ops.aten._to_copy.default, node, dtype=dtype)
            if kind == "gather":
                collective = call(graph, ALL_GATHER, node, RANKS, group)
            else:
                collective = call(graph, REDUCE_SCATTER, node, kind, RANKS, group)
            collective.meta[FQNS] = (f"p{i}",)
            outputs.append(call(graph, torch.ops.aten.neg.default, call(graph, WAIT, collective)))
        graph.output(tuple(outputs))
    return graph, inputs


def merge(graph: Graph, *fqns: list[str], form: Form = "packed") -> None:
    """Carry out a plan with these buckets."""
    buckets = [Bucket(tuple(group), None, None, form=form) for group in fqns]
    assign(graph, buckets, buckets)
    bucket(graph)


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*map_arg(args, lambda source: source.meta["val"]), **kwargs)
    return node


def run(graph: Graph, inputs: list[torch.Tensor]) -> Any:
    """Return the outputs of ``graph`` on each rank."""
    found = []
    for rank in range(RANKS):
        one = SameOnEveryRank(GraphModule(nn.Module(), graph))
        one.rank = rank
        found.append(one.run(*inputs))
    return found


SPEC = st.tuples(
    st.sampled_from(["gather", "avg", "sum"]),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.sampled_from(["0", "1"]),
    st.integers(0, 1),
)


@pytest.mark.usefixtures("one_of_four")
@settings(max_examples=60, deadline=None)
@given(specs=st.lists(SPEC, min_size=1, max_size=7), data=st.data(), form=st.sampled_from(["packed", "grouped"]))
def test_any_buckets_give_the_same_values(specs, data, form):
    graph, inputs = chains(specs)
    expected = run(graph, inputs)
    order = data.draw(st.permutations([f"p{i}" for i in range(len(specs))]))
    boundaries = sorted(data.draw(st.sets(st.integers(1, len(specs)))))
    buckets = [order[a:b] for a, b in zip([0, *boundaries], [*boundaries, len(order)], strict=True)]
    merge(graph, *buckets, form=form)
    torch.testing.assert_close(run(graph, inputs), expected, rtol=0, atol=0)

    merged = [set(c.fqns) for c in [*gathers(graph), *reductions(graph)]]
    merged += [set(node.meta[FQNS]) for node in [*groups(graph), *gathers_of_shards(graph)]]
    for group in buckets:
        mergeable = {}
        for fqn in group:
            kind, _, dtype, process_group, _ = specs[int(fqn[1:])]
            # Gathers of any dtypes are one; sums are not.
            mergeable.setdefault((kind, None if kind == "gather" else dtype, process_group), set()).add(fqn)
        assert all(members in merged for members in mergeable.values())
    assert sum(map(len, merged)) == len(specs)
    for packed in nodes(graph, ALL_GATHER, GATHER_SHARDS, GATHER_SHARDS_GROUP, PACK_GRADIENTS):
        assert all(node.op == "placeholder" for node in packed.all_input_nodes), "casts and pads are part of the copy"
    if form == "packed":
        assert not groups(graph)
    else:
        for fqns in (set(node.meta[FQNS]) for node in nodes(graph, *GATHERS)):
            assert len(fqns) == 1 or len({specs[int(fqn[1:])][2] for fqn in fqns}) > 1, "several dtypes are packed"
        copied = {fqn for pack in nodes(graph, PACK_GRADIENTS) for fqn in packed_fqns(pack)}
        assert all(specs[int(fqn[1:])][2] is not torch.float32 or specs[int(fqn[1:])][4] for fqn in copied)


@pytest.mark.parametrize(("device", "form"), [("cuda", "grouped"), ("cpu", "packed")])
@pytest.mark.usefixtures("one_of_four")
def test_gathers_of_several_dtypes_are_a_group_with_nccl_alone(device: str, form: str) -> None:
    specs = [("gather", [2, 3], torch.float32, "0", 0), ("gather", [2], torch.bfloat16, "0", 0)]
    graph, _ = chains(specs, device)
    merge(graph, ["p0", "p1"], form="grouped")
    dtypes = [result.meta["val"].dtype for node in groups(graph) for result in node.users]
    assert dtypes == ([torch.float32, torch.bfloat16] if form == "grouped" else [])
    assert len(nodes(graph, GATHER_SHARDS)) == (form == "packed")


def packed_fqns(pack: Node) -> tuple[str, ...]:
    """The FQNs of the gradients that ``pack`` packs, by the results that its collective gives."""
    (collective,) = pack.users
    return dict(parts_of(collective))[pack] if collective in groups(pack.graph) else collective.meta[FQNS]


PAD, CAST = torch.ops.aten.constant_pad_nd.default, torch.ops.prims.convert_element_type.default


@pytest.mark.parametrize(
    "steps",
    [
        [(PAD, [0, -2]), (PAD, [0, 2])],
        [(PAD, [0, -2, 0, 0]), (PAD, [0, 2, 0, 0])],
        [(PAD, [0, 0, 0, -2]), (PAD, [0, 0, 0, 2])],
        [(PAD, [0, 0, 0, -2]), (PAD, [0, 0, 0, 2], 9.0)],
        [(torch.ops.aten.slice.Tensor, 0, 0, 3), (PAD, [0, 0, 0, 6])],
        [(CAST, torch.bfloat16), (CAST, torch.float32)],
    ],
    ids=["columns", "columns, rows as they are", "rows", "not with zeros", "more rows than ranks need", "rounded"],
)
def test_slices_pads_and_casts_of_the_user_stay_in_the_graph(steps: list[tuple[Any, ...]]) -> None:
    graph, x = Graph(), torch.arange(1.0, 37).view(9, 4) / 7
    with FakeTensorMode() as mode:
        outputs = []
        for i in range(2):
            node = graph.placeholder(f"x{i}")
            node.meta["val"] = mode.from_tensor(x)
            for target, *args in steps:
                node = call(graph, target, node, *args)
            node = call(graph, REDUCE_SCATTER, node, "sum", RANKS, "0")
            node.meta[FQNS] = (f"p{i}",)
            outputs.append(call(graph, WAIT, node))
        graph.output(tuple(outputs))
    expected = run(graph, [x, x + 100])
    merge(graph, ["p0", "p1"])
    torch.testing.assert_close(run(graph, [x, x + 100]), expected, rtol=0, atol=0)


@pytest.mark.usefixtures("one_of_four")
def test_a_bucket_packs_in_its_own_order_and_skips_what_is_not_there():
    graph, _ = chains([GATHER] * 3)
    merge(graph, ["p2", "absent", "p0"], ["p1"])
    assert sorted(fqns(graph, *GATHERS)) == [("p1",), ("p2", "p0")]


@pytest.mark.usefixtures("one_of_four")
def test_buckets_of_one_leave_the_graph_as_it_is():
    graph, _ = chains([GATHER, ("avg", [2], torch.float32, "0", 0)])
    before = render_graph(graph)
    merge(graph, ["p0"], ["p1"])
    assert render_graph(graph) == before


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_gradients_that_are_divided_before_their_sum_are_divided_together():
    policy = MixedPrecisionPolicy(torch.float16, torch.float16)
    model = simple_fsdp(tiny_llama(layers=1), mp_policy=policy)
    graph = capture(model, *batch(0, 0), plan="block").backward
    packs = nodes(graph, PACK_GRADIENTS)
    assert [pack.args[3] for pack in packs] == [2.0] * len(packs)
    packed = [node for pack in packs for node in pack.all_input_nodes]
    assert packed
    assert not [node for node in packed if node.target is torch.ops.aten.div.Tensor]


@pytest.mark.usefixtures("one_of_four")
def test_a_collective_that_no_bucket_has_is_an_error_that_names_its_parameter():
    graph, _ = chains([GATHER, ("avg", [2], torch.float32, "0", 0)])
    with pytest.raises(PlanError, match="gathers p0, but no bucket"):
        merge(graph, ["p1"])
    with pytest.raises(PlanError, match="reduces p1, but no bucket"):
        merge(graph, ["p0"])


@pytest.mark.usefixtures("one_of_four")
def test_a_bucket_whose_members_were_not_merged_is_an_error(monkeypatch):
    graph, _ = chains([GATHER, GATHER, ("avg", [2], torch.float32, "0", 0)])
    monkeypatch.setattr(bucket_pass, "_merge_gathers", lambda *_: None)
    with pytest.raises(PlanError, match="not merged, or lost: p0"):
        merge(graph, ["p0", "p1"], ["p2"])


@pytest.mark.usefixtures("one_of_four")
def test_a_member_that_merging_lost_is_an_error(monkeypatch):
    merged = bucket_pass._collective
    monkeypatch.setattr(
        bucket_pass, "_collective", lambda like, packed, members, *o: merged(like, packed, members[:1], *o)
    )
    graph, _ = chains([GATHER, GATHER])
    with pytest.raises(PlanError, match="not merged, or lost: p1"):
        merge(graph, ["p0", "p1"])


@pytest.mark.usefixtures("one_of_four")
def test_casts_and_pads_of_shards_move_forward_and_compute_stays():
    graph, compute = Graph(), (torch.ops.aten.neg.default, torch.ops.aten.abs.default, torch.ops.aten.exp.default)
    with FakeTensorMode():
        shards = [graph.placeholder(f"x{i}") for i in range(2)]
        for shard in shards:
            shard.meta["val"] = torch.empty(2, 3)
        moved = [shards[0], call(graph, torch.ops.aten.permute.default, shards[1], [1, 0])]
        outputs = []
        for i in range(2):
            gather = call(graph, ALL_GATHER, moved[i], RANKS, "0")
            gather.meta[FQNS] = (f"p{i}",)
            outputs.append(call(graph, compute[i], call(graph, WAIT, gather)))
            outputs.append(call(graph, compute[2], shards[0]))
            if i == 0:
                outputs[-1].append(moved[1])
        graph.output(tuple(outputs))
    before = [node.target for node in graph.nodes if node.target in compute]
    merge(graph, ["p0", "p1"])
    assert [node.target for node in graph.nodes if node.target in compute] == before


@pytest.mark.usefixtures("one_of_four")
def test_the_record_of_a_graph_whose_collectives_are_others_cannot_be_updated():
    graph, _ = chains([GATHER, ("avg", [2], torch.float32, "0", 0)])
    (first,), (other,) = gathers(graph), reductions(graph)
    old = record_graph("forward", [], [], [first.node, other.node, first.wait, other.wait])
    assert old.order == (0, 1, -1, -2)
    assert recorded_sequence(old, [other.node, other.wait, first.node, first.wait]) == {
        "issued": old.issued[::-1],
        "order": (0, -1, 1, -2),
    }
    with pytest.raises(PlanError, match=r"lost \['reduce_scatter_tensor of float32\[6\] avg 3: p1'\]"):
        recorded_sequence(old, [first.node])


@pytest.mark.usefixtures("one_of_four")
class TestGraphs(expecttest.TestCase):
    def test_merged_gathers_as_a_graph(self):
        graph, _ = chains([("gather", [2, 3], torch.float64, "0", 1), ("gather", [4], torch.float64, "0", 0)])
        merge(graph, ["p0", "p1"])
        self.assertExpectedInline(
            render_graph(graph),
            """\
x0: float32[1, 3] = input
x1: float32[4] = input
all_gather_into_tensor_default_2: float64[30] = torch.ops.simplefsdp.all_gather_into_tensor.default([x0, x1], [6, 4], [torch.float64, torch.float64], 3, 0)  # p0, p1
wait_tensor_default_2: float64[30] = torch.ops._c10d_functional.wait_tensor.default(all_gather_into_tensor_default_2)
unpack_weights_default = torch.ops.simplefsdp.unpack_weights.default(wait_tensor_default_2, 3, [6, 4], [torch.float64, torch.float64])
getitem: float64[18] = operator.getitem(unpack_weights_default, 0)
getitem_1: float64[12] = operator.getitem(unpack_weights_default, 1)
view_default: float64[6, 3] = torch.ops.aten.view.default(getitem, [6, 3])
neg_default: float64[6, 3] = torch.ops.aten.neg.default(view_default)
neg_default_1: float64[12] = torch.ops.aten.neg.default(getitem_1)
return (neg_default, neg_default_1)
""",
        )

    def test_merged_reductions_as_a_graph(self):
        graph, _ = chains([("avg", [2, 3], torch.float64, "0", 1), ("avg", [4], torch.float64, "0", 0)])
        merge(graph, ["p0", "p1"])
        self.assertExpectedInline(
            render_graph(graph),
            """\
x0: float32[5, 3] = input
x1: float32[12] = input
pack_gradients_default: float64[30] = torch.ops.simplefsdp.pack_gradients.default([x0, x1], 3, torch.float64)
reduce_scatter_tensor_default_2: float64[10] = torch.ops._c10d_functional.reduce_scatter_tensor.default(pack_gradients_default, avg, 3, 0)  # p0, p1
wait_tensor_default_2: float64[10] = torch.ops._c10d_functional.wait_tensor.default(reduce_scatter_tensor_default_2)
as_strided_default: float64[2, 3] = torch.ops.aten.as_strided.default(wait_tensor_default_2, [2, 3], [3, 1], 0)
neg_default: float64[2, 3] = torch.ops.aten.neg.default(as_strided_default)
as_strided_default_1: float64[4] = torch.ops.aten.as_strided.default(wait_tensor_default_2, [4], [1], 6)
neg_default_1: float64[4] = torch.ops.aten.neg.default(as_strided_default_1)
return (neg_default, neg_default_1)
""",
        )

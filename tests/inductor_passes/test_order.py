"""Order respects what nodes need and puts each collective where its plan says, on FX graphs and kernels."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import expecttest
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes import order as order_pass
from inductor_passes.ops.pack import UNPACK_WEIGHTS
from inductor_passes.order import check_order, order
from inductor_passes.scheduling.issue_points import Bucket, PlanError
from inductor_passes.scheduling.order_items import OrderItem, first_uses, graph_items
from simplefsdp import BucketPlan, manual_plan, simple_fsdp
from tests.graphs import WAIT, capture
from tests.models import batch, tiny_llama


@dataclass
class Program:
    """A graph of items whose collectives stand where their values are first needed or last made, and its plan."""

    items: list[OrderItem] = field(default_factory=list)
    computes: list[int] = field(default_factory=list)
    first_use_slot: dict[str, int] = field(default_factory=dict)
    """Number of the first compute node that reads a parameter."""
    ready_slot: dict[str, int] = field(default_factory=dict)
    """Number of the compute node that makes a parameter's gradient."""
    reductions: list[Bucket] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)
    """Items around a collective, and the collective or wait that they belong to."""

    def add(self, *needs: int, **of: Any) -> int:
        self.items.append(OrderItem(frozenset(needs), **of))
        return len(self.items) - 1


@st.composite
def programs(draw: st.DrawFn) -> Program:
    params = [f"p{i}" for i in range(draw(st.integers(1, 5)))]
    n = draw(st.integers(1, 7))
    reads = [draw(st.sets(st.sampled_from(params))) for _ in range(n)]
    program = Program()
    for i in range(n):
        for param in sorted(reads[i]):
            program.first_use_slot.setdefault(param, i)
    for param in draw(st.sets(st.sampled_from(params))):
        program.ready_slot[param] = draw(st.integers(0, n - 1))
    gathers = [_gather_bucket(draw, program, fqns) for fqns in _partition(draw, sorted(program.first_use_slot))]
    reductions = _reduction_buckets(draw, program)
    program.reductions = [bucket for bucket, _ in reductions]
    weights: dict[str, int] = {}
    for i in range(n):
        for bucket in gathers:
            if min(program.first_use_slot[fqn] for fqn in bucket.fqns) == i:
                weights.update(_add_gather(program, bucket))
        earlier = draw(st.sets(st.sampled_from(program.computes))) if program.computes else set()
        node = program.add(*earlier, *(weights[fqn] for fqn in sorted(reads[i])), reads_inputs=not earlier)
        program.computes.append(node)
        for bucket, has_all_reduce in reductions:
            if max(program.ready_slot[fqn] for fqn in bucket.fqns) == i:
                _add_reduction(program, bucket, has_all_reduce)
    return program


def _partition(draw: st.DrawFn, fqns: list[str]) -> list[tuple[str, ...]]:
    buckets: dict[int, list[str]] = {}
    for fqn in draw(st.permutations(fqns)):
        buckets.setdefault(draw(st.integers(0, 2)), []).append(fqn)
    return list(map(tuple, buckets.values()))


def _gather_bucket(draw: st.DrawFn, program: Program, fqns: tuple[str, ...]) -> Bucket:
    first = min(fqns, key=lambda fqn: program.first_use_slot[fqn])
    earlier = [fqn for fqn, first_use in program.first_use_slot.items() if first_use <= program.first_use_slot[first]]
    return Bucket(fqns, draw(st.sampled_from([None, *sorted(earlier)])), first)


def _reduction_buckets(draw: st.DrawFn, program: Program) -> list[tuple[Bucket, bool]]:
    buckets = [
        (fqns, draw(st.sampled_from([None, *fqns, *program.ready_slot])))
        for fqns in _partition(draw, sorted(program.ready_slot))
    ]
    if draw(st.booleans()):  # else fusion has changed the order of gradients
        buckets.sort(key=lambda b: max(program.ready_slot[fqn] for fqn in (*b[0], b[1] or b[0][0])))
    found = []
    for place, (fqns, issue) in enumerate(buckets):
        later = [*range(place, len(buckets)), len(buckets)]
        points = sorted([draw(st.sampled_from(later)), draw(st.sampled_from(later))])
        all_reduce_after, wait = [buckets[i][0][0] if i < len(buckets) else None for i in points]
        has_all_reduce = draw(st.booleans())
        found.append((Bucket(fqns, issue, wait, all_reduce_after if has_all_reduce else None, place), has_all_reduce))
    return found


def _add_gather(program: Program, bucket: Bucket) -> dict[str, int]:
    cast = program.add(reads_inputs=True)
    gather = program.add(cast, kind="gather", fqns=bucket.fqns, bucket=bucket)
    program.copies[cast] = gather
    alone = len(bucket.fqns) == 1
    wait = program.add(gather, kind="gathered", fqns=bucket.fqns, bucket=bucket, weights=bucket.fqns if alone else ())
    if alone:
        return {bucket.fqns[0]: wait}
    unpack = program.add(wait)
    return {fqn: program.add(unpack, weights=(fqn,)) for fqn in bucket.fqns}


def _add_reduction(program: Program, bucket: Bucket, has_all_reduce: bool) -> None:
    common = {"fqns": bucket.fqns, "bucket": bucket}
    gradients = tuple((program.computes[program.ready_slot[fqn]], fqn) for fqn in bucket.fqns)
    sources = {node for node, _ in gradients}
    if len(bucket.fqns) > 1:
        pack = program.add(*sources, kind="pack", gradients=gradients, **common)
        last = program.add(pack, kind="reduction", **common)
        program.copies[pack] = last
    else:
        last = program.add(*sources, kind="reduction", gradients=gradients, **common)
    last = program.add(last, kind="reduced", has_all_reduce=has_all_reduce, **common)
    if has_all_reduce:
        last = program.add(last, kind="reduction", is_all_reduce_after=True, **common)
        last = program.add(last, kind="reduced", is_all_reduce_after=True, **common)
    program.copies[program.add(last)] = last


@settings(max_examples=300, deadline=None)
@given(programs())
def test_needs_are_respected_and_the_plan_is_realised(program):
    items, result = program.items, order(program.items)
    place = {node: i for i, node in enumerate(result)}
    assert sorted(result) == list(range(len(items)))
    assert all(place[need] < place[i] for i, item in enumerate(items) for need in item.needs)
    assert [node for node in result if node in set(program.computes)] == program.computes

    def before(node: int) -> int:
        """Return how many compute nodes come before ``node``."""
        return sum(place[compute] < place[node] for compute in program.computes)

    n = len(program.computes)
    issued = {}
    for i, item in enumerate(items):
        bucket = item.bucket
        if item.kind == "gather":
            assert before(i) == (program.first_use_slot[bucket.issue] if bucket.issue else 0)
        elif item.kind == "gathered":
            assert before(i) == min(program.first_use_slot[fqn] for fqn in bucket.fqns)
        elif item.kind == "reduction" and not item.is_all_reduce_after:
            before_it = [b for b in program.reductions if b.position <= bucket.position]
            due = [program.ready_slot[fqn] + 1 for b in before_it for fqn in (*b.fqns, b.issue) if fqn]
            assert before(i) == max(due)
            issued.update(dict.fromkeys(bucket.fqns, i))
    for i, item in enumerate(items):
        point = item.bucket and (
            item.bucket.all_reduce_after if item.has_all_reduce or item.kind == "reduction" else item.bucket.wait
        )
        if item.kind == "reduced" or item.is_all_reduce_after:
            assert before(i) == (before(issued[point]) if point else n)
            if point and point not in item.fqns:
                assert place[i] < place[issued[point]]
    gathers, reductions = ([i for i, item in enumerate(items) if item.kind == kind] for kind in ("gather", "reduction"))
    assert all(place[r] < place[g] for g in gathers for r in reductions if before(g) == before(r))
    for copy, collective in program.copies.items():
        assert before(copy) == before(collective)


@settings(max_examples=100, deadline=None)
@given(programs())
def test_ordering_once_more_changes_nothing(program):
    result = order(program.items)
    place = {node: i for i, node in enumerate(result)}
    moved = [
        program.items[node]._replace(
            needs=frozenset(place[need] for need in program.items[node].needs),
            gradients=tuple((place[source], fqn) for source, fqn in program.items[node].gradients),
        )
        for node in result
    ]
    assert order(moved) == list(range(len(moved)))


def test_a_reduction_whose_result_is_needed_before_its_wait_is_an_error():
    program = Program()
    program.ready_slot = {"a": 0, "b": 0}
    program.computes = [program.add(reads_inputs=True)]
    _add_reduction(program, Bucket(("a",), "a", None), has_all_reduce=False)
    result = len(program.items) - 2
    _add_reduction(program, Bucket(("b",), "b", None, position=1), has_all_reduce=False)
    program.add(program.computes[0], result)
    program.add(program.computes[0])
    with pytest.raises(PlanError, match="bucket of a"):
        order(program.items)


def test_a_gather_is_issued_and_awaited_in_time_though_its_points_are_used_later():
    program = Program()
    weights = [_add_gather(program, Bucket((fqn,), "b", "b"))[fqn] for fqn in "ab"]
    program.add(weights[0], reads_inputs=True)
    program.add(weights[1], reads_inputs=True)
    kinds = [program.items[i].kind for i in order(program.items)]
    assert kinds == ["compute", "gather", "gathered", "compute", "compute", "gather", "gathered", "compute"]


def test_a_bucket_with_points_that_the_graph_does_not_have_is_issued_at_the_start_and_awaited_at_the_end():
    program = Program()
    weight = _add_gather(program, Bucket(("a",), "elsewhere", "elsewhere"))["a"]
    program.ready_slot["a"] = 1
    program.computes = [program.add(reads_inputs=True)]
    program.computes.append(program.add(program.computes[0], weight))
    _add_reduction(program, Bucket(("a",), "elsewhere", "elsewhere"), has_all_reduce=False)
    program.computes.append(program.add(program.computes[1]))
    kinds = [program.items[i].kind for i in order(program.items)]
    assert kinds == [
        "compute",
        "gather",
        "compute",
        "gathered",
        "compute",
        "reduction",
        "compute",
        "reduced",
        "compute",
    ]


def test_weights_first_used_by_one_node_are_in_graph_order_on_every_rank():
    program = Program()
    fqns = [f"layers.{i}" for i in (3, 1, 4, 5, 9, 2, 6, 8)]
    weights = [_add_gather(program, Bucket((fqn,), None, fqn))[fqn] for fqn in fqns]
    program.add(*weights, reads_inputs=True)
    assert first_uses(program.items) == fqns
    program.items.pop()
    assert list(frozenset([weights[0], weights[2]])) == [weights[2], weights[0]], "sets of numbers have their own order"
    program.add(weights[2], weights[0], reads_inputs=True)
    assert first_uses(program.items)[:2] == [fqns[0], fqns[2]]


def test_a_gather_is_awaited_where_the_plan_says_though_its_own_use_is_later():
    program = Program()
    weights = [_add_gather(program, Bucket((fqn,), None, "b"))[fqn] for fqn in "ab"]
    use_of_b = program.add(weights[1], reads_inputs=True)
    program.add(weights[0], reads_inputs=True)
    before_it = itertools.takewhile(lambda i: i != use_of_b, order(program.items))
    assert sum(program.items[i].kind == "gathered" for i in before_it) == 2


def test_compute_that_needs_nothing_stays_where_it_is():
    program = Program()
    first, second = program.add(), program.add()
    program.add(second, reads_inputs=True)
    program.add(first, reads_inputs=True)
    assert order(program.items) == [0, 1, 2, 3]


def test_a_gradient_that_is_there_from_the_start_is_reduced_at_once():
    program = Program()
    program.add(reads_inputs=True)
    program.add(0)
    common = {"fqns": ("a",), "bucket": Bucket(("a",), "a", "a")}
    reduction = program.add(kind="reduction", gradients=((-1, "a"),), **common)
    program.add(reduction, kind="reduced", **common)
    assert order(program.items) == [2, 3, 0, 1]


def _three_layers() -> nn.Module:
    return simple_fsdp(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_nodes_that_were_not_put_in_order_are_an_error(monkeypatch):
    at_first = iter([lambda items: list(range(len(items)))])
    monkeypatch.setattr(order_pass, "order", lambda items: next(at_first, order)(items))
    with pytest.raises(Exception, match="the plan is not carried out: at node"):
        capture(_three_layers(), torch.ones(4, 8), plan="block")


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_all_members_are_taken_out_of_an_unpacked_bucket_at_once():
    captured = capture(simple_fsdp(tiny_llama()), *batch(0, 0), plan="block")
    for graph in (captured.forward, captured.backward):
        nodes = list(graph.nodes)
        unpacks = graph.find_nodes(op="call_function", target=UNPACK_WEIGHTS)
        assert len(unpacks) > 2
        for unpack in unpacks:
            place = nodes.index(unpack) + 1
            assert set(nodes[place : place + len(unpack.users)]) == set(unpack.users)


def test_an_order_against_the_plan_is_an_error_that_names_the_node():
    program = Program()
    weight = _add_gather(program, Bucket(("a",), None, "a"))["a"]
    program.add(weight, reads_inputs=True)
    check_order(program.items)
    cast, *others = program.items
    moved = [item._replace(needs=frozenset(n + (n > 0) for n in item.needs)) for item in others]
    late = [cast, OrderItem(frozenset(), reads_inputs=True), *moved]
    with pytest.raises(PlanError, match=r"at node 1 of 5 there is compute of other values, not gather of a$"):
        check_order(late)


def schedule(graph) -> str:
    """The events of an ordered graph, runs of compute as one line."""
    lines = []
    for node, item in zip(*graph_items(graph), strict=True):
        if node.target is WAIT:
            lines.append(f"wait {item.fqns[0]}")
        elif item.kind in ("gather", "reduction"):
            kind = "all-reduce" if item.is_all_reduce_after else item.kind
            lines.append(f"{kind} {item.fqns[0]} + {len(item.fqns) - 1}")
        elif "mm" in str(node.target):
            lines.append("matmuls")
    return "".join(line + "\n" for line, _ in itertools.groupby(lines))


@pytest.mark.usefixtures("one_of_four")
class TestSchedules(expecttest.TestCase):
    @pytest.mark.compile
    def test_order_of_plan_block(self):
        captured = capture(simple_fsdp(tiny_llama(layers=3)), *batch(0, 0), plan="block")
        self.assertExpectedInline(
            schedule(captured.forward),
            """\
gather tok_embeddings.weight + 0
gather layers.0.attention.wq.weight + 8
wait tok_embeddings.weight
gather layers.1.attention.wq.weight + 8
wait layers.0.attention.wq.weight
matmuls
gather layers.2.attention.wq.weight + 8
wait layers.1.attention.wq.weight
matmuls
gather norm.weight + 1
wait layers.2.attention.wq.weight
matmuls
wait norm.weight
matmuls
""",
        )
        self.assertExpectedInline(
            schedule(captured.backward),
            """\
gather norm.weight + 1
matmuls
gather layers.2.attention.wq.weight + 8
wait norm.weight
matmuls
reduction norm.weight + 1
matmuls
gather layers.1.attention.wq.weight + 8
wait layers.2.attention.wq.weight
matmuls
wait norm.weight
reduction layers.2.attention.wq.weight + 8
matmuls
gather layers.0.attention.wq.weight + 8
wait layers.1.attention.wq.weight
matmuls
wait layers.2.attention.wq.weight
reduction layers.1.attention.wq.weight + 8
matmuls
wait layers.0.attention.wq.weight
matmuls
wait layers.1.attention.wq.weight
reduction layers.0.attention.wq.weight + 8
wait layers.0.attention.wq.weight
reduction tok_embeddings.weight + 0
wait tok_embeddings.weight
""",
        )

    @pytest.mark.compile
    def test_order_of_a_plan_without_prefetch(self):
        plan = manual_plan([["tok_embeddings", "layers.*"], ["norm", "output"]], prefetch=0)
        captured = capture(simple_fsdp(tiny_llama(layers=1)), *batch(0, 0), plan=plan)
        self.assertExpectedInline(
            schedule(captured.forward),
            """\
gather tok_embeddings.weight + 9
wait tok_embeddings.weight
matmuls
gather norm.weight + 1
wait norm.weight
matmuls
""",
        )
        self.assertExpectedInline(
            schedule(captured.backward),
            """\
matmuls
gather norm.weight + 1
wait norm.weight
matmuls
reduction norm.weight + 1
wait norm.weight
matmuls
gather layers.0.attention.wq.weight + 8
wait layers.0.attention.wq.weight
matmuls
reduction tok_embeddings.weight + 9
wait tok_embeddings.weight
""",
        )

    @pytest.mark.compile
    def test_all_reduces_that_are_due_together_are_all_under_way_before_one_is_awaited(self):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        points = {"3": ("1", "0"), "2": ("1", "0"), "1": ("0", None), "0": (None, None)}
        own = [f"{i}.weight" for i in range(4)]
        plan = BucketPlan(
            tuple(Bucket((fqn,), fqn, fqn, position=i) for i, fqn in enumerate(own)),
            tuple(Bucket((fqn,), fqn, fqn, position=i) for i, fqn in enumerate(reversed(own))),
            tuple(
                Bucket(
                    (f"{i}.weight",),
                    None,
                    wait and f"{wait}.weight",
                    all_reduce_after and f"{all_reduce_after}.weight",
                    place,
                )
                for place, (i, (all_reduce_after, wait)) in enumerate(points.items())
            ),
            (),
            tuple((fqn, (8, 8)) for fqn in own),
        )
        model = simple_fsdp(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in own)), mesh)
        backward = capture(model, torch.ones(4, 8), plan=plan).backward
        reductions = [line for line in schedule(backward).splitlines() if "gather" not in line]
        self.assertExpectedInline(
            "\n".join(reductions),
            """\
matmuls
wait 3.weight
matmuls
reduction 3.weight + 0
matmuls
wait 2.weight
matmuls
reduction 2.weight + 0
matmuls
wait 1.weight
matmuls
wait 3.weight
all-reduce 3.weight + 0
wait 2.weight
all-reduce 2.weight + 0
reduction 1.weight + 0
matmuls
wait 1.weight
all-reduce 1.weight + 0
wait 3.weight
wait 2.weight
reduction 0.weight + 0
wait 0.weight
all-reduce 0.weight + 0
wait 1.weight
wait 0.weight""",
        )

"""Estimates of graphs, against the formulas worked out by hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.fx import Graph
from torch.nn import functional as F

from inductor_passes.fusion import adds_rows
from inductor_passes.fusion_order import put_fused_together
from inductor_passes.scheduling import cost_model
from inductor_passes.scheduling.cost_graph import CostGraph, Gather
from inductor_passes.scheduling.cost_model import cost_graph_of, node_costs
from inductor_passes.scheduling.issue_points import Schedule, ScheduledBucket
from inductor_passes.scheduling.replay import replay
from inductor_passes.torch_compat import aot_autograd
from simplefsdp import WireFormat, simple_fsdp
from tests.graphs import capture
from tests.inductor_passes.test_fusion_order import rows_added_to_a_table

pytestmark = [pytest.mark.usefixtures("one_of_four"), pytest.mark.compile]


@dataclass(frozen=True)
class Rates:
    """A profile with one number for everything; a matmul's operation takes a second, a byte a thousandth."""

    launch_s: float = 0.0
    collective_launch_s: float = 0.5
    collective_s_per_byte: float = 0.125
    member_s: float | None = 0.5

    def compute_s(self, kind: str, dtype: torch.dtype, flops: float) -> float:
        assert dtype in (torch.float32, torch.bfloat16)
        return flops * {"matmul": 1.0, "attention": 10.0}[kind]

    def memory_s(self, nbytes: float) -> float:
        return nbytes / 1000

    def contention_of(self, kind: str = "", elements: float = 0) -> float:
        return elements / 256 if kind == "matmul" else 0.5

    def collective_s(self, kind: str, ranks: Sequence[int], nbytes: int) -> float:
        assert list(ranks) in ([0, 1, 2, 3], [0, 1], [0, 2])
        factor = {"all_gather": 1.0, "reduce_scatter": 2.0, "all_reduce": 3.0, "all_to_all": 4.0}[kind]
        return factor * (1 + nbytes / 100)


class Gated(nn.Module):
    """(rows, 8) to (rows, 8): two matmuls and what is fused between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(16, 8))
        self.down = nn.Parameter(torch.ones(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        wide = F.linear(x, self.up)
        return F.linear(F.silu(wide) * wide, self.down)


def cost_graphs(model: nn.Module, *inputs: Tensor, **options: Any) -> tuple[CostGraph, CostGraph]:
    captured = capture(simple_fsdp(model, **options), *inputs)
    given = {node.name for node in captured.forward.find_nodes(op="placeholder")}
    return cost_graph_of(captured.forward, Rates(), given), cost_graph_of(captured.backward, Rates(), given)


def test_matmuls_and_what_is_fused_between_them() -> None:
    captured = capture(simple_fsdp(Gated()), torch.ones(4, 8))
    cost = node_costs(captured.forward, Rates(launch_s=1000.0))
    seconds = {node.target._overloadpacket.__name__: found for node, found in cost.seconds.items()}
    # One kernel reads 4 x 16 and writes as many: silu, its parts and the product.
    fused = 1000 + 2 * 4 * 16 * 4 / 1000
    assert seconds == {"mm": pytest.approx(1000 + 2 * 4 * 8 * 16), "mul": pytest.approx(fused)}
    assert [node.name for node in cost.stored if node.target is torch.ops.aten.mul.Tensor] == ["mul"]


def test_a_matmul_of_little_takes_as_long_as_its_bytes() -> None:
    @dataclass(frozen=True)
    class FastMatmuls(Rates):
        def compute_s(self, kind: str, dtype: torch.dtype, flops: float) -> float:
            return 1e-9 * super().compute_s(kind, dtype, flops)

    captured = capture(simple_fsdp(Gated()), torch.ones(4, 8))
    first = next(
        found for node, found in node_costs(captured.forward, FastMatmuls()).seconds.items() if node.name == "mm"
    )
    assert first == pytest.approx((4 * 8 + 16 * 8 + 4 * 16) * 4 / 1000)


def test_gathers_and_reductions_of_both_halves() -> None:
    forward, backward = cost_graphs(Gated(), torch.ones(4, 8, requires_grad=True))
    assert [(g.fqn, g.nbytes) for g in forward.gathers] == [("up", 16 * 8 * 4), ("down", 8 * 16 * 4)]
    assert forward.reductions == ()
    assert [(r.fqn, r.nbytes, r.result) for r in backward.reductions] == [("down", 512, 128), ("up", 512, 128)]
    assert [gather.fqn for gather in backward.gathers] == ["down", "up"]
    up, down = forward.gathers
    assert up.kind == down.kind
    assert (up.kind.alpha_s, up.kind.seconds(100)) == pytest.approx((1.0, 2.0))
    found = up.kind.issue_s, up.kind.issue_s_per_byte, up.kind.copy_s_per_byte, up.kind.contention
    assert found == pytest.approx((0.5, 0.125, 0.002, 0.5))
    assert (up.kind.shard, up.prepared) == (0.25, 0)
    assert backward.reductions[0].kind.seconds(100) == pytest.approx(4.0)
    # In its own step each weight is read for the last time.
    assert [(g.first_use_slot, g.last_use_slot) for g in forward.gathers] == [
        (up.first_use_slot, up.first_use_slot),
        (down.first_use_slot, down.first_use_slot),
    ]
    assert up.first_use_slot < down.first_use_slot
    assert sum(forward.seconds) == pytest.approx(2 * 1024 + 0.512)
    # One step has the first matmul, 4 x 16, and what is fused behind it, the other the second matmul, 4 x 8.
    first = 1 - 1024.512 / (1024 / (1 - 64 / 256) + 0.512 / 0.5)
    assert forward.contention[-2:] == pytest.approx((first, 32 / 256))
    flops = 4 * 1024
    assert flops < sum(backward.seconds) < flops + 10


def test_an_all_reduce_behind_a_reduce_scatter_moves_one_part_of_it() -> None:

    @dataclass(frozen=True)
    class OfTwo(Rates):
        def collective_s(self, kind: str, ranks: Sequence[int], nbytes: int) -> float:
            assert list(ranks) == ([0, 1] if kind != "all_reduce" else [0, 2])
            return 1 + nbytes / 100

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    captured = capture(simple_fsdp(Gated(), mesh), torch.ones(4, 8))
    (kind,) = {reduction.kind for reduction in cost_graph_of(captured.backward, OfTwo()).reductions}
    assert kind.seconds(200) == pytest.approx(3.0)
    assert kind.all_reduce_after is not None
    assert kind.all_reduce_after.seconds(200) == pytest.approx(2.0)
    assert kind.channel != kind.all_reduce_after.channel


def test_memory_is_that_of_what_kernels_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot_autograd, "TANGENTS_ARE_HELD", False)
    forward, backward = cost_graphs(Gated(), torch.ones(4, 8, requires_grad=True))
    wide, out = 4 * 16 * 4, 4 * 8 * 4
    # The first matmul's result and the product are kept for backward; the output stays. A schedule adds the first
    # weight to the whole step that reads it, in which the product, which is smaller, takes its place.
    assert forward.live_bytes_in_step[-2:] == (wide, 2 * wide + out)
    assert (forward.live_bytes_at_slot[0], forward.live_bytes_at_slot[-1]) == (0, 2 * wide + out)
    # Backward starts with these and the gradient of the output, and ends with that of the input. While that of the
    # wide one is computed, it, the product's gradient and the first matmul's result are there.
    assert (backward.live_bytes_at_slot[0], backward.live_bytes_at_slot[-1]) == (2 * wide + out, out)
    assert 3 * wide in backward.live_bytes_in_step


def test_before_torch_2_13_the_gradient_of_the_output_is_held_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot_autograd, "TANGENTS_ARE_HELD", True)
    _, backward = cost_graphs(Gated(), torch.ones(4, 8, requires_grad=True))
    wide, out = 4 * 16 * 4, 4 * 8 * 4
    assert (backward.live_bytes_at_slot[0], backward.live_bytes_at_slot[-1]) == (2 * wide + out, 2 * out)
    assert 3 * wide + out in backward.live_bytes_in_step


class Repeated(nn.Module):
    """(rows, 8) to (rows, 128): a matmul, eight times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).repeat(1, 8)


def test_a_gradient_takes_memory_from_the_kernel_on_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot_autograd, "TANGENTS_ARE_HELD", False)
    _, backward = cost_graphs(Repeated(), torch.ones(4, 8))
    narrow, gradient = 4 * 16 * 4, 16 * 8 * 4
    assert [(each.nbytes, each.ready_slot) for each in backward.reductions] == [(gradient, 1)]
    # A schedule adds the gradient to the one step, at whose peak, the sum over eight, it is not there yet.
    assert backward.live_bytes_in_step == (9 * narrow - gradient,)


class Normalised(nn.Module):
    """A table's rows, normalised and scaled: one kernel, which runs when the scale has been gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(64, 8))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, numbers: Tensor) -> Tensor:
        return F.rms_norm(F.embedding(numbers, self.table), (8,), self.scale)


def test_a_weight_is_in_memory_until_the_kernel_that_its_last_reader_is_fused_into_has_run() -> None:
    captured = capture(simple_fsdp(Normalised()), torch.tensor([1, 2, 1]))
    table, scale = cost_graph_of(captured.forward, Rates()).gathers
    assert table.first_use_slot < scale.first_use_slot
    assert table.last_use_slot == scale.first_use_slot


def test_a_gradient_is_complete_before_rows_that_its_kernel_made_are_added_to_a_table() -> None:
    graph = Graph()
    rows_added_to_a_table(graph)
    put_fused_together(graph)
    costs = cost_graph_of(graph, Rates())
    scale, table = sorted(costs.reductions, key=lambda reduction: reduction.nbytes)
    assert (scale.nbytes, table.nbytes) == (4 * 4, 32 * 4 * 4)
    assert scale.ready_slot < table.ready_slot == len(costs.seconds)
    # The table is filled. Rows and their numbers are read, and rows of the table are changed.
    (put,) = filter(adds_rows, graph.nodes)
    kernels = node_costs(graph, Rates())
    square, numbers = 4 * 4 * 4, 4 * 8
    assert kernels.stored[put.all_input_nodes[0]] == table.nbytes
    assert max(costs.live_bytes_in_step) >= table.nbytes
    assert kernels.seconds[put] == pytest.approx((table.nbytes + 3 * (square + numbers)) / 1000)


def test_the_memory_of_a_large_weight_is_free_when_its_last_reader_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward reads the frozen output layer's weight, and then makes a gradient before the next weight is read."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8, bias=False), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(8, 64, bias=False).requires_grad_(False))
    captured = capture(simple_fsdp(model), torch.ones(3, 8))

    def output() -> tuple[CostGraph, Gather]:
        costs = cost_graph_of(captured.backward, Rates())
        return costs, max(costs.gathers, key=lambda gather: gather.nbytes)

    costs, weight = output()
    assert weight.nbytes == 64 * 8 * 4
    # The step reads the weight by one matmul, and nothing else is in it.
    assert costs.seconds[weight.last_use_slot] == pytest.approx(2 * 3 * 64 * 8)
    monkeypatch.setattr(cost_model, "_LARGE_WEIGHT", 64)  # it is that many times as large, and not more
    coarse, weight = output()
    assert len(coarse.seconds) == len(costs.seconds) - 1
    assert coarse.seconds[weight.last_use_slot] > 2 * 3 * 64 * 8
    assert sum(coarse.seconds) == pytest.approx(sum(costs.seconds))


class Picked(nn.Module):
    """Rows of a table, picked by number: the table's gradient is zeros with some rows added to."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(64, 8))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.table[numbers]


def test_an_operator_that_changes_part_of_its_input_works_in_the_inputs_memory() -> None:
    numbers = torch.tensor([1, 2, 1])
    captured = capture(simple_fsdp(Picked()), numbers)
    cost = node_costs(captured.backward, Rates())
    (put,) = captured.backward.find_nodes(op="call_function", target=torch.ops.aten.index_put.default)
    table = 64 * 8 * 4
    graph = cost_graph_of(captured.backward, Rates())
    assert max(graph.live_bytes_in_step) < 2 * table
    (reduction,) = graph.reductions
    assert (reduction.nbytes, reduction.copied_from, reduction.in_memory_before) == (table, None, True)
    one = ScheduledBucket((0,), reduction.ready_slot, len(graph.seconds) + 1)
    assert replay(graph, Schedule((), (one,))).peak < 2 * table
    # What is written is three rows, besides their numbers.
    assert cost.seconds[put] == pytest.approx(3 * (3 * 8 * 4 + 3 * 8) / 1000)


def test_a_gradient_is_as_large_as_its_dtype_says_until_it_is_cast_for_its_reduction() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    inputs = torch.ones(4, 8, requires_grad=True, dtype=torch.bfloat16)
    _, backward = cost_graphs(Gated(), inputs, mp_policy=policy)
    assert {(r.fqn, r.nbytes, r.copied_from) for r in backward.reductions} == {
        ("up", 16 * 8 * 4, 16 * 8 * 2),
        ("down", 16 * 8 * 4, 16 * 8 * 2),
    }
    # A matmul makes each of them before the next one reads the weight, behind which it is cast.
    assert {(r.fqn, r.ready_slot, r.waiting_steps) for r in backward.reductions} == {("down", 2, 1), ("up", 4, 1)}
    _, gated = cost_graphs(Gated(), torch.ones(4, 8, requires_grad=True))
    assert {(r.copied_from, r.waiting_steps) for r in gated.reductions} == {(None, 0)}


def test_weights_that_are_kept_outlive_forward_and_are_not_gathered_again() -> None:
    forward, backward = cost_graphs(Gated(), torch.ones(4, 8, requires_grad=True), reshard_after_forward=False)
    steps = len(forward.seconds)
    assert [gather.last_use_slot for gather in forward.gathers] == [steps, steps]
    assert backward.gathers == ()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        q = F.linear(x, self.weight)
        return F.scaled_dot_product_attention(q, q, q)


def test_attention_is_on_a_curve_of_its_own() -> None:
    forward, backward = cost_graphs(Attends(), torch.ones(1, 2, 4, 8))
    attention = 2 * 2 * (2 * 4 * 4 * 8)  # two batched matmuls for two heads
    assert sum(forward.seconds) == pytest.approx(2 * 8 * 8 * 8 + 10 * attention, rel=0.01)
    assert sum(backward.seconds) > 2 * 10 * attention


class Talks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        found = all_reduce(F.linear(x, self.weight), "sum", [0, 1, 2, 3])
        return F.linear(found, self.weight) * found


def test_collectives_that_are_no_parameters_take_their_time_and_memory() -> None:
    forward, backward = cost_graphs(Talks(), torch.ones(4, 8, requires_grad=True))
    nbytes = 4 * 8 * 4
    collective = 0.5 + 3.0 * (1 + nbytes / 100)
    product = 3 * nbytes / 1000
    assert sum(forward.seconds) == pytest.approx(2 * 2 * 4 * 8 * 8 + collective + product)
    assert sum(backward.seconds) > 4 * 2 * 4 * 8 * 8 + collective
    # What was reduced is there until the product is, and saved for backward with the second matmul's result.
    assert forward.live_bytes_at_slot[-1] == 3 * nbytes
    assert [gather.fqn for gather in forward.gathers] == ["weight"]


class TalksBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x + 1
        return F.linear(all_reduce(wide, "sum", [0, 1, 2, 3]) * 2 + wide, self.weight)


def test_pointwise_operators_around_a_collective_of_the_models_own_are_not_fused() -> None:
    forward, _ = cost_graphs(TalksBetween(), torch.ones(4, 8, requires_grad=True))
    nbytes = 4 * 8 * 4
    before, collective, behind = 2 * nbytes / 1000, 0.5 + 3.0 * (1 + nbytes / 100), 3 * nbytes / 1000
    assert forward.seconds == pytest.approx((before + collective + behind, 2 * 4 * 8 * 8))


@pytest.mark.parametrize("policy", [OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)])
def test_rows_that_do_not_divide_give_every_rank_the_same(policy: OffloadPolicy) -> None:
    from tests.ranks import fake_group

    found = []
    for rank in (0, 3):
        torch.distributed.destroy_process_group()
        with fake_group(4, rank):
            torch.manual_seed(0)
            found.append(cost_graphs(nn.Linear(6, 5), torch.ones(4, 6), offload_policy=policy))
        torch.distributed.init_process_group("fake", rank=0, world_size=4)
    assert found[0] == found[1]
    # Two rows of six are gathered from each rank, and two numbers of the bias; some ranks have to pad.
    assert {gather.fqn: gather.prepared for gather in found[0][0].gathers} == {"weight": 2 * 6 * 4, "bias": 2 * 4}
    copies = [gather.held for gather in found[0][0].gathers]
    assert sorted(copies) == ([8, 48] if isinstance(policy, CPUOffloadPolicy) else [0, 0])


def test_a_shard_that_is_cast_for_its_gather_takes_no_memory_beside_it() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    forward, _ = cost_graphs(Attends(), torch.ones(1, 2, 4, 8, dtype=torch.bfloat16), mp_policy=policy)
    (gather,) = forward.gathers
    assert (gather.nbytes, gather.prepared, gather.held) == (8 * 8 * 2, 8 * 8 * 2 // 4, 0)


def test_lengths_that_are_not_fixed_count_as_the_first_and_set_no_guard() -> None:
    inputs = torch.ones(1, 2, 4, 8, requires_grad=True)
    fixed = cost_graphs(Attends(), inputs)
    torch._dynamo.mark_dynamic(inputs, 2)  # an error if a guard fixes it
    found = cost_graphs(Attends(), inputs)
    assert found == fixed
    assert all(
        type(number) in (int, float) for graph in found for number in (*graph.seconds, *graph.live_bytes_in_step)
    )


def test_a_wire_format_is_fewer_bytes_over_the_collective_that_carries_it() -> None:
    plain = cost_graphs(Gated(), torch.ones(4, 8))
    with mock.patch("simplefsdp.compile.passes.bucket"):  # costs are those of the graph before its members are encoded
        found = cost_graphs(Gated(), torch.ones(4, 8), wire=WireFormat("int8", "int4"))
    before, after = ((*forward.gathers, *backward.reductions) for forward, backward in (plain, found))
    for wide, narrow in zip(before, after, strict=True):
        kind = narrow.kind
        assert kind.plain is not None
        assert kind.plain._replace(name=wide.kind.name) == wide.kind
        assert narrow.nbytes == wide.nbytes
        assert kind.member_s is None
    gather, reduction = found[0].gathers[0].kind, found[1].reductions[0].kind
    assert (gather.wire_format, gather.wire) == ("int8", pytest.approx((128 + 4) / 512))
    assert (reduction.wire_format, reduction.wire) == ("int4", pytest.approx((64 + 4) / 512))
    assert gather.s_per_byte == pytest.approx(plain[0].gathers[0].kind.s_per_byte * gather.wire)
    assert reduction.s_per_byte == pytest.approx(4 / 100 * reduction.wire)  # an all-to-all, by ``Rates``
    assert reduction.alpha_s == 4.0


def test_two_steps_are_two_all_to_alls_the_second_of_the_sums_of_a_node() -> None:
    wire = WireFormat(reduce="int8", between_nodes="int4")
    with mock.patch("simplefsdp.compile.passes.bucket"):
        one, two = (
            cost_graphs(Gated(), torch.ones(4, 8), wire=wire, ranks_per_node=ranks)[1].reductions[0].kind
            for ranks in (4, 2)
        )
    second = two.all_reduce_after
    assert second is not None
    assert (two.wire_formats, one.wire_formats) == (("int8", "int4"), ("int8",))
    # Inside of a node as before, but over two ranks; then half of the bytes, over the network of all four.
    assert two.s_per_byte == one.s_per_byte
    assert (one.shard, two.shard) == (1 / 4, 1 / 2)
    assert second.s_per_byte == pytest.approx(4 / 100 * (64 + 4) / 512 / 2)
    assert second.copy_s_per_byte == pytest.approx(2 / 1000 * (1 + (64 + 4) / 512) / 2 / 2)
    assert second.channel == one.channel != two.channel


def test_in_hybrid_shard_the_second_step_brings_the_sums_of_each_replica() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    wire = WireFormat(reduce="int8", between_nodes="int4")
    plain = cost_graphs(Gated(), torch.ones(4, 8), mesh=mesh)[1].reductions[0].kind
    with mock.patch("simplefsdp.compile.passes.bucket"):
        kind = cost_graphs(Gated(), torch.ones(4, 8), mesh=mesh, wire=wire)[1].reductions[0].kind
    second = kind.all_reduce_after
    assert second is not None
    assert kind.wire_formats == ("int8", "int4")
    assert kind.plain is not None
    assert kind.plain._replace(name=plain.name) == plain
    # Half of the gradient are this rank's sums, and the other replica's come beside them.
    wire_int4 = (64 + 4) / 512
    assert second.s_per_byte == pytest.approx(1 / 100 * wire_int4)
    assert second.copy_s_per_byte == pytest.approx(2 / 1000 * (1 + wire_int4) / 2 / 2)
    assert (second.received, kind.received) == (2, 1)
    assert second.channel != kind.channel

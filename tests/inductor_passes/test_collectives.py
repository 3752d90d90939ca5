"""Which collective belongs to which parameter, and the merging of repeated ones."""

import operator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import Graph, Node
from torch.utils.checkpoint import checkpoint

from inductor_passes.collectives import gathers, is_deterministic, reductions, source_chain
from inductor_passes.identify import identify
from inductor_passes.torch_compat.aot_autograd import parameter_gradients, parameter_inputs
from simplefsdp import simple_fsdp
from tests.graphs import ALL_GATHER, ALL_REDUCE, PARTITIONERS, REDUCE_SCATTER, WAIT, capture, copy, fqns, nodes
from tests.models import batch, tiny_llama
from tests.ranks import fake_group

pytestmark = [pytest.mark.usefixtures("one_of_four"), pytest.mark.compile]


def test_every_collective_of_a_llama_carries_its_fqn():
    model = simple_fsdp(tiny_llama(layers=2), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    captured = capture(model, *batch(0, 0))
    names = sorted(name for name, _ in model.named_parameters())
    for graph, target, found in (
        (captured.forward, ALL_GATHER, gathers(captured.forward)),
        (captured.backward, REDUCE_SCATTER, reductions(captured.backward)),
    ):
        assert sorted(fqn for (fqn,) in fqns(graph, target)) == names
        assert sorted(fqn for collective in found for fqn in collective.fqns) == names


def test_a_name_follows_from_the_parameter_and_not_from_position_or_module():
    class Shuffled(nn.Module):
        """Reads its weights in another order than it registers them, from a module that does not own them."""

        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(3, n, bias=False) for n in (5, 6, 7))

        def forward(self, x):
            return x @ self.c.weight.sum(0) + x @ self.a.weight.sum(0) + x @ self.b.weight.sum(0)

    captured = capture(simple_fsdp(Shuffled()), torch.zeros(2, 3))
    rows = {node.meta["simplefsdp_fqns"]: node.meta["val"].shape[0] for node in nodes(captured.forward, ALL_GATHER)}
    assert rows == {("c.weight",): 8, ("a.weight",): 8, ("b.weight",): 8}  # padded to a multiple of 4
    assert fqns(captured.forward, ALL_GATHER) == [("c.weight",), ("a.weight",), ("b.weight",)]


class Repeats(nn.Module):
    """One weight, read three times: by itself, within a checkpointed region, and through another module."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        x = checkpoint(self.first, x.relu(), use_reentrant=False)
        return x @ self.first.weight + self.second(x)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_parameter_read_several_times_is_gathered_and_reduced_once(dtype):
    model = simple_fsdp(Repeats(), mp_policy=MixedPrecisionPolicy(dtype, torch.float32 if dtype else None))
    captured = capture(model, torch.ones(2, 6))
    assert len(nodes(captured.joint, ALL_GATHER)) == len(nodes(captured.joint, REDUCE_SCATTER)) == 3
    for graph, target in (
        (captured.forward, ALL_GATHER),
        (captured.backward, ALL_GATHER),
        (captured.backward, REDUCE_SCATTER),
    ):
        assert fqns(graph, target) == [("first.weight",)]


def test_repeated_gradients_are_summed_in_their_own_dtype_before_the_one_reduction():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    captured = capture(simple_fsdp(Repeats(), mp_policy=policy), torch.ones(2, 6))
    (reduction,) = reductions(captured.backward)
    (cast,) = [node for node in (reduction.input, *reduction.input.all_input_nodes) if "_to_copy" in node.name]
    total = cast.all_input_nodes[0]
    assert total.target is torch.ops.aten.add.Tensor
    assert total.meta["val"].dtype is torch.bfloat16
    (left, right) = total.all_input_nodes
    assert torch.ops.aten.add.Tensor in (left.target, right.target), "three gradients, two additions"


def test_gathers_of_a_shard_are_one_only_if_they_give_the_same():
    captured = capture(simple_fsdp(Repeats()), torch.ones(2, 6))
    graph = captured.joint
    first, second, third = found = nodes(graph, ALL_GATHER)
    for gather, dtype in ((second, torch.float16), (third, torch.bfloat16)):
        shard, *rest = gather.args
        with graph.inserting_before(gather):
            cast = graph.call_function(torch.ops.aten._to_copy.default, (shard,), {"dtype": dtype})
        cast.meta["val"] = shard.meta["val"].to(dtype)
        gather.args = (cast, *rest)
    identify(graph, captured.params)
    assert nodes(graph, ALL_GATHER) == found
    cast.kwargs = {"dtype": torch.float16}
    third.args = (cast, 2, *rest[1:])
    identify(graph, captured.params)
    assert nodes(graph, ALL_GATHER) == found
    third.args = (cast, *rest)
    identify(graph, captured.params)
    assert nodes(graph, ALL_GATHER) == [first, second]


def test_gradients_that_are_reduced_in_different_ways_are_not_summed_before():
    captured = capture(simple_fsdp(Repeats()), torch.ones(2, 6))
    other = nodes(captured.joint, REDUCE_SCATTER)[1]
    other.args = (other.args[0], "max", *other.args[2:])
    assert identify(captured.joint, captured.params) == ["first.weight"]
    assert len(nodes(captured.joint, REDUCE_SCATTER)) == 3
    assert reductions(captured.joint) == []


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (torch.ops.aten.add.Tensor, slice(2), {"alpha": 2}),
        (torch.ops.aten.mul.Tensor, slice(2), {}),
        (torch.ops.aten.add.Tensor, slice(1), {}),
    ],
)
def test_only_a_sum_of_reductions_is_reduced_as_one(target, args, kwargs):
    captured = capture(simple_fsdp(Repeats()), torch.ones(2, 6))
    (gradient,) = parameter_gradients(captured.joint).values()
    gradient.target, gradient.kwargs = target, kwargs
    gradient.args = (*gradient.args[args], 1.0)[:2]
    assert identify(captured.joint, captured.params) == ["first.weight"]
    assert gradient in captured.joint.nodes


def test_an_inference_graph_gathers_a_repeated_parameter_once():
    model = simple_fsdp(Repeats())
    with torch.no_grad():
        captured = capture(model, torch.ones(2, 6))
    assert len(nodes(captured.joint, ALL_GATHER)) == 3
    assert fqns(captured.forward, ALL_GATHER) == [("first.weight",)]
    assert len(nodes(captured.forward, WAIT)) == 1


def test_collectives_of_the_user_are_left_alone():
    group = dist.group.WORLD.group_name

    class Gathers(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            x = torch.ops._c10d_functional.all_gather_into_tensor(x, 4, group)
            return torch.ops._c10d_functional.wait_tensor(x) @ self.weight

    captured = capture(simple_fsdp(Gathers(4, 8, bias=False)), torch.zeros(2, 4), plan="block")
    assert sorted(fqns(captured.forward, ALL_GATHER)) == [(), ("weight",)]


def test_a_frozen_parameter_has_no_reduction():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    captured = capture(simple_fsdp(model), torch.zeros(2, 4))
    assert sorted(fqns(captured.backward, REDUCE_SCATTER)) == [("1.bias",), ("1.weight",)]


def test_a_parameter_that_is_not_read_is_not_gathered():
    model = nn.Linear(4, 8)
    model.unused = nn.Parameter(torch.zeros(8))
    captured = capture(simple_fsdp(model), torch.zeros(2, 4))
    assert sorted(fqns(captured.forward, ALL_GATHER)) == [("bias",), ("weight",)]


def test_identifying_twice_changes_nothing():
    captured = capture(simple_fsdp(Repeats()), torch.ones(2, 6))
    graph = copy(captured.joint)
    identify(graph, captured.params)
    names = [node.name for node in graph.nodes]
    assert identify(graph, captured.params) == []
    assert [node.name for node in graph.nodes] == names


def test_a_gradient_that_is_not_a_reduction_is_reported():
    captured = capture(simple_fsdp(nn.Linear(4, 8)), torch.zeros(2, 4))
    graph = copy(captured.joint)
    (index, gradient) = next(iter(parameter_gradients(graph).items()))
    with graph.inserting_after(gradient):
        decayed = graph.call_function(torch.ops.aten.add.Tensor, (gradient, parameter_inputs(graph)[index][0]))
    decayed.meta = dict(gradient.meta)
    graph.output_node().replace_input_with(gradient, decayed)
    assert identify(graph, captured.params) == [captured.params[index].fqn]


def test_ignored_parameters_are_nobody_s():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    captured = capture(simple_fsdp(model, ignored_params=model[0].parameters()), torch.zeros(2, 4))
    assert sorted(fqns(captured.forward, ALL_GATHER)) == [("1.bias",), ("1.weight",)]
    assert sorted(fqns(captured.backward, REDUCE_SCATTER)) == [("1.bias",), ("1.weight",)]


def test_an_all_reduce_that_follows_belongs_to_its_reduction():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    captured = capture(simple_fsdp(nn.Linear(4, 8), mesh), torch.zeros(2, 4))
    found = reductions(captured.backward)
    assert sorted(reduction.fqns for reduction in found) == [("bias",), ("weight",)]
    for reduction in found:
        assert reduction.all_reduce_after is not None
        assert [node.target for node in reduction.steps] == [REDUCE_SCATTER, ALL_REDUCE]
        assert reduction.result is reduction.all_reduce_after.wait
        assert reduction.reduction_kind() != replace(reduction, all_reduce_after=None).reduction_kind()
        elsewhere = replace(reduction.all_reduce_after, node=reduction.node)
        assert reduction.reduction_kind() != replace(reduction, all_reduce_after=elsewhere).reduction_kind()
    assert replace(found[0], all_reduce_after=None).result is found[0].wait


def test_only_pads_casts_and_views_may_lead_from_a_shard_to_its_gather():
    dist.destroy_process_group()
    with fake_group(4, 3):  # whose shard of 5 rows is empty, and padded
        model = simple_fsdp(nn.Linear(3, 5, bias=False), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        (gather,) = gathers(capture(model, torch.ones(2, 3)).forward)
    dist.init_process_group("fake", rank=0, world_size=4)
    chain = source_chain(gather.node)
    assert [node.all_input_nodes[0] for node in chain[1:]] == chain[:-1]
    assert (chain[0].all_input_nodes[0].op, chain[-1]) == ("placeholder", gather.input)
    packets = [node.target._overloadpacket for node in chain]
    assert torch.ops.aten.constant_pad_nd in packets
    assert {torch.ops.aten._to_copy, torch.ops.prims.convert_element_type} & set(packets)
    with gather.node.graph.inserting_before(gather.node):
        other = gather.node.graph.call_function(torch.ops.aten.relu.default, (gather.input,))
    gather.node.replace_input_with(gather.input, other)
    with pytest.raises(AssertionError, match=r"relu.*: expected a pad, cast or view of a shard before its all-gather"):
        source_chain(gather.node)


def test_complex_gradients_are_reduced_by_themselves():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.real = nn.Parameter(torch.ones(8, 2))
            self.complex = nn.Parameter(torch.ones(8, dtype=torch.complex64))

        def forward(self, x):
            return (x @ self.real).sum() + (x * self.complex).abs().sum()

    kinds = {r.fqns[0]: r.reduction_kind() for r in reductions(capture(simple_fsdp(Both()), torch.ones(4, 8)).backward)}
    assert kinds["real"] != kinds["complex"]
    assert [a == b for a, b in zip(kinds["real"], kinds["complex"], strict=True)].count(False) == 1


def test_a_chain_goes_on_through_what_computes_tensors_from_nothing_but_nodes():
    aten = torch.ops.aten
    graph = Graph()
    with FakeTensorMode() as mode:
        x, y = (graph.placeholder(name) for name in "xy")
        for node in (x, y):
            node.meta["val"] = mode.from_tensor(torch.ones(4, 2))
        cases = [
            (aten.t.default, (x,), True),
            (aten.add.Tensor, (x, 1), True),
            (aten.split.Tensor, (x, 2), True),
            (aten.add.Tensor, (x, y), True),
            (aten.bernoulli.default, (x,), False),
            (ALL_GATHER, (x, 4, "0"), False),
            (aten.sym_size.int, (x, 0), False),
        ]
        for target, args, expected in cases:
            node = graph.call_function(target, args)
            node.meta["val"] = target(*(a.meta["val"] if isinstance(a, Node) else a for a in args))
            assert is_deterministic(node) is expected, target
            if target is aten.split.Tensor:
                item = graph.call_function(operator.getitem, (node, 0))
                item.meta["val"] = node.meta["val"][0]
                assert is_deterministic(item)


class UsersCasts(nn.Module):
    """Reads one weight under autocast, transposed, and as it is: other steps stand before each reduction."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
        return y.float() + self.linear.weight.t() @ x.t() @ x + x @ self.linear.weight


def test_gradients_that_the_user_cast_or_transposed_are_summed_before_the_one_reduction():
    captured = capture(simple_fsdp(UsersCasts()), torch.ones(6, 6))
    assert len(nodes(captured.joint, REDUCE_SCATTER)) == 3
    assert fqns(captured.backward, REDUCE_SCATTER) == [("linear.weight",)]
    (reduction,) = reductions(captured.backward)
    assert reduction.input.meta["val"].dtype is torch.float32


class GathersItself(nn.Linear):
    """Two gathers of the user's own, of values computed from a shard."""

    def forward(self, x):
        weight = self._parameters["weight"]
        shard, group = weight.to_local(), weight.device_mesh.get_group().group_name
        doubled, tripled = (torch.ops._c10d_functional.all_gather_into_tensor(shard * k, 4, group) for k in (2, 3))
        wait = torch.ops._c10d_functional.wait_tensor
        return super().forward(x) + wait(tripled).sum() - wait(doubled).sum()


def test_gathers_of_something_computed_from_a_shard_belong_to_the_user():
    captured = capture(simple_fsdp(GathersItself(4, 8, bias=False)), torch.zeros(2, 4))
    assert sorted(fqns(captured.forward, ALL_GATHER)) == [(), (), ("weight",)]


class Parallel(nn.Module):
    """The gradients of both biases are the same."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.a(x.relu()) + self.b(x.sin())


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("plan", ["none", "block"])
def test_parameters_with_equal_gradients_do_not_share_a_reduction(plan, partitioner):
    captured = capture(simple_fsdp(Parallel()), torch.ones(2, 6), plan=plan, partitioner=partitioner)
    reduced = [fqn for carried in fqns(captured.backward, REDUCE_SCATTER) for fqn in carried]
    assert sorted(reduced) == ["a.bias", "a.weight", "b.bias", "b.weight"]
    outputs = list(parameter_gradients(captured.backward).values())
    assert len(set(outputs)) == len(outputs) == 4

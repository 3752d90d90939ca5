"""How compiled code ends an accumulation: the last backward takes what was added up, and reduces it in its buckets."""

import copy
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from inductor_passes.ops import accumulate
from inductor_passes.ops.accumulate import ACCUMULATE, ADD_UP
from inductor_passes.ops.pack import PACK_GRADIENTS
from inductor_passes.runtime import graph_dump
from inductor_passes.scheduling.cost_model import node_costs
from simplefsdp import rehearsal, simple_fsdp
from simplefsdp.frontend import eager_resharding
from simplefsdp.frontend import gradient_accumulation as accumulation
from simplefsdp.rehearsal.systems import Parallelism, System
from simplefsdp.rehearsal.timing import TrainingRun
from simplefsdp.rehearsal.workload import Workload
from tests import graphs, zoo
from tests.compare import assert_same, lowered, vectors
from tests.models import PROFILE, batch, fsdp2, local, tiny_llama
from tests.ranks import Ranks, fake_group
from tests.watch import Watch

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_the_graph_that_ends_it_has_the_buckets_of_one_without() -> None:
    found = []
    for ends in (False, True):
        model: Any = simple_fsdp(tiny_llama(layers=1, tie_embeddings=True), mp_policy=BF16)
        if ends:
            model.set_requires_gradient_sync(False)
            model.set_requires_gradient_sync(True)
        found.append(graphs.capture(model, *batch(0, 0), plan="block"))
    plain, last = found
    for graph, expected in ((last.forward, plain.forward), (last.backward, plain.backward)):
        for target in (graphs.ALL_GATHER, graphs.REDUCE_SCATTER):
            assert graphs.fqns(graph, target) == graphs.fqns(expected, target)
    added = graphs.nodes(last.backward, ADD_UP)
    assert len(added) == len(list(model.parameters())), "a tied one is added once"
    assert not graphs.nodes(last.forward, ADD_UP)
    packed = {node for pack in graphs.nodes(last.backward, PACK_GRADIENTS) for node in pack.all_input_nodes}
    alone = [fqns for fqns in graphs.fqns(last.backward, graphs.REDUCE_SCATTER) if len(fqns) == 1]
    assert packed <= set(added)
    assert len(added) == len(packed) + len(alone)
    assert {node.meta["val"].dtype for node in added} == {torch.float32}
    cost = node_costs(last.backward, PROFILE)
    for node in added:
        nbytes, gradient = node.meta["val"].nbytes, node.all_input_nodes[0].meta["val"].nbytes
        assert cost.stored[node] == nbytes
        assert cost.seconds[node] == PROFILE.launch_s + PROFILE.memory_s(gradient + 2 * nbytes)


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_an_accumulation_that_goes_on_is_not_ended() -> None:
    model: Any = simple_fsdp(nn.Linear(8, 8))
    for sync, reductions in ((False, 0), (True, 2), (False, 0)):
        model.set_requires_gradient_sync(sync)
        captured = graphs.capture(model, torch.ones(2, 8), plan="none")
        assert len(graphs.nodes(captured.backward, graphs.REDUCE_SCATTER)) == reductions


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_the_graphs_of_an_accumulation_have_reports_of_their_own(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(graph_dump, "_reports", {})
    model: Any = simple_fsdp(nn.Linear(8, 8))
    options: Any = {"lower_with": "aot_eager", "plan": "block", "report_dir": str(tmp_path)}
    compiled = torch.compile(model, backend="simplefsdp", options=options)
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        compiled(torch.ones(2, 8)).sum().backward()
    assert len({report.folder for report in graph_dump._reports.values()}) == 2


@pytest.mark.compile
def test_a_rehearsed_step_of_micro_batches_reduces_with_the_last() -> None:
    def wrap(model: nn.Module, parallelism: Parallelism) -> Any:
        return lowered(simple_fsdp(model, parallelism.mesh), "aot_eager")

    found = []
    with rehearsal.world(4, PROFILE.network) as world:
        parallelism = Parallelism(init_device_mesh("cpu", (4,)), MixedPrecisionPolicy(), True)
        for micro_batches, ends_late in ((1, False), (3, False), (3, True)):
            torch._dynamo.reset()
            workload = Workload(
                lambda: tiny_llama(layers=1), 2, 16, 30, torch.device("cpu"), parallelism, micro_batches=micro_batches
            )
            training = TrainingRun("", System(wrap, compiled=False), workload, world, ends_late=ends_late)
            step = training.step(None)
            assert len(step.parts) == 2 * micro_batches + 1
            found.append(Counter(collective.kind for collective in step.collectives))
    assert [kinds["reduce_scatter"] for kinds in found] == [3, 3, 1]
    assert [kinds["all_gather"] for kinds in found] == [5, 15, 15]


def test_a_tied_weight_has_the_bits_of_fsdp2(two_ranks: Ranks) -> None:
    two_ranks.run(_tied)


def _tied() -> None:
    theirs = tiny_llama(layers=1, tie_embeddings=True)
    for part in (*theirs.layers, theirs):
        fully_shard(part)
    # Not in bf16, in which FSDP2 adds the gradients of both uses.
    _same_bits(simple_fsdp(tiny_llama(layers=1, tie_embeddings=True)), theirs)


@pytest.mark.slow
def test_hybrid_shards_have_the_bits_of_fsdp2(four_ranks: Ranks) -> None:
    four_ranks.run(_hybrid)


def _hybrid() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    theirs = fsdp2(tiny_llama(layers=1), BF16, mesh=mesh)
    _same_bits(simple_fsdp(tiny_llama(layers=1), mesh, mp_policy=BF16), theirs)


def _same_bits(ours: Any, theirs: Any) -> None:
    found = []
    for model, forward in ((theirs, theirs), (ours, lowered(ours, "aot_eager", fullgraph=True))):
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            forward(*batch(part, dist.get_rank())).backward()
        found.append({name: local(param.grad) for name, param in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("kind", zoo.PARAMETERS)
def test_every_kind_of_parameter_is_added_up(two_ranks: Ranks, kind: str) -> None:
    two_ranks.run(_added_up, kind)


def _added_up(kind: str) -> None:
    plain, model = zoo.build(kind), simple_fsdp(zoo.build(kind))
    forward = lowered(model, "aot_eager")
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        for rank in range(2):
            _loss(plain, vectors(step, rank)).div(2).backward()
        _loss(forward, vectors(step, dist.get_rank())).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    assert_same({name: param.grad for name, param in model.named_parameters()}, expected, 1e-5)


def _loss(forward: Any, x: Tensor) -> Tensor:
    return forward(x).square().sum()


def _twice(model: Any, forward: Any, inputs: list[Tensor]) -> None:
    """The last backward is that of two calls."""
    _loss(forward, inputs[0]).backward()
    model.set_requires_gradient_sync(True)
    (_loss(forward, inputs[1]) + _loss(forward, inputs[2])).backward()


def _the_last_without_a_part(model: Any, forward: Any, inputs: list[Tensor]) -> None:
    """The last forward leaves out a part of the model; the part's sum of earlier backwards is not left behind."""
    _loss(forward, inputs[0][:2]).backward()
    _loss(forward, inputs[1]).backward()
    model.set_requires_gradient_sync(True)
    _loss(forward, inputs[2]).backward()


def _on_again(model: Any, forward: Any, inputs: list[Tensor]) -> None:
    """Go on with an accumulation right before the backward that was to end it."""
    _loss(forward, inputs[0]).backward()
    model.set_requires_gradient_sync(True)
    loss = _loss(forward, inputs[1])
    model.set_requires_gradient_sync(False)
    loss.backward()
    model.set_requires_gradient_sync(True)
    _loss(forward, inputs[2]).backward()


def _ended_by_another(model: Any, forward: Any, inputs: list[Tensor]) -> None:
    """The backward of one of two last forwards ends the accumulation of the other."""
    _loss(forward, inputs[0]).backward()
    model.set_requires_gradient_sync(True)
    one, other = (_loss(forward, x) for x in inputs[1:])
    other.backward()
    one.backward()


def _for_its_inputs(model: Any, forward: Any, inputs: list[Tensor]) -> None:
    """A backward that gives the parameters nothing takes nothing away."""
    _loss(forward, inputs[0]).backward()
    model.set_requires_gradient_sync(True)
    x = inputs[1].clone().requires_grad_()
    torch.autograd.grad(_loss(forward, x), x)
    (_loss(forward, inputs[1]) + _loss(forward, inputs[2])).backward()


def _that_fails(model: Any, forward: Any, inputs: list[Tensor]) -> None:
    """Run a backward that fails before the parameters have their gradients."""
    _loss(forward, inputs[0]).backward()
    model.set_requires_gradient_sync(True)
    hooks = [param.register_hook(_fail) for param in model.parameters()]
    with pytest.raises(ZeroDivisionError):
        _loss(forward, inputs[1]).backward()
    for hook in hooks:
        hook.remove()
    with pytest.raises(RuntimeError, match="its gradient was added up and never reduced"):
        torch.optim.SGD(model.parameters()).step()
    (_loss(forward, inputs[1]) + _loss(forward, inputs[2])).backward()


def _fail(_gradient: Tensor) -> None:
    raise ZeroDivisionError


def _with_hooks_on_what_is_saved(model: Any, forward: Any, inputs: list[Tensor]) -> None:
    """Run a backward whose graph is given copies of what was saved, by hooks."""
    _loss(forward, inputs[0]).backward()
    _loss(forward, inputs[1]).backward()
    model.set_requires_gradient_sync(True)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        loss = _loss(forward, inputs[2])
    loss.backward()


WAYS = (
    _twice,
    _the_last_without_a_part,
    _on_again,
    _ended_by_another,
    _for_its_inputs,
    _that_fails,
    _with_hooks_on_what_is_saved,
)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "tied")) for kind in ("tied", "sometimes", "graph break")],
)
def test_nothing_is_lost_or_added_twice(two_ranks: Ranks, kind: str) -> None:
    two_ranks.run(_nothing_lost, kind)


def _nothing_lost(kind: str) -> None:
    rank = dist.get_rank()
    for way in WAYS:
        torch._dynamo.reset()
        plain, model = _build(kind), simple_fsdp(_build(kind))
        for each in range(2):
            for i, x in enumerate(_inputs(each)):
                _loss(plain, x[:2] if way is _the_last_without_a_part and i == 0 else x).div(2).backward()
        for _ in range(2):  # and once more, by the same graphs
            model.zero_grad()
            model.set_requires_gradient_sync(False)
            way(model, lowered(model, "aot_eager"), _inputs(rank))
            expected = {name: param.grad for name, param in plain.named_parameters()}
            assert_same({name: param.grad for name, param in model.named_parameters()}, expected, 1e-5)
            assert not accumulate._offers, "nothing is kept alive"
            states = [module._simple_fsdp for module in model.modules()]
            assert not any(state.proxies or state.ending for state in states)


def _build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    parts: dict[str, list[nn.Module]] = {
        "tied": [zoo.Tied()],
        "sometimes": [zoo.Sometimes()],
        "graph break": [_Breaks(), zoo.Sometimes()],
    }
    return nn.Sequential(nn.Linear(zoo.DIM, zoo.DIM), *parts[kind])


class _Breaks(zoo.Tied):
    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).tanh()
        torch._dynamo.graph_break()
        return self.down(x)


def _inputs(rank: int) -> list[Tensor]:
    return [vectors(step, rank) for step in range(3)]


class _Runs(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.function()
        return grad, None


def _in_a_backward(function: Any) -> None:
    _Runs.apply(torch.ones(1, requires_grad=True), function).backward()


def test_an_offered_sum_is_taken_once_and_restored_until_it_was_received() -> None:
    gradient = torch.arange(6.0, dtype=torch.bfloat16).view(2, 3).t()
    proxy = torch.zeros(()).expand(3, 2).requires_grad_()
    proxy.grad = torch.ones(3, 2)
    own, total = gradient.float(), gradient + torch.ones(3, 2)
    found: list[Tensor] = []

    def add(times: int = 1) -> None:
        found.extend(ADD_UP(gradient, proxy.detach()) for _ in range(times))

    def add_and_receive() -> None:
        add()
        accumulate.received(proxy)

    _in_a_backward(add)
    accumulate.offer(proxy)
    try:
        add()  # in no backward
        _in_a_backward(lambda: add(2))
        _in_a_backward(lambda: accumulate.received(proxy))  # by another than took it
        _in_a_backward(add)
        proxy.grad = torch.ones(3, 2)  # more came meanwhile
        accumulate.restore(proxy)
        assert torch.equal(proxy.grad, torch.full((3, 2), 2.0))
        _in_a_backward(add_and_receive)
        _in_a_backward(add)
    finally:
        accumulate.withdraw(proxy)
    expected = [own, own, total, own, total, total + 1, own]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert all(each.is_contiguous() for each in found)
    assert proxy.grad is None
    torch.library.opcheck(ADD_UP, (gradient, proxy.detach()))


def test_gradients_are_added_to_the_sum_of_a_receiver_or_of_a_copy_of_it() -> None:
    proxy = torch.zeros((), dtype=torch.float32).expand(3, 2).requires_grad_()
    other = torch.zeros((), dtype=torch.float32).expand(3, 2).requires_grad_()
    receiver, its_twin = accumulate.receiver_of(proxy), accumulate.receiver_of(other)
    gradient = torch.arange(6.0, dtype=torch.bfloat16).view(2, 3).t()

    class Adds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, leaf: Tensor, fails: bool) -> Tensor:
            ctx.leaf, ctx.fails = leaf.detach().clone(), fails
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            zero = ACCUMULATE(gradient, ctx.leaf, torch.float32)
            if ctx.fails:
                _fail(grad)
            return grad, zero, None

    x = torch.ones(1, requires_grad=True)
    for leaf in (receiver, receiver, its_twin):
        Adds.apply(x, leaf, False).backward()
    assert proxy.grad is not None
    assert other.grad is not None
    assert torch.equal(proxy.grad, 2 * gradient.float())
    assert proxy.grad.is_contiguous()
    assert torch.equal(other.grad, gradient.float())
    torch.autograd.grad(Adds.apply(x, receiver, False), x)
    assert torch.equal(proxy.grad, 2 * gradient.float()), "a backward that is not asked for it adds nothing"
    with pytest.raises(ZeroDivisionError):
        Adds.apply(x, receiver, True).backward()
    with pytest.raises(RuntimeError, match="had added to the sums of 1 parameters in a gradient accumulation"):
        accumulate.check_complete()
    assert proxy.grad is None
    assert torch.equal(other.grad, gradient.float()), "only the sums that it had added to are gone"
    accumulate.check_complete()
    Adds.apply(x, receiver, False).backward()
    assert torch.equal(proxy.grad, gradient.float())
    with pytest.raises(ZeroDivisionError):
        Adds.apply(x, receiver, True).backward()
    Adds.apply(x, its_twin, False).backward()
    assert torch.equal(other.grad, 2 * gradient.float()), "a sum that is complete goes on"
    with pytest.raises(RuntimeError, match="go back to the first micro-batch of the step"):
        Adds.apply(x, receiver, False).backward()
    accumulate.check_complete()
    Adds.apply(x, receiver, False).backward()
    with pytest.raises(ZeroDivisionError):
        Adds.apply(x, receiver, True).backward()
    with pytest.raises(RuntimeError, match="go back to the first micro-batch of the step"):
        ADD_UP(gradient, proxy.detach())
    torch.library.opcheck(ACCUMULATE, (gradient, receiver.detach(), torch.float32))
    number = int(receiver)
    assert number in accumulate._sums
    del receiver, leaf
    assert number not in accumulate._sums, "a sum lives as long as its receiver"


def test_a_copy_of_a_model_adds_to_sums_of_its_own() -> None:
    with fake_group(2):
        model: Any = simple_fsdp(nn.Linear(4, 4))
        model.set_requires_gradient_sync(False)
        twin = copy.deepcopy(model)
        own, its = model._simple_fsdp.receivers, twin._simple_fsdp.receivers
        assert set(own) == set(its) == {"weight", "bias"}
        assert not {*map(int, own.values())} & {*map(int, its.values())}


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_a_backward_that_adds_up_is_compiled_once_for_equal_blocks(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model: Any = simple_fsdp(tiny_llama(layers=4))
    model.set_requires_gradient_sync(False)
    options: Any = {"plan": "block", "report_dir": str(tmp_path)}
    torch.compile(model, backend="simplefsdp", options=options)(*batch(0, 0)).backward()
    (bodies,) = tmp_path.glob("*/backward_bodies.txt")
    # One body for a block: nothing ends a run where a gradient is added.
    assert re.match(r"compiled once: 7\d operators called 3 times; compiled", bodies.read_text())


def test_a_compiled_part_of_an_eager_model_reduces_its_own_in_its_graph(two_ranks: Ranks) -> None:
    two_ranks.run(_a_part)


def _a_part() -> None:
    model: Any = simple_fsdp(nn.Sequential(nn.Linear(zoo.DIM, zoo.DIM), zoo.Tied()))
    model[1].compile(backend="simplefsdp", options={"lower_with": "aot_eager"})
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        loss = _loss(model, vectors(0, 0))
        with Watch() as watch:
            loss.backward()
    assert watch.counts["reduce_scatter_tensor_coalesced"] == 1, "what is eager"
    assert watch.counts["reduce_scatter_tensor"] > 0


class _Checkpointed(nn.Module):
    """A module whose compiled part is called again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(zoo.DIM, zoo.DIM), zoo.Tied()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=False)


def test_a_checkpoint_calls_again_what_it_called_whatever_is_set_by_then(two_ranks: Ranks) -> None:
    two_ranks.run(_called_again)


def _called_again() -> None:
    torch.manual_seed(0)
    plain, rank = _Checkpointed(), dist.get_rank()
    for step in range(5):
        for each in range(2):
            _loss(plain, vectors(step, each)).div(2).backward()
    torch.manual_seed(0)
    model: Any = simple_fsdp(_Checkpointed())
    model.second.compile(backend="simplefsdp", options={"lower_with": "aot_eager"})
    for _ in range(2):
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        _loss(model, vectors(0, rank)).backward()
        late = _loss(model, vectors(1, rank))
        model.set_requires_gradient_sync(True)
        last, after = (_loss(model, vectors(step, rank)) for step in (2, 3))
        for loss in (late, last, after):
            loss.backward()
        model.set_requires_gradient_sync(False)
        model.set_requires_gradient_sync(True)
        goes_on = _loss(model, vectors(4, rank))
        model.set_requires_gradient_sync(False)
        goes_on.backward()
        accumulation.reduce_now(accumulation.sharded_attributes(model))
        assert not eager_resharding.checkpoint.is_recomputing, "outside of all calls"
        expected = {name: param.grad for name, param in plain.named_parameters()}
        assert_same({name: param.grad for name, param in model.named_parameters()}, expected, 1e-5)

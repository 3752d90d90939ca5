"""Shards, gradients and the optimizer's state on CPU (``CPUOffloadPolicy``).

On a mesh of CPUs everything is done as on one of GPUs, copies included, and values are what they are without. On a mesh
of ``meta`` devices there are no values, but whatever mixes devices fails.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.fx import Graph

from inductor_passes.ops.offload import TO_DEVICE, TO_HOST
from inductor_passes.scheduling.cost_model import cost_graph_of, node_costs
from inductor_passes.torch_compat.dtensor import dtensor
from simplefsdp import clip_grad_norm_, sharded_init, simple_fsdp, step_on_shards
from simplefsdp.analysis.prediction import step_state
from tests import graphs
from tests.compare import lowered
from tests.models import PROFILE, batch, fsdp2, local, tiny_llama, train
from tests.ranks import Ranks, fake_group

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OFFLOAD = CPUOffloadPolicy()
CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(
    ("lowering", "mode"),
    [
        ("eager", "fully_shard"),
        ("eager", "replicate"),
        pytest.param("aot_eager", "fully_shard", marks=pytest.mark.slow),
        ("inductor", "fully_shard"),
    ],
)
def test_training_has_the_bits_of_training_without(two_ranks: Ranks, lowering: str, mode: str) -> None:
    two_ranks.run(_train, lowering, mode)


@pytest.mark.slow
def test_hybrid_shards_have_them_too(four_ranks: Ranks) -> None:
    four_ranks.run(_train, "aot_eager", "hybrid_shard")


def _train(lowering: str, mode: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2)) if mode == "hybrid_shard" else None
    found = []
    for policy in (OffloadPolicy(), OFFLOAD):
        torch._dynamo.reset()
        model = simple_fsdp(tiny_llama(ffn_dim=9, layers=2), mesh, mode=mode, mp_policy=BF16, offload_policy=policy)
        found.append(train(model, lowered(model, lowering, fullgraph=True), 3, dist.get_rank()))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("lowering", ["eager", pytest.param("auto", marks=pytest.mark.slow)])
def test_accumulated_and_clipped_it_has_them_too(two_ranks: Ranks, lowering: str) -> None:
    two_ranks.run(_accumulate, lowering)


def _accumulate(lowering: str) -> None:
    found = []
    for policy in (None, OFFLOAD):
        model = simple_fsdp(tiny_llama(), mp_policy=BF16, offload_policy=policy)
        forward = lowered(model, lowering)
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            forward(*batch(part, dist.get_rank())).backward()
        norm = clip_grad_norm_(model.parameters(), 0.1)
        found.append([norm, *(local(param.grad) for param in model.parameters())])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    monkeypatch.setattr(torch, "meta", torch.cpu, raising=False)  # DTensor asks it how many devices there are
    with fake_group(4):
        yield init_device_mesh("meta", (4,))


def offloaded(mesh: DeviceMesh, **kwargs: Any) -> Any:
    return simple_fsdp(tiny_llama(), mesh, mp_policy=BF16, offload_policy=OFFLOAD, **kwargs)


def tokens() -> Tensor:
    return batch(0, 0)[0].to(META)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("lowering", "accumulates"),
    [
        ("eager", False),
        ("eager", True),
        pytest.param("aot_eager", False, marks=pytest.mark.slow),
        ("aot_eager", True),
    ],
)
def test_a_step_computes_on_the_device_of_the_mesh_and_keeps_nothing_there(
    mesh: DeviceMesh, lowering: str, accumulates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether another rank has a gradient is a value, which a meta tensor has not.
    monkeypatch.setattr("simplefsdp.frontend.gradient_accumulation._on_any_rank", lambda members: [True] * len(members))
    model = offloaded(mesh)
    assert {buffer.device for buffer in model.buffers()} == {META}
    forward = lowered(model, lowering)
    optimizer = step_on_shards(torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        for last in (False, True) if accumulates else (True,):
            model.set_requires_gradient_sync(last)
            logits = forward(tokens())
            assert logits.device == META
            logits.square().mean().backward()
        gradients = [param.grad for param in model.parameters()]
        assert {gradient._local_tensor.device for gradient in gradients} == {CPU}
        optimizer.step()
        optimizer.zero_grad()
    assert {state[name].device for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")} == {CPU}
    assert {param._local_tensor.device for param in model.parameters()} == {CPU}


def test_weights_that_are_read_outside_of_forward_are_there_too(mesh: DeviceMesh) -> None:
    model = simple_fsdp(nn.Linear(4, 0), mesh, offload_policy=OFFLOAD)
    assert model.weight.device == CPU
    model.unshard()
    assert model.weight.device == META
    assert model(torch.ones(2, 4, device=META)).shape == (2, 0)


@pytest.mark.compile
def test_each_shard_is_copied_for_its_gather_and_each_gradient_behind_its_reduction(mesh: DeviceMesh) -> None:
    captured = graphs.capture(offloaded(mesh), tokens(), plan="block")
    parameters = len(list(tiny_llama().parameters()))
    assert len(graphs.nodes(captured.forward, TO_DEVICE)) == parameters
    assert len(graphs.nodes(captured.backward, TO_HOST)) == parameters
    for graph in (captured.forward, captured.backward):
        _is_copied_where_it_belongs(graph)


def _is_copied_where_it_belongs(graph: Graph) -> None:
    computed: list[int] = []  # matmuls before each node
    at = {}
    for node in graph.nodes:
        at[node] = len(computed)
        if "mm" in str(node.target):
            computed.append(1)
    assert computed
    for gather in graphs.nodes(graph, *graphs.GATHERS):
        copies = [node for node in _above(gather) if node.target is TO_DEVICE]
        assert copies
        assert {at[each] for each in copies} == {at[gather]}
    for back in graphs.nodes(graph, TO_HOST):
        (wait,) = [node for node in _above(back) if node.target is graphs.WAIT][:1]
        assert at[back] == at[wait]


def _above(node: Any) -> list[Any]:
    """The nodes that lead to it, up to the first collective and the wait for it."""
    found = []
    for source in node.all_input_nodes:
        found.append(source)
        if source.target is not graphs.WAIT:
            found += _above(source)
    return found


@pytest.mark.compile
@pytest.mark.parametrize("reshard", [True, False])
def test_a_whole_copy_is_freed_and_made_again_unless_it_is_to_stay(mesh: DeviceMesh, reshard: bool) -> None:
    model = offloaded(mesh, mode="replicate", reshard_after_forward=reshard)
    captured = graphs.capture(model, tokens(), plan="none")
    parameters = len(list(model.parameters()))
    assert len(graphs.nodes(captured.forward, TO_DEVICE)) == parameters
    again = graphs.nodes(captured.backward, TO_DEVICE)
    saved = graphs.whole_weights_among_outputs(captured.forward)
    # An embedding's backward does not need its weight.
    assert (len(again), len(saved)) == ((parameters - 1, 0) if reshard else (0, parameters - 1))
    if again:
        copied = node_costs(captured.backward, PROFILE).stored
        assert {node: copied.get(node) for node in again} == {node: node.meta["val"].nbytes for node in again}


@pytest.mark.compile
def test_offloaded_shards_take_no_memory_of_the_device(mesh: DeviceMesh) -> None:
    on_device = simple_fsdp(tiny_llama(), init_device_mesh("cpu", (4,)), mp_policy=BF16)
    states, results, peaks = [], [], []
    for model, inputs in ((on_device, batch(0, 0)[0]), (offloaded(mesh), tokens())):
        states.append(step_state((p.simple_fsdp_info, p.dtype, True) for p in model.parameters()))
        captured = graphs.capture(model, inputs, plan="none")
        found = cost_graph_of(captured.backward, PROFILE, {node.name for node in captured.forward.nodes})
        results.append(sum(reduction.result for reduction in found.reductions))
        peaks.append(sum(gather.prepared for gather in found.gathers))
    assert states[0].resident_bytes == 3 * results[0] > 0
    assert states[0].gradient_bytes == results[0]
    assert states[1] == states[0]._replace(resident_bytes=0, updated_bytes=0, gradient_bytes=0)
    assert results[1] == 0
    assert peaks[1] == peaks[0] > 0


def test_moving_the_model_leaves_shards_and_gradients_on_cpu() -> None:
    """``Module.to`` applies such a function through ``_apply``; torch without CUDA has no device to move to."""

    def to_gpu(tensor: Any) -> Tensor:
        if not isinstance(tensor, DTensor):
            return torch.empty(tensor.shape, device="cuda")
        moved = torch.empty(tensor._local_tensor.shape, device="cuda")
        return dtensor(moved, tensor.device_mesh, tensor.placements, tensor.shape)

    with fake_group(4):
        mesh = init_device_mesh("cpu", (4,))
        mesh._device_type = "cuda"
        model = simple_fsdp(nn.Linear(8, 8), mesh, offload_policy=OFFLOAD)
        model.register_buffer("scale", torch.ones(2))
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        with FakeTensorMode():
            model._apply(to_gpu)
        assert model.scale.device.type == "cuda"
        for param in model.parameters():
            assert local(param).device == CPU
            assert local(param.grad).device == CPU


def test_a_shard_on_another_device_cannot_be_assigned() -> None:
    with fake_group(4):
        mesh = init_device_mesh("cpu", (4,))
        mesh._device_type = "cuda"
        model = simple_fsdp(nn.Linear(8, 8), mesh, offload_policy=OFFLOAD)
        with FakeTensorMode():
            on_gpu = dtensor(torch.empty(2, 8, device="cuda"), mesh, (Shard(0),), model.weight.shape)
            refused = r"weight: .* of shape \(8, 8\) placed as .* on cuda was assigned .* placed as .* on cpu\."
            with pytest.raises(RuntimeError, match=refused):
                model.weight = nn.Parameter(on_gpu)


def test_made_on_meta_it_is_initialised_and_loaded_on_cpu() -> None:
    with fake_group(4):
        torch.manual_seed(0)
        whole = nn.Linear(8, 8)
        for load in (False, True):
            with torch.device("meta"):
                model = simple_fsdp(nn.Linear(8, 8), init_device_mesh("cpu", (4,)), offload_policy=OFFLOAD)
            if load:
                model.load_state_dict(whole.state_dict(), assign=True)
            else:
                model.to_empty(device="cpu")
                torch.manual_seed(0)
                with sharded_init():
                    model.reset_parameters()
            weight: Any = model.weight
            assert weight.simple_fsdp_info.communication.device == "cpu"
            assert torch.equal(weight._local_tensor, whole.weight[:2])


def test_loaded_by_assignment_a_shard_stays_on_cpu(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = simple_fsdp(nn.Linear(8, 8), mesh, offload_policy=OFFLOAD)
    model.load_state_dict(nn.Linear(8, 8).state_dict(), assign=True)
    assert model.weight.device == CPU


def test_norms_are_reduced_on_the_device_of_the_mesh(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reduced(Exception):
        pass

    def stop(tensor: Tensor, *_: Any) -> NoReturn:
        raise Reduced(tensor.device)

    monkeypatch.setattr(dist, "all_reduce", stop)
    model = offloaded(mesh)
    model(tokens()).square().mean().backward()
    with pytest.raises(Reduced, match="meta"):
        clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("first", ["sharded", "whole, on cpu"])
def test_norms_are_reduced_there_whatever_comes_first(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    devices = []
    monkeypatch.setattr(
        "simplefsdp.training.clip_grad._norm", lambda _found, _order, _foreach, device: devices.append(device)
    )
    params = [nn.Parameter(torch.ones(1)), *offloaded(mesh).parameters()]
    with pytest.raises(TypeError):  # as there is no norm
        clip_grad_norm_(params if first == "whole, on cpu" else params[::-1], 1.0)
    assert devices == [META]


def test_a_buffer_that_modules_share_stays_one(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        layer.register_buffer("cache", model[0]._buffers.get("cache", torch.ones(3)))
    simple_fsdp(model, mesh, offload_policy=OFFLOAD)
    assert model[0].cache is model[1].cache
    assert model[0].cache.device == META


def test_a_copy_of_the_model_is_offloaded_alike(mesh: DeviceMesh) -> None:
    model = copy.deepcopy(offloaded(mesh))
    model(tokens()).square().mean().backward()
    assert {param.grad._local_tensor.device for param in model.parameters()} == {CPU}


def test_second_derivatives_of_whole_gradients(two_ranks: Ranks) -> None:
    two_ranks.run(_second_derivatives)


def _second_derivatives() -> None:
    found = []
    for policy in (None, OFFLOAD):
        torch.manual_seed(0)
        model: Any = simple_fsdp(nn.Linear(4, 4), offload_policy=policy)
        loss = model(torch.ones(2, 4)).square().sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(gradient.full_tensor().square().sum() for gradient in gradients).backward()
        found.append([local(param.grad) for param in model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_an_offload_policy_of_another_type_is_refused(mesh: DeviceMesh) -> None:
    for wrong, name in ((CPUOffloadPolicy, "CPUOffloadPolicy"), (True, "bool")):
        with pytest.raises(TypeError, match=f"offload_policy: expected .*CPUOffloadPolicy or None, found .*{name}"):
            simple_fsdp(nn.Linear(4, 4), mesh, offload_policy=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight: found on device 'cpu', but mesh is on 'meta'"):
        simple_fsdp(nn.Linear(4, 4), mesh, offload_policy=OffloadPolicy())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("lowering", ["eager", "aot_eager", "inductor"])
def test_on_a_gpu_training_is_that_of_fsdp2(lowering: str, pinned: bool) -> None:
    policy = CPUOffloadPolicy(pin_memory=pinned)
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        theirs = fsdp2(tiny_llama(), BF16, mesh=mesh, offload_policy=policy)
        ours = simple_fsdp(tiny_llama(), mesh, mp_policy=BF16, offload_policy=policy)
        assert all(param._local_tensor.is_pinned() == pinned for param in _sharded(ours))
        forward = lowered(ours, lowering)
        losses, norms = [], []
        for model, call in ((theirs, theirs), (ours, forward)):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(3):
                loss = call(*(each.cuda() for each in batch(step, 0)))
                loss.backward()
                norms.append(clip_grad_norm_(model.parameters(), 0.1).item())
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        tolerance = 1e-3 if lowering == "inductor" else 0
        assert losses[3:] == pytest.approx(losses[:3], rel=tolerance, abs=tolerance)
        assert all(map(math.isfinite, norms))
        assert all(param._local_tensor.device == CPU for param in _sharded(ours.to("cuda")))
    finally:
        dist.destroy_process_group()


def _sharded(model: nn.Module) -> list[Any]:
    return list(model.parameters())

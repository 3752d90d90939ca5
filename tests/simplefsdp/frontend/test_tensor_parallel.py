"""Tensor parallelism first, then ``simple_fsdp`` over the rest of the mesh: as FSDP2 does it, to the bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

from inductor_passes.collectives import FQNS
from inductor_passes.runtime.record import is_collective
from inductor_passes.torch_compat.dtensor import REDUCES_IN_OWN_DTYPE
from simplefsdp import rehearsal, sharded_init, simple_fsdp
from simplefsdp.frontend import eager_resharding
from simplefsdp.models import llama
from tests.compare import EVERY_LOWERING, lowered, whole
from tests.graphs import capture
from tests.models import PROFILE, batch, fsdp2, local, tiny_llama
from tests.ranks import Ranks

FP32, BF16 = MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Branch(nn.Module):
    """7 channels, on two ranks 4 and 3."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.up(self.norm(x)).relu())


def branches(tp: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Branch(), Branch())
    for branch in model.children():
        parallelize_module(branch, tp, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    return model


def parallel_llama(tp: DeviceMesh, loss_parallel: bool = False) -> llama.Llama:
    model = tiny_llama(layers=2)
    model.parallelize(tp, loss_parallel)
    return model


def mesh_of(*sizes: int) -> DeviceMesh:
    names = ("replicate", "shard", "tp") if len(sizes) == 3 else ("dp", "tp")
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def equal_to(
    reference: nn.Module, model: nn.Module, forward: Any, inputs: Any, rank: int, tolerance: float = 0.0
) -> None:
    """Parameters, their layout, losses and gradients of AdamW steps, bitwise; with a tolerance, only the losses."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (reference, model)]
    for step in range(3):
        losses = [f(*inputs(step, rank)) for f in (reference, forward)]
        for loss in losses:
            loss.square().mean().backward()
        pairs = {"loss": (losses[1].detach(), losses[0].detach())}
        for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            for what, a, b in (("", one, other), (".grad", one.grad, other.grad)):
                assert isinstance(a, DTensor)
                assert isinstance(b, DTensor)
                assert (a.placements, a.shape) == (b.placements, b.shape), name
                pairs[name + what] = a.to_local().detach(), b.to_local().detach()
        if tolerance:
            torch.testing.assert_close(*pairs["loss"], rtol=tolerance, atol=0)
        for name, (found, expected) in pairs.items():
            assert tolerance or torch.equal(found, expected), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def vectors(step: int, rank: int) -> tuple[Tensor]:
    return (torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(100 * step + rank)),)


@pytest.mark.parametrize(
    ("policy", "lowering"),
    [
        *(pytest.param(FP32, *each.values, marks=each.marks) for each in EVERY_LOWERING),
        (BF16, "eager"),
        pytest.param(BF16, "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_a_sequence_parallel_llama_trains_bitwise_as_with_fsdp2(
    four_ranks: Ranks, policy: MixedPrecisionPolicy, lowering: str
) -> None:
    four_ranks.run(_llama, policy, lowering)


def _llama(policy: MixedPrecisionPolicy, lowering: str) -> None:
    mesh = mesh_of(2, 2)
    reference, model = (parallel_llama(mesh["tp"]) for _ in range(2))
    fsdp2(reference, policy, mesh=mesh["dp"])
    simple_fsdp(model, mesh["dp"], mp_policy=policy)
    # From 2.15 on FSDP2 sums the norms' gradients over tp in reduce_dtype, and no longer in their own.
    bitwise = lowering != "inductor" and (policy == FP32 or not REDUCES_IN_OWN_DTYPE)
    tolerance = 0.0 if bitwise else 1e-3 if policy == FP32 else 2e-2
    forward = lowered(model, lowering, fullgraph=True)
    equal_to(reference, model, forward, batch, mesh["dp"].get_local_rank(), tolerance)


@pytest.mark.parametrize("lowering", ["eager", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_loss_by_parts_of_the_vocabulary_trains_bitwise_as_with_fsdp2(four_ranks: Ranks, lowering: str) -> None:
    """Inside of the model, and so of the graph."""
    four_ranks.run(_loss_parallel, lowering)


def _loss_parallel(lowering: str) -> None:
    mesh = mesh_of(2, 2)
    reference, model = (parallel_llama(mesh["tp"], loss_parallel=True) for _ in range(2))
    fsdp2(reference, FP32, mesh=mesh["dp"])
    simple_fsdp(model, mesh["dp"])
    forward = lowered(model, lowering, fullgraph=True)
    with loss_parallel():
        equal_to(
            reference, model, forward, batch, mesh["dp"].get_local_rank(), tolerance=1e-3 * (lowering == "inductor")
        )
    (logits,) = {model(*batch(0, 0)[:1]).placements}
    assert logits == (Shard(2),)


@pytest.mark.parametrize("lowering", ["eager", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_parallel_loss_outside_of_the_model_trains_bitwise_as_with_fsdp2(four_ranks: Ranks, lowering: str) -> None:
    """Outside of the model, and so of the graph, which gives and takes parts of them."""
    four_ranks.run(_loss_parallel_outside, lowering)


def _loss_parallel_outside(lowering: str) -> None:
    mesh = mesh_of(2, 2)
    reference, model = (parallel_llama(mesh["tp"], loss_parallel=True) for _ in range(2))
    fsdp2(reference, FP32, mesh=mesh["dp"])
    forward = lowered(simple_fsdp(model, mesh["dp"]), lowering, fullgraph=True)
    tokens, targets = batch(0, mesh["dp"].get_local_rank())
    losses = []
    for call in (reference, forward):
        with loss_parallel():
            logits = call(tokens)
            assert logits.placements == (Shard(2),)
            losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
            losses[-1].backward()
    assert torch.equal(*map(whole, losses))
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(local(one.grad), local(other.grad)), name


@pytest.mark.compile
def test_no_rank_has_whole_logits_where_the_loss_is_parallel() -> None:
    with rehearsal.world(8, PROFILE.network), loss_parallel():
        mesh = mesh_of(4, 2)
        shapes = {}
        for parts in (False, True):
            model = simple_fsdp(parallel_llama(mesh["tp"], parts), mesh["dp"])
            joint = capture(model, *batch(0, 0), plan="block").joint
            shapes[parts] = {
                tuple(node.meta["val"].shape) for node in joint.nodes if hasattr(node.meta.get("val"), "shape")
            }
    assert (32, 30) in shapes[False]
    assert (32, 30) not in shapes[True]
    assert (32, 15) in shapes[True]


@pytest.mark.slow
def test_a_tensor_parallel_model_trains_as_a_single_process(four_ranks: Ranks) -> None:
    four_ranks.run(_single)


def _single() -> None:
    mesh = mesh_of(2, 2)
    plain = tiny_llama(layers=2)
    model = simple_fsdp(parallel_llama(mesh["tp"]), mesh["dp"])
    forward = lowered(model, "aot_eager")
    for step in range(2):
        batches = [batch(step, rank) for rank in range(2)]
        tokens, targets = zip(*batches, strict=True)
        plain(torch.cat(tokens), torch.cat(targets)).backward()
        forward(*batches[mesh["dp"].get_local_rank()]).backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert param.grad is not None
        torch.testing.assert_close(whole(param.grad), other.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1, 2)], ids=["fully", "hybrid"])
def test_uneven_parts_of_uneven_parts_train_bitwise_as_with_fsdp2(
    four_ranks: Ranks, sizes: tuple[int, ...], lowering: str
) -> None:
    four_ranks.run(_uneven, sizes, lowering)


def _uneven(sizes: tuple[int, ...], lowering: str) -> None:
    mesh = mesh_of(*sizes)
    data, rank = (
        (mesh["dp"], mesh["dp"].get_local_rank())
        if len(sizes) == 2
        else (mesh["replicate", "shard"], mesh["replicate"].get_local_rank())
    )
    reference, model = branches(mesh["tp"]), branches(mesh["tp"])
    for part in (*reference.children(), reference):
        fully_shard(part, mesh=data)
    simple_fsdp(model, data)
    equal_to(reference, model, lowered(model, lowering, fullgraph=True), vectors, rank)


@pytest.mark.parametrize("lowering", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_gradients_are_added_up_without_communication_over_the_data_parallel_ranks(
    four_ranks: Ranks, lowering: str
) -> None:
    four_ranks.run(_accumulate, lowering)


def _accumulate(lowering: str) -> None:
    mesh = mesh_of(2, 2)
    models: list[Any] = [parallel_llama(mesh["tp"]) for _ in range(2)]
    fsdp2(models[0], FP32, mesh=mesh["dp"])
    simple_fsdp(models[1], mesh["dp"])
    for model, forward in zip(models, (models[0], lowered(models[1], lowering)), strict=True):
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            forward(*batch(step, mesh["dp"].get_local_rank())).backward()
    for param, other in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(param.grad.to_local(), other.grad.to_local())


@pytest.mark.compile
@pytest.mark.parametrize("plan", ["block", "auto"])
def test_its_own_collectives_are_left_where_they_are(plan: str) -> None:
    with rehearsal.world(8, PROFILE.network):
        mesh = mesh_of(4, 2)
        groups = {name: mesh[name].get_group().group_name for name in ("dp", "tp")}
        model = simple_fsdp(parallel_llama(mesh["tp"]), mesh["dp"])
        captured = capture(model, *batch(0, 0), plan=plan, profile=PROFILE)

    def those_of(graph: Any, group: str) -> list[Any]:
        return [node for node in graph.nodes if is_collective(node) and node.args[-1] == groups[group]]

    own, after = those_of(captured.joint, "tp"), []
    for graph in (captured.forward, captured.backward):
        after += those_of(graph, "tp")
        assert all(FQNS in node.meta for node in those_of(graph, "dp"))
    assert not any(FQNS in node.meta for node in after)
    assert len(own) >= 12
    # Recomputed ones are there twice; the others as often and in the same order as before.
    assert {str(node.target) for node in own} == {str(node.target) for node in after}
    parameters = len(list(model.parameters()))
    assert len(those_of(captured.forward, "dp")) < parameters
    assert {fqn for node in those_of(captured.backward, "dp") for fqn in node.meta[FQNS]} == {
        name for name, _ in model.named_parameters()
    }


@pytest.mark.compile
def test_gradients_summed_over_both_meshes_are_reduced_over_both() -> None:
    """In a model that is replicated over one dimension, the norms' gradients are all-reduced over ``tp``, then ``dp``:
    the first is the model's own."""
    with rehearsal.world(8, PROFILE.network):
        mesh = mesh_of(4, 2)
        tp = mesh["tp"].get_group().group_name
        model = simple_fsdp(parallel_llama(mesh["tp"]), mesh["dp"], mode="replicate")
        backward = capture(model, *batch(0, 0), plan="block").backward
    own = [node for node in backward.nodes if is_collective(node) and node.args[-1] == tp]
    assert len([node for node in own if "all_reduce" in str(node.target)]) >= 5
    assert not any(FQNS in node.meta for node in own)
    reduced = [fqn for node in backward.nodes if is_collective(node) for fqn in node.meta.get(FQNS, ())]
    assert sorted(reduced) == sorted(name for name, _ in model.named_parameters())


def test_full_weights_are_freed_between_forward_and_backward() -> None:
    with rehearsal.world(8, PROFILE.network):
        mesh = mesh_of(4, 2)
        model = simple_fsdp(parallel_llama(mesh["tp"]), mesh["dp"])
        sizes = {param.numel() // 2 for param in model.parameters() if param.ndim == 2}
        saved: list[int] = []
        original = eager_resharding._pack

        def pack(storages: Any, tensor: Tensor) -> Any:
            packed = original(storages, tensor)
            local = packed._local_tensor if isinstance(packed, DTensor) else packed
            if isinstance(local, Tensor) and local.ndim == 2:
                saved.append(local.numel())
            return packed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(eager_resharding, "_pack", pack)
            model(*batch(0, 0)).backward()
    assert saved
    assert sizes.isdisjoint(saved)


def test_whole_state_dicts_load_and_shards_are_drawn_as_the_whole(four_ranks: Ranks) -> None:
    four_ranks.run(_load)


def _load() -> None:
    mesh = mesh_of(2, 2)
    plain = tiny_llama(layers=2)
    torch.manual_seed(1)
    plain.reset_parameters()
    model = simple_fsdp(parallel_llama(mesh["tp"]), mesh["dp"])
    model.load_state_dict(plain.state_dict())
    expected = plain.state_dict()
    for name, param in model.named_parameters():
        assert torch.equal(whole(param), expected[name]), name
    with torch.device("meta"):
        model = tiny_llama(layers=2)
    model.parallelize(mesh["tp"])
    simple_fsdp(model, mesh["dp"]).to_empty(device="cpu")
    torch.manual_seed(1)
    with sharded_init():
        model.reset_parameters()
    for name, param in model.named_parameters():
        assert torch.equal(whole(param), expected[name]), name


@pytest.mark.usefixtures("one_of_four")
def test_meshes_that_do_not_fit_together_are_named() -> None:
    mesh = mesh_of(2, 2)
    model = branches(mesh["tp"])
    with pytest.raises(
        ValueError, match=r"0\.up\.weight: is a DTensor over dimension 'tp' that simple_fsdp is to shard"
    ):
        simple_fsdp(model, mesh["tp"])
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    with pytest.raises(
        ValueError, match=r"0\.up\.weight: is a DTensor over .* which is no sibling of simple_fsdp's mesh"
    ):
        simple_fsdp(model, other["y"])
    with pytest.raises(ValueError, match="no sibling of simple_fsdp's mesh"):
        simple_fsdp(model)
    with pytest.raises(ValueError, match="kv_heads = 2 cannot be dealt evenly to 4 ranks"):
        tiny_llama().parallelize(init_device_mesh("cpu", (4,)))
    names = [name for name, _ in model.named_parameters()]
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    simple_fsdp(model, mesh["dp"])
    with pytest.raises(RuntimeError, match=r"0\.up\.weight: this is the parameter as it was before simple_fsdp"):
        early.param_groups[0]["params"][names.index("0.up.weight")].sum()

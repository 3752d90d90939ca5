"""Weights that say themselves what is gathered of them: quantized ones of torchao, to the bits of FSDP2."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from inductor_passes.collectives import ALL_GATHER, FQNS
from inductor_passes.ops.gather_shards import GATHER_SHARDS
from simplefsdp import WireFormat, clip_grad_norm_, full_state_dict, simple_fsdp
from simplefsdp.frontend.gather_hooks import inner_tensors, part_of_subclass
from tests.graphs import capture, nodes
from tests.models import PROFILE
from tests.ranks import Ranks, fake_group

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LAYERS = (0, 2, 4)
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {"plan": "none", "lower_with": "aot_eager"},
    "block": {"plan": "block", "lower_with": "aot_eager"},
    "auto": {"plan": "auto", "profile": PROFILE, "lower_with": "aot_eager"},
    "greedy": {"plan": "greedy", "profile": PROFILE, "lower_with": "aot_eager"},
}


def _int8(weight: Tensor) -> Tensor:
    from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight

    return Int8QuantizedTrainingLinearWeight.from_float(weight)


def _int8_matmul(weight: Tensor) -> Tensor:
    from torchao.prototype.quantized_training import int8_mixed_precision as of

    return of.Int8MixedPrecisionTrainingLinearWeight(weight, of.Int8MixedPrecisionTrainingConfig())


def _nf4(weight: Tensor) -> Tensor:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    return to_nf4(weight, 16, 8)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {"int8": _int8, "int8 matmul": _int8_matmul, "nf4": _nf4}


def model(kind: str) -> nn.Module:
    """Three linear layers, of which the first two have quantized weights; those of NF4 are frozen."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 64, bias=False), nn.GELU(), nn.Linear(64, 8)
    )
    for index in LAYERS[:2]:
        weight = KINDS[kind](layers[index].weight.detach())
        layers[index].weight = nn.Parameter(weight, requires_grad=kind != "nf4")
    return layers


def _trained(sharded: nn.Module, options: dict[str, Any] | None = None, micro_batches: int = 1) -> dict[str, Tensor]:
    """The tensors inside of each shard after three steps."""
    forward = torch.compile(sharded, backend="simplefsdp", fullgraph=True, options=options) if options else sharded
    optimizer = torch.optim.SGD([param for param in sharded.parameters() if param.requires_grad], lr=0.1)
    for step in range(3):
        for number in range(step * micro_batches, (step + 1) * micro_batches):
            if micro_batches > 1:
                sharded.set_requires_gradient_sync((number + 1) % micro_batches == 0)
            generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
            forward(torch.randn(16, 64, generator=generator)).float().square().mean().backward()
        torch.manual_seed(step)  # weights in int8 are rounded at random
        optimizer.step()
        optimizer.zero_grad()
    inner: dict[str, Tensor] = {}
    for fqn, param in sharded.named_parameters():
        assert isinstance(param, DTensor)
        inner |= {f"{fqn} {i}": tensor for i, tensor in enumerate(inner_tensors(param._local_tensor))}
    return inner


def _trains_as_under_fsdp2(kind: str, names: list[str], mesh: tuple[int, ...] = (2,), micro_batches: int = 1) -> None:
    on = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
    for policy in (BF16, MixedPrecisionPolicy(reduce_dtype=torch.float32)):
        theirs: Any = model(kind)
        for layer in (*(theirs[i] for i in LAYERS), theirs):
            fully_shard(layer, mesh=on, mp_policy=policy)
        expected = _trained(theirs, micro_batches=micro_batches)
        for name in names:
            found = _trained(simple_fsdp(model(kind), on, mp_policy=policy), OPTIONS.get(name), micro_batches)
            for tensor, value in expected.items():
                assert torch.equal(found[tensor], value), f"{tensor}, {name}, {policy}"


@pytest.mark.compile
@pytest.mark.parametrize("kind", KINDS)
def test_training_has_the_bits_of_fsdp2(two_ranks: Ranks, kind: str) -> None:
    two_ranks.run(_trains_as_under_fsdp2, kind, ["eager", *OPTIONS])


@pytest.mark.compile
def test_accumulated_gradients_have_the_bits_of_fsdp2(two_ranks: Ranks) -> None:
    two_ranks.run(_trains_as_under_fsdp2, "int8", ["eager", "block"], (2,), 2)


@pytest.mark.compile
@pytest.mark.slow
def test_in_hybrid_shard_training_has_the_bits_of_fsdp2(four_ranks: Ranks) -> None:
    four_ranks.run(_trains_as_under_fsdp2, "int8", ["eager", "block"], (2, 2))


def _inductor_finds_its_own_code() -> None:
    """Two kinds of the same shapes, in one cache."""
    for kind in KINDS:
        eager = _trained(simple_fsdp(model(kind), mp_policy=BF16))
        found = _trained(simple_fsdp(model(kind), mp_policy=BF16), {"plan": "block"})
        for name, value in eager.items():
            if value.is_floating_point():
                torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-3)


@pytest.mark.compile
@pytest.mark.slow
def test_inductor_compiles_each_kind(two_ranks: Ranks) -> None:
    two_ranks.run(_inductor_finds_its_own_code)


@pytest.mark.compile
def test_what_a_weight_is_made_of_travels_in_one_bucket_and_again_in_backward() -> None:
    with fake_group(4):
        graphs = capture(simple_fsdp(model("int8"), mp_policy=BF16), torch.randn(16, 64), plan="block")
        keeping = capture(
            simple_fsdp(model("int8"), mp_policy=BF16, reshard_after_forward=False), torch.randn(16, 64), plan="block"
        )
    for graph, fqns in ((graphs.forward, ["0.weight", "2.weight"]), (graphs.backward, ["2.weight"])):
        found = {node.meta[FQNS]: node.args[1:3] for node in nodes(graph, GATHER_SHARDS)}
        for fqn in fqns:
            assert {*zip(*found[fqn, fqn], strict=True)} >= {(2048, torch.int8)}, found
    assert not nodes(keeping.backward, GATHER_SHARDS, ALL_GATHER)


def _clips() -> None:
    sharded = simple_fsdp(model("int8 matmul"))
    sharded(torch.randn(16, 64)).square().mean().backward()
    norm = clip_grad_norm_(sharded.parameters(), 1e-3)
    assert norm > 1e-3
    gradients = [param.grad.full_tensor() for param in sharded.parameters()]
    total = torch.stack([gradient.norm() for gradient in gradients]).norm()
    torch.testing.assert_close(total, torch.tensor(1e-3), rtol=1e-3, atol=0)


def _saved_whole() -> None:
    for kind in KINDS:
        whole = full_state_dict(simple_fsdp(model(kind), mp_policy=BF16))
        expected = model(kind).state_dict() if dist.get_rank() == 0 else {}
        assert list(whole) == list(expected)
        for fqn, weight in expected.items():
            assert type(whole[fqn]) is type(weight)
            for found, tensor in zip(inner_tensors(whole[fqn]), inner_tensors(weight), strict=True):
                assert torch.equal(found, tensor), fqn


def test_the_first_rank_saves_whole_weights_as_they_were(two_ranks: Ranks) -> None:
    two_ranks.run(_saved_whole)


def test_gradients_are_clipped(two_ranks: Ranks) -> None:
    two_ranks.run(_clips)


@pytest.mark.usefixtures("one_of_four")
def test_outside_of_a_call_the_shard_is_read_and_the_former_weight_raises() -> None:
    layers = model("nf4")
    former = layers[0].weight
    kind = type(former)
    sharded = simple_fsdp(layers)
    assert isinstance(sharded[0].weight, DTensor)
    assert type(sharded[0].weight._local_tensor) is kind
    assert sharded[0].weight._local_tensor.shape == (32, 64)
    with pytest.raises(RuntimeError, match=r"0\.weight: this is the parameter as it was before simple_fsdp"):
        former.t()


def test_a_rank_alone_has_what_the_hooks_make_of_its_own_shard() -> None:
    with fake_group(1):
        torch.manual_seed(0)
        x = torch.randn(16, 64)
        assert torch.equal(simple_fsdp(model("nf4"))(x), model("nf4")(x))


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "replicate"}, "0.weight: a NF4Tensor.* cannot be replicated"),
        ({"offload_policy": CPUOffloadPolicy()}, "0.weight: a NF4Tensor.* cannot be offloaded"),
        ({"wire": WireFormat(gather="int8")}, "wire: 0.weight: a NF4Tensor says itself what is gathered of it"),
    ],
)
def test_what_such_a_weight_cannot_have_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simple_fsdp(model("nf4"), **arguments)


def test_of_fewer_rows_than_ranks_the_last_ranks_have_none() -> None:
    pytest.importorskip("torchao")
    weight = _int8(torch.ones(3, 8))
    assert [part_of_subclass(weight, 4, rank, 0).shape[0] for rank in range(4)] == [1, 1, 1, 0]


@pytest.mark.usefixtures("one_of_four")
def test_shards_of_different_sizes_and_meshes_without_names_are_refused() -> None:
    layers = nn.Sequential(nn.Linear(8, 6, bias=False))
    layers[0].weight = nn.Parameter(_int8(layers[0].weight.detach()))
    with pytest.raises(ValueError, match=r"0\.weight: .* 6 rows do not divide by 4 ranks"):
        simple_fsdp(layers)
    with pytest.raises(ValueError, match=r"0\.weight: .* needs a mesh whose dimensions have names"):
        simple_fsdp(model("int8"), init_device_mesh("cpu", (2, 2)))

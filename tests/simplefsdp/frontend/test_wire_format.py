"""Weights and gradients in wire formats: the same bits eager and compiled, near to full precision, or refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from inductor_passes.collectives import ALL_TO_ALL
from inductor_passes.ops.encode import DECODE_SUMS, DECODE_WEIGHTS, ENCODE_GRADIENTS, ENCODE_SHARDS
from simplefsdp import WireFormat, simple_fsdp
from tests import zoo
from tests.compare import trained_to_the_bits_of_eager, vectors, whole
from tests.graphs import GATHERS, REDUCE_SCATTER, capture, nodes
from tests.models import batch, tiny_llama, train
from tests.ranks import Ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NARROW = WireFormat(gather="int8", reduce="int4-hadamard")
MIXED = {"*": WireFormat(gather="fp8", reduce="int8"), "*norm*": WireFormat(), "output*": WireFormat("int8", None)}
PLANS = {"aot_eager": "block", "one by one": "none"}


def _llama(wire: Any, policy: MixedPrecisionPolicy = BF16, **kwargs: Any) -> nn.Module:
    return simple_fsdp(tiny_llama(ffn_dim=9), mp_policy=policy, wire=wire, **kwargs)


def _hybrid(wire: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _llama(wire, mesh=mesh)


def _columns(wire: Any) -> nn.Module:
    return _llama(wire, shard_placement_fn=lambda param: Shard(param.ndim - 1))


def _offloaded(wire: Any) -> nn.Module:
    return _llama(wire, offload_policy=CPUOffloadPolicy())


def _fp16(wire: Any) -> nn.Module:
    return _llama(wire, MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16))


def _divided(wire: Any) -> nn.Module:
    return _llama(wire, MixedPrecisionPolicy(), gradient_divide_factor=3.0)


SETTINGS: dict[str, Callable[[Any], nn.Module]] = {
    "uneven": _llama,
    "hybrid": _hybrid,
    "columns": _columns,
    "offloaded": _offloaded,
    "fp16": _fp16,
    "divided": _divided,
}


def _bits(setting: str, wire: Any, lowering: str) -> None:
    build = SETTINGS[setting]
    found = trained_to_the_bits_of_eager(lambda: build(wire), plan=PLANS[lowering])
    plain = build(None)
    exact = train(plain, plain, 3, dist.get_rank())
    assert any(not torch.equal(a, b) for a, b in zip(found[0], exact[0], strict=True))
    torch.testing.assert_close(found[0], exact[0], rtol=0.02, atol=0)


@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("one by one", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "wire", [pytest.param(NARROW, id="all", marks=pytest.mark.slow), pytest.param(MIXED, id="some")]
)
def test_compiled_training_has_the_bits_of_eager_on_two_ranks(two_ranks: Ranks, wire: Any, lowering: str) -> None:
    two_ranks.run(_bits, "uneven", wire, lowering)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_compiled_training_has_the_bits_of_eager_on_four_ranks(four_ranks: Ranks, setting: str) -> None:
    four_ranks.run(_bits, setting, NARROW, "aot_eager")


def test_the_weights_that_arrive_are_the_same_on_every_rank(four_ranks: Ranks) -> None:
    four_ranks.run(_arrived)


def _arrived() -> None:
    torch.manual_seed(0)
    model = simple_fsdp(nn.Linear(50, 7), wire=WireFormat(gather="int8"))
    here = model(torch.eye(50)).detach()
    of_rank_0 = here.clone()
    dist.broadcast(of_rank_0, 0)
    assert torch.equal(here, of_rank_0)
    exact = whole(model.weight).t() + whole(model.bias)
    assert not torch.equal(here, exact)
    torch.testing.assert_close(here, exact, rtol=0, atol=0.003)


@pytest.mark.parametrize("reduce", ["bf16-fp32sum", "fp8", "int8", "int4", "int4-hadamard", "int8-stochastic"])
def test_reduced_gradients_are_near_to_those_of_full_precision(four_ranks: Ranks, reduce: str) -> None:
    four_ranks.run(_near, reduce)


def _near(reduce: str) -> None:
    gradients = []
    for wire in (None, WireFormat(reduce=reduce)):
        model = simple_fsdp(tiny_llama(), wire=wire)
        tokens, targets = batch(0, dist.get_rank())
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        gradients.append([whole(param.grad) for param in model.parameters()])
    exact, found = (torch.cat([gradient.flatten() for gradient in each]) for each in gradients)
    error = float((found - exact).norm() / exact.norm())
    allowed = {
        "bf16-fp32sum": 0.003,
        "fp8": 0.04,
        "int8": 0.01,
        "int4": 0.2,
        "int4-hadamard": 0.15,
        "int8-stochastic": 0.02,
    }[reduce]
    assert 0 < error < allowed


@pytest.mark.parametrize(
    "name", ["tied", "LoRA", "used twice", "checkpoint", "fewer rows than ranks", "zero-size", "0-dim", "embedding"]
)
def test_unusual_modules_have_the_bits_of_eager(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(_unusual, name)


def _unusual(name: str) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = simple_fsdp(zoo.build(name), wire=NARROW)
        options: Any = {"lower_with": "aot_eager", "plan": "block"}
        forward = torch.compile(model, backend="simplefsdp", options=options) if compiled else model
        forward(vectors(0, dist.get_rank())).square().mean().backward()
        found.append([None if p.grad is None else whole(p.grad) for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_accumulated_gradients_are_reduced_in_their_format(two_ranks: Ranks) -> None:
    two_ranks.run(_accumulated)


def _accumulated() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model: Any = simple_fsdp(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6)), wire=NARROW)
        options: Any = {"lower_with": "aot_eager", "plan": "block"}
        forward = torch.compile(model, backend="simplefsdp", options=options) if compiled else model
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            forward(vectors(micro, dist.get_rank())).square().mean().backward()
        found.append([whole(param.grad) for param in model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_tensor_parallel_parameters_travel_in_a_format(four_ranks: Ranks) -> None:
    four_ranks.run(_tensor_parallel)


def _tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for wire, compiled in ((None, False), (NARROW, False), (NARROW, True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        simple_fsdp(model, mesh["dp"], wire=wire)
        options: Any = {"lower_with": "aot_eager", "plan": "block"}
        forward = torch.compile(model, backend="simplefsdp", options=options) if compiled else model
        forward(vectors(0, mesh["dp"].get_local_rank())).square().mean().backward()
        found.append([whole(param.grad) for param in model.parameters()])
    exact, eager, compiled_ones = found
    torch.testing.assert_close(eager, compiled_ones, rtol=0, atol=0)
    torch.testing.assert_close(eager, exact, rtol=0.3, atol=0.05)


def test_other_compilers_carry_the_formats_too(two_ranks: Ranks) -> None:
    two_ranks.run(_other_compiler)


def _other_compiler() -> None:
    found = []
    for compiled in (False, True):
        model = _llama(NARROW)
        forward = torch.compile(model, backend="aot_eager") if compiled else model
        found.append(train(model, forward, 2, dist.get_rank()))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.slow
def test_inductor_agrees_and_reports_what_is_sent(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_inductor, str(tmp_path))


def _inductor(folder: str) -> None:
    eager = _llama(NARROW)
    expected = train(eager, eager, 2, dist.get_rank())
    model = _llama(NARROW)
    options: Any = {"plan": "block", "report_dir": folder}
    found = train(model, torch.compile(model, backend="simplefsdp", options=options), 2, dist.get_rank())
    torch.testing.assert_close(found[0], expected[0], rtol=0.02, atol=0)
    if dist.get_rank() == 0:
        (forward,) = Path(folder).glob("*/*_forward_after_bucket.txt")
        (backward,) = Path(folder).glob("*/*_backward_after_bucket.txt")
        assert "simplefsdp.all_gather_into_tensor" not in forward.read_text()
        assert "all_to_all_single" in backward.read_text()
        assert "reduce_scatter" not in backward.read_text()


def test_ranks_with_different_formats_are_told(two_ranks: Ranks) -> None:
    two_ranks.run(_different)


def _different() -> None:
    torch.manual_seed(0)
    model = simple_fsdp(nn.Linear(6, 6), wire=WireFormat(gather="int8" if dist.get_rank() else "fp8"))
    forward = torch.compile(model, backend="simplefsdp", options={"lower_with": "aot_eager"})
    with pytest.raises(RuntimeError, match=r"sharded different models.*\n?.*gather_format=int8"):
        forward(vectors(0, 0))


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_a_graph_has_one_transfer_for_each_bucket_and_format() -> None:
    captured = capture(_llama(MIXED), batch(0, 0)[0], plan="block")
    formats = {"forward": ENCODE_SHARDS, "backward": ENCODE_GRADIENTS}
    encoded = {name: [node.args for node in nodes(getattr(captured, name), op)] for name, op in formats.items()}
    decoded = [*nodes(captured.forward, DECODE_WEIGHTS), *nodes(captured.backward, DECODE_SUMS)]
    # The first embedding, three blocks, and the last layer, whose norm is not encoded.
    assert [args[2] for args in encoded["forward"]] == ["fp8"] * 4 + ["int8"]
    assert [args[2] for args in encoded["backward"]] == ["int8"] * 4
    assert len(decoded) == 9
    assert len(nodes(captured.forward, *GATHERS)) == 5 + 4  # the norms of each block are another transfer
    assert len(nodes(captured.backward, ALL_TO_ALL)) == 4
    assert len(nodes(captured.backward, REDUCE_SCATTER)) == 4


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"wire": {"*": "int8"}}, TypeError, "wire: expected a WireFormat or {glob: WireFormat}, found {'*': 'int8'}"),
        ({"wire": "int8"}, TypeError, "wire: expected a WireFormat or {glob: WireFormat}, found 'int8'"),
        ({"wire": {"wieght": NARROW}}, ValueError, "wire: unknown pattern 'wieght'"),
        ({"wire": NARROW, "mode": "replicate"}, ValueError, "wire: weight: mode 'replicate' gathers and scatters"),
        (
            {"wire": NARROW, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
            ValueError,
            "wire: gradients are reduced in torch.float64",
        ),
    ],
)
def test_bad_formats_are_refused_by_name(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        simple_fsdp(nn.Linear(6, 6), **arguments)
    assert str(raised.value).startswith(message)


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.int32])
def test_a_parameter_that_cannot_be_encoded_is_named(dtype: torch.dtype) -> None:
    model = nn.Linear(6, 6)
    model.scale = nn.Parameter(torch.ones(8).to(dtype), requires_grad=dtype is not torch.int32)
    with pytest.raises(ValueError, match=f"wire: scale: a {dtype} parameter cannot travel as 'int8' and"):
        simple_fsdp(model, wire=NARROW)
    simple_fsdp(model, wire={"*": NARROW, "scale": WireFormat()})


@pytest.mark.parametrize(("option", "value"), [("gather", "int4"), ("reduce", "bf16"), ("gather", 8)])
def test_unknown_formats_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"WireFormat: {option}: unknown format '{value}'"):
        WireFormat(**{option: value})

"""Errors that wire formats make of weights and gradients are told, for all parameters or some, by any rank alone."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard

from inductor_passes.torch_compat.dtensor import local_tensor
from simplefsdp import WireFormat, simple_fsdp, wire_errors
from tests.ranks import Ranks

pytestmark = pytest.mark.usefixtures("one_of_four")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.LayerNorm(512), nn.Linear(512, 6))


def trained(model: nn.Module) -> nn.Module:
    model(torch.randn(64, 256)).square().mean().backward()
    return model


def with_gradients(model: nn.Module) -> nn.Module:
    """Give shards gradients of their own: on one rank those that were reduced have their format's values already."""
    for param in trained(model).parameters():
        local_tensor(param.grad).normal_()
    return model


def to_the_nearest_of_blocks(values: Tensor, levels: int) -> float:
    """Return the relative error of blocks of 128 values that are rounded to multiples of their scale."""
    blocks = values.reshape(-1, 128)
    scales = blocks.abs().amax(1, keepdim=True) / levels
    error = (blocks / scales).round() * scales - blocks
    return float(error.norm() / values.norm())


def test_errors_are_those_of_rounding_blocks_to_their_levels() -> None:
    model = with_gradients(simple_fsdp(network(), wire={"0.*": WireFormat("int8", "int4")}))
    found = wire_errors(model)
    assert list(found) == ["0.weight", "0.bias"]
    weight: Any = model[0].weight
    assert found["0.weight"].gather == pytest.approx(to_the_nearest_of_blocks(local_tensor(weight), 127), rel=1e-4)
    assert found["0.weight"].reduce == pytest.approx(to_the_nearest_of_blocks(local_tensor(weight.grad), 7), rel=1e-4)


def test_columns_are_blocks_of_what_travels() -> None:
    placed = simple_fsdp(network(), shard_placement_fn=lambda param: Shard(param.ndim - 1), wire=WireFormat("int8"))
    weight: Any = placed[0].weight
    of_columns = to_the_nearest_of_blocks(local_tensor(weight).T.contiguous(), 127)
    assert wire_errors(placed, "0.weight")["0.weight"].gather == pytest.approx(of_columns, rel=1e-4)


@pytest.mark.compile
def test_what_does_not_travel_in_a_format_or_is_not_there_has_no_error() -> None:
    model = simple_fsdp(network(), wire={"*": WireFormat("fp8"), "2.*": WireFormat(reduce="bf16-fp32sum")})
    before = wire_errors(model)
    assert {error.reduce for error in before.values()} == {None}
    assert before["1.bias"] == (0.0, None)  # zeros
    assert before["2.weight"] == (None, None)
    (after,) = wire_errors(with_gradients(model), "2.weight").values()
    assert after.gather is None
    assert after.reduce is not None
    assert 2**-10 < after.reduce < 2**-8
    compiled: Any = torch.compile(model, backend="eager")
    assert wire_errors(compiled).keys() == before.keys()


def test_values_that_are_not_finite_have_an_error_that_is_not() -> None:
    model = with_gradients(simple_fsdp(network(), wire=WireFormat("int8", "int8")))
    weight: Any = model[0].weight
    local_tensor(weight.grad)[0, 0] = math.inf
    (found,) = wire_errors(model, "0.weight").values()
    assert found.reduce is not None
    assert not math.isfinite(found.reduce)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, found list"):
        wire_errors([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no parameter travels in a wire format; see simple_fsdp\(wire=\.\.\.\)"):
        wire_errors(simple_fsdp(network()))
    with pytest.raises(ValueError, match=r"parameters: unknown pattern '0\.wieght'; did you mean '0\.weight'\?"):
        wire_errors(simple_fsdp(network(), wire={"0.weight": WireFormat("int8")}), "0.wieght")


@pytest.mark.parametrize("wire_format", ["bf16-fp32sum", "fp8", "int8", "int4", "int4-hadamard", "int4-stochastic"])
def test_the_error_of_a_gradient_is_about_that_of_the_mean_over_the_ranks(four_ranks: Ranks, wire_format: str) -> None:
    for estimated, real in four_ranks.run(_estimated_and_real, wire_format):
        assert real < estimated < 1.3 * real


def _estimated_and_real(wire_format: str) -> tuple[float, float]:
    """Return what ``wire_errors`` says of a gradient, and how far it is off one that travels as it is."""
    gradients = []
    for wire in (WireFormat(reduce=wire_format), WireFormat()):
        model: Any = simple_fsdp(network(), wire=wire)
        torch.manual_seed(dist.get_rank())
        trained(model)
        gradients.append(model[0].weight.grad.full_tensor())
        if wire.reduce:
            (found,) = wire_errors(model, "0.weight").values()
    assert found.reduce is not None
    off, plain = gradients
    return found.reduce, float((off - plain).norm() / plain.norm())


SETTINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "uneven": lambda model: simple_fsdp(model, wire=WireFormat("int8", "int8")),
    "offloaded": lambda model: simple_fsdp(
        model, wire=WireFormat("int8", "int8"), offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_rank_may_ask_alone_also_one_that_has_nothing(four_ranks: Ranks, setting: str) -> None:
    found = four_ranks.run(_asked_by_some, setting)
    assert found[1] == found[2] == {}
    few = "2.weight"  # 6 rows: two for each of three ranks, none for the last
    assert found[0][few].gather > 0
    assert found[3][few] == (None, None)
    assert 0 < found[3]["0.weight"].reduce < 0.02


def _asked_by_some(setting: str) -> Any:
    model = trained(SETTINGS[setting](network()))
    return wire_errors(model) if dist.get_rank() in (0, 3) else {}

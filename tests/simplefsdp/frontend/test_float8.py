"""Linear layers of torchao in float8: bits of FSDP2, and float8 on the wire."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from simplefsdp import simple_fsdp
from tests.graphs import capture
from tests.inductor_passes.test_cast_before_gather import trained, travels
from tests.ranks import Ranks, fake_group

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def model(recipe: str, gathers_in_float8: bool = False) -> nn.Module:
    """Three linear layers whose matmuls are in float8, emulated on CPU; the last has a bias."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if recipe == "tensorwise":
        config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathers_in_float8)
    else:
        config = Float8LinearConfig.from_recipe_name(recipe)
        object.__setattr__(config, "emulate", True)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 48, bias=False), nn.GELU(), nn.Linear(48, 34, bias=False), nn.Linear(34, 16))
    convert_to_float8_training(layers, config=config)
    return layers


def _gather_as_bytes() -> None:
    """Let FSDP2 gather float8 as bytes, which gloo can."""
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Weight

    before, after = Weight.fsdp_pre_all_gather, Weight.fsdp_post_all_gather

    def pre(self: Any, mesh: Any) -> Any:
        (data,), scale = before(self, mesh)
        return (data.view(torch.uint8),), scale

    def post(self: Any, gathered: Any, scale: Any, dtype: Any, *, out: Any = None) -> Any:
        return after(self, (gathered[0].view(torch.float8_e4m3fn),), scale, dtype, out=out)

    mock.patch.multiple(Weight, fsdp_pre_all_gather=pre, fsdp_post_all_gather=post).start()


def _trains_as_under_fsdp2(recipe: str, gathers_in_float8: bool) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    def train(sharded: nn.Module, options: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
        return trained(sharded, options, (16, 32), precompute_float8_dynamic_scale_for_fsdp)

    theirs: Any = model(recipe, gathers_in_float8)
    if gathers_in_float8:
        _gather_as_bytes()
    for layer in (theirs[0], theirs[2], theirs[3], theirs):
        fully_shard(layer, mp_policy=BF16)
    expected = train(theirs)
    for options in (None, {"plan": "block", "lower_with": "aot_eager"}):
        found = train(simple_fsdp(model(recipe, gathers_in_float8), mp_policy=BF16), options)
        for fqn, value in expected.items():
            assert torch.equal(found[fqn], value), f"{fqn}, {options}"


@pytest.mark.compile
@pytest.mark.parametrize(("recipe", "gathers"), [("tensorwise", False), ("tensorwise", True), ("rowwise", False)])
def test_training_has_the_bits_of_fsdp2(two_ranks: Ranks, recipe: str, gathers: bool) -> None:
    pytest.importorskip("torchao.float8")
    two_ranks.run(_trains_as_under_fsdp2, recipe, gathers)


@pytest.mark.compile
@pytest.mark.parametrize("gathers", [False, True])
def test_weights_travel_in_float8_whether_fsdp2_would_gather_them_so_or_not(gathers: bool) -> None:
    pytest.importorskip("torchao.float8")
    with fake_group(4):
        sharded = simple_fsdp(model("tensorwise", gathers), mp_policy=BF16)
        graphs = capture(sharded, torch.randn(16, 32), plan="block")
    in_float8 = dict.fromkeys(("0.weight", "2.weight", "3.weight"), torch.uint8)
    assert travels(graphs.forward) == {**in_float8, "3.bias": torch.bfloat16}
    assert travels(graphs.backward) == dict.fromkeys(("2.weight", "3.weight"), torch.uint8)


@pytest.mark.usefixtures("one_of_four")
def test_a_weight_that_fsdp2_would_gather_in_float8_is_a_plain_shard_and_stays_tied() -> None:
    pytest.importorskip("torchao.float8")
    layers = model("tensorwise", gathers_in_float8=True)
    layers[2].weight = layers[0].weight
    ignored = layers[3].weight
    sharded = simple_fsdp(layers, ignored_params=[ignored])
    assert isinstance(sharded[0].weight, DTensor)
    assert type(sharded[0].weight._local_tensor) is torch.Tensor
    assert sharded[2].weight is sharded[0].weight
    assert sharded[3].weight is ignored


@pytest.mark.usefixtures("one_of_four")
def test_the_state_of_a_model_that_was_not_sharded_is_loaded() -> None:
    pytest.importorskip("torchao.float8")
    sharded = simple_fsdp(model("tensorwise", gathers_in_float8=True))
    state = model("tensorwise", gathers_in_float8=True).state_dict()
    with torch.no_grad():
        sharded[0].weight.zero_()
    sharded.load_state_dict(state)
    assert torch.equal(sharded[0].weight.to_local(), state["0.weight"]._tensor[:12])


@pytest.mark.usefixtures("one_of_four")
def test_an_optimizer_that_was_built_before_is_told() -> None:
    pytest.importorskip("torchao.float8")
    layers = model("tensorwise", gathers_in_float8=True)
    optimizer = torch.optim.SGD([layers[0].weight], lr=0.1)
    simple_fsdp(layers)
    with pytest.raises(RuntimeError, match=r"0\.weight: this is the parameter as it was before simple_fsdp"):
        optimizer.step()

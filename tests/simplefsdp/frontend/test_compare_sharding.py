"""Ranks that have sharded different models are told before they train on a mixture of them, or hang."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from inductor_passes.runtime.agreement import forget_failures
from simplefsdp import simple_fsdp
from tests.ranks import Ranks

DIFFER = "have sharded different models, and would train on a mixture of them. The first difference: "


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, 4))


def eager(seed: int) -> Callable[..., Any]:
    return simple_fsdp(model(seed))


def compiled(seed: int) -> Callable[..., Any]:
    options: Any = {"lower_with": "aot_eager", "plan": "block"}
    return torch.compile(simple_fsdp(model(seed)), backend="simplefsdp", options=options)


def replicated(seed: int) -> Callable[..., Any]:
    return simple_fsdp(model(seed), mode="replicate")


def sharded_in_two_calls(seed: int) -> Callable[..., Any]:
    whole: Any = model(0)
    torch.manual_seed(seed)
    nn.init.normal_(whole[1].weight)
    simple_fsdp(whole[1])
    return simple_fsdp(whole)


def unlike_in_one_element(seed: int) -> Callable[..., Any]:
    whole: Any = nn.Sequential(nn.LayerNorm(8), model(0)[1])
    whole[1].weight = nn.Parameter(torch.ones(64, 8))
    whole[1].bias = None
    with torch.no_grad():
        whole[1].weight[5, 3] += seed
    return simple_fsdp(whole, check_initial_weights="exact")


def _told(build: Callable[[int], Callable[..., Any]]) -> str:
    """Return what this rank is told of a model whose seed is the number of the rank."""
    forward, x = build(dist.get_rank()), torch.ones(2, 8)
    try:
        with torch.no_grad():
            forward(x)  # What is only evaluated may be different on each rank.
        forward(x).sum().backward()
    except Exception as error:
        dist.barrier()
        forget_failures()
        return str(error)
    return ""


@pytest.mark.parametrize("build", [eager, compiled, replicated, sharded_in_two_calls, unlike_in_one_element])
def test_a_difference_is_an_error_on_all_ranks(two_ranks: Ranks, build: Callable[[int], Callable[..., Any]]) -> None:
    told = two_ranks.run(_told, build)
    for me, other in ((0, 1), (1, 0)):
        assert f"ranks {me} and {other} {DIFFER}on rank {me} 'initial value of 1.weight: " in told[me]
        assert "check_initial_weights=False) takes values as they are" in told[me]


def turned(other: int) -> Callable[..., Any]:
    """A model whose last weight has its dims exchanged on one rank: as many elements, in other places."""
    whole: Any = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    whole[1].extra = nn.Parameter(torch.ones((4, 6) if other else (6, 4)))
    return simple_fsdp(whole, check_initial_weights=False)


def of_another_dtype(other: int) -> Callable[..., Any]:
    whole: Any = model(0)
    whole[1].extra = nn.Parameter(torch.ones(4, dtype=torch.float64 if other else torch.float32))
    return simple_fsdp(whole, check_initial_weights=False)


def of_another_policy(other: int) -> Callable[..., Any]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32 if other else torch.bfloat16)
    return simple_fsdp(model(0), mp_policy=policy)


def partly_frozen(other: int) -> Callable[..., Any]:
    sharded: Any = simple_fsdp(model(0))
    sharded[1].weight.requires_grad_(not other)
    return sharded


def on_meta_divided_by_another_factor(other: int) -> Callable[..., Any]:
    with torch.device("meta"):
        whole = model(0)
    sharded: Any = simple_fsdp(whole, gradient_divide_factor=1.0 if other else 4.0)
    sharded.to_empty(device="cpu")
    return sharded


SHARDED_OTHERWISE = {
    turned: ("sharding of 1.extra: shape=(6, 4), dim=0", "sharding of 1.extra: shape=(4, 6), dim=0"),
    of_another_dtype: ("dtype=torch.float32", "dtype=torch.float64"),
    of_another_policy: ("reduce_dtype=torch.bfloat16", "reduce_dtype=torch.float32"),
    partly_frozen: ("1.weight is trained", "1.weight is frozen"),
    on_meta_divided_by_another_factor: ("divide_factor=4.0", "divide_factor=1.0"),
}


@pytest.mark.parametrize("build", SHARDED_OTHERWISE)
def test_another_sharding_is_an_error_on_all_ranks(two_ranks: Ranks, build: Callable[[int], Any]) -> None:
    lines = SHARDED_OTHERWISE[build]
    told = two_ranks.run(_told, build)
    for me, other in ((0, 1), (1, 0)):
        assert f"ranks {me} and {other} {DIFFER}on rank {me} '" in told[me]
        mine, theirs = told[me].partition("The first difference: ")[2].split(f", on rank {other} ")
        assert lines[me] in mine
        assert lines[other] in theirs


def _goes_on(check: Any) -> None:
    """Train a model of this rank's own values, or of one value on all, if ranks are to compare them."""
    rank = dist.get_rank()
    whole: Any = nn.Linear(64, 8)
    nn.init.constant_(whole.weight, 0.5)
    nn.init.constant_(whole.bias, 0.5 if check else float(rank))
    with torch.no_grad():
        whole.weight[0, 1] += rank if check is True else 0.0  # between two of the elements that are compared
    sharded = simple_fsdp(whole, check_initial_weights=check)
    for _ in range(2):
        sharded(torch.ones(2, 64)).sum().backward()
    bias = sharded.bias.full_tensor()
    assert bias.tolist() == ([0.5] * 8 if check else [0.0] * 4 + [1.0] * 4)


@pytest.mark.parametrize("check", [True, "exact", False])
def test_weights_in_which_no_difference_is_looked_for_or_found_train(two_ranks: Ranks, check: Any) -> None:
    two_ranks.run(_goes_on, check)


@pytest.mark.usefixtures("one_of_four")
def test_another_value_of_the_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="check_initial_weights: expected True, False or 'exact', found 'sampled'"):
        simple_fsdp(nn.Linear(4, 4), check_initial_weights="sampled")  # type: ignore[arg-type]

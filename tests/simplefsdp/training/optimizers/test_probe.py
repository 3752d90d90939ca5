"""Trials of optimizers find out on which values their steps depend."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import Shard

from simplefsdp import simple_fsdp
from simplefsdp.training.optimizers.distribute import PER_PARAMETER, REFUSED
from simplefsdp.training.optimizers.on_shards import ELEMENTWISE
from simplefsdp.training.optimizers.probe import way_of
from simplefsdp.training.optimizers.ranger21 import Ranger21


def test_torchs_optimizers_are_what_the_tables_say() -> None:
    every: set[Any] = {
        kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)
    }
    assert every - {optim.Optimizer} == {*ELEMENTWISE, *PER_PARAMETER, *REFUSED} - {Ranger21}
    kind: Any
    for kind in (*ELEMENTWISE, *PER_PARAMETER):
        shapes = [(4, 4)] if kind is optim.Muon else [(4, 4), (4,), ()]
        optimizer: Any = kind([nn.Parameter(torch.ones(shape)) for shape in shapes])
        if optimizer.state:  # Adagrad of torch 2.11 makes its state in the constructor, where a trial has none
            continue
        assert way_of(optimizer, 0) == ("shards" if kind in ELEMENTWISE else "owners"), kind
    for kind in (optim.LBFGS, optim.SparseAdam):
        with pytest.raises(TypeError, match=f"optimizer: {kind.__name__} cannot be distributed, its step"):
            way_of(kind([nn.Parameter(torch.ones(4, 4))]), 0)


class ByRule(optim.Optimizer):
    """Takes what a rule makes of one gradient, or of all of them, from the parameters."""

    def __init__(self, params: Any, rule: Callable[..., Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * self.rule(param.grad, **group))


def late(gradient: Tensor, step: int, **_: Any) -> Tensor:
    return gradient / gradient.norm() if step > 30 else gradient


def large(gradient: Tensor, **_: Any) -> Tensor:
    return gradient / gradient.norm() if min(gradient.shape) >= 128 else gradient


def of_all(gradient: Tensor, params: Any, **_: Any) -> Tensor:
    return gradient / sum(param.grad.norm() for param in params)


def of_columns(gradient: Tensor, **_: Any) -> Tensor:
    return gradient / gradient.norm(dim=0, keepdim=True)


def of_rows(gradient: Tensor, **_: Any) -> Tensor:
    return gradient / gradient.norm(dim=1, keepdim=True)


def random(gradient: Tensor, **_: Any) -> Tensor:
    return torch.randn_like(gradient)


def nothing(gradient: Tensor, **_: Any) -> Tensor:
    return torch.zeros_like(gradient)


def broken(*_: Any, **__: Any) -> Tensor:
    raise KeyError("mask")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (lambda gradient, **_: gradient.sign(), "shards"),
        (late, "owners"),
        (large, "owners"),
        (of_columns, "owners"),
        (of_rows, "shards"),
        (of_all, r"cannot be distributed, what its step does to a parameter depends on other parameters .*whole_model"),
        (random, "cannot be distributed, its step draws random numbers or is not repeatable"),
        (nothing, "cannot be distributed, it leaves a parameter as it is"),
        (broken, r"cannot be distributed, its step fails: KeyError\('mask'\) \(on a few small parameters\)"),
    ],
)
def test_optimizers_are_told_apart_by_what_they_do(rule: Any, expected: str) -> None:
    optimizer = ByRule([nn.Parameter(torch.ones(4, 4))], rule)
    if expected in ("shards", "owners"):
        assert way_of(optimizer, 0) == expected
    else:
        with pytest.raises(TypeError, match=f"optimizer: ByRule {expected}"):
            way_of(optimizer, 0)


class Waits(optim.Adam):
    """An elementwise optimizer that collects what it may use some day."""

    def __init__(self, params: Any, make: Callable[[Tensor], Any]) -> None:
        super().__init__(params)
        self.make = make

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        super().step()
        for param in self.param_groups[0]["params"]:
            self.state[param]["more"] = self.make(param)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (torch.zeros_like, "shards"),
        (lambda _: torch.zeros(()), "shards"),
        (lambda _: "text", "shards"),
        (lambda param: param @ param.T, "owners"),
        (lambda param: [param.clone()], "owners"),
    ],
)
def test_state_that_is_not_of_the_shape_of_a_parameter_needs_owners(make: Any, expected: str) -> None:
    assert way_of(Waits([nn.Parameter(torch.ones(4, 4))], make), 0) == expected


def test_one_rank_may_step_what_depends_on_all_parameters() -> None:
    assert way_of(ByRule([nn.Parameter(torch.ones(4, 4))], of_all), 0, whole_model=True) == "owners at once"


class Remembers(optim.SGD):
    """An optimizer that looks for the tensors of the step before."""

    seen: Any = None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"][:1]:
            self.seen = param if self.seen is None else self.seen
            self.seen.sub_(param.grad)
        for param in self.param_groups[0]["params"][1:]:
            param.sub_(param.grad)


def test_what_keeps_tensors_between_steps_is_refused_also_for_a_whole_model() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(TypeError, match="Remembers cannot be distributed"):
        way_of(Remembers([weight]), 0)
    with pytest.raises(TypeError, match="Remembers cannot be distributed, it keeps parameters or gradients between"):
        way_of(Remembers([weight]), 0, whole_model=True)


@pytest.mark.usefixtures("one_of_four")
def test_rows_that_ranks_have_parts_of_need_owners() -> None:
    model = simple_fsdp(nn.Linear(8, 8, bias=False), shard_placement_fn=lambda _: Shard(1))
    assert way_of(ByRule(model.parameters(), of_rows), 0) == "owners"
    assert way_of(ByRule(model.parameters(), of_columns), 0) == "owners"


def test_a_probe_leaves_the_optimizer_and_the_random_state_alone() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = ByRule([weight], late, lr=0.0)  # as at the beginning of a warm-up
    before = torch.get_rng_state()
    assert way_of(optimizer, 0) == "owners"
    assert torch.equal(torch.get_rng_state(), before)
    assert not optimizer.state
    assert optimizer.param_groups == [{"params": [weight], "lr": 0.0}]
    assert weight.grad is None
    assert torch.equal(weight, torch.ones(4, 4))

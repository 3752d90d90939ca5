"""Optimizers on shards, loss scaling, autocast, and an optimizer built too early."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from simplefsdp import simple_fsdp, step_on_shards
from simplefsdp.training.optimizers.on_shards import ELEMENTWISE
from tests import zoo
from tests.compare import assert_same, lowered, same_steps, vectors
from tests.ranks import Ranks

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
OPTIMIZERS: dict[str, Any] = {
    "AdamW fused": functools.partial(AdamW, fused=True),
    "AdamW foreach": functools.partial(AdamW, foreach=True),
    "AdamW loop": functools.partial(AdamW, foreach=False),
    "SGD foreach": functools.partial(SGD, momentum=0.9, foreach=True),
    "AdamW fused, on shards": lambda *args, **kwargs: step_on_shards(AdamW(*args, fused=True, **kwargs)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_optimizers_on_uneven_and_empty_shards(four_ranks: Ranks, optimizer: str, lowering: str) -> None:
    four_ranks.run(_optimizer, optimizer, lowering)


def _optimizer(optimizer: str, lowering: str) -> None:
    # 6 rows on 4 ranks are 2, 2, 2 and 0, one row is 1, 0, 0 and 0
    same_steps(uneven, lowering, optimizer=OPTIMIZERS[optimizer], tolerance=1e-4)


def uneven() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(zoo.build("tied"), zoo.PARAMETERS["fewer rows than ranks"](), zoo.PARAMETERS["0-dim"]())


def same_state(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    """Assert that two optimizers have the same state: values, and placements of each ``DTensor``."""
    for one, other in zip(*(optimizer.param_groups[0]["params"] for optimizer in (found, expected)), strict=True):
        ours, theirs = found.state[one], expected.state[other]
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert type(ours[key]) is type(value)
            torch.testing.assert_close(ours[key], value, rtol=0, atol=0)
            if isinstance(value, DTensor):
                assert (ours[key].placements, ours[key].shape) == (value.placements, value.shape)


CASES: list[tuple[Any, dict[str, Any]]] = [
    # Rprop indexes, which DTensor cannot do; test_distribute.py has it.
    *(
        (kind, {"foreach": foreach})
        for kind in ELEMENTWISE
        if kind is not torch.optim.Rprop
        for foreach in (False, True)
    ),
    (torch.optim.Adam, {"fused": True}),
    (AdamW, {"fused": True}),
    (AdamW, {}),
]


def test_steps_on_shards_are_bitwise_those_on_dtensors(four_ranks: Ranks) -> None:
    four_ranks.run(_on_shards)


def _on_shards() -> None:
    for kind, options in CASES:
        more = {"momentum": 0.9} if kind in (SGD, torch.optim.RMSprop) else {}
        models = [uneven() for _ in range(2)]
        for model in models:
            simple_fsdp(model, ignored_params=[model[2].weight])
        plain, ours = (kind(model.parameters(), lr=0.1, **options, **more) for model in models)
        assert step_on_shards(ours) is ours
        schedulers = [torch.optim.lr_scheduler.LinearLR(optimizer) for optimizer in (plain, ours)]
        for step in range(3):
            if step == 2:  # as from a checkpoint
                ours.load_state_dict(copy.deepcopy(plain.state_dict()))
            for model in models:
                for i, param in enumerate(model.parameters()):
                    value = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + i))
                    if isinstance(param, DTensor):
                        value = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
                    param.grad = None if i == 1 and step == 0 else value
            for each in (plain, ours, *schedulers):
                each.step()
            for found, expected in zip(*(list(model.parameters()) for model in models), strict=True):
                assert type(found) is type(expected)
                for a, b in ((found, expected), (found.grad, expected.grad)):
                    torch.testing.assert_close(a, b, rtol=0, atol=0)
            same_state(ours, plain)


def test_optimizers_that_need_whole_matrices_are_refused_by_step_on_shards() -> None:
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(
        TypeError,
        match=r"optimizer: expected one of ASGD, Adadelta, .*, found LBFGS; distribute_optimizer\(\) takes others",
    ):
        step_on_shards(torch.optim.LBFGS([weight]))

    class Lars(torch.optim.SGD):
        pass

    with pytest.raises(TypeError, match="found Lars"):
        step_on_shards(Lars([weight]))


def test_a_closure_is_called_once_before_the_step_with_gradients() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = step_on_shards(SGD([weight], lr=1.0))

    def closure() -> torch.Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2
    assert torch.equal(weight, -torch.ones(2))


@pytest.mark.usefixtures("one_of_four")
def test_hooks_of_a_step_see_the_parameters() -> None:
    model = simple_fsdp(nn.Linear(8, 8))
    optimizer = step_on_shards(AdamW(model.parameters()))
    seen: list[Any] = []
    optimizer.register_step_pre_hook(
        lambda own, *_: seen.append(("before", own.param_groups[0]["params"], len(own.state)))
    )
    optimizer.register_step_post_hook(
        lambda own, *_: seen.append(("after", own.param_groups[0]["params"], len(own.state)))
    )
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert [(when, states) for when, _, states in seen] == [("before", 0), ("after", 2)]
    assert all(found is param for _, params, _ in seen for found, param in zip(params, model.parameters(), strict=True))


@pytest.mark.usefixtures("one_of_four")
def test_a_step_that_fails_leaves_the_parameters_where_they_were() -> None:
    model = simple_fsdp(nn.Linear(8, 8))
    optimizer = step_on_shards(AdamW(model.parameters(), betas=(0.9, 0.9)))
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    before = optimizer.state[model.weight]["exp_avg"]
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert optimizer.state[model.weight]["exp_avg"] is before


@pytest.mark.parametrize("optimizer", [SGD, functools.partial(AdamW, fused=True), AdamW])
@pytest.mark.usefixtures("one_of_four")
def test_an_optimizer_built_before_sharding_says_so(optimizer: Any) -> None:
    model = nn.Linear(6, 8)
    early = optimizer(model.parameters(), lr=0.1)
    simple_fsdp(model)
    model(torch.ones(1, 6)).sum().backward()
    for method in (early.step, early.zero_grad):
        with pytest.raises(RuntimeError, match=r"weight: this is the parameter as it was before simple_fsdp\(\)"):
            method()
    assert "Parameter" in repr(early.param_groups[0]["params"][0])


@pytest.mark.usefixtures("one_of_four")
def test_a_parameter_kept_in_a_plain_list_says_so() -> None:
    class Hides(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 8)
            self.hidden = [self.weight]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.hidden[0].t()

    model = simple_fsdp(Hides())
    with pytest.raises(RuntimeError, match=r"weight: this is the parameter as it was before simple_fsdp\(\)"):
        model(torch.ones(1, 6))


@pytest.mark.parametrize("on_shards", [False, True])
@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_fp16_with_a_grad_scaler_skips_the_same_steps_as_fsdp2(
    two_ranks: Ranks, lowering: str, on_shards: bool
) -> None:
    two_ranks.run(_scaler, lowering, on_shards)


def _scaler(lowering: str, on_shards: bool) -> None:
    policy = MixedPrecisionPolicy(torch.float16, torch.float16, output_dtype=torch.float32)
    results = []
    for wrap in (fully_shard, simple_fsdp):
        model: Any = wrap(zoo.build("LoRA"), mp_policy=policy)
        forward = lowered(model, lowering if wrap is simple_fsdp else "eager")
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer: Any = AdamW(trained, lr=0.05, fused=True) if on_shards else SGD(trained, lr=0.05)
        if on_shards and wrap is simple_fsdp:
            step_on_shards(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scales = []
        for step in range(6):
            x = vectors(step, dist.get_rank())
            if step == 3 and dist.get_rank() == 1:
                x = x * 1e4  # overflows on one rank, in a gradient of which the other holds a part
            loss = forward(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        results.append((scales, {n: p.to_local() for n, p in model.named_parameters()}))
    assert results[0][0] == results[1][0]
    assert results[0][0][3] < results[0][0][2], "a step was skipped"
    assert_same(results[1][1], results[0][1], tolerance=0)
    assert all(p.isfinite().all() for p in results[1][1].values())


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_autocast_around_the_forward(two_ranks: Ranks, lowering: str) -> None:
    two_ranks.run(_autocast, lowering)


class _Autocast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()


def _autocast(lowering: str) -> None:
    same_steps(lambda: _Autocast(zoo.build("used twice")), lowering, tolerance=0.03)

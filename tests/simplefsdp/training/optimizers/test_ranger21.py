"""Ranger21 against its paper, and sharded against one process."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from simplefsdp import Ranger21, simple_fsdp
from simplefsdp.training.checkpoint import StrictLoadPlanner
from tests.compare import whole
from tests.ranks import Ranks
from tests.simplefsdp.training.optimizers.test_distribute import MODES, Model, set_gradients
from tests.watch import Collectives

SETTINGS: dict[str, Any] = {
    "lr": 0.05,
    "betas": (0.8, 0.9),
    "momentum_noise": 0.7,
    "weight_decay": 0.1,
    "clipping": 0.3,
    "clipping_eps": 0.1,
    "lookahead_steps": 3,
    "lookahead": 0.4,
    "warmup": 4,
    "warmdown": 5,
    "eps": 1e-6,
}
ITERATIONS = 16


def by_the_paper(values: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
    """Algorithm 1 of arXiv 2106.13731, in float64, a line for each of its lines."""
    s = SETTINGS
    (beta1, beta2), noise = s["betas"], s["momentum_noise"]
    theta = [value.double() for value in values]
    momenta = [[torch.zeros_like(p), torch.zeros_like(p)] for p in theta]  # m_{t-2}, m_{t-1}
    second, largest = ([torch.zeros_like(p) for p in theta] for _ in range(2))
    slow = [p.clone() for p in theta]

    def unit_norm(x: Tensor) -> Tensor:
        return x.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.ndim - 1)) if x.ndim > 1 else x.norm()

    for t, of_step in enumerate(gradients, start=1):
        clipped = []
        for p, g in zip(theta, of_step, strict=True):
            g = g.double()
            limit = s["clipping"] * unit_norm(p).clamp(min=s["clipping_eps"])
            g = torch.where(unit_norm(g) > limit, limit * g / unit_norm(g), g)
            if g.ndim > 1:
                g = g - g.mean(dim=tuple(range(1, g.ndim)), keepdim=True)
            clipped.append(g)
        second = [beta2 * v + (1 - beta2) * g**2 for v, g in zip(second, clipped, strict=True)]
        largest = [torch.maximum(a, b) for a, b in zip(largest, second, strict=True)]
        count = sum(p.numel() for p in theta)
        mean = sum((v / (1 - beta2**t)).sum() for v in second) / count
        up, down = max(t * (1 - beta2) / 2, t / s["warmup"]), (ITERATIONS - t) / s["warmdown"]
        lr = s["lr"] * min(1.0, up, down)
        for i, (p, g) in enumerate(zip(theta, clipped, strict=True)):
            older, last = momenta[i]
            now = beta1**2 * older + (1 - beta1**2) * g
            momenta[i] = [last, now]
            estimate = ((1 + noise) * now - noise * last) / (1 - beta1**t)
            root = (largest[i] / (1 - beta2**t)).sqrt() + s["eps"]
            update = estimate / (math.hypot(1 + noise, noise) * root)
            decay = lr / mean.sqrt() * s["weight_decay"] * (1 - 1 / unit_norm(p)) * p
            theta[i] = p - decay - lr * update
            if t % s["lookahead_steps"] == 0:
                slow[i] = s["lookahead"] * slow[i] + (1 - s["lookahead"]) * theta[i]
                theta[i] = slow[i].clone()
    return theta


def test_steps_are_those_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (4,), (3, 2, 2), (), (6, 1)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(ITERATIONS)]
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = Ranger21(params, ITERATIONS, **SETTINGS)
    for of_step in gradients:
        for param, gradient in zip(params, of_step, strict=True):
            param.grad = gradient.clone()
        optimizer.step()
    for param, expected in zip(params, by_the_paper(values, gradients), strict=True):
        torch.testing.assert_close(param.detach().double(), expected, rtol=1e-4, atol=1e-5)


def test_the_schedule_warms_up_and_down_by_default_as_the_paper_says() -> None:
    weight = nn.Parameter(torch.ones(3))
    (group,) = Ranger21([weight], 1000).param_groups
    assert (group["warmup"], group["warmdown"]) == (220, 280)
    assert (group["lr"], group["betas"], group["weight_decay"], group["lookahead_steps"]) == (
        1e-3,
        (0.9, 0.999),
        1e-4,
        5,
    )


def make(model: nn.Module) -> Ranger21:
    return Ranger21([param for param in model.parameters() if param.requires_grad], ITERATIONS, **SETTINGS)


def run(optimizer: Any, plain: nn.Module, model: nn.Module, first: int, last: int) -> None:
    for step in range(first, last):
        set_gradients(plain, model, step)
        optimizer.step()
        optimizer.zero_grad()


def assert_close(model: nn.Module, plain: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        tolerance = 1e-4 if param.dtype == torch.float32 else 0.02
        found, expected = whole(param), other.detach()
        assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance / 10), (name, found - expected)


@pytest.mark.parametrize("mode", MODES)
def test_sharded_steps_are_those_of_one_process_by_one_all_reduce(four_ranks: Ranks, mode: str) -> None:
    four_ranks.run(_sharded, mode)


def _sharded(mode: str) -> None:
    plain, model = Model(0), MODES[mode](Model(0))
    reference, optimizer = make(plain), make(model)
    for step in range(ITERATIONS - 1):
        set_gradients(plain, model, step)
        reference.step()
        with Collectives() as collectives:
            optimizer.step()
        assert collectives.seen == ["allreduce_.default"]
    assert_close(model, plain)


@pytest.mark.parametrize("mode", ["columns", "tensor parallel"])
def test_a_checkpoint_goes_on_in_the_middle_of_everything(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, mode: str
) -> None:
    four_ranks.run(_save, str(tmp_path), mode)
    two_ranks.run(_load, str(tmp_path), "fully")
    _load(str(tmp_path), None)


def _save(folder: str, mode: str) -> None:
    model = MODES[mode](Model(0))
    optimizer = make(model)
    run(optimizer, Model(0), model, 0, 7)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def _load(folder: str, mode: str | None) -> None:
    plain = Model(0)
    run(make(plain), plain, Model(0), 0, 0)
    reference = make(plain)
    for step in range(12):
        set_gradients(plain, Model(0), step)
        reference.step()
    model = Model(7) if mode is None else MODES[mode](Model(7))
    optimizer = make(model)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder, planner=StrictLoadPlanner())
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert optimizer.param_groups[0]["step"] == 7
    run(optimizer, Model(0), model, 7, 12)
    assert_close(model, plain)


def test_a_closure_is_called_before_the_step() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Ranger21([weight], 10, warmup=1)

    def closure() -> Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert (weight < 1).all()


@pytest.mark.usefixtures("one_of_four")
def test_bad_settings_and_parameters_are_named() -> None:
    weight = nn.Parameter(torch.ones(3))
    make_one: Any = functools.partial(Ranger21, [weight])
    for settings, message in (
        ({"iterations": 0}, "iterations: expected a positive number of steps, found 0"),
        ({"iterations": 9, "warmup": 1.5}, "warmup: expected a positive number of steps, found 1.5"),
        ({"iterations": 9, "lr": -1.0}, "lr: expected a number of at least 0, found -1.0"),
        ({"iterations": 9, "clipping": math.nan}, "clipping: expected a number of at least 0, found nan"),
        ({"iterations": 9, "betas": (0.9, 1.0)}, r"betas: expected from 0 to less than 1, found \(0.9, 1.0\)"),
        ({"iterations": 9, "lookahead": 1.0}, "lookahead: expected from 0 to less than 1, found 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            make_one(**settings)
    early = nn.Linear(4, 4)
    params = list(early.parameters())
    simple_fsdp(early)
    with pytest.raises(RuntimeError, match=r"this is the parameter as it was before simple_fsdp\(\)"):
        Ranger21(params, 9)
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(TypeError, match="a parameter: Ranger21 steps real parameters with dense gradients"):
        Ranger21([weight], 9).step()

"""Optimizers on shards, loss scaling, autocast, and an optimizer built too early."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from simplefsdp import simple_fsdp
from tests import zoo
from tests.compare import assert_same, lowered, same_steps, vectors
from tests.ranks import Ranks

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
OPTIMIZERS: dict[str, Any] = {
    "AdamW fused": functools.partial(AdamW, fused=True),
    "AdamW foreach": functools.partial(AdamW, foreach=True),
    "AdamW loop": functools.partial(AdamW, foreach=False),
    "SGD foreach": functools.partial(SGD, momentum=0.9, foreach=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_optimizers_on_uneven_and_empty_shards(four_ranks: Ranks, optimizer: str, lowering: str) -> None:
    four_ranks.run(_optimizer, optimizer, lowering)


def _optimizer(optimizer: str, lowering: str) -> None:
    # 6 rows on 4 ranks are 2, 2, 2 and 0, one row is 1, 0, 0 and 0
    def build() -> nn.Module:
        return nn.Sequential(zoo.build("tied"), zoo.PARAMETERS["fewer rows than ranks"](), zoo.PARAMETERS["0-dim"]())

    same_steps(build, lowering, optimizer=OPTIMIZERS[optimizer], tolerance=1e-4)


@pytest.mark.parametrize("optimizer", [SGD, functools.partial(AdamW, fused=True), AdamW])
@pytest.mark.usefixtures("one_of_four")
def test_an_optimizer_built_before_sharding_says_so(optimizer: Any) -> None:
    model = nn.Linear(6, 8)
    early = optimizer(model.parameters(), lr=0.1)
    simple_fsdp(model)
    model(torch.ones(1, 6)).sum().backward()
    for use in (early.step, early.zero_grad):
        with pytest.raises(RuntimeError, match=r"weight: this is the parameter as it was before simple_fsdp\(\)"):
            use()
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


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_fp16_with_a_grad_scaler_skips_the_same_steps_as_fsdp2(two_ranks: Ranks, lowering: str) -> None:
    two_ranks.run(_scaler, lowering)


def _scaler(lowering: str) -> None:
    policy = MixedPrecisionPolicy(torch.float16, torch.float16, output_dtype=torch.float32)
    results = []
    for wrap in (fully_shard, simple_fsdp):
        model: Any = wrap(zoo.build("LoRA"), mp_policy=policy)
        forward = lowered(model, lowering if wrap is simple_fsdp else "eager")
        optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
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

"""TorchInductor computes no shapes again behind the call of a body."""

import pytest
import torch
from torch import nn
from torch._inductor import fx_utils

from simplefsdp import simple_fsdp


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_shapes_behind_a_body_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    updated: list[int] = []
    update = fx_utils.FakeTensorUpdater.incremental_update

    def noted(updater: fx_utils.FakeTensorUpdater) -> int:
        updated.append(update(updater))
        return updated[-1]

    monkeypatch.setattr(fx_utils.FakeTensorUpdater, "incremental_update", noted)
    compare = fx_utils._is_fake_tensor_same
    model = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4))
    sharded = simple_fsdp(nn.Sequential(*model))
    with torch._inductor.config.patch(force_disable_caches=True):
        torch._dynamo.reset()
        torch.compile(sharded, backend="simplefsdp", options={"plan": "block"})(torch.ones(2, 8)).sum().backward()
    graphs = 2
    assert len(updated) > graphs  # of bodies too
    assert sum(updated) == graphs  # the operator with which ranks compare what they have compiled is new
    assert fx_utils._is_fake_tensor_same is compare

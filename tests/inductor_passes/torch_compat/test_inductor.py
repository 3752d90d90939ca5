"""TorchInductor computes no shapes again behind the call of a body, and a thread asks what the CPU can do."""

import threading

import pytest
import torch
from torch import nn
from torch._inductor import cpu_vec_isa, fx_utils

from inductor_passes.torch_compat.inductor import find_vector_instructions
from simplefsdp import simple_fsdp


@pytest.mark.compile
@pytest.mark.skipif(not hasattr(fx_utils, "_is_fake_tensor_same"), reason="torch 2.11 compares otherwise")
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


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_one_thread_finds_the_vector_instructions_of_a_cpu_while_graphs_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking: list[str] = []
    pick = cpu_vec_isa.pick_vec_isa

    def noted() -> cpu_vec_isa.VecISA:
        asking.append(threading.current_thread().name)
        return pick()

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", noted)
    find_vector_instructions.cache_clear()
    sharded = simple_fsdp(nn.Sequential(nn.Linear(8, 8)))
    for size in (2, 4):
        torch._dynamo.reset()
        torch.compile(sharded, backend="simplefsdp", options={"plan": "block"})(torch.ones(size, 8))
    assert asking.count("vector instructions") == 1

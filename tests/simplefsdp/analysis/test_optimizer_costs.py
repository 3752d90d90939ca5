"""Predicted memory and work of optimizers, beside those that they have and do."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from simplefsdp import Ranger21, distribute_optimizer, galore, muon, simple_fsdp, step_on_shards
from simplefsdp.analysis.optimizer_costs import OPTIMIZERS, optimizer_state, state_of_parameters
from simplefsdp.analysis.prediction import StepCosts, predict, step_costs, timelines
from simplefsdp.training.optimizers.distribute import distribution_of
from tests.models import PROFILE, tiny_llama
from tests.ranks import fake_group
from tests.simplefsdp.analysis.test_prediction import BACKWARD, FORWARD, PLAN

MAKE: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    "sgd": lambda model: torch.optim.SGD(model.parameters()),
    "muon": muon,
}
SEEN: dict[str, Callable[[Any], Any]] = {
    "an optimizer of torch's that was left as it is": lambda model: torch.optim.AdamW(model.parameters()),
    "AdamW": lambda model: step_on_shards(torch.optim.AdamW(model.parameters())),
    "AdamW with a maximum": lambda model: step_on_shards(torch.optim.AdamW(model.parameters(), amsgrad=True)),
    "SGD": lambda model: step_on_shards(torch.optim.SGD(model.parameters())),
    "SGD with momentum": lambda model: distribute_optimizer(torch.optim.SGD(model.parameters(), momentum=0.9)),
    "SGD of owners": lambda model: distribute_optimizer(torch.optim.SGD(model.parameters(), momentum=0.9), "owners"),
    "Adagrad": lambda model: step_on_shards(torch.optim.Adagrad(model.parameters())),
    "ASGD": lambda model: step_on_shards(torch.optim.ASGD(model.parameters())),
    "Adadelta": lambda model: step_on_shards(torch.optim.Adadelta(model.parameters())),
    "RMSprop": lambda model: step_on_shards(torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True)),
    "Ranger21": lambda model: Ranger21(model.parameters(), iterations=10),
    "Adafactor": lambda model: distribute_optimizer(torch.optim.Adafactor(model.parameters())),
    "Adan": lambda model: distribute_optimizer(pytorch_optimizer.Adan(model.parameters())),
    "SOAP": lambda model: distribute_optimizer(pytorch_optimizer.SOAP(model.parameters())),
    "Muon": muon,
    "GaLore": lambda model: galore(model, rank=8),
    "GaLore, by rows": lambda model: galore(model, rank=8, on="rows"),
    "GaLore, 8bit": lambda model: galore(model, rank=8, moments="8bit"),
    "GaLore, factored": lambda model: galore(model, rank=8, moments="factored"),
    "GaLore, factored, without first moments": lambda model: galore(
        model, rank=8, moments="factored", betas=(0.0, 0.9)
    ),
}


def states_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state on this rank, without counts of steps."""
    values = [
        value for of in optimizer.state.values() for name, value in of.items() if name not in ("step", "eta", "mu")
    ]
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return sum((value._local_tensor if isinstance(value, DTensor) else value).nbytes for value in tensors)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take a step and return the bytes of this rank's shards and state."""
    for param in model.parameters():
        param.grad = param.detach().clone()
    optimizer.step()
    params: list[Any] = [*model.parameters()]
    return sum(param._local_tensor.nbytes for param in params) + states_bytes(optimizer)


@pytest.mark.parametrize("name", SEEN)
def test_of_an_optimizer_that_was_seen_the_state_is_known_before_its_first_step(name: str) -> None:
    if "8bit" in name:
        pytest.importorskip("torchao")
    found = []
    for rank in range(4):
        with fake_group(4, rank):
            model: Any = simple_fsdp(tiny_llama(layers=4))
            optimizer = SEEN[name](model)
            predicted = state_of_parameters(model.parameters())
            found.append(step(model, optimizer))
    # Shards are counted by padded rows, and the rank that owns most need not be the one with the largest shards.
    assert max(found) <= predicted.resident_bytes <= 1.05 * max(found)
    assert predicted.parameters == len(list(model.parameters()))
    distribution = distribution_of(optimizer)
    assert (predicted.exchange_bytes > 0) == bool(distribution and distribution.owned)


def test_a_frozen_matrix_has_no_state_by_rows() -> None:
    with fake_group(4):
        model: Any = simple_fsdp(tiny_llama(layers=1))
        optimizer = galore(model, rank=8, on="rows")
        weight = model.layers[0].feed_forward.w1.weight
        trained = state_of_parameters([weight])
        weight.requires_grad_(False)
        frozen = state_of_parameters([weight])
    assert optimizer.state == {}
    assert trained.products
    assert frozen.products == ()
    assert trained.resident_bytes - frozen.resident_bytes == 4 * 8 * (36 + 2 * 13)  # 50 rows, 13 of them here


def test_two_optimizers_of_a_model_take_their_steps_one_after_the_other() -> None:
    with fake_group(4):
        model = simple_fsdp(tiny_llama(layers=2))
        params = [*model.parameters()]
        first = step_on_shards(torch.optim.SGD(params[:3]))
        second = distribute_optimizer(torch.optim.Adafactor([param for param in params[3:] if param.ndim == 2]))
        state = state_of_parameters(params)
        parts = [state_of_parameters(params[:3]), state_of_parameters(params[3:])]
    assert state.resident_bytes == sum(part.resident_bytes for part in parts)
    assert state.exchange_bytes == parts[1].exchange_bytes > parts[0].exchange_bytes == 0
    assert first.state == second.state == {}


def test_what_is_on_cpu_takes_no_memory_of_a_device() -> None:
    with fake_group(4):
        model = simple_fsdp(tiny_llama(layers=2), offload_policy=CPUOffloadPolicy(pin_memory=False))
        optimizer = muon(model)
        state = state_of_parameters(model.parameters())
    distribution = distribution_of(optimizer)
    assert distribution is not None
    assert distribution.owned
    assert (state.resident_bytes, state.exchange_bytes) == (0, 0)


@pytest.mark.parametrize("name", MAKE)
def test_state_is_that_of_the_rank_that_has_most(name: str) -> None:
    found = []
    for rank in range(4):
        with fake_group(4, rank):
            model: Any = simple_fsdp(tiny_llama(layers=3))
            predicted = optimizer_state(model, name)
            found.append(step(model, MAKE[name](model)))
    # Shards are counted by padded rows, and the rank that owns most need not be the one with the largest shards.
    assert max(found) <= predicted.resident_bytes <= 1.05 * max(found)
    assert predicted.parameters == len(list(model.parameters()))


def test_galore_projects_to_a_quarter_of_the_shorter_side() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(64, 32, bias=False))
    with fake_group(2):
        simple_fsdp(model)
        of_galore, of_adamw, of_sgd = (optimizer_state(model, name) for name in ("galore", "adamw", "sgd"))
    assert of_galore.resident_bytes - of_sgd.resident_bytes == 4 * (32 * 8 + 2 * 8 * 64 + 1) + 8 * 5 * 4
    assert of_adamw.resident_bytes - of_sgd.resident_bytes == 8 * (64 * 16 + 5 * 4)
    assert of_galore.products == (2.0 * 8 * 32 * 64, 2.0 * 8 * 32 * 64)
    assert of_galore.exchange_bytes == 2 * 4 * 32 * 64


def test_exchanges_and_products_are_part_of_the_prediction() -> None:
    graphs = FORWARD, BACKWARD
    with fake_group(4):
        model = simple_fsdp(tiny_llama(layers=2))
        states = {name: optimizer_state(model, name) for name in OPTIMIZERS}
    costs = {name: step_costs(graphs, state, PROFILE, math.inf) for name, state in states.items()}
    predicted = {name: predict(PLAN, of, timelines(PLAN, graphs)) for name, of in costs.items()}
    assert predicted["muon"].outside_s > predicted["galore"].outside_s > predicted["sgd"].outside_s
    assert predicted["adamw"].resident_bytes > predicted["muon"].resident_bytes > predicted["sgd"].resident_bytes
    for name, state in states.items():
        assert predicted[name].peak_bytes == state.resident_bytes + state.gradient_bytes + state.exchange_bytes
        assert (state.exchange_bytes > 0) == name.startswith(("muon", "galore"))
    again = StepCosts.from_json(costs["muon"].to_json())
    assert again.outside_bytes == costs["muon"].outside_bytes

"""Predicted memory and work of optimizers, beside those that they have and do."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from simplefsdp import muon, simple_fsdp
from simplefsdp.analysis.optimizer_costs import OPTIMIZERS, optimizer_state
from simplefsdp.analysis.prediction import StepCosts, predict, step_costs, timelines
from tests.models import PROFILE, tiny_llama
from tests.ranks import fake_group
from tests.simplefsdp.analysis.test_prediction import BACKWARD, FORWARD, PLAN

MAKE: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    "sgd": lambda model: torch.optim.SGD(model.parameters()),
    "muon": muon,
}


def states_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state on this rank, without counts of steps."""
    values = [value for of in optimizer.state.values() for name, value in of.items() if name != "step"]
    return sum((value._local_tensor if isinstance(value, DTensor) else value).nbytes for value in values)


@pytest.mark.parametrize("name", MAKE)
def test_state_is_that_of_the_rank_that_has_most(name: str) -> None:
    found = []
    for rank in range(4):
        with fake_group(4, rank):
            model: Any = simple_fsdp(tiny_llama(layers=3))
            predicted = optimizer_state(model, name)
            shards = sum(param._local_tensor.nbytes for param in model.parameters())
            for param in model.parameters():
                param.grad = param.detach().clone()
            optimizer = MAKE[name](model)
            optimizer.step()
            found.append(shards + states_bytes(optimizer))
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
        assert (state.exchange_bytes > 0) == (name in ("muon", "galore"))
    again = StepCosts.from_json(costs["muon"].to_json())
    assert again.outside_bytes == costs["muon"].outside_bytes

"""The state of a distributed optimizer: who has it, and how it is saved, loaded and taken over by others."""

import copy
import functools
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from simplefsdp import distribute_optimizer, simple_fsdp
from simplefsdp.training.checkpoint import StrictLoadPlanner
from tests.compare import whole
from tests.ranks import Ranks
from tests.simplefsdp.training.optimizers.test_distribute import MODES, Model, assert_same_values, set_gradients

KINDS: dict[str, Any] = {
    "Adafactor": functools.partial(optim.Adafactor, lr=0.1),
    "AdamW on owners": functools.partial(optim.AdamW, lr=0.1),
}


def build(kind: str, model: nn.Module, distribute: bool = True) -> Any:
    optimizer = KINDS[kind](param for param in model.parameters() if param.requires_grad)
    return distribute_optimizer(optimizer, "owners", exchange_bytes=600) if distribute else optimizer


def steps(optimizer: Any, plain: nn.Module, model: nn.Module, first: int, last: int) -> None:
    for step in range(first, last):
        set_gradients(plain, model, step)
        optimizer.step()
        optimizer.zero_grad()


def save(folder: str, kind: str, mode: str) -> None:
    model = MODES[mode](Model(0))
    optimizer = build(kind, model)
    steps(optimizer, Model(0), model, 0, 4)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(folder: str, kind: str, mode: str | None) -> None:
    """Go on from a checkpoint as one process that was never interrupted."""
    plain = Model(0)
    reference = build(kind, plain, distribute=False)
    for step in range(8):
        set_gradients(plain, copy.deepcopy(plain), step)
        reference.step()
    shard = (lambda model: model) if mode is None else MODES[mode]
    model = shard(Model(7))
    optimizer = build(kind, model, distribute=mode is not None)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder, planner=StrictLoadPlanner())
    set_model_state_dict(model, weights)
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))
    steps(optimizer, Model(0), model, 4, 8)
    assert_same_values(shard, plain, model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["fully", "tensor parallel"])
def test_a_checkpoint_goes_on_with_other_ranks_and_in_one_process(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, mode: str, kind: str
) -> None:
    four_ranks.run(save, str(tmp_path), kind, mode)
    four_ranks.run(load, str(tmp_path), kind, "hybrid")
    four_ranks.run(load, str(tmp_path), kind, "tensor parallel")
    two_ranks.run(load, str(tmp_path), kind, "fully")
    load(str(tmp_path), kind, None)


def test_a_checkpoint_of_shards_is_taken_over_by_owners(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_save_shards, str(tmp_path))
    two_ranks.run(load, str(tmp_path), "AdamW on owners", "fully")


def _save_shards(folder: str) -> None:
    model = MODES["fully"](Model(0))
    optimizer = distribute_optimizer(optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1))
    steps(optimizer, Model(0), model, 0, 4)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def test_state_of_steps_before_is_taken_over_by_owners(two_ranks: Ranks) -> None:
    two_ranks.run(_takes_over)


def _takes_over() -> None:
    plain, model = Model(0), MODES["fully"](Model(0))
    reference, optimizer = (build("AdamW on owners", m, distribute=False) for m in (plain, model))
    for step in range(6):
        if step == 3:
            distribute_optimizer(optimizer, "owners")
        set_gradients(plain, model, step)
        for each in (reference, optimizer):
            each.step()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(param), other.detach())  # AdamW rounds otherwise on DTensors
    for param, state in optimizer.state.items():
        assert not isinstance(param, DTensor) or not any(isinstance(value, DTensor) for value in state.values())


def test_a_state_dict_is_loaded_by_the_same_ranks_and_refused_where_it_is_of_other_owners(two_ranks: Ranks) -> None:
    two_ranks.run(_state_dict)


def _state_dict() -> None:
    model = MODES["fully"](Model(0))
    optimizer = build("Adafactor", model)
    steps(optimizer, Model(0), model, 0, 2)
    state = copy.deepcopy(optimizer.state_dict())
    values = [whole(param).clone() for param in model.parameters()]
    results = []
    for _ in range(2):
        with torch.no_grad():
            for param, value in zip(model.parameters(), values, strict=True):
                local = distribute_like(param, value)
                (param._local_tensor if isinstance(param, DTensor) else param).copy_(local)
        optimizer.load_state_dict(copy.deepcopy(state))
        steps(optimizer, Model(0), model, 2, 4)
        results.append([whole(param).clone() for param in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    others: list[Any] = [None, None]
    dist.all_gather_object(others, state)
    optimizer.load_state_dict(others[1 - dist.get_rank()])
    set_gradients(Model(0), model, 4)
    with pytest.raises(RuntimeError, match=r": rank . owns it and has no state for it, rank . has; load optimizers by"):
        optimizer.step()


def distribute_like(param: Any, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return value
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None).to_local()


@pytest.mark.parametrize("mode", ["fully", "hybrid", "tensor parallel"])
def test_whole_state_leaves_and_enters_by_torchs_functions(two_ranks: Ranks, four_ranks: Ranks, mode: str) -> None:
    (two_ranks if mode == "fully" else four_ranks).run(_whole_state, mode)


def _whole_state(mode: str) -> None:
    plain, model = Model(0), MODES[mode](Model(0))
    reference, optimizer = build("Adafactor", plain, distribute=False), build("Adafactor", model)
    for step in range(3):
        set_gradients(plain, model, step)
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
    everywhere, on_first = (StateDictOptions(full_state_dict=True, cpu_offload=offload) for offload in (False, True))
    expected = get_optimizer_state_dict(plain, reference)["state"]
    found = get_optimizer_state_dict(model, optimizer, options=everywhere)["state"]
    assert found.keys() == expected.keys()
    for name, state in expected.items():
        torch.testing.assert_close(found[name], state, rtol=0, atol=0)
    weights, state = get_state_dict(model, optimizer, options=on_first)
    assert (len(state.get("state", {})) == len(expected)) == (dist.get_rank() == 0)
    asked = "simplefsdp.training.optimizers.distribute.options_of_full_state"
    with unittest.mock.patch(asked, return_value=on_first):
        assert (len(optimizer.state_dict()["state"]) == len(expected)) == (dist.get_rank() == 0), "as torch keeps them"
    other = MODES[mode](Model(7))
    other_optimizer = build("Adafactor", other)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, weights, options=from_first)
    set_optimizer_state_dict(other, other_optimizer, state, options=from_first)
    for step in range(3, 6):
        set_gradients(plain, other, step)
        for each in (reference, other_optimizer):
            each.step()
    assert_same_values(MODES[mode], plain, other)


def test_whole_state_of_one_process_is_what_it_has() -> None:
    model = nn.Linear(6, 6)
    optimizer = distribute_optimizer(optim.Adafactor(model.parameters()))
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    whole_state: Any = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    assert sorted(whole_state["state"]) == ["bias", "weight"]


def test_ranks_that_own_nothing_do_not_keep_others_waiting(two_ranks: Ranks) -> None:
    found = two_ranks.run(_one_matrix)
    assert sorted(map(len, found)) == [0, 1]


def _one_matrix() -> Any:
    model = simple_fsdp(nn.Linear(6, 6, bias=False))
    optimizer = distribute_optimizer(optim.Adafactor(model.parameters()))
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return get_optimizer_state_dict(model, optimizer)["state"]


def test_each_rank_saves_the_state_that_it_owns(two_ranks: Ranks) -> None:
    names = two_ranks.run(_names)
    assert not set(names[0]) & set(names[1])
    assert len(names[0]) + len(names[1]) == 15
    assert min(map(len, names)) > 2


def _names() -> list[Any]:
    model = MODES["fully"](Model(0))
    optimizer = build("Adafactor", model)
    steps(optimizer, Model(0), model, 1, 2)
    plain = {name for name, param in model.named_parameters() if not isinstance(param, DTensor)}
    return [name for name in get_optimizer_state_dict(model, optimizer)["state"] if name not in plain]

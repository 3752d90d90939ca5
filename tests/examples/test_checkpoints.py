"""Checkpoints of the trainer, of which some are never finished."""

import itertools
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples import checkpoints


def model_of(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """All values, the optimizer's too, say which step it is."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=1.0)
    for param in model.parameters():
        nn.init.constant_(param, step)
        param.grad = torch.full_like(param, step)
    optimizer.step()
    return model, optimizer


def save_for_ever(folder: Path) -> None:
    """Three of them, over and over."""
    for step in itertools.cycle((1, 2, 3)):
        checkpoints.save(folder, *model_of(step), step)


def load(path: Path | None) -> tuple[int, set[float]]:
    assert path is not None
    model, optimizer = model_of(0)
    step = checkpoints.load(path, model, optimizer)
    state: Any = [s["momentum_buffer"] for s in optimizer.state_dict()["state"].values()]
    return step, {value for tensor in (*model.parameters(), *state) for value in tensor.unique().tolist()}


@pytest.mark.subprocess
def test_a_save_that_is_killed_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    random.seed(0)
    for i in range(20):
        folder = tmp_path / str(i)
        process = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(folder,), daemon=True)
        process.start()
        while checkpoints.newest(folder) is None:
            time.sleep(0.001)
        time.sleep(0.1 * random.random())
        process.kill()
        process.join()
        step, values = load(checkpoints.newest(folder))
        assert step > 0
        assert values == {float(step)}


def test_a_later_run_in_the_same_folder_replaces_what_is_there(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, *model_of(3), 2)
    (tmp_path / "checkpoint.part").mkdir()
    (tmp_path / "checkpoint.part" / "half").touch()
    (tmp_path / "checkpoint_old").mkdir()
    path = checkpoints.save(tmp_path, *model_of(2), 2)
    assert path == checkpoints.newest(tmp_path)
    assert load(path) == (2, {2.0})
    assert not (path / "half").exists()
    checkpoints.save(tmp_path, *model_of(10), 10)
    assert load(checkpoints.newest(tmp_path)) == (10, {10.0})


def test_there_may_be_none(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path / "nothing") is None

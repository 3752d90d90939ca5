"""Checkpoints that survive whatever stops a run, through ``torch.distributed.checkpoint``."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from simplefsdp.training.checkpoint import StrictLoadPlanner


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Path:
    """Write ``folder/checkpoint_STEP``. It has that name once all of it is written, so that a run that is killed
    meanwhile leaves the checkpoints before it as they were."""
    path, part, old = (folder / f"checkpoint{end}" for end in (f"_{step}", ".part", ".old"))
    if _rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    _wait_for_all()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "step": step}, checkpoint_id=part)
    if _rank() == 0:
        if path.exists():  # of an earlier run
            path.rename(old)
        part.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    _wait_for_all()
    return path


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read what any number of ranks has saved; the step to go on with. Of another model nothing is loaded, and all that
    differs is said."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=path, planner=StrictLoadPlanner())
    set_model_state_dict(model, model_state)
    # Not strict, as this rank may own the optimizer's state of some parameters only; the planner is strict for all.
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=StateDictOptions(strict=False))
    return state["step"]


def newest(folder: Path) -> Path | None:
    """The checkpoint of the latest step, as rank 0 sees the folder."""
    found: list[Path | None] = [None]
    if _rank() == 0:
        numbered = [(int(number), path) for path in folder.glob("checkpoint_*") if (number := path.name[11:]).isdigit()]
        found = [max(numbered)[1] if numbered else None]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()

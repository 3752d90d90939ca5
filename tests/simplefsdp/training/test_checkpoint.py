"""Checkpoints through ``torch.distributed.checkpoint``: on other numbers of ranks, in other modes, with FSDP2."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_flatten, tree_map_only

from simplefsdp import simple_fsdp
from simplefsdp.training.checkpoint import StrictLoadPlanner
from tests import zoo
from tests.compare import lowered, vectors, whole
from tests.models import tiny_llama
from tests.ranks import Ranks
from tests.simplefsdp.frontend.test_tensor_parallel import mesh_of, parallel_llama

GLOBAL = 12
"""Rows of a step, of all ranks together."""


def model_of(wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shards of 6, 5 and 1 rows, tied ones among them."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(zoo.build("tied"), zoo.PARAMETERS["fewer rows than ranks"](), nn.Linear(6, 5)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, ranks: int) -> None:
    forward = lowered(model, "aot_eager") if not isinstance(model, torch.distributed.fsdp.FSDPModule) else model
    for step in steps:
        rows = vectors(step, 0, GLOBAL).chunk(ranks)[rank]
        forward(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: Any = None) -> None:
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path, process_group=group)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def values(state: dict[str, Any]) -> Any:
    return tree_map_only(Tensor, lambda tensor: whole(tensor).clone(), state)


def same(found: Any, expected: Any) -> None:
    (ours, layout), (theirs, other) = tree_flatten(found), tree_flatten(expected)
    assert layout == other
    for one, another in zip(ours, theirs, strict=True):
        assert torch.equal(one, another) if isinstance(one, Tensor) else one == another


def sub_mesh(ranks: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(range(ranks)))


def hybrid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


WRAPS: dict[str, Callable[[], Any]] = {
    "fully_shard": lambda: simple_fsdp,
    "hybrid_shard": lambda: functools.partial(simple_fsdp, mesh=hybrid()),
    "replicate": lambda: functools.partial(simple_fsdp, mode="replicate"),
    "fsdp2": lambda: fully_shard,
}


@pytest.fixture(scope="module")
def saved(four_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of three steps on four ranks, and its whole content."""
    path = tmp_path_factory.mktemp("checkpoint")
    return path, four_ranks.run(_save, path)[0]


def _save(path: Path) -> Any:
    model, optimizer = model_of(simple_fsdp)
    train(model, optimizer, range(3), dist.get_rank(), 4)
    state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id=path)
    return values(state)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_training_goes_on_on_another_number_of_ranks(four_ranks: Ranks, saved: tuple[Path, Any], ranks: int) -> None:
    four_ranks.run(_go_on, *saved, ranks)


def _go_on(path: Path, expected: Any, ranks: int) -> None:
    mesh = sub_mesh(ranks)
    plain, its_optimizer = model_of(lambda model: model)
    for step in range(5):
        plain(vectors(step, 0, GLOBAL)).square().mean().backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
    if dist.get_rank() >= ranks:
        return
    model, optimizer = model_of(functools.partial(simple_fsdp, mesh=mesh))
    load(path, model, optimizer, mesh.get_group())
    same(values(state_of(model, optimizer)), expected)
    train(model, optimizer, range(3, 5), dist.get_rank(), ranks)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(param), other.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_checkpoint_is_loaded_in_every_mode_and_by_fsdp2(
    four_ranks: Ranks, saved: tuple[Path, Any], wrap: str
) -> None:
    four_ranks.run(_other_mode, *saved, wrap)


def _other_mode(path: Path, expected: Any, wrap: str) -> None:
    model, optimizer = model_of(WRAPS[wrap]())
    load(path, model, optimizer)
    same(values(state_of(model, optimizer)), expected)


@pytest.mark.parametrize("wrap", ["hybrid_shard", "replicate", "fsdp2"])
def test_checkpoints_of_every_mode_and_of_fsdp2_are_loaded(four_ranks: Ranks, tmp_path: Path, wrap: str) -> None:
    four_ranks.run(_from_other_mode, tmp_path, wrap)


def _from_other_mode(path: Path, wrap: str) -> None:
    model, optimizer = model_of(WRAPS[wrap]())
    train(model, optimizer, range(2), dist.get_rank(), 4)
    state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id=path)
    mine, my_optimizer = model_of(simple_fsdp)
    load(path, mine, my_optimizer)
    same(values(state_of(mine, my_optimizer)), values(state))


def test_the_same_ranks_go_on_bitwise_also_from_what_is_saved_meanwhile(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(_asynchronous, tmp_path)


def _asynchronous(path: Path) -> None:
    group = dist.new_group(backend="gloo")  # of its own: training goes on, with collectives of the default one
    model, optimizer = model_of(simple_fsdp)
    train(model, optimizer, range(3), dist.get_rank(), 4)
    written = dcp.async_save(state_of(model, optimizer), checkpoint_id=path, process_group=group)
    train(model, optimizer, range(3, 6), dist.get_rank(), 4)
    written.result()
    again, its_optimizer = model_of(simple_fsdp)
    load(path, again, its_optimizer)
    train(again, its_optimizer, range(3, 6), dist.get_rank(), 4)
    same(values(state_of(again, its_optimizer)), values(state_of(model, optimizer)))


def test_tensor_parallel_shards_are_loaded_without_tensor_parallelism_and_back(
    four_ranks: Ranks, tmp_path: Path
) -> None:
    four_ranks.run(_tensor_parallel, tmp_path)


def _tensor_parallel(path: Path) -> None:
    mesh = mesh_of(2, 2)
    model = simple_fsdp(parallel_llama(mesh["tp"]), mesh["dp"])
    expected = values(get_model_state_dict(model))
    dcp.save(get_model_state_dict(model), checkpoint_id=path / "parallel")
    alone = simple_fsdp(tiny_llama(layers=2))
    state = get_model_state_dict(alone)
    dcp.load(state, checkpoint_id=path / "parallel")
    set_model_state_dict(alone, state)
    same(values(get_model_state_dict(alone)), expected)
    with torch.no_grad():
        for param in alone.parameters():
            param.mul_(2)
    dcp.save(get_model_state_dict(alone), checkpoint_id=path / "alone")
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=path / "alone")
    set_model_state_dict(model, state)
    same(values(get_model_state_dict(model)), tree_map_only(Tensor, lambda x: 2 * x, expected))


def test_whole_state_dicts_leave_and_enter_on_rank_0(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(_whole, tmp_path / "model.safetensors")


def _whole(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model, _ = model_of(simple_fsdp)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(full) == (dist.get_rank() == 0)
    if full:
        save_file({name: tensor.clone() for name, tensor in full.items()}, path)  # it refuses tied ones
    other, _ = model_of(simple_fsdp)
    read: Any = load_file(path) if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, read, options=options)
    same(values(get_model_state_dict(other)), values(get_model_state_dict(model)))


def test_all_that_does_not_fit_is_listed_and_nothing_is_loaded(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_does_not_fit, tmp_path)


def _does_not_fit(folder: Path) -> None:
    def state(*layers: tuple[int, int]) -> dict[str, Any]:
        model = nn.Sequential(*(nn.Linear(*sizes) for sizes in layers))
        for param in model.parameters():
            nn.init.constant_(param, len(layers))
        return {"model": simple_fsdp(model).state_dict(), "step": 7}

    dcp.save(state((6, 8), (8, 6), (6, 4)) | {"scheduler": 1}, checkpoint_id=folder)
    here = state((6, 8), (8, 8))
    with pytest.raises(dcp.api.CheckpointException) as error:
        dcp.load(here, checkpoint_id=folder, planner=StrictLoadPlanner())
    expected = [
        "model.1.weight: (6, 8) in the checkpoint, (8, 8) here",
        "model.1.bias: (6,) in the checkpoint, (8,) here",
        "model.2.weight: not here",
        "model.2.bias: not here",
    ]
    assert str(error.value.failures[0][0]) == "the checkpoint does not fit:\n  " + "\n  ".join(expected)
    assert all((param.to_local() == 2).all() for param in here["model"].values())
    more = state((6, 8), (8, 6), (6, 4), (4, 4))
    with pytest.raises(
        dcp.api.CheckpointException, match=r"model.3.weight: not in the checkpoint\n  model.3.bias: not in"
    ):
        dcp.load(more, checkpoint_id=folder, planner=StrictLoadPlanner())
    fits = state((6, 8), (8, 6), (6, 4)) | {"step": 0}
    dcp.load(fits, checkpoint_id=folder, planner=StrictLoadPlanner())
    assert fits["step"] == 7
    stages = [{"0": {"weight": torch.zeros(8, 6), "bias": torch.zeros(8)}}, {"2": {"bias": torch.zeros(4)}}]
    missing = ["model.1.weight: not here", "model.1.bias: not here", "model.2.weight: not here"]  # on none of the ranks
    with pytest.raises(dcp.api.CheckpointException) as error:
        dcp.load({"model": stages[dist.get_rank()]}, checkpoint_id=folder, planner=StrictLoadPlanner())
    assert str(error.value.failures[0][0]).split("\n  ")[1:] == missing


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_however_it_is_compiled_the_keys_are_the_same() -> None:
    model, optimizer = model_of(simple_fsdp)
    keys = list(model.state_dict())
    compiled: Any = torch.compile(model, backend="simplefsdp")
    assert list(get_model_state_dict(compiled)) == keys
    assert list(get_state_dict(compiled, optimizer)[0]) == keys
    model.compile(backend="simplefsdp")
    assert list(model.state_dict()) == list(get_model_state_dict(model)) == keys

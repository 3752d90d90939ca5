"""The whole weights come to the first rank, and to no other, for tools that know nothing of shards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from inductor_passes.runtime.agreement import forget_failures
from simplefsdp import full_state_dict, simple_fsdp
from tests.ranks import Ranks


class Tied(nn.Module):
    """An embedding that is also the output, buffers of which one is not saved, and a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.output = nn.Linear(5, 7, bias=False)
        self.output.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.register_buffer("positions", torch.arange(4), persistent=False)

    def forward(self, tokens: Any) -> Any:
        return self.output(self.norm(self.embedding(tokens))) * self.scale

    def get_extra_state(self) -> str:
        return "version 1"

    def set_extra_state(self, state: str) -> None:
        assert state == "version 1"


SETTINGS: dict[str, Callable[[Any], Any]] = {
    "uneven": simple_fsdp,
    "columns": lambda model: simple_fsdp(
        model, shard_placement_fn=lambda param: Shard(param.ndim - 1) if param.ndim else None
    ),
    "hybrid": lambda model: simple_fsdp(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))),
    "replicate": lambda model: simple_fsdp(model, mode="replicate"),
    "offloaded": lambda model: simple_fsdp(model, offload_policy=CPUOffloadPolicy()),
    "FSDP2": lambda model: fully_shard(model, ignored_params={model.scale}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_first_rank_has_what_the_model_had_before(four_ranks: Ranks, setting: str) -> None:
    four_ranks.run(_same, setting)


def _same(setting: str) -> None:
    expected = Tied().state_dict()
    state = full_state_dict(SETTINGS[setting](Tied()))
    if dist.get_rank():
        assert state == {}
        return
    assert list(state) == list(expected)
    assert state.pop("_extra_state") == expected.pop("_extra_state")
    torch.testing.assert_close(state, dict(expected), rtol=0, atol=0)
    assert all(type(value) is torch.Tensor and not value.requires_grad for value in state.values())
    assert state["output.weight"] is state["embedding.weight"]
    Tied().load_state_dict(state | {"_extra_state": "version 1"})


def test_tensor_parallel_weights_are_whole_too(four_ranks: Ranks) -> None:
    four_ranks.run(_tensor_parallel)


def _tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    state = full_state_dict(simple_fsdp(model, mesh["dp"]))
    assert bool(state) == (dist.get_rank() == 0)
    if state:
        torch.testing.assert_close(state, expected, rtol=0, atol=0)


def test_a_compiled_model_has_the_names_of_the_model_and_values_of_its_own(two_ranks: Ranks) -> None:
    two_ranks.run(_compiled)


def _compiled() -> None:
    model = simple_fsdp(Tied())
    compiled: Any = torch.compile(model, backend="simplefsdp")
    state = full_state_dict(compiled)
    assert [*state] == ([] if dist.get_rank() else [*Tied().state_dict()])
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert all(value.any() for name, value in state.items() if name in ("embedding.weight", "scale"))


def test_a_part_of_the_ranks_gives_the_weights_to_its_own_first(four_ranks: Ranks) -> None:
    four_ranks.run(_stages)


def _stages() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))
    state = full_state_dict(simple_fsdp(Tied(), mesh["dp"]))
    assert bool(state) == (dist.get_rank() % 2 == 0)


def test_ranks_with_other_models_are_told(two_ranks: Ranks) -> None:
    two_ranks.run(_others)


def _others() -> None:
    model = simple_fsdp(nn.Linear(4, 4 + dist.get_rank()), check_initial_weights=False)
    with pytest.raises(RuntimeError, match=r"do not gather the same whole weights.*weight: \([45], 4\)"):
        full_state_dict(model)
    dist.barrier()
    forget_failures()


@pytest.mark.usefixtures("one_of_four")
def test_weights_without_values_are_named() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="full_state_dict: weight is on meta"):
        full_state_dict(simple_fsdp(model))


def test_a_model_that_is_not_sharded_is_copied() -> None:
    model = Tied()
    state = full_state_dict(model)
    assert state["embedding.weight"] is state["output.weight"]
    assert state["embedding.weight"].data_ptr() != model.embedding.weight.data_ptr()

"""The state of owned parameters: left to the owners, and sent to all ranks where the whole state is asked for."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from inductor_passes.torch_compat.distributed import is_single_process_group
from simplefsdp.training.optimizers.exchange import mesh_device, process_group
from simplefsdp.training.optimizers.ownership import Owned, name_of


def place_state(state: MutableMapping[Tensor, Any], owned: Sequence[Owned]) -> None:
    """Leave the state of each owned parameter to its owner; whole values are made from sharded ones.

    Raises:
        RuntimeError (on all ranks): an owner has no state for a parameter, and another rank has.
    """
    by_group: dict[dist.ProcessGroup, list[Owned]] = {}
    for each in owned:
        by_group.setdefault(process_group(each.param.device_mesh), []).append(each)
        if mine := state.get(each.param):
            whole = {key: _whole(value) for key, value in mine.items()}
            if each.owner_rank == dist.get_rank():
                state[each.param] = whole
    for group, members in by_group.items():
        have = [i for i, each in enumerate(members) if state.get(each.param)]
        everywhere = {dist.get_rank(): have}
        if not is_single_process_group(group.group_name):
            found: list[Any] = [None] * group.size()
            dist.all_gather_object(found, have, group)
            everywhere = dict(zip(dist.get_process_group_ranks(group), found, strict=True))
        for i, each in enumerate(members):
            others = [rank for rank, indices in everywhere.items() if i in indices]
            if others and each.owner_rank in everywhere and each.owner_rank not in others:
                raise RuntimeError(
                    f"{name_of(each.param)}: rank {each.owner_rank} owns it and has no state for it, rank {others[0]} "
                    "has; load optimizers by torch.distributed.checkpoint, or load the whole state on every rank"
                )
            if each.owner_rank != dist.get_rank():
                state.pop(each.param, None)


def state_of_all(state: Mapping[Tensor, Any], owned: Sequence[Owned]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield each owned parameter and its state, which the owner sends to the other ranks of its mesh.

    All ranks of a mesh call this function together. Tensors are where the owner has them: on a CPU, or on the device of
    the mesh.
    """
    for each in owned:
        mine = state.get(each.param, {})
        group, wire = process_group(each.param.device_mesh), mesh_device(each.param.device_mesh)
        if is_single_process_group(group.group_name):
            yield each.param, mine
            continue
        is_owner = each.owner_rank == dist.get_rank()
        told: list[Any] = [{key: _Like.of(value) for key, value in mine.items()}]
        dist.broadcast_object_list(told, each.owner_rank, group)
        found = dict(told[0])
        for key, like in told[0].items():
            if isinstance(like, _Like):
                value = mine[key].detach() if is_owner else torch.empty(like.shape, dtype=like.dtype, device=wire)
                sent = value.to(wire).contiguous()
                dist.broadcast(sent, each.owner_rank, group)
                found[key] = sent.cpu() if like.is_on_cpu else sent
        yield each.param, found


class _Like(NamedTuple):
    """A tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype
    is_on_cpu: bool

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return a tensor's description; any other value as it is."""
        return cls(value.shape, value.dtype, value.device.type == "cpu") if isinstance(value, Tensor) else value


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value

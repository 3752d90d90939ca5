"""The way of parameters to their owners, with their gradients, and of new values back to the shards.

Each way is one all-to-all. What a rank sends is packed by one concatenation, and what it receives is unpacked by one
copy of many parts; values travel as bytes, in the dtype of the parameter.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from inductor_passes.torch_compat.dtensor import local_tensor
from simplefsdp.training.optimizers.ownership import Owned


class Exchange:
    """Parameters of one mesh and dtype that are brought to their owners together.

    ``fetch``, ``receive``, ``send_back`` and ``store`` are called in this order, once a step, on every rank of the
    mesh. The first and the third issue a collective that the next one waits for.
    """

    def __init__(self, owned: Sequence[Owned]):
        self.owned = owned
        first = owned[0]
        mesh, shard = first.param.device_mesh, first.param._local_tensor
        self._like: dict[str, Any] = {"dtype": shard.dtype, "device": shard.device}
        self._bytes = shard.element_size()
        self._wire = mesh_device(mesh)
        self._group = process_group(mesh)
        ranks = first.layout.ranks
        me = ranks.index(dist.get_rank())
        # In the order of group ranks, which both sides of an all-to-all count by.
        order = [ranks.index(rank) for rank in dist.get_process_group_ranks(self._group)]
        by_owner: dict[int, list[Owned]] = {rank: [] for rank in order}
        for each in owned:
            by_owner[each.owner].append(each)
        self.mine = by_owner[me]
        holders = [each.layout.holders(each.owner) for each in self.mine]

        lends = {rank: [each for each in by_owner[rank] if me in each.layout.holders(rank)] for rank in order}
        self._lent = [each for rank in order for each in lends[rank]]
        self._lent_bytes = [2 * sum(self._part_bytes(each, me) for each in lends[rank]) for rank in order]
        borrows = {rank: [i for i, held_by in enumerate(holders) if rank in held_by] for rank in order}
        self._borrowed = [(i, self.mine[i].layout.parts[rank]) for rank in order for i in borrows[rank]]
        self._borrowed_bytes = [2 * sum(self._part_bytes(self.mine[i], rank) for i in borrows[rank]) for rank in order]
        self._returned = [(i, each.layout.parts[rank]) for rank in order for i, each in enumerate(self.mine)]
        self._returned_bytes = [sum(self._part_bytes(each, rank) for each in self.mine) for rank in order]
        self._regained = [each for rank in order for each in by_owner[rank]]
        self._regained_bytes = [sum(self._part_bytes(each, me) for each in by_owner[rank]) for rank in order]

    @property
    def received_bytes(self) -> int:
        """Bytes of values and gradients that this rank receives."""
        return sum(self._borrowed_bytes)

    def fetch(self) -> None:
        """Begin to send this rank's shards, with their gradients, to the owners."""
        shards = [(each.param, each.param._local_tensor.detach()) for each in self._lent]
        parts = [part for param, shard in shards for part in (_gradient(param, shard), shard)]
        self._work = self._all_to_all(parts, self._lent_bytes, self._borrowed_bytes)

    def receive(self) -> list[tuple[DTensor, Tensor]]:
        """Return this rank's parameters, and whole tensors with whole gradients; no gradient where a shard has none."""
        received = self._arrived()
        wholes = [[torch.empty(each.param.shape, **self._like) for _ in range(2)] for each in self.mine]
        _copy([whole[part] for i, part in self._borrowed for whole in wholes[i]], received)
        found = []
        for each, (gradient, value) in zip(self.mine, wholes, strict=True):
            value.requires_grad_().grad = None if each.param.grad is None else gradient
            found.append((each.param, value))
        return found

    def send_back(self, values: Sequence[Tensor]) -> None:
        """Begin to send the new values of this rank's parameters, in the order of ``receive``, to all their shards."""
        parts = [values[i][part] for i, part in self._returned]
        self._work = self._all_to_all(parts, self._returned_bytes, self._regained_bytes)

    def store(self) -> None:
        """Copy the new values into this rank's shards."""
        _copy([each.param._local_tensor.detach() for each in self._regained], self._arrived())

    def _part_bytes(self, each: Owned, rank: int) -> int:
        return self._bytes * math.prod(dim.stop - dim.start for dim in each.layout.parts[rank])

    def _all_to_all(self, parts: list[Tensor], sent: list[int], wanted: list[int]) -> tuple[Any, Tensor]:
        packed = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0, **self._like)
        packed = packed.view(torch.uint8).to(self._wire)
        arrived = torch.empty(sum(wanted), dtype=torch.uint8, device=self._wire)
        return dist.all_to_all_single(arrived, packed, wanted, sent, self._group, async_op=True), arrived

    def _arrived(self) -> Tensor:
        work, arrived = self._work
        del self._work
        work.wait()
        return arrived.to(self._like["device"]).view(self._like["dtype"])


@functools.cache
def _process_group(ranks: tuple[int, ...], world: dist.ProcessGroup) -> dist.ProcessGroup:
    if list(ranks) == dist.get_process_group_ranks(world):
        return world
    group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="owners of parameters")
    assert group is not None
    return group


def process_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return a process group of all ranks of a mesh. All of them must call this function in the same order."""
    if mesh.ndim == 1:
        return mesh.get_group()
    world = dist.group.WORLD
    assert world is not None
    return _process_group(tuple(sorted(mesh.mesh.flatten().tolist())), world)


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """Return the device on which the process groups of a mesh communicate."""
    kind = mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def _gradient(param: DTensor, shard: Tensor) -> Tensor:
    """Return the gradient of this rank's shard; zeros if there is none, so that what is sent depends on no rank."""
    return torch.zeros_like(shard) if param.grad is None else local_gradient(param)


def local_gradient(param: Any) -> Tensor:
    """Return this rank's part of a parameter's gradient, placed and of the dtype as the parameter is."""
    gradient = param.grad
    if isinstance(gradient, DTensor) and gradient.placements != param.placements:
        gradient = gradient.redistribute(param.device_mesh, param.placements)
    return local_tensor(gradient).to(param.dtype)


def _copy(places: list[Tensor], flat: Tensor) -> None:
    """Copy consecutive values of ``flat`` into each of ``places``."""
    parts = flat.split([place.numel() for place in places]) if places else ()
    filled = [(place, part.view(place.shape)) for place, part in zip(places, parts, strict=True) if place.numel()]
    if filled:
        torch._foreach_copy_([place for place, _ in filled], [part for _, part in filled])

"""Which rank owns which parameter, and in which order owned parameters are exchanged.

All of it follows from shapes, placements and meshes, so every rank finds the same without a collective.
"""

import functools
import heapq
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from simplefsdp.frontend.sharding import part_of

Part = tuple[slice, ...]
"""A range of each dim of a parameter."""


class Layout(NamedTuple):
    """Which rank holds which part of a parameter; ranks are counted in the order of ``ranks``."""

    ranks: tuple[int, ...]
    """Global ranks of the parameter's mesh."""
    parts: tuple[Part, ...]
    """The part of each rank."""
    replica: tuple[tuple[int, ...], ...]
    """Coordinates of each rank on the dimensions of the mesh over which the parameter is replicated."""

    def holders(self, owner: int) -> list[int]:
        """Return ranks whose parts together are the whole once, the owner's own among them."""
        return [rank for rank, replica in enumerate(self.replica) if replica == self.replica[owner]]


class Owned(NamedTuple):
    """A parameter that one rank steps as a whole."""

    param: DTensor
    layout: Layout
    owner: int
    """Index of the owner in ``layout.ranks``."""

    @property
    def owner_rank(self) -> int:
        return self.layout.ranks[self.owner]

    @property
    def whole_bytes(self) -> int:
        return self.param.numel() * self.param.element_size()


def name_of(param: Tensor) -> str:
    """Return the name of a parameter in its model, if ``simple_fsdp`` has sharded it."""
    info = getattr(param, "simple_fsdp_info", None)
    return "a parameter" if info is None else info.fqn


def layout(param: DTensor) -> Layout:
    """Return the layout of a parameter.

    Raises:
        ValueError: ``param`` is placed by other rules than those of ``simple_fsdp`` and ``distribute_tensor``.
    """
    found = _layout(param.device_mesh, tuple(param.placements), tuple(param.shape))
    here = found.parts[found.ranks.index(torch.distributed.get_rank())]
    if tuple(param._local_tensor.shape) != _shape(here):
        raise ValueError(
            f"{name_of(param)}: {tuple(param.shape)} on {param.device_mesh} as {param.placements}: this rank holds "
            f"{tuple(param._local_tensor.shape)}, expected {_shape(here)}"
        )
    return found


@functools.lru_cache(maxsize=1024)
def _layout(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> Layout:
    coordinates: list[list[int]] = torch.ones(mesh.shape).nonzero().tolist()
    return Layout(
        tuple(mesh.mesh.flatten().tolist()),
        tuple(part_of(shape, mesh.shape, coordinate, placements) for coordinate in coordinates),
        tuple(
            tuple(at for at, placement in zip(coordinate, placements, strict=True) if isinstance(placement, Replicate))
            for coordinate in coordinates
        ),
    )


def _shape(part: Part) -> tuple[int, ...]:
    return tuple(each.stop - each.start for each in part)


def sides(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a parameter as a matrix: trailing dims count as one."""
    return (shape[0] if shape else 1), math.prod(shape[1:])


def cost(shape: Sequence[int]) -> float:
    """Return what the step of a matrix is taken to cost: rows x columns x the lesser of both, as a product of matrices.

    Trailing dims count as one. What is no matrix costs its number of values.
    """
    if len(shape) < 2:
        return float(math.prod(shape))
    rows, columns = sides(shape)
    return float(rows * columns * min(rows, columns))


def deal(costs: Sequence[float], loads: Sequence[float]) -> list[int]:
    """Return an owner for each cost: the dearest first, each to the rank that has least so far.

    From ``loads`` of zero, the most that a rank gets is at most 4/3 of the best possible (Graham 1969).

    Args:
        costs: one for each parameter.
        loads: what each rank has already.
    """
    owners = [0] * len(costs)
    least = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(least)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, owners[i] = least[0]
        heapq.heapreplace(least, (load + costs[i], owners[i]))
    return owners


def exchange_groups(owned: Sequence[Owned], limit_bytes: int) -> list[list[Owned]]:
    """Return the parameters in groups that are exchanged together, the dearest first.

    In each group an owner receives values and gradients of at most ``limit_bytes``, or of one parameter. There are as
    many groups as the owner needs who has most.
    """
    groups: list[list[Owned]] = []
    state: dict[int, tuple[int, int]] = {}  # of each owner: the group that it fills, and its bytes there
    for each in sorted(owned, key=lambda each: -cost(each.param.shape)):
        i, filled = state.get(each.owner, (0, 0))
        bytes_ = 2 * each.whole_bytes
        if filled and filled + bytes_ > limit_bytes:
            i, filled = i + 1, 0
        state[each.owner] = i, filled + bytes_
        groups += [[] for _ in range(i + 1 - len(groups))]
        groups[i].append(each)
    return groups


def lanes(params: Sequence[Tensor]) -> dict[Any, list[DTensor]]:
    """Return parameters that can be exchanged together: on the same ranks, of one dtype and device."""
    found: dict[Any, list[DTensor]] = {}
    for param in params:
        if isinstance(param, DTensor):
            lane = layout(param).ranks, param.device_mesh.device_type, param.dtype, param._local_tensor.device
            found.setdefault(lane, []).append(param)
    return found

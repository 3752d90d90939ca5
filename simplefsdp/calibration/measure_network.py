"""Measure the network between the ranks of this job: alpha and bandwidth of each kind of collective, and groups."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from inductor_passes.torch_compat.distributed import issues_groups
from simplefsdp.hardware.profile import KINDS, Link, Network

SIZES = tuple(1 << n for n in (12, 16, 18, 19, 20, 21, 22, 23))
"""Bytes of the whole tensors that are measured on CPU; on a GPU, where transfers are larger, sixteen times as many."""
GROUPS = tuple(itertools.product((2, 8, 32), (1 << 16, 1 << 18, 1 << 20)))
"""Members of the groups of all-gathers that are measured, and bytes of all of them; on a GPU sixteen times as many."""
_LATE_S = 0.002
_c10d = torch.ops._c10d_functional


T = TypeVar("T")


class GroupSweep(NamedTuple):
    """Measured times of collectives in one process group."""

    ranks: int
    sizes: tuple[int, ...]
    """Bytes of the whole tensors."""
    seconds: Mapping[str, tuple[float, ...]]
    """Median seconds for each size, by kind of collective."""


class LinkFit(NamedTuple):
    alpha_s: float
    s_per_byte: float
    """Seconds for each byte that a rank receives."""
    error: float
    """The largest relative error on the sizes of the fit."""


def _all_gather(whole: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_gather_into_tensor(whole, whole.chunk(group.size())[0].clone(), group=group)


def _reduce_scatter(whole: Tensor, group: dist.ProcessGroup) -> None:
    dist.reduce_scatter_tensor(torch.empty_like(whole.chunk(group.size())[0]), whole, group=group)


def _all_reduce(whole: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(whole, group=group)


_MEASURED: Mapping[str, Callable[[Tensor, dist.ProcessGroup], None]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
}


def sweep(group: dist.ProcessGroup, device: torch.device, repeats: int) -> GroupSweep:
    """Measure what each kind and size of collective takes on this rank; all ranks of ``group`` must call this function.

    The last rank comes late, as in training one of them does, and it is its time that counts: gloo's all-gather takes
    longer then than between ranks that come together (of two, 0.75 instead of 0.5 of the whole tensor cross the link).
    """
    factor = 16 if device.type == "cuda" else 1
    sizes = tuple(factor * size // (4 * group.size()) * 4 * group.size() or 4 * group.size() for size in SIZES)
    found: dict[str, list[float]] = {kind: [] for kind in _MEASURED}
    for (kind, collective), size in itertools.product(_MEASURED.items(), sizes):
        whole = torch.zeros(size // 4, device=device)
        times = []
        for _ in range(repeats):
            dist.barrier(group)
            if group.rank() == group.size() - 1:
                time.sleep(_LATE_S)
            _finish(device)
            began = time.perf_counter()
            collective(whole, group)
            _finish(device)
            times.append(time.perf_counter() - began)
        found[kind].append(statistics.median(times))
    return GroupSweep(group.size(), sizes, {kind: tuple(seconds) for kind, seconds in found.items()})


def group_member_s(group: dist.ProcessGroup, device: torch.device, repeats: int) -> float:
    """Return what each member of a group of all-gathers takes beyond the first: ``Network.member_s``.

    Groups are compared with one collective of as many bytes, in turn; the result is a median and at least 0. All ranks
    of ``group`` must call this function.
    """
    factor = 16 if device.type == "cuda" else 1
    found = []
    for members, size in GROUPS:
        numel = factor * size // (4 * group.size() * members)
        shards, whole = torch.zeros(members, numel, device=device), torch.zeros(members * numel, device=device)
        more = [_seconds([*shards], group, device) - _seconds([whole], group, device) for _ in range(repeats)]
        found.append(statistics.median(more) / (members - 1))
    return max(0.0, statistics.median(found))


def _seconds(shards: list[Tensor], group: dist.ProcessGroup, device: torch.device) -> float:
    """Return what a group of all-gathers takes."""
    dist.barrier(group)
    _finish(device)
    began = time.perf_counter()
    for result in _c10d.all_gather_into_tensor_coalesced(shards, group.size(), group.group_name):
        _c10d.wait_tensor(result)
    _finish(device)
    return time.perf_counter() - began


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fit(found: GroupSweep) -> dict[str, LinkFit]:
    """Return, for each kind, the alpha and the seconds of a received byte that have the least relative errors."""
    fits = {}
    for kind, seconds in found.seconds.items():
        rounds = 2 if kind == "all_reduce" else 1
        received = rounds * numpy.array(found.sizes) * (found.ranks - 1) / found.ranks
        columns = numpy.stack([numpy.ones_like(received), received], axis=1)
        measured = numpy.array(seconds)
        # Relative errors count, so that small messages do, too.
        (alpha, per_byte), *_ = numpy.linalg.lstsq(columns / measured[:, None], numpy.ones_like(measured), rcond=None)
        alpha, per_byte = max(float(alpha), 1e-6), max(float(per_byte), 1e-15)
        fits[kind] = LinkFit(alpha, per_byte, float(abs(columns @ (alpha, per_byte) / measured - 1).max()))
    return fits


def measure_network(
    device: torch.device, ranks_per_node: int, *, repeats: int = 5
) -> tuple[Network, dict[str, dict[str, LinkFit]]]:
    """The network between all ranks of this job, and the fits (``"inside"``, ``"between"``) that it is made of.

    All ranks must call it; all have the same result. ``ranks_per_node``: ranks are on nodes in order, as torchrun
    starts them. Inside of nodes it measures all of them at once.

    Raises:
        ValueError: there is one rank only, or the ranks are not whole nodes.
    """
    ranks = dist.get_world_size()
    if ranks < 2 or ranks % ranks_per_node:
        raise ValueError(f"a network is measured between whole nodes of {ranks_per_node}, found {ranks} ranks")
    world = dist.group.WORLD
    assert world is not None
    fits: dict[str, dict[str, LinkFit]] = {}
    if ranks_per_node > 1:
        group = world if ranks == ranks_per_node else dist.new_subgroups(ranks_per_node)[0]
        fits["inside"] = fit(_of_rank(ranks_per_node - 1, sweep(group, device, repeats)))
    if ranks > ranks_per_node:
        fits["between"] = fit(_of_rank(ranks - 1, sweep(world, device, repeats)))
    # Between nodes, rings of all ranks of a node are side by side (``hardware/profile.py``).
    inside, between = fits.get("inside", {}), fits.get("between", {})
    links = {
        level: _links(found, share)
        for level, found, share in (("inside", inside or between, 1), ("between", between or inside, ranks_per_node))
    }
    source = f"measured, {ranks} ranks on {device.type}, torch {torch.__version__}"
    nodes = ranks // ranks_per_node
    groups = issues_groups(world.group_name)
    member_s = _of_rank(ranks - 1, group_member_s(world, device, repeats) if groups else None)
    return Network("measured", source, ranks_per_node, nodes, links["inside"], links["between"], member_s), fits


def _of_rank(rank: int, found: T) -> T:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    result: T = every[rank]
    return result


def _links(fits: Mapping[str, LinkFit], share: int) -> dict[str, Link]:
    links = {kind: Link(1 / (found.s_per_byte * share), found.alpha_s) for kind, found in fits.items()}
    return {kind: links.get(kind, links["all_gather"]) for kind in KINDS}

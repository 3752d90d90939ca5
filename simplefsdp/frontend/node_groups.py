"""Process groups inside nodes and between them, for gradients that are reduced in two steps.

::

    8 ranks, 4 on each node:    inside: (0 1 2 3) (4 5 6 7)    between: (0 4) (1 5) (2 6) (3 7)
"""

import os
import weakref
from collections import Counter
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from inductor_passes.runtime.agreement import Subject, compare
from inductor_passes.torch_compat.distributed import new_groups_are_split
from simplefsdp.frontend.gloo import run_in_order


class NodeGroups(NamedTuple):
    """Process groups of this rank: the first fields of ``inductor_passes.collectives.TwoSteps``."""

    inside: str
    ranks: int
    between: str
    nodes: int


_SUBJECT = Subject(
    differ="do not make the same process groups for gradients in a wire format",
    awaited="simple_fsdp() with gradients in a wire format",
    late="over several nodes, for which it makes process groups",
    remedy="Give simple_fsdp() the same wire=... on all ranks, and one ranks_per_node=...; that of all ranks reduces "
    "in one step",
    every_time=True,
)

_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, NodeGroups]]" = weakref.WeakKeyDictionary()
"""The groups that were made for each process group, by the number of ranks on a node."""


def node_size(given: int | None) -> int:
    """Return the number of ranks on each node: as given, else as torchrun says, else all ranks.

    Raises:
        TypeError, ValueError: the number is not one, or does not divide the number of all ranks.
    """
    name, found = ("ranks_per_node", given) if given is not None else ("LOCAL_WORLD_SIZE", _local_world_size())
    ranks = dist.get_world_size()
    if found is None:
        return ranks
    if not isinstance(found, int) or isinstance(found, bool):
        raise TypeError(f"{name}: expected a number of ranks, found {found!r}")
    if found < 1 or (ranks % found and found < ranks):
        raise ValueError(f"{name}: {ranks} ranks are not whole nodes of {found}")
    return min(found, ranks)


def node_groups(group: dist.ProcessGroup, ranks_per_node: int) -> NodeGroups | None:
    """Return the groups inside nodes and between them of the ranks of ``group``; the same ones at every call.

    All ranks of ``group`` must call it; they meet at the store, no collective runs.

    Args:
        ranks_per_node: number of ranks of the whole world on each node, which are numbered node by node.

    Returns:
        ``None`` if the ranks are on one node, or one is on each, or some nodes have more of them than others.

    Raises:
        RuntimeError: the ranks were given other numbers.
    """
    if ranks_per_node in (made := _made.setdefault(group, {})):
        return made[ranks_per_node]
    ranks = dist.get_process_group_ranks(group)
    on_node = Counter(rank // ranks_per_node for rank in ranks)
    among, nodes = len(ranks) // len(on_node), len(on_node)
    if ranks != sorted(ranks) or set(on_node.values()) != {among} or 1 in (among, nodes):
        return None
    compare({group.group_name: [f"ranks per node: {ranks_per_node}"]}, subject=_SUBJECT)
    node, place = divmod(ranks.index(dist.get_rank()), among)
    of_nodes = [[*range(first, first + among)] for first in range(0, len(ranks), among)]
    of_places = [[*range(place, len(ranks), among)] for place in range(among)]
    inside, between = _part(group, of_nodes, node), _part(group, of_places, place)
    made[ranks_per_node] = NodeGroups(inside.group_name, among, between.group_name, nodes)
    return made[ranks_per_node]


def _part(group: dist.ProcessGroup, parts: list[list[int]], own: int) -> dist.ProcessGroup:
    """Return the process group of one of the disjoint parts of ``group``, given by ranks of ``group``."""
    if new_groups_are_split(group):
        made: Any = dist.split_group(parent_pg=group, split_ranks=parts)
    else:
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group([ranks[rank] for rank in parts[own]], use_local_synchronization=True)
    run_in_order(made)
    return cast(dist.ProcessGroup, made)


def _local_world_size() -> int | None:
    text = os.environ.get("LOCAL_WORLD_SIZE")
    return int(text) if text and text.isdecimal() else None

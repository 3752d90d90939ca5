"""Nodes of a graph as ``order`` and the cost model see them: needs, role in communication, place among compute.

``graph_items`` answers for FX nodes, ``kernel_items`` (``inductor_order.py``) for Inductor's kernels.
"""

import operator
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from inductor_passes.collectives import ALL_GATHER, BUCKET, FQNS, GROUPS, WAIT, gathers_sums, received
from inductor_passes.ops.encode import DECODE_SUMS, DECODE_WEIGHTS, ENCODE_GRADIENTS, ENCODE_SUMS
from inductor_passes.ops.gather_shards import GATHER_SHARDS, GATHER_SHARDS_GROUP
from inductor_passes.ops.pack import PACK_GRADIENTS, UNPACK_WEIGHTS
from inductor_passes.scheduling.issue_points import Bucket

PACKS = (PACK_GRADIENTS, ENCODE_GRADIENTS)
"""Operators that make the input of a reduction of several gradients, or of one in a wire format."""
UNPACKS = (UNPACK_WEIGHTS, DECODE_WEIGHTS)
"""Operators whose results are the weights of a bucket."""

Kind = Literal["compute", "gather", "gathered", "pack", "reduction", "reduced"]


class OrderItem(NamedTuple):
    """A node of a graph, or a kernel, as ``order`` sees it."""

    needs: frozenset[int]
    """Positions of the nodes that must come before."""
    reads_inputs: bool = False
    """Whether the node reads an input of the graph."""
    kind: Kind = "compute"
    """``"gather"`` and ``"reduction"`` issue a collective of parameters, ``"gathered"`` and ``"reduced"`` await one,
    ``"pack"`` packs gradients; everything else is ``"compute"``."""
    fqns: tuple[str, ...] = ()
    """Parameters whose collective the node issues, awaits or packs."""
    bucket: Bucket | None = None
    """The bucket of that collective; ``None`` for compute."""
    is_all_reduce_after: bool = False
    """Whether the node issues or awaits the all-reduce of a reduce-scatter's result."""
    has_all_reduce: bool = False
    """Whether the node awaits a reduce-scatter whose result is then all-reduced."""
    weights: tuple[str, ...] = ()
    """FQNs of the parameters whose full weights are this node's result: a wait's, or an unpacked member's."""
    gradients: tuple[tuple[int, str], ...] = ()
    """The position of each full gradient (-1: an input of the graph) and its FQN, for a node that issues a reduction
    or packs one."""


def graph_items(graph: Graph) -> tuple[list[Node], list[OrderItem]]:
    """Return the nodes of an FX graph that ``order`` arranges, and an ``OrderItem`` for each."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    position = {node: i for i, node in enumerate(nodes)}
    items = []
    for node in nodes:
        needs = frozenset(position[n] for n in node.all_input_nodes if n in position)
        plain = OrderItem(needs, reads_inputs=any(n.op == "placeholder" for n in node.all_input_nodes))
        inputs: list[Node] = []
        map_arg(node.args, inputs.append)
        items.append(order_item(node, plain, [position.get(n, -1) for n in inputs]))
    return nodes, items


def order_item(node: Node, plain: OrderItem, sources: Sequence[int]) -> OrderItem:
    """Return ``plain`` with its role in communication.

    Args:
        node: the FX node that ``plain`` is, or that became the kernel that ``plain`` is.
        plain: an item that has its needs and nothing else.
        sources: positions of the node's inputs, in the order of its arguments; none for a kernel that only hands on a
            result.
    """
    if node.target is operator.getitem and _source(node).target in UNPACKS:
        return plain._replace(weights=(_source(_source(_source(node))).meta[FQNS][cast(int, node.args[1])],))
    if node.target in PACKS:
        reduction = next(iter(node.users))
        fqns = dict(parts_of(reduction))[node] if reduction.target in GROUPS else reduction.meta[FQNS]
        gradients = tuple(zip(sources, fqns, strict=True)) if sources else ()
        return plain._replace(kind="pack", fqns=fqns, bucket=reduction.meta.get(BUCKET), gradients=gradients)
    if node.target is ENCODE_SUMS:
        return plain._replace(reads_inputs=False)  # a shard says whose errors these are, and is not read
    collective = _source(node) if node.target is WAIT else node
    if FQNS not in collective.meta:
        return plain
    fqns = collective.meta[FQNS]
    if node.target in GROUPS or collective.target is operator.getitem:
        return _item_of_group(node, plain, sources)
    item = plain._replace(fqns=fqns, bucket=collective.meta.get(BUCKET))
    if collective.target is GATHER_SHARDS or (collective.target is ALL_GATHER and not gathers_sums(collective)):
        if node is collective:
            return item._replace(kind="gather")
        return item._replace(kind="gathered", weights=fqns if len(fqns) == 1 else ())
    item = item._replace(is_all_reduce_after=is_all_reduce_after(collective))
    if node is not collective:
        return item._replace(kind="reduced", has_all_reduce=any(FQNS in user.meta for user in received(node).users))
    if item.is_all_reduce_after or _source(node).target in PACKS:
        return item._replace(kind="reduction")
    return item._replace(kind="reduction", gradients=((sources[0], fqns[0]),))


def _item_of_group(node: Node, plain: OrderItem, sources: Sequence[int]) -> OrderItem:
    """Return the item of a group of collectives, of one of its results, or of the wait for a result."""
    part = _source(node) if node.target is WAIT else node
    group = _source(part) if part.target is operator.getitem else part
    gathers = group.target is GATHER_SHARDS_GROUP
    item = plain._replace(fqns=part.meta[FQNS], bucket=part.meta.get(BUCKET))
    if node.target is WAIT:
        return item._replace(kind="gathered", weights=item.fqns) if gathers else item._replace(kind="reduced")
    if gathers:
        return item._replace(kind="gather")
    made = zip(sources, parts_of(group), strict=True) if node is group else ()
    gradients = tuple((at, fqns[0]) for at, (source, fqns) in made if source.target not in PACKS)
    return item._replace(kind="reduction", gradients=gradients)


def parts_of(group: Node) -> list[tuple[Node, tuple[str, ...]]]:
    """Return the inputs of a group of collectives and the FQNs of each."""
    fqns = {cast(int, result.args[1]): result.meta[FQNS] for result in group.users}
    return [(source, fqns[i]) for i, source in enumerate(cast(Sequence[Node], group.args[0]))]


def is_all_reduce_after(reduction: Node) -> bool:
    """Return whether ``reduction`` reduces the result of a reduction of the same parameters over other ranks."""
    source = _source(reduction)
    source = _source(source) if source.target in (DECODE_SUMS, ENCODE_SUMS) else source
    return source.target is WAIT and FQNS in _source(source).meta


def _source(node: Node) -> Node:
    return node.all_input_nodes[0]


class ComputePositions(NamedTuple):
    """Positions of uses, gradients and copies among the compute nodes of a graph, which are numbered from 0."""

    main: dict[int, int]
    """The number of each item that is a compute node."""
    copy_in: set[int]
    """Items that prepare gathers, as casts and pads of shards do."""
    copy_out: set[int]
    """Items that read nothing but gathered weights, or nothing but reduced gradients."""
    first_use_slot: dict[str, int]
    """The first compute node that reads a gathered weight, by FQN; the number of compute nodes if none does."""
    last_use_slot: dict[str, int]
    """The last compute node that reads a gathered weight, by FQN, for weights that one reads."""
    ready_slot: dict[str, int]
    """The compute node before which a full gradient is complete, by FQN; their number if the last one makes it."""
    weights: list[tuple[str, ...]]
    """For each item, the FQNs of the full weights that it holds or is made of; none for compute nodes."""


def compute_positions(items: Sequence[OrderItem]) -> ComputePositions:
    """Return where a graph's compute nodes use weights and complete gradients, and which items only copy."""
    users = users_of(items)
    copy_in: set[int] = set()
    for i in reversed(range(len(items))):
        prepares = any(user in copy_in or items[user].kind in ("gather", "gathered") for user in users[i])
        if items[i].kind == "compute" and prepares:
            copy_in.add(i)
    copy_out: set[int] = set()
    main: dict[int, int] = {}
    weights: list[tuple[str, ...]] = []
    first_use: dict[str, int] = {}
    last_use: dict[str, int] = {}
    for i, item in enumerate(items):
        # In the order of the nodes: sets of strings have another order in every process, and ranks must agree.
        read = tuple(dict.fromkeys(fqn for need in sorted(item.needs) for fqn in weights[need]))
        weights.append(item.weights or read)
        if item.kind != "compute" or i in copy_in:
            continue
        received = (n in copy_out or items[n].kind in ("gathered", "reduced") for n in item.needs)
        if item.needs and not item.reads_inputs and all(received):
            copy_out.add(i)
            continue
        weights[i] = ()
        main[i] = len(main)
        for fqn in read:
            first_use.setdefault(fqn, main[i])
            last_use[fqn] = main[i]
    gradient = {}
    for item in items:
        for fqn in item.weights:
            first_use.setdefault(fqn, len(main))
        for producer, fqn in item.gradients:
            gradient[fqn] = 0 if producer < 0 else main.get(producer, len(main) - 1) + 1
    return ComputePositions(main, copy_in, copy_out, first_use, last_use, gradient, weights)


def first_uses(items: Sequence[OrderItem]) -> list[str]:
    """Return the FQNs of the gathered parameters in the order of their first use."""
    first_use = compute_positions(items).first_use_slot
    return sorted(first_use, key=lambda fqn: first_use[fqn])


def last_gradients(items: Sequence[OrderItem]) -> list[str]:
    """Return the FQNs of the reduced parameters in the order in which their full gradients become complete."""
    ready = compute_positions(items).ready_slot
    return sorted(ready, key=lambda fqn: ready[fqn])


def users_of(items: Sequence[OrderItem]) -> list[list[int]]:
    """For each item, the positions of the items that need it."""
    users: list[list[int]] = [[] for _ in items]
    for i, item in enumerate(items):
        for need in item.needs:
            users[need].append(i)
    return users

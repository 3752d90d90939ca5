"""The order of collectives and waits, as a plan says: one function over nodes and what they need.

::

    slot 0                    | slot 1                                   | slot 2 ...
    gather B0, gather B1,     |                                          |
    wait B0, compute          | gather B2, wait B1, compute, compute ... | gather B3, wait B2, compute ...

Compute stays as it is. Before each compute node there is a slot, and whatever belongs to communication goes into one:
a gather and what prepares it into the slot of its bucket's issue point; the wait for it, and what is made of the
weights alone, before the first compute that reads them; a reduction and what packs it, the wait for it and what is made
of its result, into the slots behind the gradients that the plan names. Nodes are then listed by slot and, within one,
by what they are, but never before what they need. Fusing kernels may bring the first use of a weight forward: a gather
is then awaited in time, whatever the plan says. What cannot be put into its slot is an error.

``graph_items`` and ``kernel_items`` (``scheduler.py``) say of FX nodes and of Inductor's kernels what ``order`` asks.
"""

import heapq
import operator
from collections.abc import Sequence
from operator import attrgetter
from typing import Literal, NamedTuple, cast

from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from inductor_passes.collectives import ALL_GATHER, BUCKET, FQNS, WAIT
from inductor_passes.ops.pack import PACK_GRADIENTS, UNPACK_WEIGHTS

Kind = Literal["compute", "gather", "gathered", "pack", "reduction", "reduced"]


class Bucket(NamedTuple):
    """Parameters whose gather or reduction is one collective, and when.

    A point names a parameter by its FQN; one that a graph does not have is that graph's start where something is
    issued, and its end where something is awaited.
    """

    fqns: tuple[str, ...]
    """In packing order."""
    issue: str | None
    """Of a gather: before the first use of this parameter's full weight, and before the wait for that, if it is due
    there; ``None``: at the start of the graph. Of a reduction: when this parameter's full gradient, and all of the
    bucket's own, are there, and those before it in the plan have been issued; ``None``: nothing but these."""
    wait: str | None
    """Of a gather: before the first use of this parameter, the first of the bucket to be used. Of a reduction: before
    the reduction of this parameter is issued. ``None``: at the end of the graph."""
    all_reduce_after: str | None = None
    """Of a reduce-scatter that an all-reduce follows: when the one is awaited and the other issued, as ``wait``."""
    position: int = 0
    """Among the plan's buckets of its direction: what is due at the same point is issued and awaited in this order."""


class OrderItem(NamedTuple):
    """What ``order`` asks of a node."""

    needs: frozenset[int]
    """Positions of the nodes that must come before."""
    reads_inputs: bool = False
    """Whether it reads what the graph is given."""
    kind: Kind = "compute"
    fqns: tuple[str, ...] = ()
    """Of the parameters whose gather or reduction it is, or is waited for or packed by it."""
    bucket: Bucket | None = None
    """Of all but compute."""
    is_all_reduce_after: bool = False
    """It is, or waits for, the all-reduce of a reduce-scatter's result."""
    has_all_reduce: bool = False
    """It waits for a reduce-scatter whose result is then all-reduced."""
    weights: tuple[str, ...] = ()
    """FQNs of the parameters whose full weights are this node's result: of a wait, or of an unpacked member."""
    gradients: tuple[tuple[int, str], ...] = ()
    """Of a reduction, or of what packs it: the position of each full gradient (-1: an input) and its FQN."""


class PlanError(RuntimeError):
    """The plan cannot be carried out on this graph."""


# Within a slot: what an all-reduce is to follow is awaited and handed on before anything else is awaited, reductions
# are awaited before others are issued, gathers when all that is due has been issued. What is due of a reduction in the
# slot in which it is issued comes right behind it.
_ALL_REDUCE, _REDUCED, _REDUCTION, _GATHER, _GATHERED, _COMPUTE = range(6)


def order(items: Sequence[OrderItem]) -> list[int]:
    """Positions of ``items``, a graph in some valid order, in the order of the plan that their buckets are part of.

    The compute nodes among them stay in the order they are in. The result of ordering once more is the same.

    Raises:
        PlanError: a result is needed before the point where the plan awaits it.
    """
    keys = _keys(items)
    users = _users(items)
    missing = [len(item.needs) for item in items]
    ready = [(keys[i], i) for i in range(len(items)) if not missing[i]]
    heapq.heapify(ready)
    result: list[int] = []
    while ready:
        (slot, *_), i = heapq.heappop(ready)
        if result and slot < keys[result[-1]][0]:
            raise PlanError(_late(items, i, result))
        result.append(i)
        for user in users[i]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (keys[user], user))
    return result


def check_order(items: Sequence[OrderItem]) -> None:
    """Raise ``PlanError`` if ``items`` are not in the order of their plan."""
    for i, due in enumerate(order(items)):
        if i != due:
            found, expected = (f"{items[n].kind} of {', '.join(items[n].fqns[:1]) or 'other values'}" for n in (i, due))
            raise PlanError(
                f"the plan is not carried out: at node {i} of {len(items)} there is {found}, not {expected}"
            )


def _late(items: Sequence[OrderItem], late: int, done: Sequence[int]) -> str:
    """Blames what ``late`` waited for, or itself."""
    blamed = next((items[i] for i in reversed(done) if i in items[late].needs and items[i].bucket), items[late])
    bucket = blamed.bucket
    assert bucket is not None, "compute waits for compute that was behind it"
    return (
        f"plan: the bucket of {bucket.fqns[0]} ({len(bucket.fqns)} parameters; issue: {bucket.issue}, then: "
        f"{bucket.all_reduce_after}, wait: {bucket.wait}) cannot be carried out: in this graph its {blamed.kind} node "
        "depends on what comes after that point, or something before that point depends on it"
    )


def first_uses(items: Sequence[OrderItem]) -> list[str]:
    """FQNs of the gathered parameters in the order of their first use."""
    use = compute_positions(items).first_use_slot
    return sorted(use, key=lambda fqn: use[fqn])


def last_gradients(items: Sequence[OrderItem]) -> list[str]:
    """FQNs of the reduced parameters in the order in which their full gradients are there."""
    there = compute_positions(items).ready_slot
    return sorted(there, key=lambda fqn: there[fqn])


def _users(items: Sequence[OrderItem]) -> list[list[int]]:
    users: list[list[int]] = [[] for _ in items]
    for i, item in enumerate(items):
        for need in item.needs:
            users[need].append(i)
    return users


class ComputePositions(NamedTuple):
    """Where things are among the compute nodes, which are numbered; the end is their number."""

    main: dict[int, int]
    """The number of each item that is one."""
    copy_in: set[int]
    """Items that gathers are prepared by."""
    copy_out: set[int]
    """Items that are made of gathered weights alone, or of reduced gradients alone."""
    first_use_slot: dict[str, int]
    """By FQN of a gathered parameter: the first compute node that reads it, or the end."""
    last_use_slot: dict[str, int]
    """By FQN of a gathered parameter that compute reads: the last such node."""
    ready_slot: dict[str, int]
    """By FQN of a reduced parameter: the compute node before which its full gradient is there, or the end."""
    weights: list[tuple[str, ...]]
    """Of each item but compute: FQNs of the parameters whose full weights it is made of."""


def compute_positions(items: Sequence[OrderItem]) -> ComputePositions:
    users = _users(items)
    copy_in: set[int] = set()
    for i in reversed(range(len(items))):
        prepares = users[i] and all(user in copy_in or items[user].kind in ("gather", "gathered") for user in users[i])
        if items[i].kind == "compute" and prepares:
            copy_in.add(i)
    copy_out: set[int] = set()
    main: dict[int, int] = {}
    weights: list[tuple[str, ...]] = []
    use: dict[str, int] = {}
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
            use.setdefault(fqn, main[i])
            last_use[fqn] = main[i]
    gradient = {}
    for item in items:
        for fqn in item.weights:
            use.setdefault(fqn, len(main))
        for producer, fqn in item.gradients:
            gradient[fqn] = 0 if producer < 0 else main.get(producer, len(main) - 1) + 1
    return ComputePositions(main, copy_in, copy_out, use, last_use, gradient, weights)


_Key = tuple[int, int, int, int]
"""Slot, phase, place of the bucket, and the stage of a reduction in its own slot: issued, handed on, awaited."""


def _keys(items: Sequence[OrderItem]) -> list[_Key]:
    at = compute_positions(items)
    end = len(at.main)
    users = _users(items)
    issued: dict[str | None, int] = {}
    last = 0
    buckets = dict.fromkeys(item.bucket for item in items if item.kind == "reduction" and item.bucket)
    for bucket in sorted(buckets, key=attrgetter("position")):
        last = max([last, *(at.ready_slot[fqn] for fqn in (*bucket.fqns, bucket.issue) if fqn in at.ready_slot)])
        issued.update(dict.fromkeys(bucket.fqns, last))

    def used(bucket: Bucket, *points: str | None) -> int:
        """The first use of any of the points, but not after any of the bucket's own."""
        return min(at.first_use_slot[fqn] for fqn in (*bucket.fqns, *points) if fqn in at.first_use_slot)

    def reduced(item: OrderItem, bucket: Bucket, phase: int, *points: str | None) -> _Key:
        """The end comes after all that is issued in the last slot."""
        issue = issued[item.fqns[0]]
        slot = max(issue, *(issued.get(point, end + 1) for point in points))
        return (slot, phase, bucket.position, 0) if slot > issue else (slot, _REDUCTION, bucket.position, 1 + phase)

    def key(item: OrderItem, bucket: Bucket) -> _Key:
        if item.kind == "gather":
            return (used(bucket, bucket.issue) if bucket.issue in at.first_use_slot else 0), _GATHER, bucket.position, 0
        if item.kind == "gathered":
            return used(bucket, bucket.wait), _GATHERED, bucket.position, 0
        if item.has_all_reduce or (item.is_all_reduce_after and item.kind == "reduction"):
            return reduced(item, bucket, _ALL_REDUCE, bucket.all_reduce_after)
        if item.kind == "reduced":
            return reduced(
                item, bucket, _REDUCED, *([bucket.all_reduce_after] if item.is_all_reduce_after else []), bucket.wait
            )
        return issued[item.fqns[0]], _REDUCTION, bucket.position, 0

    keys = [(at.main.get(i, end), _COMPUTE, 0, 0) for i in range(len(items))]
    for i, item in enumerate(items):
        if item.bucket is not None:
            keys[i] = key(item, item.bucket)
        elif i in at.copy_out:
            waits = [keys[n] for n in item.needs if keys[n][1] != _GATHERED]
            keys[i] = max(waits) if waits else (end, _GATHERED, 0, 0)
    for i in reversed(range(len(items))):
        if i in at.copy_in:
            keys[i] = min(keys[user] for user in users[i])
        elif i in at.copy_out and keys[i][1] == _GATHERED:
            keys[i] = min([end, *(keys[user][0] for user in users[i])]), _GATHERED, 0, 0
    for i in at.copy_out:
        if items[i].weights:  # what is unpacked is in memory until all of its members are taken out
            (unpacked,) = items[i].needs
            keys[i] = keys[unpacked]
    return keys


def graph_items(graph: Graph) -> tuple[list[Node], list[OrderItem]]:
    """The nodes of an FX graph that ``order`` may move or that it must keep behind each other, and what they are."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    position = {node: i for i, node in enumerate(nodes)}
    items = []
    for node in nodes:
        needs = frozenset(position[n] for n in node.all_input_nodes if n in position)
        plain = OrderItem(needs, reads_inputs=any(n.op == "placeholder" for n in node.all_input_nodes))
        inputs = [n for n in tree_leaves(node.args) if isinstance(n, Node)]
        items.append(order_item(node, plain, [position.get(n, -1) for n in inputs]))
    return nodes, items


def order_item(node: Node, plain: OrderItem, sources: Sequence[int]) -> OrderItem:
    """What ``plain`` is beyond its needs, given the FX node (it is, or became a kernel) and its inputs' positions, in
    the order of its arguments (of a kernel that only hands on a result: none)."""
    if node.target is operator.getitem and _source(node).target is UNPACK_WEIGHTS:
        return plain._replace(weights=(_source(_source(_source(node))).meta[FQNS][cast(int, node.args[1])],))
    if node.target is PACK_GRADIENTS:
        reduction = next(iter(node.users))
        fqns = reduction.meta[FQNS]
        gradients = tuple(zip(sources, fqns, strict=True)) if sources else ()
        return plain._replace(kind="pack", fqns=fqns, bucket=reduction.meta.get(BUCKET), gradients=gradients)
    collective = _source(node) if node.target is WAIT else node
    if FQNS not in collective.meta:
        return plain
    fqns = collective.meta[FQNS]
    item = plain._replace(fqns=fqns, bucket=collective.meta.get(BUCKET))
    if collective.target is ALL_GATHER:
        if node is collective:
            return item._replace(kind="gather")
        return item._replace(kind="gathered", weights=fqns if len(fqns) == 1 else ())
    item = item._replace(is_all_reduce_after=_follows(collective))
    if node is not collective:
        return item._replace(kind="reduced", has_all_reduce=any(FQNS in user.meta for user in node.users))
    if item.is_all_reduce_after or _source(node).target is PACK_GRADIENTS:
        return item._replace(kind="reduction")
    return item._replace(kind="reduction", gradients=((sources[0], fqns[0]),))


def _follows(reduction: Node) -> bool:
    source = _source(reduction)
    return source.target is WAIT and FQNS in _source(source).meta


def _source(node: Node) -> Node:
    return node.all_input_nodes[0]


def order_graph(graph: Graph) -> None:
    """Put the nodes of a graph whose collectives carry buckets into the order of their plan.

    Raises:
        PlanError: see ``order``.
    """
    nodes, items = graph_items(graph)
    output = graph.output_node()
    for i in order(items):
        output.prepend(nodes[i])
    check_order(graph_items(graph)[1])
    graph.lint()

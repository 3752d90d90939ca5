"""Put collectives and waits where the plan says: one function over nodes and what they need.

Compute nodes stay in their order. Before each compute node there is a slot, and every node that belongs to
communication goes into one, as ``issue_points.py`` says: a gather and what prepares it; the wait for the gather and
what is made of the weights alone; a reduction and what packs it; the wait for the reduction and what is made of its
result. Nodes are then listed by slot and, within a slot, by phase, but never before what they need. A node that cannot
be put into its slot is an error.
"""

import heapq
from collections.abc import Sequence
from operator import attrgetter

from torch.fx import Graph

from inductor_passes.scheduling import issue_points
from inductor_passes.scheduling.issue_points import ActionKey, Bucket, Phase, PlanError
from inductor_passes.scheduling.order_items import OrderItem, compute_positions, graph_items, users_of


def order(items: Sequence[OrderItem]) -> list[int]:
    """Positions of ``items``, a graph in some valid order, in the order of the plan that their buckets are part of.

    The compute nodes among them stay in the order they are in. The result of ordering once more is the same.

    Raises:
        PlanError: a result is needed before the point where the plan awaits it.
    """
    keys = _keys(items)
    users = users_of(items)
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
    """An error message that blames the bucket that ``late`` waited for, or else its own."""
    blamed = next((items[i] for i in reversed(done) if i in items[late].needs and items[i].bucket), items[late])
    bucket = blamed.bucket
    assert bucket is not None, "compute waits for compute that was behind it"
    return (
        f"plan: the bucket of {bucket.fqns[0]} ({len(bucket.fqns)} parameters; issue: {bucket.issue}, then: "
        f"{bucket.all_reduce_after}, wait: {bucket.wait}) cannot be carried out: in this graph its {blamed.kind} node "
        "depends on what comes after that point, or something before that point depends on it"
    )


def _keys(items: Sequence[OrderItem]) -> list[ActionKey]:
    """The slot and phase of each item, and its place within."""
    at = compute_positions(items)
    end = len(at.main)
    users = users_of(items)
    reducing = dict.fromkeys(item.bucket for item in items if item.kind == "reduction" and item.bucket)
    buckets = sorted(reducing, key=attrgetter("position"))
    reductions = dict(zip(buckets, issue_points.reduction_slots(buckets, at.ready_slot, end), strict=True))

    def key(item: OrderItem, bucket: Bucket) -> ActionKey:
        if item.kind in ("gather", "gathered"):
            issue, wait = issue_points.gather_slots(bucket, at.first_use_slot)
            phase, slot = (Phase.GATHER_ISSUE, issue) if item.kind == "gather" else (Phase.GATHER_WAIT, wait)
        else:
            issue, all_reduce, wait = reductions[bucket]
            if item.has_all_reduce or (item.is_all_reduce_after and item.kind == "reduction"):
                phase, slot = Phase.ALL_REDUCE, all_reduce
            elif item.kind == "reduced":
                phase, slot = Phase.REDUCTION_WAIT, max(wait, all_reduce) if item.is_all_reduce_after else wait
            else:
                phase, slot = Phase.REDUCTION_ISSUE, issue
        return issue_points.action_key(phase, slot, issue, bucket.position)

    keys: list[ActionKey] = [(at.main.get(i, end), Phase.COMPUTE, 0, 0) for i in range(len(items))]
    for i, item in enumerate(items):
        if item.bucket is not None:
            keys[i] = key(item, item.bucket)
        elif i in at.copy_out:
            waits = [keys[n] for n in item.needs if keys[n][1] != Phase.GATHER_WAIT]
            keys[i] = max(waits) if waits else (end, Phase.GATHER_WAIT, 0, 0)
    for i in reversed(range(len(items))):
        if i in at.copy_in:
            keys[i] = min(keys[user] for user in users[i])
        elif i in at.copy_out and keys[i][1] == Phase.GATHER_WAIT:
            keys[i] = min([end, *(keys[user][0] for user in users[i])]), Phase.GATHER_WAIT, 0, 0
    for i in at.copy_out:
        if items[i].weights:  # the unpacked buffer is in memory until all of its members are taken out
            (unpacked,) = items[i].needs
            keys[i] = keys[unpacked]
    return keys


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

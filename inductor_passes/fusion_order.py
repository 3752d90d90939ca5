"""Put operators that TorchInductor fuses next to each other.

::

    mul, mm of w3's gradient, mm, mul, silu_backward, mm of w1's gradient
    ==>   mul, mul, silu_backward, mm of w3's gradient, mm, mm of w1's gradient

A fused kernel runs where all that it reads is there. Elsewhere its operators mislead: a plan would issue or await
something between them, and a body (``compile_once.py``) would end there, which takes the kernel apart; a gradient that
a kernel makes would be reduced as late as its last operator comes.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile

import torch
from torch.fx import Graph, Node

from inductor_passes.collectives import before_cast_and_pad, reductions
from inductor_passes.fusion import fused_regions, is_view, own_collective, storage_of, writes_to_inputs
from inductor_passes.scheduling.order_items import compute_positions, graph_items


def put_fused_together(graph: Graph) -> None:
    """Move operators that one kernel computes to where the last of its inputs is there, each with its views.

    Those that only make a gradient come last, as it can be reduced when the kernel has ended. What reads a result that
    comes later now follows it; all else keeps its order, and so do random numbers and the model's own collectives.
    Operators that write to their inputs, and what is behind the first of them, stay.
    """
    computed = (node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr"))
    every = [*takewhile(lambda node: not writes_to_inputs(node), computed)]
    if not every:
        return
    behind = every[-1].next
    gathered = _made_of_weights(graph)
    nodes = [node for node in every if node not in gathered]
    for node in _with_weights(_ordered(graph, nodes, _units(graph, nodes)), gathered):
        behind.prepend(node)
    graph.lint()


def _made_of_weights(graph: Graph) -> dict[Node, None]:
    """Return gathers, what prepares them, and what is made of their results alone: a plan says where they are.

    They come before their first reader, and have no part in the order of compute: that is the same for weights that
    are kept unsharded.
    """
    nodes, items = graph_items(graph)
    at = compute_positions(items)
    copies = at.copy_in | {i for i in at.copy_out if at.weights[i]}
    return {nodes[i]: None for i, item in enumerate(items) if item.kind in ("gather", "gathered") or i in copies}


def _with_weights(ordered: Sequence[Node], gathered: dict[Node, None]) -> Iterator[Node]:
    """Yield ``ordered``, and before each node those of ``gathered`` that it is the first to need."""
    left = dict(gathered)

    def needed(node: Node) -> Iterator[Node]:
        for source in node.all_input_nodes:
            if source in left:
                yield from needed(source)
                del left[source]
                yield source

    for node in ordered:
        yield from needed(node)
        yield node
    yield from left


def _units(graph: Graph, nodes: Sequence[Node]) -> dict[Node, Node]:
    """Return, for each node, the first node of what is moved with it: its kernel, or that of which it is a view."""
    regions = fused_regions(graph)
    unit: dict[Node, Node] = {}
    first: dict[Node, Node] = {}  # of a kernel that also computes what is made of weights alone, which is not moved
    for node in nodes:
        viewed = node.all_input_nodes[0] if is_view(node) and node.all_input_nodes else None
        if viewed in regions:
            regions[node] = regions[viewed]
        unit[node] = first.setdefault(regions.get(node, node), node)
    return unit


def _ordered(graph: Graph, nodes: Sequence[Node], unit: dict[Node, Node]) -> list[Node]:
    """Return ``nodes`` unit by unit: each at the place of its first node, or of what it needs if that comes later."""
    members: dict[Node, list[Node]] = defaultdict(list)
    needs: dict[Node, dict[Node, None]] = defaultdict(dict)
    for node in sorted(nodes, key=_makes_a_gradient(graph, nodes, unit).__getitem__):
        members[unit[node]].append(node)
    for node in nodes:
        needs[unit[node]].update((unit[source], None) for source in node.all_input_nodes if source in unit)
    for before, after in pairwise(node for node in nodes if _keeps_its_turn(node)):
        needs[unit[after]][unit[before]] = None
    users: dict[Node, list[Node]] = defaultdict(list)
    missing = {}
    for one, sources in needs.items():
        sources.pop(one, None)
        missing[one] = len(sources)
        for source in sources:
            users[source].append(one)
    position = {node: i for i, node in enumerate(nodes)}
    due = dict(position)  # not before this place
    ready = [(due[one], position[one], one) for one, count in missing.items() if not count]
    heapq.heapify(ready)
    ordered: list[Node] = []
    while ready:
        *_, one = heapq.heappop(ready)
        ordered += members[one]
        for user in users[one]:
            due[user] = max(due[user], due[one])
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (due[user], position[user], user))
    return ordered if len(ordered) == len(nodes) else [*nodes]  # kernels that need each other are none


def _makes_a_gradient(graph: Graph, nodes: Sequence[Node], unit: dict[Node, Node]) -> dict[Node, bool]:
    """Return, for each node, whether its kernel has it for nothing but a gradient that is reduced."""
    gradients: set[Node] = set()
    for reduction in reductions(graph):
        source = storage_of(before_cast_and_pad(reduction.input))
        node = reduction.input
        while node is not source and node.all_input_nodes:
            gradients.add(node)
            node = node.all_input_nodes[0]
        gradients.add(source)
    found: dict[Node, bool] = {}
    for node in reversed(nodes):
        inside = [found[user] for user in node.users if unit.get(user) is unit[node]]
        found[node] = all(inside) and (node in gradients or 0 < len(inside) == len(node.users))
    return found


def _keeps_its_turn(node: Node) -> bool:
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return torch.Tag.nondeterministic_seeded in tags or bool(own_collective(node)) or node.is_impure()

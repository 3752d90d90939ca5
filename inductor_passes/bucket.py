"""Merge the collectives of a bucket into one, on a forward, backward or inference graph (after partitioning).

::

    shard_0 - unary* - all_gather - wait -> ...          shard_0 - unary* -+                            +- copy -> ...
    shard_1 - unary* - all_gather - wait -> ...   ==>    shard_1 - unary* -+- cat - all_gather - wait - +- copy -> ...

    grad_0 - reduce_scatter - wait -> ...                grad_0 -+                                +- view -> ...
    grad_1 - reduce_scatter - wait -> ...         ==>    grad_1 -+- cat - reduce_scatter - wait - +- view -> ...

All-reduces, also those that follow a reduce-scatter, are merged in the same way.
A bucket's gather is issued where its first member was, its reduction where its last member was. Packing order is
the bucket's own: rank r's part of the buffer holds member 0's rows of rank r, then member 1's, as in FSDP2. A bucket
is carried out by one collective per process group, dtype and reduction operator; a member that the graph does not
gather (or reduce) is left out, and a collective that stays alone is not touched.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ._compat import stable_topological_sort
from .collectives import MARK, Collective, gathers, reductions, source_chain

_aten = torch.ops.aten


def bucket(graph: Graph, buckets: Sequence[Sequence[str]]) -> None:
    """Merge gathers and reductions, each within its bucket (lists of FQNs in packing order)."""
    for members in _members(gathers(graph), buckets):
        _merge_gathers(graph, members)
    for members in _members(reductions(graph), buckets):
        _merge_reductions(graph, members)
    # The results of a merged reduction are there later than the members' were: their users move behind it.
    stable_topological_sort(graph)
    graph.lint()


def _members(found: list[Collective], buckets: Sequence[Sequence[str]]) -> list[list[Collective]]:
    """The collectives to merge: those of one bucket with the same group, dtype and operator, in packing order."""
    by_fqn: dict[str, list[Collective]] = {}
    for collective in found:
        by_fqn.setdefault(collective.fqns[0], []).append(collective)
    merged = []
    for fqns in buckets:
        alike: dict[tuple, list[Collective]] = {}
        for collective in [c for fqn in fqns for c in by_fqn.get(fqn, [])]:
            alike.setdefault(collective.kind, []).append(collective)
        merged += [members for members in alike.values() if len(members) > 1]
    return merged


def _merge_gathers(graph: Graph, members: list[Collective]) -> None:
    first = min(member.node for member in members)
    for member in members:
        for node in source_chain(member.node):
            if node > first:
                first.prepend(node)
    ranks, group = members[0].options
    sizes = [_numel(member.input) for member in members]
    with graph.inserting_before(first):
        packed = _call(_aten.cat.default, [_view(m.input, [n]) for m, n in zip(members, sizes, strict=True)])
        gathered = _collective(first.target, packed, members, ranks, group)
        parts = _split(_view(gathered, [ranks, sum(sizes)]), sizes)
        full = [_call(_aten.clone.default, part, memory_format=torch.contiguous_format) for part in parts]
        _replace(members, full)


def _merge_reductions(graph: Graph, members: list[Collective]) -> None:
    last = max(member.node for member in members)
    inputs, results = (
        [_numel(node) for node in nodes] for nodes in zip(*((m.input, m.node) for m in members), strict=True)
    )
    ranks = inputs[0] // results[0]  # an all-reduce has one row
    with graph.inserting_before(last):
        rows = [_view(m.input, [ranks, n]) for m, n in zip(members, results, strict=True)]
        reduced = _view(_call(_aten.cat.default, rows, 1), [sum(inputs)])
        step: Collective | None = members[0]
        while step:
            reduced = _collective(step.node.target, reduced, members, *step.options)
            step = step.then
        _replace(members, _split(reduced, results))


def _collective(target: Any, packed: Node, members: list[Collective], *options: object) -> Node:
    node = _call(target, packed, *options)
    node.meta[MARK] = tuple(fqn for member in members for fqn in member.fqns)
    return _call(torch.ops._c10d_functional.wait_tensor.default, node)


def _replace(members: list[Collective], results: list[Node]) -> None:
    views = [
        _view(result, list(member.node.meta["val"].shape)) for member, result in zip(members, results, strict=True)
    ]
    for member, view in zip(members, views, strict=True):
        member.result.replace_all_uses_with(view)
        _erase(member)


def _erase(collective: Collective) -> None:
    if collective.then:
        _erase(collective.then)
    collective.node.graph.erase_node(collective.wait)
    collective.node.graph.erase_node(collective.node)


def _split(buffer: Node, sizes: list[int]) -> list[Node]:
    """``buffer`` cut along its last dim."""
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_call(_aten.slice.Tensor, buffer, -1, start, start + n) for start, n in zip(offsets, sizes, strict=True)]


def _view(node: Node, shape: list[int]) -> Node:
    return _call(_aten.view.default, node, shape)


def _numel(node: Node) -> int:
    return node.meta["val"].numel()


def _call(target: Callable, *args: Any, **kwargs: Any) -> Node:
    """A node with its value's shape and dtype, inserted where the graph's insertion point is."""
    inputs = [arg for arg in tree_leaves(args) if isinstance(arg, Node)]
    node = inputs[0].graph.call_function(target, args, kwargs)
    with inputs[0].meta["val"].fake_mode:
        node.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return node

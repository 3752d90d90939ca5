"""Gather weights in the dtype in which they are read, where that takes fewer bytes.

::

    shard - all_gather - wait - view* - cast - ...   ==>   shard - cast - all_gather - wait - view* - ...

Under autocast, for example, matmuls read a weight of float32 in bfloat16. What is computed from a weight element by
element is the same before its gather and behind it, to the bit, also where it takes numbers that are made of the whole
weight's greatest magnitude, as the scale of a float8 tensor is::

    shard - all_gather - wait -+- abs - max - ... - scale -+
                               +---------------------------+- multiply, clamp, cast - ...

      ==>   shard - abs - max - all_reduce - ... - scale -+
            shard ----------------------------------------+- multiply, clamp, cast - all_gather - wait - ...

One all-reduce has the maxima of all weights of a graph. A weight that is read in several dtypes, or by anything but
these operators, travels as it is; so does one with a wire format. A weight that is kept for backward is kept as it has
travelled, unless backward casts it once more. Source: FSDP2 with torchao's float8 all-gather
(``torchao/float8/fsdp_utils.py``), whose scales and bits these are.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from inductor_passes.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    CASTS,
    COPIES,
    WAIT,
    Collective,
    gathers,
    is_deterministic,
    shard_of,
    source_chain,
)
from inductor_passes.ops.offload import TO_DEVICE
from inductor_passes.torch_compat.fx import insert_call, move_before

_aten = torch.ops.aten
_MOVES = (
    _aten.permute.default,
    _aten.slice.Tensor,
    _aten.t.default,
    _aten.transpose.int,
    _aten.view.default,
    *COPIES,
)
"""Operators that put elements into other places and change none of them."""
_MAXIMA = (_aten.max.default, _aten.amax.default)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, *_FLOAT8)
"""Dtypes in which a weight may travel."""


@dataclass(frozen=True)
class _MadeOfWeight:
    """Nodes that are made of one gathered weight and of nothing else."""

    gather: Collective
    whole: Mapping[Node, Node]
    """For each node with all of the weight's elements, the one that it is made of; the wait is made of itself."""
    numbers: frozenset[Node]
    """Nodes with one element, made of the weight's greatest magnitude."""

    def path(self, node: Node) -> list[Node]:
        """Return the nodes from the wait, which is left out, to ``node``."""
        return _path(self.whole, node)

    def maxima_before(self, narrow: Node) -> list[Node]:
        """Return the maxima of the weight that are not made of ``narrow``."""
        maxima = [node for node in self.numbers if node.target in _MAXIMA]
        return sorted(node for node in maxima if narrow not in self.path(node.all_input_nodes[0]))


def cast_before_gather(graph: Graph) -> dict[str, torch.dtype]:
    """Move casts of weights before their gathers, in a graph whose collectives are marked and not merged.

    Returns:
        For each FQN of a weight that travels in another dtype now, that dtype.
    """
    narrowed = [(made, narrow) for made in map(_made_of, gathers(graph)) if (narrow := _narrowest(made)) is not None]
    _reduce_maxima(graph, narrowed)
    for made, narrow in narrowed:
        _gather_cast(made, narrow)
    graph.lint()
    return {made.gather.fqns[0]: narrow.meta["val"].dtype for made, narrow in narrowed}


def saved_for_backward(gather: Collective) -> list[Node]:
    """Return what backward needs of a weight that is not gathered again, in a joint graph: what all readers read."""
    made = _made_of(gather)
    narrow = _narrowest(made)
    return [gather.wait] if narrow is None else [narrow, *made.maxima_before(narrow)]


def _made_of(gather: Collective) -> _MadeOfWeight:
    whole, numbers = {gather.wait: gather.wait}, set[Node]()
    pending = list(gather.wait.users)
    while pending:
        node = pending.pop()
        if node in whole or node in numbers or not is_deterministic(node):
            continue
        sources = [source for source in node.all_input_nodes if source not in numbers]
        if not sources and _is_elementwise(node, node.all_input_nodes[0]):
            numbers.add(node)
        elif len(sources) == 1 and sources[0] in whole:
            if node.target in _MOVES or _is_elementwise(node, sources[0]):
                whole[node] = sources[0]
            elif _is_greatest_magnitude(node, _path(whole, sources[0])):
                numbers.add(node)
            else:
                continue
        else:
            continue
        pending.extend(node.users)
    return _MadeOfWeight(gather, whole, frozenset(numbers))


def _is_elementwise(node: Node, source: Node) -> bool:
    value, read = node.meta["val"], source.meta["val"]
    pointwise = node.target in CASTS or torch.Tag.pointwise in getattr(node.target, "tags", ())
    return pointwise and isinstance(value, torch.Tensor) and (value.shape, value.device) == (read.shape, read.device)


def _is_greatest_magnitude(node: Node, path: Sequence[Node]) -> bool:
    # Of magnitudes, because shards are padded with zeros.
    of_magnitudes = bool(path) and path[-1].target is _aten.abs.default
    unchanged = all(each.target in (*_MOVES, *CASTS) for each in path[:-1])
    return node.target in _MAXIMA and node.meta["val"].dim() == 0 and of_magnitudes and unchanged


def _path(whole: Mapping[Node, Node], node: Node) -> list[Node]:
    nodes: list[Node] = []
    while whole[node] is not node:
        nodes.insert(0, node)
        node = whole[node]
    return nodes


def _narrowest(made: _MadeOfWeight) -> Node | None:
    """Return the node to gather in place of the weight, or ``None``: all readers read it, and it has fewer bytes."""
    gather, before = made.gather, made.gather.wait.meta["val"]
    if gather.wire_format is not None or before.is_complex():
        return None
    found = [
        node
        for node in sorted(made.whole)
        if node.meta["val"].dtype in _DTYPES
        and node.meta["val"].itemsize < before.itemsize
        and not _is_read_otherwise(made, node)
        and _can_be_moved(made, node)
    ]
    return min(found, key=lambda node: node.meta["val"].itemsize, default=None)


def _is_read_otherwise(made: _MadeOfWeight, narrow: Node) -> bool:
    """Return whether anything reads the weight but through ``narrow`` and maxima."""
    pending = [made.gather.wait]
    while pending:
        for user in pending.pop().users:
            if user in made.whole:
                pending += [user] if user is not narrow else []
            elif user not in made.numbers:
                return True
    return False


def _can_be_moved(made: _MadeOfWeight, narrow: Node) -> bool:
    value, moved = narrow.meta["val"], made.gather.wait.meta["val"]
    with moved.fake_mode:
        moved = moved.to(value.dtype)
        for node in made.path(narrow):
            if node.target in _MOVES:
                target: Any = node.target
                moved = target(moved, *node.args[1:], **node.kwargs)
    on_host = any(node.target is TO_DEVICE for node in source_chain(made.gather.node))
    return moved.stride() == value.stride() and not (on_host and made.maxima_before(narrow))


def _reduce_maxima(graph: Graph, narrowed: Iterable[tuple[_MadeOfWeight, Node]]) -> None:
    """Replace the maxima of gathered weights by those of shards, all-reduced at the head of the graph.

    Rounding to another dtype keeps the order of numbers, so it is the maxima that are cast.
    """
    by_kind: dict[Any, list[tuple[_MadeOfWeight, Node]]] = {}
    for made, narrow in narrowed:
        for maximum in made.maxima_before(narrow):
            dtypes = tuple(cast.meta["val"].dtype for cast in _casts_before(made, maximum))
            kind = made.gather.options[-1], shard_of(made.gather.node).meta["val"].dtype, dtypes
            by_kind.setdefault(kind, []).append((made, maximum))
    head = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(head):
        for (group, *_), maxima in by_kind.items():
            norms = insert_call(
                _aten._foreach_norm.Scalar, [_not_empty(shard_of(made.gather.node)) for made, _ in maxima], math.inf
            )
            local = [insert_call(operator.getitem, norms, i) for i in range(len(maxima))]
            packed = insert_call(_aten.cat.default, [insert_call(_aten.view.default, each, [1]) for each in local])
            for cast in _casts_before(*maxima[0]):
                packed = _copy(cast, {cast.all_input_nodes[0]: _rounded(packed)})
            greatest = insert_call(WAIT, insert_call(ALL_REDUCE, packed, "max", group))
            for i, (_, maximum) in enumerate(maxima):
                maximum.replace_all_uses_with(insert_call(_aten.select.int, greatest, 0, i))


def _casts_before(made: _MadeOfWeight, maximum: Node) -> list[Node]:
    """Return the casts between a shard and the greatest magnitude of its weight."""
    nodes = [*source_chain(made.gather.node), *made.path(maximum.all_input_nodes[0])]
    return [node for node in nodes if node.target in CASTS]


def _not_empty(shard: Node) -> Node:
    """Return a shard, with a row of zeros if it has none."""
    value = shard.meta["val"]
    if value.numel():
        return shard
    return insert_call(_aten.constant_pad_nd.default, shard, [*[0] * (2 * value.dim() - 1), 1])


def _rounded(shard: Node) -> Node:
    """Return a shard of 16 bits as it would have travelled.

    TorchInductor does not round what one kernel computes and reads again, unless the kernel looks at the bits.
    """
    dtype = shard.meta["val"].dtype
    if dtype not in (torch.bfloat16, torch.float16) or shard.op == "placeholder":
        return shard
    return insert_call(_aten.view.dtype, insert_call(_aten.view.dtype, shard, torch.int16), dtype)


def _on_shard(made: _MadeOfWeight, path: Sequence[Node], shard: Node) -> Node:
    """Insert what a path does to a weight's elements, done to those of a shard."""
    copies = {made.gather.wait: shard}
    for node in path:
        source = made.whole[node]
        copies[node] = copies[source] if node.target in _MOVES else _copy(node, copies)
    return copies[path[-1]]


def _gather_cast(made: _MadeOfWeight, narrow: Node) -> None:
    """Gather ``narrow`` in place of its weight; the numbers that it takes are made before."""
    gather, path, dtype = made.gather, made.path(narrow), narrow.meta["val"].dtype
    for source in [source for node in path for source in node.all_input_nodes if source in made.numbers]:
        move_before(gather.node, source)
    with gather.node.graph.inserting_before(gather.node):
        sent = _on_shard(made, path, _rounded(gather.input))
        as_bytes = dtype in _FLOAT8 and sent.meta["val"].device.type != "cuda"  # NCCL can, gloo cannot
        if as_bytes:
            sent = insert_call(_aten.view.dtype, sent, torch.uint8)
        issued = insert_call(ALL_GATHER, sent, *gather.options)
        issued.meta.update((key, value) for key, value in gather.node.meta.items() if key.startswith("simplefsdp_"))
        whole = insert_call(WAIT, issued)
        if as_bytes:
            whole = insert_call(_aten.view.dtype, whole, dtype)
        for node in path:
            if node.target in _MOVES:
                whole = insert_call(node.target, whole, *node.args[1:], **node.kwargs)
    narrow.replace_all_uses_with(whole)
    for node in reversed([gather.node, *sorted({*made.whole, *made.numbers})]):
        if not node.users:
            node.graph.erase_node(node)


def _copy(node: Node, inputs: Mapping[Node, Node]) -> Node:
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: inputs.get(n, n))
    return insert_call(node.target, *args, **kwargs)

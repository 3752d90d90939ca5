"""Find the collectives of each sharded parameter in a traced graph, name them, and merge repeated ones.

A parameter that is read several times is gathered several times, and each of these reads gives a gradient that is
reduced. ``collectives.py`` draws the chains that are recognised.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from inductor_passes.collectives import (
    ALL_GATHER,
    ALL_TO_ALL,
    CASTS,
    COPIES,
    EXCHANGED,
    FQNS,
    MOVES,
    PADS,
    REDUCE_SCATTER,
    REDUCTIONS,
    TWO_STEPS,
    WAIT,
    WIRE_FORMAT,
    GraphParameter,
    erase_unused_chain,
    is_deterministic,
    prepares_a_shard,
    source_chain,
    wait_of,
)
from inductor_passes.ops.accumulate import ADD_UP
from inductor_passes.ops.add_rows import ADD_ROWS
from inductor_passes.ops.offload import TO_DEVICE
from inductor_passes.torch_compat.aot_autograd import parameter_gradients, parameter_inputs

_ADD = torch.ops.aten.add.Tensor
_EMBEDDING = torch.ops.aten.embedding.default


def identify(graph: Graph, params: Mapping[int, GraphParameter]) -> list[str]:
    """Mark every gather and reduction of ``params`` (by position among the graph's original inputs), merging repeats.

    A parameter that is read several times is left with one gather, and its full gradients are summed before one
    reduction, in the order in which autograd would have summed the reduced ones. The graph is an inference or a
    joint graph, as AOTAutograd makes it. Returns the FQNs of trained parameters of which no reduction was found:
    their gradient is right but takes part in no bucket.
    """
    for index, shards in parameter_inputs(graph).items():
        for shard in shards if index in params else ():
            if params[index].is_exchanged:
                for embedding in _reachable(shard, _EMBEDDING):
                    _mark_exchange(params[index].fqn, embedding)
            _merge_gathers(params[index], _reachable(shard, ALL_GATHER))
    missed = []
    for index, gradient in parameter_gradients(graph).items():
        if index not in params or not params[index].groups:
            continue
        if not _merge_reductions(params[index], gradient) and not params[index].is_exchanged:
            missed.append(params[index].fqn)
    graph.lint()
    return missed


def device_copies_of_replicated(
    graph: Graph, params: Mapping[int, GraphParameter]
) -> list[tuple[GraphParameter, Node]]:
    """Return the copies to the device of offloaded parameters that are not gathered, as every rank has the whole."""
    return [
        (params[index], copy)
        for index, shards in parameter_inputs(graph).items()
        for shard in shards
        if index in params and not _reachable(shard, ALL_GATHER)
        for copy in _reachable(shard, TO_DEVICE)
    ]


def _mark_exchange(fqn: str, embedding: Node) -> None:
    """Mark the collectives around the lookup of all ranks' tokens, in forward and, from the tokens, in backward."""
    tokens = embedding.args[1]
    assert isinstance(tokens, Node)
    gather = next((node for node in tokens.all_input_nodes if node.target is ALL_GATHER), None)
    sums = [node for node in tokens.users if node.target is ADD_ROWS]
    before = [_nearest(node, lambda node: node.all_input_nodes[:1]) for node in sums]
    for collective in (gather, _nearest(embedding, lambda node: list(node.users)), *before):
        if collective is not None:
            collective.meta[EXCHANGED] = fqn


def _nearest(node: Node, neighbours: Callable[[Node], list[Node]]) -> Node | None:
    """Return the first all-to-all on the way from ``node``, or ``None``."""
    pending = [node]
    while pending:
        node = pending.pop(0)
        if node.target is ALL_TO_ALL:
            return node
        pending.extend(neighbours(node))
    return None


def _reachable(shard: Node, target: Callable[..., Any]) -> list[Node]:
    """Return the calls of ``target`` reached from ``shard`` through casts, pads and views, in graph order."""
    found, pending = [], list(shard.users)
    while pending:
        node = pending.pop()
        if node.target is target:
            found.append(node)
        elif prepares_a_shard(node):
            pending.extend(node.users)
    return sorted(found)


def _merge_gathers(param: GraphParameter, found: list[Node]) -> None:
    distinct: list[Node] = []
    for gather in found:
        _mark(gather, param.fqn, param.gather_format)
        twin = next((other for other in distinct if _same_result(other, gather)), None)
        if twin is None:
            distinct.append(gather)
            continue
        wait = wait_of(gather)
        wait.replace_all_uses_with(wait_of(twin))
        erase_unused_chain(wait)


def _same_result(a: Node, b: Node) -> bool:
    return a.args[1:] == b.args[1:] and list(map(_step, source_chain(a))) == list(map(_step, source_chain(b)))


def _step(node: Node) -> tuple:
    """A node's operator and arguments without the first input, to compare nodes by."""
    return node.target, node.args[1:], node.kwargs


@dataclass(frozen=True)
class _Reduction:
    """A reduction chain: nodes before the collectives, the collectives, and nodes from them to the shard's gradient."""

    before: tuple[Node, ...]
    after: tuple[Node, ...]
    """The collectives and the nodes behind them; the first collective comes first."""

    @property
    def collectives(self) -> list[Node]:
        return [node for node in self.after if node.target in REDUCTIONS]


def _merge_reductions(param: GraphParameter, gradient: Node) -> bool:
    """Mark the reduction that ``gradient`` comes from; where it is a sum of reductions, reduce the sum instead."""
    chains = [_reduction_ending_at(term, param) for term in _terms(gradient)]
    found = [chain for chain in chains if chain is not None]
    if len(found) != len(chains) or len({tuple(map(_step, chain.after)) for chain in found}) != 1:
        return False
    collectives = found[0].collectives
    if len(found) > 1:
        collectives, result = _reduce_the_sum(gradient, found)
        gradient.replace_all_uses_with(result)
        _erase_tree(gradient)
    for node in collectives:
        _mark(node, param.fqn, param.reduce_format if node.target is REDUCE_SCATTER else None)
        if node.target is REDUCE_SCATTER and param.two_steps is not None:
            node.meta[TWO_STEPS] = param.two_steps
    return True


def _mark(collective: Node, fqn: str, wire_format: str | None) -> None:
    collective.meta[FQNS] = (fqn,)
    if wire_format is not None:
        collective.meta[WIRE_FORMAT] = wire_format


def _terms(node: Node) -> list[Node]:
    """Return the nodes whose sum ``node`` is, in order."""
    if node.target is _ADD and len(node.all_input_nodes) == 2 and not node.kwargs:
        return [term for summand in node.all_input_nodes for term in _terms(summand)]
    return [node]


def _reduction_ending_at(last: Node, param: GraphParameter) -> _Reduction | None:
    after = [last]
    while is_deterministic(after[0]) and len(after[0].all_input_nodes) == 1:
        after.insert(0, after[0].all_input_nodes[0])
    for i, group in enumerate(reversed(param.groups)):
        if i:
            after.insert(0, after[0].all_input_nodes[0])
        if not _extend_to_its_collective(after, group):
            return None
    before: list[Node] = []
    for targets in (COPIES, PADS, MOVES, CASTS, (ADD_UP,)):
        node = (before or after)[0].all_input_nodes[0]
        if node.target not in targets or len(node.users) != 1:
            continue
        if targets is CASTS and node.all_input_nodes[0].meta["val"].dtype is not param.dtype:
            continue  # a cast of the user's (autocast): the gradient of the weight is what comes out of it
        before.insert(0, node)
    return _Reduction(tuple(before), tuple(after))


def _extend_to_its_collective(after: list[Node], group: str) -> bool:
    """Insert the reduction over ``group`` before ``after``'s first node, if that node is the wait for it."""
    if after[0].target is not WAIT:
        return False
    node = after[0].all_input_nodes[0]
    if node.target not in REDUCTIONS or node.args[-1] != group:
        return False
    after.insert(0, node)
    return True


def _reduce_the_sum(gradient: Node, chains: list[_Reduction]) -> tuple[list[Node], Node]:
    """Return the collectives that reduce the sum of the chains' full gradients, and what replaces ``gradient``.

    The sum is taken before the nodes that all chains have in common, in the order in which the reduced gradients were
    added.
    """
    common = min(len(chain.before) for chain in chains)
    while any(_step(chain.before[-k]) != _step(chains[0].before[-k]) for chain in chains for k in range(1, common + 1)):
        common -= 1
    separate = [(*chain.before[len(chain.before) - common :], *chain.after) for chain in chains]
    grads = dict(zip(_terms(gradient), (nodes[0].all_input_nodes[0] for nodes in separate), strict=True))
    with gradient.graph.inserting_before(gradient):
        total = _sum(gradient, grads)
        copies = {separate[-1][0].all_input_nodes[0]: total}
        for node in separate[-1]:
            copies[node] = gradient.graph.node_copy(node, lambda n: copies.get(n, n))
    return [copies[node] for node in chains[-1].collectives], copies[separate[-1][-1]]


def _sum(node: Node, grads: dict[Node, Node]) -> Node:
    if node in grads:
        return grads[node]
    left, right = (_sum(term, grads) for term in node.all_input_nodes)
    total = node.graph.call_function(_ADD, (left, right))
    total.meta = {**node.meta, "val": left.meta["val"]}
    return total


def _erase_tree(node: Node) -> None:
    terms = node.all_input_nodes if node.target is _ADD else []
    if terms:
        node.graph.erase_node(node)
        for term in terms:
            _erase_tree(term)
    else:
        erase_unused_chain(node)

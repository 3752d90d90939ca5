"""Find the collectives of each sharded parameter in a graph, name them, and merge repeated ones.

::

    shard - unary* - all_gather - wait - ...                     the gather chain of a parameter
    ... - [cast] - [pad] - reduce_scatter - wait - unary* - gradient      its reduction chain

A chain belongs to a parameter because it starts at the placeholder of its shard, or ends at the output that is
its shard's gradient, and for no other reason (names and positions of nodes mean nothing). What is found is marked on
the collective itself, ``node.meta["simplefsdp_fqns"]``; the mark survives partitioning and lowering passes, which keep
collectives. A collective without a mark belongs to the user and is never touched.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ._compat import parameter_gradients, parameter_inputs

MARK = "simplefsdp_fqns"

_C10D = "c10d"
_c10d = torch.ops._c10d_functional
_ALL_GATHER = _c10d.all_gather_into_tensor.default
_REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
_WAIT = _c10d.wait_tensor.default

_CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_PADS = (torch.ops.aten.constant_pad_nd.default,)
_COPIES = (torch.ops.aten.clone.default,)
_ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class GraphParameter:
    """What the passes know of a sharded parameter."""

    fqn: str
    reshard: bool
    """Whether backward gathers it again (else the full weight is saved)."""


@dataclass(frozen=True)
class Collective:
    """A marked collective and the wait for it."""

    fqns: tuple[str, ...]
    node: Node
    wait: Node

    @property
    def input(self) -> Node:
        return self.node.all_input_nodes[0]

    @property
    def options(self) -> tuple[Any, ...]:
        """All arguments but the input: ``(ranks, group name)``, for a reduction with the operator in front."""
        return self.node.args[1:]


def gathers(graph: Graph) -> list[Collective]:
    """The marked all-gathers, in graph order."""
    return _marked(graph, _ALL_GATHER)


def reductions(graph: Graph) -> list[Collective]:
    """The marked reduce-scatters, in graph order."""
    return _marked(graph, _REDUCE_SCATTER)


def identify(graph: Graph, params: Mapping[int, GraphParameter]) -> list[str]:
    """Mark every gather and reduction of ``params`` (by position among the graph's original inputs), merging repeats.

    A parameter that is read several times is left with one gather, and its full gradients are summed before one
    reduction, in the order in which autograd would have summed the reduced ones. The graph is an inference or a
    joint graph, as AOTAutograd makes it. Returns the FQNs of trained parameters of which no reduction was found:
    their gradient is right but takes part in no bucket.
    """
    for index, shard in parameter_inputs(graph).items():
        if index in params:
            _merge_gathers(params[index], [(g, wait) for g in _reachable(shard) if (wait := _wait_of(g))])
    missed = []
    for index, gradient in parameter_gradients(graph).items():
        if index in params and not _merge_reductions(graph, params[index], gradient):
            missed.append(params[index].fqn)
    graph.lint()
    return missed


def unary(node: Node) -> bool:
    """Whether ``node`` computes a tensor (or a tuple of them) from one other node and nothing else."""
    if node.op != "call_function" or len(node.all_input_nodes) != 1:
        return False
    if not isinstance(node.meta.get("val"), torch.Tensor | list | tuple):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    # Communication ends a chain; a random operator depends on the generator too.
    return not (_C10D in node.target.namespace or torch.Tag.nondeterministic_seeded in node.target.tags)


def source_chain(node: Node) -> list[Node]:
    """The unary nodes that lead from a placeholder to ``node``, in order; raises if there is anything else."""
    chain: list[Node] = []
    while (node := node.all_input_nodes[0]).op != "placeholder":
        assert unary(node), f"{node.name}: expected a view, cast or pad of a shard before its all-gather"
        chain.insert(0, node)
    return chain


def _marked(graph: Graph, target: object) -> list[Collective]:
    nodes = [n for n in graph.nodes if n.target is target and MARK in n.meta]
    return [Collective(n.meta[MARK], n, wait) for n in nodes if (wait := _wait_of(n))]


def _wait_of(collective: Node) -> Node | None:
    users = list(collective.users)
    return users[0] if len(users) == 1 and users[0].target is _WAIT else None


def _reachable(shard: Node) -> list[Node]:
    """All-gathers reached from ``shard`` through unary nodes, in graph order."""
    found, pending = [], list(shard.users)
    while pending:
        node = pending.pop()
        if node.target is _ALL_GATHER:
            found.append(node)
        elif unary(node):
            pending.extend(node.users)
    return sorted(found)


def _merge_gathers(param: GraphParameter, found: list[tuple[Node, Node]]) -> None:
    kept: list[tuple[Node, Node]] = []
    for gather, wait in found:
        gather.meta[MARK] = (param.fqn,)
        twin = next((other for other in kept if _same_result(other[0], gather)), None)
        if twin is None:
            kept.append((gather, wait))
            continue
        wait.replace_all_uses_with(twin[1])
        _erase_upwards(wait)


def _same_result(a: Node, b: Node) -> bool:
    return (
        a.args[1:] == b.args[1:]
        and a.meta["val"].dtype == b.meta["val"].dtype
        and [n.target for n in source_chain(a)] == [n.target for n in source_chain(b)]
    )


def _erase_upwards(node: Node) -> None:
    """Erase ``node`` and whatever of its unary chain has no other user."""
    while node.op == "call_function" and not node.users:
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        if len(inputs) != 1:
            return
        node = inputs[0]


@dataclass(frozen=True)
class _Reduction:
    """One reduction chain: ``grad`` enters at the first of ``nodes``, the last one is the shard's gradient."""

    grad: Node
    nodes: tuple[Node, ...]
    scatter: Node


def _merge_reductions(graph: Graph, param: GraphParameter, gradient: Node) -> bool:
    """Mark the reduction that ``gradient`` comes from; where it is a sum of reductions, reduce the sum instead."""
    chains = list(_reductions_summed_in(gradient))
    if not chains or None in chains:
        return False
    found = [chain for chain in chains if chain is not None]
    if len(found) > 1:
        if len({_signature(chain) for chain in found}) != 1:
            return False
        with graph.inserting_before(gradient):
            total = _sum_of_grads(gradient)
            copies = {found[-1].grad: total}
            for node in found[-1].nodes:
                copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
        result = copies[found[-1].nodes[-1]]
        gradient.replace_all_uses_with(result)
        _erase_tree(gradient)
        copies[found[-1].scatter].meta[MARK] = (param.fqn,)
        return True
    found[0].scatter.meta[MARK] = (param.fqn,)
    return True


def _reductions_summed_in(node: Node) -> Iterator[_Reduction | None]:
    if node.target is _ADD and len(node.all_input_nodes) == 2 and not node.kwargs:
        for term in node.args:
            yield from _reductions_summed_in(term)  # type: ignore[arg-type]
    else:
        yield _reduction_ending_at(node)


def _reduction_ending_at(last: Node) -> _Reduction | None:
    nodes = [last]
    while unary(nodes[0]):
        nodes.insert(0, nodes[0].all_input_nodes[0])
    if nodes[0].target is not _WAIT:
        return None
    scatter = nodes[0].all_input_nodes[0]
    if scatter.target is not _REDUCE_SCATTER:
        return None
    nodes.insert(0, scatter)
    for targets in (_COPIES, _PADS, _CASTS):
        producer = nodes[0].args[0]
        if isinstance(producer, Node) and producer.target in targets and len(producer.users) == 1:
            nodes.insert(0, producer)
    return _Reduction(nodes[0].args[0], tuple(nodes), scatter)  # type: ignore[arg-type]


def _signature(chain: _Reduction) -> tuple:
    # dtype of the gradients included: they are added before the first cast
    steps = tuple((n.target, tuple(a for a in n.args if not isinstance(a, Node | list))) for n in chain.nodes)
    return chain.grad.meta["val"].dtype, chain.grad.meta["val"].shape, steps


def _sum_of_grads(node: Node) -> Node:
    if node.target is not _ADD:
        chain = _reduction_ending_at(node)
        assert chain is not None
        return chain.grad
    left, right = (_sum_of_grads(term) for term in node.args)  # type: ignore[arg-type]
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
        _erase_upwards(node)

"""A run of compute nodes, and the body that stands for it and for all runs like it."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from inductor_passes.collectives import CASTS, WAIT
from inductor_passes.fusion import is_view

INVOKE = torch.ops.higher_order.invoke_subgraph
_aten = torch.ops.aten
_ALIGNMENT = 16
"""Bytes. TorchInductor lets kernels of a body read its inputs by vectors of this size."""


def is_part(node: Node) -> bool:
    """Return whether a node is a view, or one of several results of an operator."""
    return node.target is operator.getitem or is_alias(node)


def is_alias(node: Node) -> bool:
    """Return whether a node's value is memory of its first input."""
    target = node.target
    if target is _aten.reshape.default:  # what TorchInductor makes of views
        return True
    if target is operator.getitem:  # of split or unbind
        return is_alias(node.all_input_nodes[0])
    return target is not WAIT and is_view(node)


class Run:
    """Compute nodes between two steps of communication, in order."""

    def __init__(self, nodes: Sequence[Node]):
        self._all = list(nodes)
        inside = set(nodes)
        views: dict[Node, None] = {}
        results: dict[Node, None] = {}
        for node in nodes:
            if not all(user in inside for user in node.users):
                *chain, base = _views_of(node, inside)
                views.update(dict.fromkeys(reversed(chain)))
                if base in inside:
                    results.setdefault(base)
        self._views = list(views)
        self._results = list(results)
        needed = _needed(self._results, inside)
        computed = [node for node in nodes if node in needed]
        self.taken = _taken_once_more(computed, inside)
        """Views outside of the run that the body takes once more; where only bodies read them they can be erased."""
        self._nodes = [*self.taken, *computed]
        number = {node: i for i, node in enumerate(self._nodes)}
        operands: dict[Node, int] = {}

        def named(node: Node) -> str:
            return f"%{number[node]}" if node in number else f"${operands.setdefault(node, len(operands))}"

        lines = [f"{n.target}{map_arg(n.args, named)}{map_arg(n.kwargs, named)}" for n in self._nodes]
        self._operands = list(operands)
        self.operators = sum(not is_part(n) for n in self._nodes)
        self.is_called = False
        """Whether a call of a body stands for the run."""
        self.key: Any = None
        """Equal for two runs that can be calls of one body; ``None`` for a run that cannot be one."""
        if all(map(_can_be_passed, self._operands)) and all(map(_is_memory_of_its_own, self._results)):
            about = tuple(_about(node.meta["val"]) for node in self._operands)
            self.key = tuple(lines), about, tuple(number[node] for node in self._results)

    def body(self) -> GraphModule:
        """Return a function of the operands that returns the results."""
        graph = Graph()
        copies: dict[Node, Node] = {}
        for i, node in enumerate(self._operands):
            copies[node] = graph.placeholder(f"arg{i}_1")
            copies[node].meta["val"] = node.meta["val"]
        for node in self._nodes:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        output = graph.output(tuple(copies[node] for node in self._results))
        output.meta["user_visible_output_idxs"] = list(range(len(self._results)))
        output.meta["original_output_strides"] = [node.meta["val"].stride() for node in self._results]
        graph.lint()
        return GraphModule({}, graph)

    def call(self, name: str, replaced: dict[Node, Node]) -> None:
        """Insert a call of the body ``name`` behind the run, and let whoever reads the run's results read the call's.

        Args:
            replaced: what stands for the results of runs whose calls are inserted already; this run's are added.
        """
        last = self._all[-1]
        graph = last.graph
        new: dict[Node, Node] = {}
        with graph.inserting_before(last.next):
            body = graph.get_attr(name)
            call = graph.call_function(INVOKE, (body, name, *(replaced.get(n, n) for n in self._operands)))
            call.meta["val"] = tuple(node.meta["val"] for node in self._results)
            for i, node in enumerate(self._results):
                new[node] = graph.call_function(operator.getitem, (call, i))
                new[node].meta = dict(node.meta)
            for view in self._views:
                new[view] = graph.node_copy(view, lambda n: new.get(n, replaced.get(n, n)))
        inside = {*self._all, *new.values()}
        for node, result in new.items():
            for user in [user for user in node.users if user not in inside]:
                user.replace_input_with(node, result)
        replaced.update(new)
        self.is_called = True

    def erase(self) -> list[Node]:
        """Erase the run's nodes, whose results nobody reads any more, and return them."""
        for node in reversed(self._all):
            node.graph.erase_node(node)
        return self._all


def _views_of(node: Node, inside: set[Node]) -> list[Node]:
    """Return ``node``, what it is a view of, and so on: views in ``inside`` and at last a node that is none."""
    chain = [node]
    while chain[-1] in inside and is_alias(chain[-1]):
        chain.append(chain[-1].all_input_nodes[0])
    return chain


def is_whole_view(node: Node) -> bool:
    """Return whether a node is a view of all of its only input, of which no size is a symbol."""
    if node.target is operator.getitem or not is_alias(node) or len(node.all_input_nodes) != 1:
        return False
    value, whole = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(whole, Tensor):
        return False
    return all(isinstance(n, int) for n in (*value.shape, *whole.shape)) and value.numel() == whole.numel()


def _needed(results: Sequence[Node], inside: set[Node]) -> set[Node]:
    needed: set[Node] = set()
    left = list(results)
    while left:
        node = left.pop()
        if node in inside and node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    return needed


def _taken_once_more(nodes: Sequence[Node], inside: set[Node]) -> list[Node]:
    """Return the views outside of a run that the run takes once more, of something that can be passed to it.

    Parts that cannot be passed, and views of whole tensors: a node less in a graph that grows with the number of calls.
    """
    found: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node not in inside and is_part(node) and (not _can_be_passed(node) or is_whole_view(node)):
            for source in node.all_input_nodes:
                visit(source)
            found.setdefault(node)

    for node in nodes:
        for source in node.all_input_nodes:
            visit(source)
    return list(found)


def _can_be_passed(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.storage_offset() * value.itemsize % _ALIGNMENT == 0


def _is_memory_of_its_own(result: Node) -> bool:
    """Return whether TorchInductor makes new memory for a result; for a cast to the same dtype it makes none."""
    value = result.meta.get("val")
    if not isinstance(value, Tensor):
        return False
    return result.target not in CASTS or value.dtype is not result.all_input_nodes[0].meta["val"].dtype


def _about(value: Tensor) -> tuple[Any, ...]:
    """Return what code that reads a tensor depends on."""
    return value.dtype, value.device, tuple(value.shape), value.stride(), value.storage_offset(), value.layout

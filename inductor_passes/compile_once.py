"""Let TorchInductor compile compute that repeats once: runs of compute that are alike become calls of one body.

::

    wait B1, [block 0 ...], gather B3, wait B2, [block 1 ...]  ==>  wait B1, body(...), gather B3, wait B2, body(...)

A *run* is the compute between two steps of communication, in the order of the plan, so that a plan is carried out as
without bodies: whatever it issues or awaits in the middle of a block ends a run. Two runs are alike if they are equal
node by node but for names: operators, constants, which node reads which, dtypes, shapes and strides of what they read,
and which results are read outside. A body is a ``GraphModule`` that ``invoke_subgraph`` calls: TorchInductor lowers it
and generates its kernels and its code once.

What a body may not hold stays outside and ends a run: collectives, operators that write to their inputs, higher-order
operators, sizes that are symbols. A body's result is never a view, of an input or of another result: Inductor would
take it for memory of its own. Views are taken outside.
"""

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from inductor_passes.bodies import INVOKE, Run, is_alias, is_part
from inductor_passes.fusion import is_fused, nbytes_of
from inductor_passes.ops.accumulate import ACCUMULATE
from inductor_passes.order import order_graph
from inductor_passes.runtime.graph_dump import render_graph
from inductor_passes.scheduling.issue_points import block_of
from inductor_passes.scheduling.order_items import compute_positions, graph_items

_LEAST_OPERATORS = 8
"""Runs with fewer operators are not worth a call."""


class Body(NamedTuple):
    """A body and its calls."""

    operators: int
    calls: int


class Bodies(NamedTuple):
    """The bodies of one graph, and the compute that is in none."""

    bodies: tuple[Body, ...]
    alone: int
    """Operators that are compiled where they stand: in runs that are like no other, and outside of runs."""
    outside: tuple[tuple[str, int], ...]
    """Why operators are in no run, and how many."""

    def __str__(self) -> str:
        shared = ", ".join(f"{body.operators} operators called {body.calls} times" for body in self.bodies)
        reasons = ", ".join(f"{count} with {reason}" for reason, count in self.outside)
        return f"compiled once: {shared or 'nothing'}; compiled where they stand: {self.alone} operators" + (
            f" ({reasons})" if reasons else ""
        )


def compile_once(graph: Graph) -> Bodies:
    """Replace runs that are alike by calls of one body, in a graph whose collectives carry buckets and are merged.

    The graph is put into the order of its plan where anything repeats, and is not touched where nothing does.

    Returns:
        The bodies that were made, and why compute is in none.

    Raises:
        PlanError: see ``order``.
    """
    before = [node for node in graph.nodes if node.op != "output"]
    order_graph(graph)
    bodies: list[Body] = []
    for at_each_weight in (False, True):
        runs, outside = _runs(graph, at_each_weight)
        bodies += _share(graph, runs)
    alone = outside.total() + sum(run.operators for run in runs if not run.is_called)
    if not bodies:
        for node in before:
            graph.output_node().prepend(node)
    graph.lint()
    return Bodies(tuple(bodies), alone, tuple((+outside).most_common()))


def _share(graph: Graph, runs: Iterable[Run]) -> list[Body]:
    """Replace those of a graph's runs that are alike by calls of one body."""
    of_key: dict[Any, list[Run]] = defaultdict(list)
    for run in runs:
        if run.key is not None:
            of_key[run.key].append(run)
    repeated = [calls for calls in of_key.values() if len(calls) > 1 and calls[0].operators >= _LEAST_OPERATORS]
    module = graph.owning_module
    assert module is not None
    replaced: dict[Node, Node] = {}
    for name, body, calls in zip(_free_names(module), [calls[0].body() for calls in repeated], repeated, strict=False):
        module.add_submodule(name, body)
        for run in calls:
            run.call(name, replaced)
    erased: set[Node] = set()
    for calls in repeated:
        for run in calls:
            erased.update(run.erase())
    views = dict.fromkeys(view for calls in repeated for run in calls for view in run.taken)
    for view in reversed(views):
        if not view.users and view not in erased:  # as a view that another run has, too
            graph.erase_node(view)
    return [Body(calls[0].operators, len(calls)) for calls in repeated]


def render_bodies(graph: Graph, bodies: Bodies) -> str:
    """Return ``bodies`` and the nodes of each as text."""
    calls = dict.fromkeys(node.args[1] for node in graph.find_nodes(op="call_function", target=INVOKE))
    texts = [f"\n{name}:\n{render_graph(getattr(graph.owning_module, str(name)).graph)}" for name in calls]
    return f"{bodies}\n{''.join(texts)}"


def _free_names(module: GraphModule) -> Iterator[str]:
    number = 0
    while True:
        if not hasattr(module, name := f"body_{number}"):
            yield name
        number += 1


def _runs(graph: Graph, at_each_weight: bool) -> tuple[list[Run], Counter[str]]:
    """Return the runs of a graph in the order of its plan, and why how many operators are in none.

    Args:
        at_each_weight: end a run also before each node that is the first or the last to read a weight, not only where
            the weights of another block are read: pieces of blocks can be alike where whole blocks are not, because
            a plan issues and awaits something else in each.
    """
    nodes, items = graph_items(graph)
    at = compute_positions(items)
    reads: dict[int, set[str | None]] = defaultdict(set)
    for used in (at.first_use_slot, at.last_use_slot):
        for fqn, slot in used.items():
            reads[slot].add(block_of(fqn))
    outside: Counter[str] = Counter()
    runs: list[list[Node]] = [[]]
    run_of: dict[Node, int] = {}
    block: set[str | None] = set()
    added: list[Node] = []
    for i, node in enumerate(nodes):
        if i not in at.main:
            if items[i].kind != "compute" and runs[-1]:
                runs.append([])
            continue
        if (blocks := reads.get(at.main[i])) and (at_each_weight or blocks != block):
            block = blocks
            if runs[-1]:
                runs.append([])
        inputs = node.all_input_nodes
        if node.target is operator.getitem:
            if inputs[0] in run_of:
                run_of[node] = run_of[inputs[0]]
                runs[run_of[node]].append(node)
        elif node.target is ACCUMULATE:  # nothing waits for it, so it can be called behind the run of its gradient
            outside["operators of simplefsdp"] += 1
            added.append(node)
        elif is_alias(node) and all(n not in run_of for n in inputs):
            continue  # of an input, or of what stays outside: where torch found two that are equal, one run has it
        elif reason := _reason_outside(node):
            outside[reason] += node.target is not INVOKE
            if runs[-1] and any(run_of.get(n) == len(runs) - 1 for n in inputs):
                runs.append([])
        else:
            run_of[node] = len(runs) - 1
            runs[-1].append(node)
    _add_what_is_made_of_weights(nodes, at.copy_out, run_of)
    delayed = _delay_what_is_fused_later(nodes, runs, run_of)
    place: dict[Node, float] = {node: i for i, node in enumerate(nodes)}
    place.update((node, place[runs[run_of[node]][0]] - 0.5) for node in delayed)
    ends: dict[int, float] = {}
    for node, run in run_of.items():
        ends[run] = max(place[node], ends.get(run, -1.0))
    for node in added:
        made_in = (run_of.get(source, -1) for source in node.all_input_nodes)
        place[node] = max(place[node], *(ends.get(run, -1.0) + 0.5 for run in made_in))
    nodes.sort(key=place.__getitem__)
    for node in nodes:
        graph.output_node().prepend(node)
    members: list[list[Node]] = [[] for _ in runs]
    for node in nodes:
        if node in run_of:
            members[run_of[node]].append(node)
    return [Run(run) for run in members if run], outside


def _reason_outside(node: Node) -> str | None:
    """Return why a compute node cannot be in a body; ``None``: it can be."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "higher-order operators"
    if not isinstance(target, torch._ops.OpOverload):
        return None if target is operator.getitem else "symbolic sizes"
    if "c10d" in target.namespace:
        return "collectives of the model's own"
    if target._schema.is_mutable:
        return "operators that write to their inputs"
    if target.namespace == "simplefsdp":
        return "operators of simplefsdp"
    if target.namespace == "prims" and "inductor" in target._opname and "seed" in target._opname:
        return "seeds of random numbers"  # the number of the seed differs from block to block
    if any(n.op == "get_attr" for n in node.all_input_nodes):
        return "constants of the model"
    if any(map(_is_symbolic, [node, *node.all_input_nodes])):
        return "symbolic sizes"
    return None


def _is_symbolic(node: Node) -> bool:
    for value in tree_leaves(node.meta.get("val")):
        if not isinstance(value, Tensor):
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                return True
        elif any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride(), value.storage_offset())):
            return True
    return False


def _add_what_is_made_of_weights(nodes: Sequence[Node], copy_out: set[int], run_of: dict[Node, int]) -> None:
    """Add to a run what is computed from weights alone and read by no other: casts and transposed views."""
    for i in sorted(copy_out, reverse=True):
        node = nodes[i]
        users = {run_of.get(user, -1) for user in node.users}
        if len(users) == 1 and -1 not in users and node.target is not operator.getitem and not _reason_outside(node):
            run_of[node] = users.pop()


def _delay_what_is_fused_later(
    nodes: Sequence[Node], runs: Sequence[Sequence[Node]], run_of: dict[Node, int]
) -> list[Node]:
    """Move the end of a run into the run that TorchInductor would compute it in: fused with what reads it there.

    Return what was moved.

    ::

        [... add, rsqrt, mul], wait for a norm's weight, [mul, ...]  ==>  [...], wait, [add, rsqrt, mul, mul, ...]
    """
    first = _before_anything_else([node for node in nodes if node in run_of], run_of)
    for i, run in reversed(list(enumerate(runs))):
        for node in reversed(run):
            if node.target is operator.getitem or not (is_fused(node) or is_alias(node)):
                continue
            readers = [*_readers(node, run_of)]
            later = min((run_of.get(reader, -1) for reader in readers), default=-1)
            if later <= i or not (is_alias(node) or any(n in first and run_of[n] == later for n in readers)):
                continue
            if not _sums_up_what_is_read_no_more(node, run_of):
                _move([node], later, run_of)
                first.add(node)
    return [node for i, run in enumerate(runs) for node in run if run_of[node] != i]


def _sums_up_what_is_read_no_more(node: Node, run_of: Mapping[Node, int]) -> bool:
    """Return whether ``node`` is the sum, or the like, of something large that no later run reads.

    In a later run it would hold that in memory. TorchInductor takes such a sum, as of a norm weight's gradient, in two
    steps, and fuses what reads it with the second.
    """
    if not _reduces(node):
        return False
    run = run_of[node]
    sources = [*node.all_input_nodes]
    for source in sources:  # grows
        if any(run_of.get(reader, -1) > run for reader in _readers(source, run_of)):
            continue
        if run_of.get(source) == run and (is_fused(source) or is_alias(source)) and not _reduces(source):
            sources += [more for more in source.all_input_nodes if more not in sources]
        elif nbytes_of(source) > nbytes_of(node):
            return True
    return False


def _reduces(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.reduction in node.target.tags


def _before_anything_else(nodes: Sequence[Node], run_of: Mapping[Node, int]) -> set[Node]:
    """Return what TorchInductor may compute by the first kernel of each run, because it reads no result of another."""
    first: set[Node] = set()
    for node in nodes:
        sources = [source for source in node.all_input_nodes if run_of.get(source) == run_of.get(node)]
        if (is_fused(node) or is_part(node)) and first.issuperset(sources):
            first.add(node)
    return first


def _readers(node: Node, run_of: Mapping[Node, int]) -> Iterator[Node]:
    """Return what reads ``node``, one of its results or a view of it that is in a run, but for the graph's output."""
    for user in node.users:
        if is_part(user) and user in run_of:
            yield from _readers(user, run_of)
        elif user.op != "output":
            yield user


def _move(nodes: Iterable[Node], run: int, run_of: dict[Node, int]) -> None:
    """Move ``nodes``, and the parts of them that no later run has, to a run."""
    for node in nodes:
        run_of[node] = run
        _move((user for user in node.users if is_part(user) and run_of.get(user, run) < run), run, run_of)

"""Let AOTAutograd trace compute that repeats once: blocks of Dynamo's graph that are alike become calls of one body.

::

    gather w0, [block 0 ...], gather w1, [block 1 ...], ...  ==>  gather w0, block(x, w0), gather w1, block(x, w1), ...

The forward and the backward of a body are traced by themselves and put back into the joint graph, which is what it is
without bodies (``ops/call.py``), before anything is planned. Gathers stay outside, and so does what a body may not
hold. An activation checkpoint is part of a body, and its nodes keep the marks by which partitioners know them. A block
begins where the first of its weights is read.

Two blocks are alike if they are equal node by node but for names: functions, constants, which node reads which, and
dtypes, shapes, strides and ``requires_grad`` of what they read.
"""

import hashlib
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from inductor_passes.checkpoints import is_plain, operand_of, region_key, region_of
from inductor_passes.ops.call import CALL, add_body, prepare
from inductor_passes.torch_compat.aot_autograd import checkpoint_tags, trace_by_itself
from inductor_passes.torch_compat.proxy_tensor import fake_like

_LEAST_NODES = 4
"""Blocks with fewer nodes are not worth a call."""


class TracedOnce(NamedTuple):
    """The bodies of a graph, and the compute that is in none."""

    bodies: tuple[tuple[int, int], ...]
    """Number of nodes and of calls of each body."""
    outside: tuple[tuple[str, int], ...]
    """Why nodes of repeated blocks are in no body, and how many."""

    def __str__(self) -> str:
        shared = ", ".join(f"{nodes} nodes called {calls} times" for nodes, calls in self.bodies)
        reasons = ", ".join(f"{count} with {reason}" for reason, count in self.outside)
        return f"traced once: {shared or 'nothing'}" + (f"; traced one by one: {reasons}" if reasons else "")


class _Body(NamedTuple):
    """A body, as its calls know it: names of its forward and its backward (``ops/call.py``)."""

    forward: str
    backward: str | None
    """``None``: nothing is differentiable."""
    differentiable: tuple[bool, ...]
    """Whether each result has a gradient."""
    has_gradient: tuple[bool, ...]
    """Whether each operand gets a gradient."""


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx, body, *operands):
        ctx.body = body
        found = CALL(list(operands), body.forward)
        count = len(body.differentiable)
        ctx.save_for_backward(*found[count:])
        fixed = [x for x, differs in zip(found[:count], body.differentiable, strict=True) if not differs]
        ctx.mark_non_differentiable(*fixed)
        return tuple(found[:count])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        tangents = [grad.contiguous() for grad, differs in zip(grads, ctx.body.differentiable, strict=True) if differs]
        found = iter(CALL([*ctx.saved_tensors, *tangents], ctx.body.backward))
        return None, *(next(found) if has_gradient else None for has_gradient in ctx.body.has_gradient)


def call_block(forward: str, backward: str | None, differentiable: Any, has_gradient: Any, *operands: Tensor) -> Any:
    """Return the results of a body, as ``trace_once`` puts it into Dynamo's graph."""
    return _Call.apply(_Body(forward, backward, tuple(differentiable), tuple(has_gradient)), *operands)


def trace_once(
    module: GraphModule, block_of: Mapping[Node, str | None], decompositions: Callable[[], Mapping[Any, Any] | None]
) -> TracedOnce:
    """Replace blocks of Dynamo's graph that are alike by calls of one body.

    Args:
        module: the graph; it is changed.
        block_of: the block that the weight of each gather belongs to. Gathers read nothing but inputs of the graph.
        decompositions: returns those with which the graph will be traced, as ``aot_autograd`` takes them.
    """
    runs, outside = _runs(module.graph, block_of)
    of_key: dict[Any, list[_Run]] = defaultdict(list)
    for run in runs:
        if run.key is not None and run.size >= _LEAST_NODES:
            of_key[run.key].append(run)
    bodies: list[tuple[_Body, list[_Run]]] = []
    for calls in of_key.values():
        if len(calls) > 1:
            body = calls[0].trace(decompositions())
            if isinstance(body, str):
                outside[body] += sum(run.size for run in calls)
            else:
                bodies.append((body, calls))
    replaced: dict[Node, Node] = {}
    for body, calls in bodies:
        for run in calls:
            run.call(body, replaced)
    if bodies:
        module.graph.lint()
        module.recompile()
    return TracedOnce(tuple((calls[0].size, len(calls)) for _, calls in bodies), tuple(outside.most_common()))


def _runs(graph: Graph, block_of: Mapping[Node, str | None]) -> tuple[list["_Run"], Counter[str]]:
    """Return the blocks of a graph, in order, and why how many nodes are in none."""
    outside: Counter[str] = Counter()
    if any(node.target is torch.autograd.grad or _changes_a_context(node) for node in graph.nodes):
        outside["contexts that the graph enters"] += len(graph.nodes)
        return [], outside
    runs: list[list[Node]] = [[]]
    block: str | None = None
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or node in block_of:
            continue
        read = [block_of[source] for source in node.all_input_nodes if source in block_of]
        if read and read[0] != block:
            block = read[0]
            runs.append([])
        if reason := _reason_outside(node):
            outside[reason] += 1
            runs.append([])
        else:
            runs[-1].append(node)
    run_of = {node: i for i, nodes in enumerate(runs) for node in nodes}
    return [_Run(nodes, run_of, block_of) for nodes in runs if nodes], outside


def _changes_a_context(node: Node) -> bool:
    """Return whether a call is there for what it does to the calls behind it, such as to enter ``torch.autocast``."""
    return node.op == "call_function" and node.meta.get("example_value") is None and node.target is not operator.setitem


def _reason_outside(node: Node) -> str | None:
    """Return why a node cannot be in a body; ``None``: it can be."""
    inputs = node.all_input_nodes
    if is_plain(node):
        inner = [n for n in region_of(node).graph.nodes if n.op not in ("placeholder", "output")]
        if any(map(_changes_a_context, inner)):
            return "contexts that the graph enters"
        if reason := next(filter(None, map(_reason_outside, inner)), None):
            return f"{reason} in checkpoints"
        inputs = [n for n in inputs if n is not node.args[0]]
    elif isinstance(node.target, torch._ops.HigherOrderOperator):
        return "higher-order operators"
    if any(n.op == "get_attr" for n in inputs):
        return "constants of the model"
    values = tree_leaves([n.meta.get("example_value") for n in (node, *inputs)])
    return next(filter(None, map(_reason_not_passed, values)), None)


def _reason_not_passed(value: Any) -> str | None:
    """Return why a value can be no operand, result or part of a body; ``None``: it can be."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return "symbolic sizes"
    if not isinstance(value, Tensor):
        return "values that are no tensors"
    if any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride(), value.storage_offset())):
        return "symbolic sizes"
    return "subclasses of tensors" if is_traceable_wrapper_subclass(value) else None


def _shares_or_changes_memory(function: GraphModule, operands: Sequence[Tensor]) -> bool:
    """Return whether a function writes to an operand, or returns memory of an operand or the same memory twice."""
    examples: list[Any] = fake_like(operands)
    with examples[0].fake_mode, torch.no_grad():  # also for tensors that the function makes
        results = function(*examples)
    memory = [x.untyped_storage()._cdata for x in (*examples, *results)]
    return len(set(memory)) < len(memory) or any(x._version for x in examples)


class _Run:
    """Nodes of Dynamo's graph, in order, that a call may stand for."""

    def __init__(self, nodes: Sequence[Node], run_of: Mapping[Node, int], gathers: Container[Node]):
        self.nodes = list(nodes)
        inside = set(nodes)
        self._results = [node for node in nodes if any(user not in inside for user in node.users)]
        checkpoints = list(filter(is_plain, nodes))
        self._regions = [node.all_input_nodes[0] for node in checkpoints]
        number = {node: f"%{i}" for i, node in enumerate(nodes)}
        number.update((node, f"@{i}") for i, node in enumerate(self._regions))
        regions = list(map(region_of, checkpoints))
        self.size = sum(len(region.graph.nodes) for region in regions) + len(nodes) - len(regions)
        """Number of nodes."""
        operands: dict[Node, int] = {}

        def named(node: Node) -> str:
            return number.get(node) or f"${operands.setdefault(node, len(operands))}"

        calls = [(n.op, n.target, f"{map_arg(n.args, named)}{map_arg(n.kwargs, named)}") for n in nodes]
        self._operands = list(operands)
        self._gathered = tuple(i for i, node in enumerate(self._operands) if node in gathers)
        self.key: Any = None
        """Equal for two runs that can be calls of one body; ``None`` for a run that cannot be one."""
        values = [node.meta["example_value"] for node in (*self._operands, *self._results)]
        if all(isinstance(value, Tensor) for value in values) and not self._adds_up_in_another_order(run_of):
            about = tuple(map(_about, values))
            results = tuple(number[node] for node in self._results)
            self.key = tuple(calls), tuple(map(region_key, regions)), about, self._gathered, results

    def _adds_up_in_another_order(self, run_of: Mapping[Node, int]) -> bool:
        """Return whether the gradient of an operand has several terms here and others from other runs.

        Autograd adds up terms one after another, the last reader's first; terms of a body are added up by themselves.
        The run that makes the operand is no other one: the terms of its readers come last.
        """
        for node in self._operands:
            readers: Counter[int | None] = Counter()
            for user in node.users:
                readers[run_of.get(user)] += _reads(user, node)
            here = readers.pop(run_of[self.nodes[0]])
            readers.pop(run_of.get(node, -1), None)
            if node.meta["example_value"].requires_grad and here > 1 and readers:
                return True
        return False

    def trace(self, decompositions: Mapping[Any, Any] | None) -> _Body | str:
        """Trace the forward and the backward of the body, or return why there can be none."""
        graph = Graph()
        copies: dict[Node, Node] = {node: graph.placeholder(f"arg{i}") for i, node in enumerate(self._operands)}
        regions = {str(node.target): getattr(node.graph.owning_module, str(node.target)) for node in self._regions}
        copies.update((node, graph.get_attr(str(node.target))) for node in self._regions)
        for node in self.nodes:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output(tuple(copies[node] for node in self._results))
        operands = [node.meta["example_value"] for node in self._operands]
        results = [node.meta["example_value"] for node in self._results]
        function = GraphModule(regions, graph)
        if _shares_or_changes_memory(function, operands):
            return "results that share memory, or changes in place"
        if torch.is_grad_enabled() and not all(x.is_contiguous() for x in results if x.requires_grad):
            return "results that are not contiguous"
        forward, backward = trace_by_itself(function, operands, self._gathered, decompositions, prepare)
        if any(graph.graph.find_nodes(op="get_attr") for graph in (forward, backward) if graph is not None):
            return "constants of the model"
        if backward is None:
            return _Body(self._add(forward), None, (False,) * len(results), (False,) * len(operands))
        gradients: Any = backward.graph.output_node().args[0]
        has_gradient = tuple(isinstance(gradient, Node) for gradient in gradients)
        backward.graph.output_node().args = (tuple(filter(lambda n: isinstance(n, Node), gradients)),)
        differentiable = tuple(value.requires_grad for value in results)
        return _Body(self._add(forward), self._add(backward), differentiable, has_gradient)

    def _add(self, module: GraphModule) -> str:
        operands = [_about(node.meta["val"]) for node in module.graph.find_nodes(op="placeholder")]
        digest = hashlib.sha256(f"{module.code}{operands}{checkpoint_tags(module.graph)}".encode()).hexdigest()
        add_body(digest, module)
        return digest

    def call(self, body: _Body, replaced: dict[Node, Node]) -> None:
        """Put a call of ``body`` in the run's place.

        Args:
            replaced: what stands for the results of runs whose calls are inserted already; this run's are added.
        """
        last = self.nodes[-1]
        graph = last.graph
        inside = set(self.nodes)
        with graph.inserting_before(last.next):
            call = graph.call_function(call_block, (*body, *(replaced.get(n, n) for n in self._operands)))
            call.meta = {**last.meta, "example_value": tuple(node.meta["example_value"] for node in self._results)}
            for i, node in enumerate(self._results):
                replaced[node] = graph.call_function(operator.getitem, (call, i))
                replaced[node].meta = dict(node.meta)
        for node in self._results:
            for user in [user for user in node.users if user not in inside]:
                user.replace_input_with(node, replaced[node])
        for node in reversed([*self._regions, *self.nodes]):
            graph.erase_node(node)


def _reads(user: Node, source: Node) -> int:
    """Return how many operators read ``source`` by the node ``user``."""
    if not is_plain(user):
        return 1
    return sum(len(inner.users) for inner, passed in operand_of(user) if passed is source)


def _about(value: Tensor) -> tuple[Any, ...]:
    """Return what the trace of a function depends on in one of its operands."""
    return value.dtype, value.device, tuple(value.shape), value.stride(), value.requires_grad

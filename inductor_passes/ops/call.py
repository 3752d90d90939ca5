"""A call of a body: one node of a graph that is traced, in place of the nodes of the body, until it is inlined.

::

    shard - call(gather) -> full weight      ==>      shard - cast - all_gather - wait - view -> full weight

AOTAutograd takes about a millisecond for each operator that it traces, twice. What repeats, such as the gather and the
reduction of each parameter, is traced by itself, once for each kind. AOTAutograd sees one operator with the same
results, and ``inline`` copies nodes, which takes microseconds.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from inductor_passes.ops.pack import LIBRARY
from inductor_passes.torch_compat.aot_autograd import number_checkpoints, tell_checkpoints_apart
from inductor_passes.torch_compat.autograd import without_dispatch_modes
from inductor_passes.torch_compat.proxy_tensor import is_traced, trace

_WAIT = torch.ops._c10d_functional.wait_tensor.default


class _Bodies(NamedTuple):
    prepare: Callable[[GraphModule], object]
    """Runs the passes that torch runs on the graph while bodies are calls in it."""
    graphs: dict[str, GraphModule]
    """Bodies, by what they are traced of."""


class _Thread(threading.local):
    bodies: _Bodies | None = None
    """Bodies of the graph that this thread traces; ``None``: nothing is called."""


_thread = _Thread()


@contextmanager
def calls_traced(prepare: Callable[[GraphModule], object]) -> Iterator[None]:
    """Let ``call`` leave calls in the graphs that are traced meanwhile, which ``inline`` has to replace.

    Args:
        prepare: the passes that run on the graph before calls are inlined; here they run on each body.
    """
    before, _thread.bodies = _thread.bodies, _Bodies(prepare, {})
    try:
        yield
    finally:
        _thread.bodies = before


def call(function: Callable[..., Tensor], key: Any, *operands: Tensor) -> Tensor:
    """Return ``function(*operands)``, as a call where calls are traced. Not differentiable.

    Args:
        function: returns memory of its own, writes to none of its operands, and depends on nothing but ``key`` and its
            operands' values, shapes, strides, dtypes and devices.
        key: what tells this function from others, by its ``repr``.
        operands: tensors without symbolic sizes.
    """
    bodies = _thread.bodies
    if bodies is None:
        return function(*operands)
    about = [(tuple(each.shape), each.stride(), each.dtype, each.device) for each in operands]
    name = repr((key, about, is_traced()))
    if name not in bodies.graphs:
        bodies.graphs[name] = trace(lambda *args: (function(*args),), operands)
        if is_traced():
            prepare(bodies.graphs[name])
    (result,) = CALL(list(operands), name)
    return result


def prepare(body: GraphModule) -> None:
    """Run the passes that a body needs."""
    assert _thread.bodies is not None
    with without_dispatch_modes():
        _thread.bodies.prepare(body)


def add_body(name: str, body: GraphModule) -> None:
    """Add what ``CALL`` calls by this name in the graphs that this thread traces."""
    assert _thread.bodies is not None
    _thread.bodies.graphs[name] = body


def inline(graph: Graph) -> None:
    """Replace the calls in a graph, and in the graphs of its submodules, by the nodes of their bodies.

    The order is that of a graph without calls, on which partitioners and plans depend: what only a call reads, as a
    gathered weight, is made where the body reads it first, and what only an output needs, as a reduction, follows on
    its gradient.
    """
    module = graph.owning_module
    for each in () if module is None else module.children():
        if isinstance(each, GraphModule):
            inline(each.graph)
    calls = list(graph.find_nodes(op="call_function", target=CALL))
    for i, node in enumerate(calls):
        operands, name = node.args
        _inline(node, _body(name).graph, operands, i)
    if calls:
        number_checkpoints(graph)


def _inline(call_node: Node, body: Graph, operands: Any, number_of_call: int) -> None:
    graph = call_node.graph
    copies: dict[Node, Node] = dict(zip(body.find_nodes(op="placeholder"), operands, strict=True))
    returned: Any = body.output_node().args[0]
    parts: dict[Node, list[Node]] = {}
    for part in call_node.users:
        number: Any = part.args[1]
        parts.setdefault(returned[number], []).append(part)
    read: set[Node] = set()
    with graph.inserting_before(call_node):
        for node in body.nodes:
            if node.op == "output":
                continue
            if node.op != "placeholder":
                for source in node.all_input_nodes:
                    if source.op == "placeholder" and source not in read:
                        read.add(source)
                        for made in _made_for_one(copies[source]):
                            call_node.prepend(made)
                copies[node] = graph.node_copy(node, lambda n: copies[n])
                copies[node].meta = {**call_node.meta, **node.meta}
                tell_checkpoints_apart(copies[node], number_of_call)
            for part in parts.get(node, ()):
                part.replace_all_uses_with(copies[node])
                graph.erase_node(part)
            if node in parts and node.op != "placeholder":
                for reader in _read_for_output(copies[node]):
                    call_node.prepend(reader)
    graph.erase_node(call_node)


def _read_for_output(value: Node) -> list[Node]:
    """Return the nodes that reduce ``value`` for an output, in order; none where anything else is made of it."""
    chain: list[Node] = []
    while len(value.users) == 1:
        (reader,) = value.users
        if reader.op == "output":
            return chain if any(node.target is CALL for node in chain) else []
        if any(source is not value and source.op != "placeholder" for source in reader.all_input_nodes):
            break
        chain.append(reader)
        value = reader
    return []


def _made_for_one(value: Node) -> list[Node]:
    """Return the nodes that gather ``value`` from an input, in order; none where anything else reads them."""
    chain: list[Node] = []
    while value.op != "placeholder":
        if len(value.users) > 1 or len(value.all_input_nodes) != 1:
            return []
        chain.append(value)
        (value,) = value.all_input_nodes
    return chain[::-1] if any(node.target is _WAIT for node in chain) else []


def _body(name: str) -> GraphModule:
    assert _thread.bodies is not None, "a call was not inlined while it was traced"
    return _thread.bodies.graphs[name]


def _run(operands: list[Tensor], body: str) -> list[Tensor]:
    return list(_body(body)(*operands))


def _shapes(_operands: list[Tensor], body: str) -> list[Tensor]:
    returned: Any = _body(body).graph.output_node().args[0]
    results = [node.meta["val"] for node in returned]
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in results]


LIBRARY.define("call(Tensor[] operands, str body) -> Tensor[]")
LIBRARY.impl("call", _run, "CompositeExplicitAutograd")
torch.library.register_fake("simplefsdp::call", _shapes, lib=LIBRARY)

CALL = torch.ops.simplefsdp.call.default

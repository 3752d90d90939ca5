"""Take gathers out of the activation checkpoints of Dynamo's graph, so that equal checkpoints can be traced once.

::

    checkpoint([gather w, ... w ...], x, shard)      ==>      gather w, checkpoint([... w ...], x, w)

Whether a weight is gathered again in backward is decided for all weights alike (``tag.py``), inside and outside of a
checkpoint.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_CONTEXTS = "_checkpoint_context_fn"
"""Key in the ``meta`` of a checkpoint's graph: the ``context_fn`` of ``torch.utils.checkpoint.checkpoint``."""


def region_of(call: Node) -> GraphModule:
    """Return the graph that a call of ``CHECKPOINT`` runs."""
    attribute: Any = call.args[0]
    region = getattr(call.graph.owning_module, attribute.target)
    assert isinstance(region, GraphModule)
    return region


def is_plain(call: Node) -> bool:
    """Return whether a node calls ``CHECKPOINT`` with a graph that no other calls, and tensors for its inputs alone."""
    if call.target is not CHECKPOINT or any(isinstance(value, Node) for value in call.kwargs.values()):
        return False
    inputs = region_of(call).graph.find_nodes(op="placeholder")
    return len(call.all_input_nodes[0].users) == 1 and len(inputs) == len(call.args) - 1


def operand_of(call: Node) -> Iterator[tuple[Node, Any]]:
    """Return each input of the graph that a call of ``CHECKPOINT`` runs, and what the call passes for it."""
    return zip(region_of(call).graph.find_nodes(op="placeholder"), call.args[1:], strict=True)


def take_gathers_out(module: GraphModule, gather: Any) -> None:
    """Move calls of ``gather`` on a checkpoint's own inputs in front of the checkpoint.

    Args:
        module: Dynamo's graph; it is changed.
        gather: the function that gathers.
    """
    calls = list(filter(is_plain, module.graph.find_nodes(op="call_function", target=CHECKPOINT)))
    for call in calls:
        _take_out(call, gather)
    if calls:
        module.graph.lint()
        module.recompile()


def _take_out(call: Node, gather: Any) -> None:
    region = region_of(call)
    passed = dict(operand_of(call))
    for inner in region.graph.find_nodes(op="call_function", target=gather):
        if not all(isinstance(passed.get(source), Node) for source in inner.all_input_nodes):
            continue
        with call.graph.inserting_before(call):
            outer = call.graph.node_copy(inner, lambda n: passed[n])
        with region.graph.inserting_before(next(iter(region.graph.nodes))):
            weight = region.graph.placeholder(inner.name)
        weight.meta = dict(inner.meta)
        passed[weight] = outer
        inner.replace_all_uses_with(weight)
        region.graph.erase_node(inner)
    for source in region.graph.find_nodes(op="placeholder"):
        if not source.users:
            region.graph.erase_node(source)
    call.args = (call.args[0], *(passed[source] for source in region.graph.find_nodes(op="placeholder")))
    region.graph.lint()
    region.recompile()


def region_key(region: GraphModule) -> Any:
    """Return what is equal for two checkpointed graphs that compute and save the same."""
    number = {node: i for i, node in enumerate(region.graph.nodes)}
    nodes = tuple(
        (node.op, _target_key(node), f"{map_arg((node.args, node.kwargs), number.get)}") for node in region.graph.nodes
    )
    return nodes, _contexts_key(region.meta.get(_CONTEXTS))


def _target_key(node: Node) -> Any:
    if node.op == "placeholder":
        return None
    if node.op != "get_attr":
        return node.target
    value = getattr(node.graph.owning_module, str(node.target))
    return region_key(value) if isinstance(value, GraphModule) else id(value)


def _contexts_key(contexts: Any) -> Any:
    """Return what is equal for functions that make the same contexts: blocks often make each a ``partial`` of one."""
    if not isinstance(contexts, functools.partial):
        return id(contexts)
    return id(contexts.func), tuple(map(id, contexts.args)), tuple((k, id(v)) for k, v in contexts.keywords.items())

"""Let matmuls make gradients in the dtype in which they are reduced.

::

    mm in bf16 - view* - cast to fp32 - reduce_scatter   ==>   mm in bf16 with a result in fp32 - view* - reduce_scatter

A GPU's matmul sums up in fp32 and rounds the sum, and the cast is a copy of the gradient. Without both, a group of
reductions reads the gradient where the matmul has put it. The gradient is not rounded then, as FSDP2's is, and takes
twice the memory from the matmul on instead of from the cast on. ``lower_with="aot_eager"`` keeps the cast.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from inductor_passes.collectives import CASTS, REDUCE_SCATTER, Collective, reductions
from inductor_passes.fusion import is_view

_MATMUL = torch.ops.aten.mm.default
_CASTING_MATMUL = torch.ops.aten.mm.dtype
_HALF = (torch.bfloat16, torch.float16)


def cast_in_matmuls(graph: Graph, is_allowed: Callable[[Collective], bool]) -> list[str]:
    """Replace casts of gradients to float32 by matmuls with such a result, where ``is_allowed``; return their FQNs.

    Gradients that an all-reduce reduces, which are packed, keep their casts. For GPUs: matmuls of CPUs have no such
    result.
    """
    replaced: list[str] = []
    for reduction in reductions(graph):
        chain = _from_matmul(reduction)
        if chain and is_allowed(reduction):
            _cast_in(graph, *chain)
            replaced += reduction.fqns
    graph.lint()
    return replaced


def cast_what_is_encoded(graph: Graph) -> list[str]:
    """Undo ``cast_in_matmuls`` for gradients in a wire format, whose encoding casts them and reads fewer bytes so.

    Return the FQNs of these gradients.
    """
    undone: list[str] = []
    for reduction in reductions(graph):
        matmul, views = _behind_views(reduction.input)
        if reduction.wire_format is not None and matmul.target is _CASTING_MATMUL:
            _cast_behind(graph, matmul, views, reduction.node)
            undone += reduction.fqns
    graph.lint()
    return undone


def _from_matmul(reduction: Collective) -> tuple[Node, list[Node], Node] | None:
    """Return the matmul that makes a reduction's gradient, the views of its result, and the cast of the last view."""
    cast, alone = reduction.input, reduction.node.target is REDUCE_SCATTER and reduction.all_reduce_after is None
    if not alone or cast.target not in CASTS or len(cast.users) != 1 or cast.meta["val"].dtype is not torch.float32:
        return None
    node, views = _behind_views(cast.all_input_nodes[0])
    value = node.meta["val"]
    if node.target is not _MATMUL or len(node.users) != 1 or value.dtype not in _HALF:
        return None
    return node, views, cast


def _behind_views(node: Node) -> tuple[Node, list[Node]]:
    """Return the node of which ``node`` is a view that nothing else reads, and the views on the way, ``node`` last."""
    views: list[Node] = []
    while is_view(node) and len(node.users) == 1:
        views.insert(0, node)
        node = node.all_input_nodes[0]
    return node, views


def _cast_in(graph: Graph, matmul: Node, views: list[Node], cast: Node) -> None:
    dtype = cast.meta["val"].dtype
    _replace_matmul(graph, matmul, views, _CASTING_MATMUL, (*matmul.args, dtype), dtype)
    cast.replace_all_uses_with(cast.all_input_nodes[0])
    graph.erase_node(cast)


def _cast_behind(graph: Graph, matmul: Node, views: list[Node], reduction: Node) -> None:
    gradient = reduction.all_input_nodes[0]
    dtype, own = gradient.meta["val"].dtype, matmul.all_input_nodes[0].meta["val"].dtype
    made = _replace_matmul(graph, matmul, views, _MATMUL, matmul.args[:2], own)
    last = views[-1] if views else made
    with graph.inserting_before(reduction):
        cast = graph.call_function(torch.ops.prims.convert_element_type.default, (last, dtype))
    cast.meta = {**last.meta, "val": last.meta["val"].to(dtype)}
    reduction.replace_input_with(last, cast)


def _replace_matmul(
    graph: Graph, matmul: Node, views: list[Node], target: Any, args: tuple[Any, ...], dtype: torch.dtype
) -> Node:
    """Make ``matmul``, and so the views of its result, in ``dtype``, and return the new matmul."""
    with graph.inserting_before(matmul):
        made = graph.call_function(target, args)
    made.meta = {**matmul.meta, "val": matmul.meta["val"].to(dtype)}
    matmul.replace_all_uses_with(made)
    graph.erase_node(matmul)
    for view in views:
        view.meta["val"] = view.meta["val"].to(dtype)
    return made

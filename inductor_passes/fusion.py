"""Which operators TorchInductor fuses with their neighbours, and which nodes are views of others."""

import operator

import torch
from torch.fx import Node

from inductor_passes.collectives import CASTS, REDUCE_SCATTER, WAIT, Collective, before_cast_and_pad

_aten = torch.ops.aten


def is_view(node: Node) -> bool:
    """Return whether a node's value is part of an input's memory."""
    if node.target in (operator.getitem, WAIT):
        return True
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    return any(value.alias_info and not value.alias_info.is_write for value in returns)


def storage_of(node: Node) -> Node:
    """Return the node whose memory ``node`` is a view of; ``node`` itself, if it is no view."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def is_fused(node: Node) -> bool:
    """Return whether TorchInductor makes one kernel of a node and its neighbours, as it does of all but matmuls."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    tags = node.target.tags
    return torch.Tag.pointwise in tags or torch.Tag.reduction in tags or node.target._overloadpacket in _FUSED


def is_fused_cast(node: Node) -> bool:
    """Return whether ``node`` casts what is computed by a kernel that can cast it on the way."""
    return node.target in CASTS and is_fused(storage_of(node.all_input_nodes[0]))


def can_be_reduced_in_place(reduction: Collective) -> bool:
    """Return whether a reduce-scatter can read its gradient where it lies, as a member of a group.

    It cannot if the gradient must be copied for it: to cast it outside of the kernel that makes it, to pad or divide it
    or to make it contiguous; or if the reduction must work on one tensor with others, as all-reduces do.
    """
    source = reduction.input
    copied = before_cast_and_pad(source) is not source and not is_fused_cast(source)
    alone = reduction.node.target is not REDUCE_SCATTER or reduction.all_reduce_after is not None
    value = source.meta["val"]
    return not (copied or alone or source.target is _aten.div.Tensor) and value.dim() > 0 and value.is_contiguous()


_FUSED = (
    _aten.cat,
    _aten.clone,
    _aten.constant_pad_nd,
    _aten.copy,
    _aten.embedding,
    _aten.full,
    _aten.gather,
    _aten.index,
    _aten.arange,
    _aten._to_copy,
    _aten.where,
    torch.ops.prims.convert_element_type,
    torch.ops.prims.iota,
)
"""Operators that Inductor fuses although torch's tags do not say so."""

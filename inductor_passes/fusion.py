"""Which operators TorchInductor fuses with their neighbours, and which nodes are views of others."""

import operator

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from inductor_passes.collectives import CASTS, FQNS, REDUCE_SCATTER, WAIT, Collective, before_cast_and_pad
from inductor_passes.ops.accumulate import ACCUMULATE, ADD_UP
from inductor_passes.ops.offload import TO_DEVICE
from inductor_passes.torch_compat.fx import size_hint

_aten = torch.ops.aten
_ADDS = (_aten._unsafe_index_put.default, _aten._unsafe_masked_index_put_accumulate.default)
_ADDS_IF_TOLD = (_aten.index_put.default, _aten.index_put_.default)
"""Operators that add rows where their argument ``accumulate`` says so, as torch 2.11 makes an embedding's gradient."""


def is_view(node: Node) -> bool:
    """Return whether a node's value is part of an input's memory."""
    if node.target in (operator.getitem, WAIT, _aten._unsafe_view.default):  # the last is one that its schema hides
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


def shard_before_cast_and_pad(gather: Collective) -> Node:
    """Return what a gather casts and pads on the way: a shard, or what comes of it if that is computed by a kernel."""
    source = before_cast_and_pad(gather.input)
    made = storage_of(source)
    return source if made.op == "placeholder" or made.target is TO_DEVICE else gather.input


def mixes_dtypes(gather: Collective) -> bool:
    """Return whether a group of gathers may have several dtypes: NCCL's may, and gloo makes one buffer of a group."""
    on_a_gpu: bool = gather.input.meta["val"].device.type == "cuda"
    return on_a_gpu


def communicates(node: Node) -> bool:
    if node.target in (ADD_UP, ACCUMULATE):
        return False
    return getattr(node.target, "namespace", "") in ("_c10d_functional", "simplefsdp")


def computes(node: Node) -> bool:
    return node.op == "call_function" and bool(tensors_of(node)) and not communicates(node) and not is_view(node)


def own_collective(node: Node) -> str:
    """Return the kind of collective that ``node`` is, if it is the model's own; else an empty string."""
    packet = getattr(node.target, "_overloadpacket", None) if communicates(node) and FQNS not in node.meta else None
    return _OWN.get(packet.__name__, "") if packet else ""


_OWN = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


def sources_of(node: Node) -> list[Node]:
    """Return the nodes whose memory a node reads: its inputs, without views."""
    return list(dict.fromkeys(map(storage_of, node.all_input_nodes)))


def tensors_of(node: Node) -> list[Tensor]:
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]


def nbytes_of(node: Node) -> int:
    """Return the bytes of a node's value, as far as sizes are known."""
    return sum(size_hint(tensor.numel()) * tensor.element_size() for tensor in tensors_of(node))


def writes_to_inputs(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def adds_rows(node: Node) -> bool:
    """Return whether ``node`` adds rows to a tensor, as an embedding's gradient is made.

    The tensor, where it is zeros, is filled at the same place: nothing else needs its memory earlier. The kernel that
    computes the rows adds them; here it counts as another one, before which gradients that it makes are complete.
    """
    return node.target in _ADDS or (node.target in _ADDS_IF_TOLD and node.args[3:] == (True,))


def fused_regions(graph: Graph) -> dict[Node, Node]:
    """Return, for each node that Inductor would fuse, the first node of its region."""
    depth: dict[Node, int] = {}  # matmuls, the model's own collectives and the like on the way here
    for node in graph.nodes:
        inside = [depth[source] + adds_rows(source) for source in node.all_input_nodes]
        alone = (computes(node) and not (is_fused(node) or adds_rows(node))) or bool(own_collective(node))
        ours = communicates(node) and not own_collective(node.all_input_nodes[0] if node.target is WAIT else node)
        depth[node] = 0 if ours else max(inside, default=0) + alone
    for node in reversed(graph.nodes):  # what is only needed later is computed there
        if node.users and all(is_view(n) or is_fused(n) for n in (node, *node.users)):
            depth[node] = min(depth[user] for user in node.users)
    first: dict[Node, Node] = {}

    def root(node: Node) -> Node:
        while first[node] is not node:
            node = first[node]
        return node

    for node in graph.nodes:
        if computes(node) and (is_fused(node) or adds_rows(node)):
            first[node] = node
            for source in sources_of(node):
                filled = source.target is _aten.full.default and len(source.users) == 1
                if source in first and (filled if adds_rows(node) else depth[source] == depth[node]):
                    one, other = sorted((root(source), root(node)))
                    first[other] = one
    return {node: root(node) for node in first}


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

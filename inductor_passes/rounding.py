"""Reduce the gradient that a kernel has computed, and not what is left of it after a rounding.

::

    fp32 sum - cast to bf16 - cast to fp32 - [pad] - reduce_scatter   ==>   fp32 sum - [pad] - reduce_scatter

A gradient that is summed in fp32 (of an embedding, of a norm) is rounded to the dtype of its weight, and cast back to
the dtype of its reduction. TorchInductor fuses both casts and rounds nothing, but what is left is a copy of the
gradient, for an embedding the largest one of a model. ``lower_with="aot_eager"`` keeps the rounding, as FSDP2 does.
"""

from torch.fx import Graph, Node

from inductor_passes.collectives import CASTS, PADS, reductions

ROUNDED_TO = "simplefsdp_rounded_to"
"""Key in a reduction's ``node.meta`` for the dtype to which its gradient is no longer rounded."""


def skip_rounding(graph: Graph) -> None:
    """Take the rounding out of each marked reduction's input, on a joint graph, and note it on the reduction."""
    for reduction in reductions(graph):
        cast = reduction.input
        while cast.target in PADS and len(cast.users) == 1:
            cast = cast.all_input_nodes[0]
        if not _casts_only_for_one(cast):
            continue
        rounding = cast.all_input_nodes[0]
        if not _casts_only_for_one(rounding):
            continue
        summed = rounding.all_input_nodes[0]
        dtype, rounded = summed.meta["val"].dtype, rounding.meta["val"].dtype
        if cast.meta["val"].dtype is dtype and rounded.itemsize < dtype.itemsize:
            cast.replace_all_uses_with(summed)
            graph.erase_node(cast)
            graph.erase_node(rounding)
            reduction.node.meta[ROUNDED_TO] = rounded
    graph.lint()


def _casts_only_for_one(node: Node) -> bool:
    return node.target in CASTS and len(node.users) == 1

"""Decide, before partitioning, whether full weights are gathered again in backward or saved.

[Note: the whole chain]
``shard - cast - all_gather - wait - [slice] - view*`` is tagged up to the last node that depends on nothing but
gathered weights: a transposed view, ``1 + weight``, a concatenation of two. With a shorter tag a partitioner saves
what comes after it, and a transposed view of a full weight is a full weight. The tag overrides what the user's
activation checkpointing put on these nodes: resharding is this library's decision, and under either a parameter is
gathered at most once in backward.

[Note: what a checkpointed region returns]
Eager mode saves the input of the norm behind the last checkpointed block: it is the norm's own. The partitioner would
recompute the block to get it, and all that follows from the norm's gradient (the reduction of the output layer's, which
is large) would wait until then.
"""

import sys
from collections.abc import Mapping

from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from inductor_passes.cast_before_gather import saved_for_backward
from inductor_passes.collectives import GraphParameter, gathers, is_deterministic, source_chain
from inductor_passes.identify import device_copies_of_replicated
from inductor_passes.torch_compat.aot_autograd import tangents

# The partitioner saves what lies between two checkpointed regions: a recomputed node whose user has a larger id.
_LAST_REGION = sys.maxsize


def tag(graph: Graph, params: Mapping[int, GraphParameter], *, saves_casts: bool = False) -> None:
    """Tag each marked gather chain of a joint graph: recompute it in backward, or save the gathered weight. A weight
    that is offloaded and not sharded is copied again, or its copy saved.

    Uses the partitioners' own vocabulary (``meta["recompute"]``, a ``torch.utils.checkpoint.CheckpointPolicy``), which
    ``min_cut_rematerialization_partition`` and ``default_partition`` both obey.

    Args:
        saves_casts: save what is read of a weight in fewer bytes than it has (``cast_before_gather.py``), and not the
            weight.
    """
    reshard = {param.fqn: param.reshard for param in params.values()}
    weights: set[Node] = set()
    saved: list[Node] = []
    for param, copy in device_copies_of_replicated(graph, params):
        _recompute(*source_chain(copy), copy)
        weights.add(copy)
        if param.reshard is False:
            saved.append(copy)
    for gather in gathers(graph):
        _recompute(*source_chain(gather.node), gather.node, gather.wait)
        weights.add(gather.wait)
        if reshard[gather.fqns[0]] is False:
            saved += saved_for_backward(gather) if saves_casts else [gather.wait]
    for node in graph.nodes:
        if is_deterministic(node) and node.all_input_nodes and weights.issuperset(node.all_input_nodes):
            _recompute(node)
            weights.add(node)
    saved += _returned_by_regions(graph)
    for node in saved:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _returned_by_regions(graph: Graph) -> list[Node]:
    """Return what nodes of checkpointed regions give to nodes of forward that are in no region; see the note above."""
    gradients = set(tangents(graph))
    returned: dict[Node, None] = {}
    for node in graph.nodes:
        if not gradients.isdisjoint(node.all_input_nodes):
            break  # here backward begins
        if node.op == "call_function" and not _is_recomputed(node):
            given = [source for source in node.all_input_nodes if _is_recomputed(source)]
            returned.update(dict.fromkeys(source for source in given if source.meta["ac_graph_id"] != _LAST_REGION))
    return [node for node in returned if isinstance(node.meta["val"], Tensor)]


def _is_recomputed(node: Node) -> bool:
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _recompute(*nodes: Node) -> None:
    for node in nodes:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = _LAST_REGION

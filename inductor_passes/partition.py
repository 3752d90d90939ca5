"""Cut the joint graph into the same forward and backward on every rank.

[Note: ranks must agree]
torch's partitioners weigh what to save by the sizes of values and by their distance in the graph. On uneven shards both
depend on the rank: some ranks pad their shard, and an empty one weighs nothing. Ranks then recompute different things
in backward, gather in different orders, and hang. So while the graph is partitioned, each shard stands for what its
gather reads (padded and cast, the same shape on every rank), and the steps in between are put back into both graphs.
"""

from collections.abc import Callable
from typing import Any, cast

from torch.fx import Graph, GraphModule, Node

from inductor_passes.bodies import is_whole_view
from inductor_passes.collectives import SHARD, Collective, gathers, reductions, shard_of, source_chain
from inductor_passes.torch_compat.aot_autograd import (
    PartitionedGraphs,
    min_cut_rematerialization_partition,
    opaque_objects_last,
    opaque_objects_weigh_nothing,
)
from inductor_passes.torch_compat.fx import as_lazy_as, generating_no_code

_SOURCE = "simplefsdp_source"
"""Key in ``node.meta``: the nodes from a shard to its folded gather, as a graph, and the placeholder's own value."""


def partition(
    joint: GraphModule,
    inputs: Any,
    *,
    num_fwd_outputs: int,
    partitioner: Callable[..., PartitionedGraphs] = min_cut_rematerialization_partition,
    **kwargs: Any,
) -> PartitionedGraphs:
    """Partition a joint graph, whose gathers are marked and tagged, by one of torch's partitioners."""
    by_shard: dict[Node, list[Collective]] = {}
    for gather in gathers(joint.graph):
        by_shard.setdefault(shard_of(gather.node), []).append(gather)
    for shard, found in by_shard.items():
        if len(found) == 1:  # two gathers that read the same shard in different ways must not look the same
            _fold(shard, found[0].node)
    # Two parameters with the same gradient must not come to share one reduction and the memory of its result, or
    # whoever accumulates into one gradient, or clips it, changes the other. So each has its own group meanwhile. It
    # reads the shard, where errors are fed back, so that backward has the shard.
    shards = {found[0].fqns[0]: shard for shard, found in by_shard.items()}
    for reduction in reductions(joint.graph):
        feeds_back = reduction.two_steps is not None and reduction.two_steps.feeds_back
        read = [shards[reduction.fqns[0]]] if feeds_back else []
        _set_group(reduction.node, (reduction.options[-1], reduction.fqns, *read))
    with opaque_objects_weigh_nothing(), generating_no_code():
        forward, backward = partitioner(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
    for module in (forward, backward):
        for shard in module.graph.find_nodes(op="placeholder"):
            if _SOURCE in shard.meta:  # also where nothing gathers it
                shard.meta["val"] = shard.meta.pop(_SOURCE)
        for gather in gathers(module.graph):
            if _SOURCE in gather.node.meta:
                _unfold(gather.node)
        for reduction in reductions(module.graph):
            group, _, *read = reduction.options[-1]
            if read:
                (reduction.node.meta[SHARD],) = read
            _set_group(reduction.node, group)
    _save_what_views_are_of(forward.graph, backward.graph, num_fwd_outputs)
    forward, backward = opaque_objects_last(forward, backward, num_fwd_outputs)
    return forward, as_lazy_as(forward, backward)


def _save_what_views_are_of(forward: Graph, backward: Graph, num_fwd_outputs: int) -> None:
    """Let views of whole tensors be taken in the backward graph, and the tensors be saved for it.

    Views then are part of the bodies that read them (``compile_once.py``).
    """
    output = forward.output_node()
    values: list[Any] = list(cast(Any, output.args[0]))
    placeholders = {node.name: node for node in backward.find_nodes(op="placeholder")}
    first = next(node for node in backward.nodes if node.op != "placeholder")
    for i, value in enumerate(values[num_fwd_outputs:], num_fwd_outputs):
        chain: list[Node] = []
        base = value
        while is_whole_view(base):
            chain.append(base)
            (base,) = base.all_input_nodes
        if not chain or base.op == "placeholder" or base in values:
            continue
        saved = placeholders[value.name]
        readers = list(saved.users)
        copies = {base: saved}
        with backward.inserting_before(first):
            for node in reversed(chain):
                copies[node] = backward.node_copy(node, copies.__getitem__)
        for reader in readers:
            reader.replace_input_with(saved, copies[value])
        values[i], saved.meta["val"] = base, base.meta["val"]
    output.args = (tuple(values),)
    forward.eliminate_dead_code()


def _set_group(reduction: Node, group: Any) -> None:
    reduction.args = (*reduction.args[:-1], group)


def _fold(shard: Node, gather: Node) -> None:
    """Let ``gather`` read the placeholder, and keep the nodes in between in the gather's ``meta``."""
    chain = source_chain(gather)
    steps = Graph()
    copies = {shard: steps.placeholder("shard")}
    for node in chain:
        copies[node] = steps.node_copy(node, lambda n: copies[n])
    gather.meta[_SOURCE], shard.meta[_SOURCE] = steps, shard.meta["val"]
    shard.meta["val"] = gather.all_input_nodes[0].meta["val"]
    gather.replace_input_with(gather.all_input_nodes[0], shard)
    for node in reversed(chain):
        if not node.users:
            node.graph.erase_node(node)


def _unfold(gather: Node) -> None:
    steps: Graph = gather.meta.pop(_SOURCE)
    (shard,) = gather.all_input_nodes
    copies: dict[Node, Node] = {}
    last = shard
    with gather.graph.inserting_before(gather):
        for node in steps.nodes:
            last = shard if node.op == "placeholder" else gather.graph.node_copy(node, lambda n: copies[n])
            copies[node] = last
    gather.replace_input_with(shard, last)

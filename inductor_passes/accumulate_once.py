"""Let a weight that a graph reads several times add to its accumulated gradient once: the sum of its gradients.

::

    gradient 1 - accumulate,  gradient 2 - accumulate   ==>   gradient 1 - cast -+- add - accumulate
                                                              gradient 2 - cast -+

So the sum has the bits that autograd gives it, which adds up the gradients of all reads before it adds them to what was
there.
"""

from collections import defaultdict
from functools import reduce

import torch
from torch.fx import Graph, Node

from inductor_passes.fusion import storage_of
from inductor_passes.ops.accumulate import ACCUMULATE
from inductor_passes.torch_compat.fx import insert_call, stable_topological_sort

_CAST = torch.ops.prims.convert_element_type.default


def accumulate_once(graph: Graph) -> None:
    """Merge the accumulations of each weight in a joint graph."""
    of_receiver: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=ACCUMULATE):
        of_receiver[storage_of(node.args[1])].append(node)
    several = [nodes for nodes in of_receiver.values() if len(nodes) > 1]
    for nodes in several:
        _merge(nodes)
    if several:
        stable_topological_sort(graph)
        graph.lint()


def _merge(nodes: list[Node]) -> None:
    *others, last = nodes
    _, receiver, dtype = last.args
    with last.graph.inserting_before(last):
        gradients = [insert_call(_CAST, node.args[0], dtype) for node in nodes]
        total = reduce(lambda one, other: insert_call(torch.ops.aten.add.Tensor, one, other), gradients)
        merged = insert_call(ACCUMULATE, total, receiver, dtype)
    for node in (*others, last):
        node.replace_all_uses_with(merged)
        node.graph.erase_node(node)
    for user in [*merged.users]:  # autograd's sum of the results, which are zeros
        if user.target is torch.ops.aten.add.Tensor and user.all_input_nodes == [merged]:
            user.replace_all_uses_with(merged)
            user.graph.erase_node(user)

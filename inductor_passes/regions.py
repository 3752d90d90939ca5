"""Put regions that Dynamo traces once (``torch.compiler.nested_compile_region``) back into the graph around them.

::

    region(x, shard 0), region(..., shard 1), ...  ==>  gather w0, [block 0 ...], gather w1, [block 1 ...], ...

A region holds the gathers of its weights, for which a plan has other places. AOTAutograd traces once what is alike all
the same (``trace_once.py``).
"""

from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from inductor_passes.bodies import INVOKE


def inline_regions(module: GraphModule) -> None:
    """Replace calls of regions in Dynamo's graph, and in the graphs of its submodules, by the nodes of the regions."""
    for child in list(module.children()):
        if isinstance(child, GraphModule):
            inline_regions(child)
    calls = list(module.graph.find_nodes(op="call_function", target=INVOKE))
    for call in calls:
        _inline(module, call)
    if calls:
        module.graph.lint()
        module.recompile()


def _inline(module: GraphModule, call: Node) -> None:
    graph = module.graph
    attribute, _, *operands = call.args
    assert isinstance(attribute, Node)
    region = getattr(module, str(attribute.target))
    copies: dict[Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), operands, strict=True))
    with graph.inserting_before(call):
        for node in region.graph.nodes:
            if node.op == "get_attr":
                name = f"{attribute.target}_{node.target}".replace(".", "_")
                if not hasattr(module, name):
                    setattr(module, name, getattr(region, node.target))
                copies[node] = graph.get_attr(name)
            elif node.op not in ("placeholder", "output"):
                copies[node] = graph.node_copy(node, lambda n: copies[n])
    returned = map_arg(region.graph.output_node().args[0], lambda n: copies[n])
    for part in list(call.users):
        part.replace_all_uses_with(returned[part.args[1]])
        graph.erase_node(part)
    graph.erase_node(call)
    if not attribute.users:
        graph.erase_node(attribute)

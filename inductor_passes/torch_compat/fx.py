"""FX graphs: order of nodes, side effects, calls, and sizes that may be symbolic."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch._inductor.pattern_matcher import stable_topological_sort as stable_topological_sort
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import has_side_effect as has_side_effect
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves


def insert_call(target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call at the insertion point of the graph of its inputs, with its value in ``meta``; return the node."""
    inputs = [arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, Node)]
    node = inputs[0].graph.call_function(target, args, kwargs)
    fake = tree_leaves(inputs[0].meta["val"])[0].fake_mode
    values, named = map_arg((args, kwargs), lambda n: n.meta["val"])
    with fake:
        node.meta["val"] = target(*values, **named)
    return node


@contextmanager
def generating_no_code() -> Iterator[None]:
    """Let this thread's graph modules generate no code meanwhile: whoever calls one calls its ``recompile`` first.

    torch's partitioners make modules of a joint graph again and again and call none of them; for each, code is
    generated, parsed and compiled.
    """
    this_thread, generate = threading.get_ident(), GraphModule.recompile

    def recompile(module: GraphModule) -> Any:
        return generate(module) if threading.get_ident() != this_thread else None

    with patch.object(GraphModule, "recompile", recompile):
        yield


def as_lazy_as(other: GraphModule, module: GraphModule) -> GraphModule:
    """Return ``module`` as one that generates its code when it is called, if ``other`` is such a module.

    torch's partitioners make one of the forward graph only. Whatever copies or changes the backward graph generates,
    parses and compiles its code each time, although TorchInductor calls neither.
    """
    return _LazyGraphModule.from_graphmodule(module) if isinstance(other, _LazyGraphModule) else module


def move_before(first: Node, node: Node) -> None:
    """Move ``node`` before ``first``, and whatever it is made of, as far as they come later."""
    if node > first:
        for source in node.all_input_nodes:
            move_before(first, source)
        first.prepend(node)


def size_hint(size: Any) -> int:
    """Return the value of a size that may be symbolic, as far as it is known; for estimates only: it sets no guard."""
    if isinstance(size, int):
        return size
    return int(known) if (known := size.node._hint) is not None else 1

"""Graphs of a sharded model, made on one process with a fake group."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from inductor_passes.collectives import GraphParameter
from inductor_passes.ops.call import inline
from inductor_passes.ops.gather_shards import GATHER_SHARDS
from inductor_passes.regions import inline_regions
from simplefsdp.compile.context import compilation_context
from simplefsdp.compile.options import parse_options
from simplefsdp.compile.passes import Passes

PARTITIONERS: dict[str, Callable[..., Any]] = {
    "min_cut": min_cut_rematerialization_partition,
    "default": default_partition,
}

_c10d = torch.ops._c10d_functional
ALL_GATHER = _c10d.all_gather_into_tensor.default
GATHERS = (ALL_GATHER, GATHER_SHARDS)
"""Gathers into one tensor, as a graph has them before and after it was bucketed."""
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
ALL_REDUCE = _c10d.all_reduce.default
WAIT = _c10d.wait_tensor.default


@dataclass
class Captured:
    """The graphs of one compilation. ``joint`` is an inference graph where nothing needs a gradient."""

    params: dict[int, GraphParameter] = field(default_factory=dict)
    joint: Graph = field(default_factory=Graph)
    forward: Graph = field(default_factory=Graph)
    backward: Graph = field(default_factory=Graph)


def capture(
    model: nn.Module,
    *inputs: Any,
    plan: Any = "none",
    partitioner: str = "min_cut",
    round_gradients: bool = True,
    decompositions: Mapping[Any, Any] | None = None,
    **options: Any,
) -> Captured:
    """Compile ``model(*inputs)`` up to its final graphs. ``joint`` is kept as traced, before any pass."""
    captured = Captured()

    def backend(gm: GraphModule, example_inputs: Any) -> Any:
        inline_regions(gm)
        passes = Passes(
            compilation_context(example_inputs, parse_options({"plan": plan, "compile_once": False, **options}))
        )
        captured.params = passes.given.params

        def tag_and_partition(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            inline(joint.graph)
            captured.joint = copy(joint.graph)
            passes.identify_and_tag(joint.graph, round_gradients=round_gradients)
            modules = passes.partition_and_plan(joint, joint_inputs, partitioner=PARTITIONERS[partitioner], **kwargs)
            for module in modules:
                passes.order_and_record(module.graph, order=True)
            captured.forward, captured.backward = (module.graph for module in modules)
            return modules

        def infer(graph: GraphModule, _inputs: Any) -> Any:
            inline(graph.graph)
            captured.joint = copy(graph.graph)
            passes.identify_and_tag(graph.graph, round_gradients=round_gradients)
            passes.order_and_record(graph.graph, order=True)
            captured.forward = graph.graph
            return make_boxed_func(graph.forward)

        def lower(module: GraphModule, _inputs: Any) -> Any:
            return make_boxed_func(module.forward)

        with passes.tracing(gm, example_inputs, lambda: decompositions):
            return aot_autograd(
                fw_compiler=lower,
                inference_compiler=infer,
                partition_fn=tag_and_partition,
                decompositions=decompositions,
            )(gm, example_inputs)

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return captured


def copy(graph: Graph) -> Graph:
    """A copy with the descriptions of its outputs, which ``Graph.graph_copy`` leaves behind."""
    new = Graph()
    output = new.graph_copy(graph, {})
    new.output(output).meta = dict(graph.output_node().meta)
    return new


def nodes(graph: Graph, *targets: Any) -> list[Node]:
    return sorted(node for target in targets for node in graph.find_nodes(op="call_function", target=target))


def called_code(code: str) -> str:
    """The code of ``call`` in a module that Inductor generated, with the code of bodies in place of their calls."""
    bodies = dict(re.findall(r"^def (body_\d+)\(args\):\n(.*?)(?=^\S)", code, re.MULTILINE | re.DOTALL))
    call = code[code.index("def call(") :]
    return re.sub(r"^.* = (body_\d+)\(\1_args\)$", lambda found: bodies[found[1]], call, flags=re.MULTILINE)


@contextmanager
def recorded_gathers(result: Tensor | None = None) -> Iterator[list[Tensor]]:
    """The inputs of all-gathers meanwhile, which give ``result`` if that is not ``None``."""
    inputs: list[Tensor] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is not ALL_GATHER:
                return out
            inputs.append(args[0].clone())
            return out if result is None else out.copy_(result)  # what is waited for is this tensor

    with Mode():
        yield inputs


def fqns(graph: Graph, *targets: Any) -> list[tuple[str, ...]]:
    """FQNs carried by each collective of these kinds, in graph order."""
    return [node.meta.get("simplefsdp_fqns", ()) for node in nodes(graph, *targets)]


def whole_weights_among_outputs(graph: Graph) -> list[str]:
    """Outputs that depend on shards and on nothing else, but are not shards themselves: gathered weights."""
    weight: dict[Node, bool] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            weight[node] = "attr='_local_tensor'" in str(node.meta.get("desc"))
        elif node.op == "call_function":
            weight[node] = bool(node.all_input_nodes) and all(weight[n] for n in node.all_input_nodes)
    return [n.name for n in graph.output_node().all_input_nodes if n.op == "call_function" and weight[n]]

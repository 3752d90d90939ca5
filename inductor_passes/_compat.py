"""Every torch-internal name that the passes use, and what differs between torch 2.11 and 2.15.

Everything here exists under the same name in 2.11, 2.13 and 2.15.
"""

import functools

from torch._dynamo.eval_frame import skip_code
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
)
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "CheckpointPolicy",
    "CustomGraphPass",
    "compile_id",
    "get_hash_for_files",
    "inductor_options",
    "is_backward",
    "min_cut_rematerialization_partition",
    "parameter_gradients",
    "parameter_inputs",
    "skip_code",
    "stable_topological_sort",
]


def compile_id() -> str:
    """Dynamo's id of the graph that is being compiled, ``frame_attempt``, as in torch's own logs."""
    return str(CompileContext.current_compile_id()).replace("/", "_")


@functools.cache
def inductor_options() -> frozenset[str]:
    """Names that ``torch.compile(options=...)`` accepts for Inductor."""
    return frozenset(inductor_config.get_config_copy())


def parameter_inputs(graph: Graph) -> dict[int, Node]:
    """Placeholder of the local shard of each DTensor input, by position among the inputs that Dynamo passed."""
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        match node.meta.get("desc"):
            case SubclassGetAttrAOTInput(base=PlainAOTInput(idx=idx), attr="_local_tensor"):
                found[idx] = node
    return found


def parameter_gradients(graph: Graph) -> dict[int, Node]:
    """Node returned as the local gradient of each DTensor input, by position; empty for forward graphs."""
    found = {}
    output = graph.output_node()
    for node, desc in zip(output.args[0], output.meta.get("desc", ()), strict=False):
        match desc:
            case SubclassGetAttrAOTOutput(base=GradAOTOutput(grad_of=PlainAOTInput(idx=idx)), attr="_local_tensor"):
                if isinstance(node, Node):
                    found[idx] = node
    return found


def is_backward(graph: Graph) -> bool:
    """Whether a graph takes gradients of outputs (a backward or joint graph)."""
    return any(_is_tangent(node.meta.get("desc")) for node in graph.find_nodes(op="placeholder"))


def _is_tangent(desc: object) -> bool:
    while isinstance(desc, SubclassGetAttrAOTInput):
        desc = desc.base
    return isinstance(desc, TangentAOTInput)

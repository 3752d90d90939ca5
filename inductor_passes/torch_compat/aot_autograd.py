"""Graphs as AOTAutograd makes and partitions them: what their inputs and outputs stand for, and where partitioners need
help."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from functorch.compile import default_partition, make_boxed_func
from functorch.compile import min_cut_rematerialization_partition as min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, tracing
from torch.fx import Graph, GraphModule, Node

from inductor_passes.torch_compat.autograd import KEEPS_GRADIENT_DTYPE, note_gradient_dtype
from inductor_passes.torch_compat.proxy_tensor import fake_like

TANGENTS_ARE_HELD = not hasattr(torch.autograd.Function, "boxed_grads_call")
"""Whether the gradients of outputs stay in memory until a backward graph has run; before torch 2.13
(pytorch/pytorch#177837)."""

PartitionedGraphs = tuple[GraphModule, GraphModule]


_TAGS = ("recompute", "ac_graph_id")
"""Keys in ``node.meta`` by which partitioners know the nodes of activation checkpoints, and one checkpoint from the
next: ids are larger the later a checkpoint is called."""
_HIDDEN = "simplefsdp_checkpoint"


def checkpoint_tags(graph: Graph) -> list[Any]:
    """Return what partitioners know of each node: which checkpoint of the graph it is in, and what becomes of it."""
    ids: dict[Any, int] = {None: -1}
    return [
        (str(node.meta.get("recompute")), ids.setdefault(node.meta.get("ac_graph_id"), len(ids)))
        for node in graph.nodes
    ]


def tell_checkpoints_apart(node: Node, number: int) -> None:
    """Let a node of the graph's call ``number`` belong to other checkpoints than copies of it in other calls."""
    if "ac_graph_id" in node.meta:
        node.meta["ac_graph_id"] = number, node.meta["ac_graph_id"]


def number_checkpoints(graph: Graph) -> None:
    """Give checkpoints that were told apart ids as torch does, in the order of the graph."""
    ids: dict[Any, int] = {}
    for node in graph.nodes:
        if "ac_graph_id" in node.meta:
            node.meta["ac_graph_id"] = ids.setdefault(node.meta["ac_graph_id"], len(ids))


def trace_by_itself(
    function: GraphModule,
    operands: Sequence[Tensor],
    of_kept_dtype: Sequence[int],
    decompositions: Mapping[Any, Any] | None,
    prepare: Callable[[GraphModule], object],
) -> tuple[GraphModule, GraphModule | None]:
    """Return the forward and the backward graph of a part of the graph that is being compiled.

    The forward returns the results and what the backward reads before the gradients of the results. Without gradients
    (``torch.no_grad``, or nothing that requires one) there is no backward. What an activation checkpoint computes is
    saved like everything else, and tagged for whoever partitions the graph that the part is of.

    Args:
        function: a graph of Dynamo's; it writes to none of its inputs, and its results share no memory.
        operands: what it is called with, whose values do not count.
        of_kept_dtype: numbers of the operands made by functions that ``keep_gradient_dtype``: the backward returns
            their gradients in the gradients' own dtypes.
        decompositions: of operators, as ``aot_autograd`` takes them.
        prepare: is called with the joint graph.
    """
    found: list[GraphModule] = []
    noting = _Noting(function, of_kept_dtype if KEEPS_GRADIENT_DTYPE else ())

    def partition(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **_kwargs: Any) -> PartitionedGraphs:
        noting.remove_casts(joint.graph, num_fwd_outputs)
        prepare(joint)
        for node in joint.graph.nodes:
            node.meta[_HIDDEN] = {name: node.meta.pop(name) for name in _TAGS if name in node.meta}
        found.extend(default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs))
        for node in (node for module in found for node in module.graph.nodes):
            node.meta.update(node.meta.pop(_HIDDEN, {}))
        return found[0], found[1]

    def forward_alone(graph: GraphModule, _inputs: Sequence[Any]) -> Any:
        prepare(graph)
        found.append(graph)
        return make_boxed_func(graph.forward)

    with tracing(TracingContext(TracingContext.get().fake_mode)):
        aot_module_simplified(
            cast(Any, noting),
            fake_like(operands, requires_grad=True),
            fw_compiler=lambda graph, _inputs: make_boxed_func(graph.forward),
            inference_compiler=cast(Any, forward_alone),
            partition_fn=partition,
            decompositions=cast(Any, decompositions),
            keep_inference_input_mutations=True,
        )
    return found[0], found[1] if len(found) > 1 else None


class _Noting(nn.Module):
    """A function that notes the dtypes of some operands' gradients, each of which autograd casts to its operand's."""

    def __init__(self, function: GraphModule, numbers: Sequence[int]):
        super().__init__()
        self.function = function
        self.numbers = frozenset(numbers)
        self.noted: dict[int, torch.dtype] = {}

    def forward(self, *operands: Tensor) -> Any:
        noted = [
            note_gradient_dtype(x, self.noted, i) if i in self.numbers and x.requires_grad else x
            for i, x in enumerate(operands)
        ]
        return self.function(*noted)

    def remove_casts(self, joint: Graph, number_of_results: int) -> None:
        """Let a joint graph return gradients in the dtypes noted, and remove the views that ``forward`` made."""
        placeholders = list(joint.find_nodes(op="placeholder"))
        values = _outputs(joint)
        for i, dtype in self.noted.items():
            (view,) = placeholders[i].users
            view.replace_all_uses_with(placeholders[i])
            joint.erase_node(view)
            cast = values[number_of_results + i]
            if cast.meta["val"].dtype != dtype:
                values[number_of_results + i] = cast.all_input_nodes[0]
                assert values[number_of_results + i].meta["val"].dtype == dtype
        joint.output_node().args = (values,)
        joint.eliminate_dead_code()


def parameter_inputs(graph: Graph) -> dict[int, list[Node]]:
    """Return the placeholders of each DTensor input's local shard, by position among the inputs that Dynamo passed.

    One for each shard, or those of the tensors inside where shards are tensor subclasses.
    """
    found: dict[int, list[Node]] = {}
    for node in graph.find_nodes(op="placeholder"):
        desc = node.meta.get("desc")
        while isinstance(desc, SubclassGetAttrAOTInput) and isinstance(desc.base, SubclassGetAttrAOTInput):
            desc = desc.base
        match desc:
            case SubclassGetAttrAOTInput(base=PlainAOTInput(idx=idx), attr="_local_tensor"):
                found.setdefault(idx, []).append(node)
    return found


def parameter_gradients(graph: Graph) -> dict[int, Node]:
    """Return the node of each DTensor input's local gradient, by position; none for forward graphs."""
    found = {}
    for node, desc in zip(_outputs(graph), graph.output_node().meta.get("desc", ()), strict=False):
        match desc:
            case SubclassGetAttrAOTOutput(base=GradAOTOutput(grad_of=PlainAOTInput(idx=idx)), attr="_local_tensor"):
                if isinstance(node, Node):
                    found[idx] = node
    return found


def _outputs(graph: Graph) -> list[Any]:
    return list(cast(Any, graph.output_node().args[0]))


def is_backward(graph: Graph) -> bool:
    """Return whether a graph takes gradients of outputs (a backward or joint graph)."""
    return bool(tangents(graph))


def tangents(graph: Graph) -> list[Node]:
    """Return the inputs of a backward or joint graph that are gradients of outputs."""
    return [node for node in graph.find_nodes(op="placeholder") if _is_tangent(node.meta.get("desc"))]


def is_higher_order_body(graph: Graph) -> bool:
    """Return whether a graph is the body of a higher-order operator (a branch of ``torch.cond``) in another graph."""
    return not any("desc" in node.meta for node in graph.find_nodes(op="placeholder"))


def held_inputs(graph: Graph) -> frozenset[Node]:
    """Return the inputs of a backward graph that autograd holds until the graph has run, whoever reads them last."""
    if not TANGENTS_ARE_HELD:
        return frozenset()
    return frozenset(tangents(graph))


def _is_tangent(desc: object) -> bool:
    while isinstance(desc, SubclassGetAttrAOTInput):
        desc = desc.base
    return isinstance(desc, TangentAOTInput)


def opaque_objects_weigh_nothing() -> AbstractContextManager[None]:
    """Let partitioners count the mesh of a DTensor as no bytes.

    Partitioners weigh all inputs under ``torch._functorch.config.activation_memory_budget``, and refuse to weigh a mesh
    from torch 2.13 on.
    """
    name = "unsafe_treat_script_objects_as_zero_size"
    if not hasattr(functorch_config, name):
        return nullcontext()
    return cast(AbstractContextManager[None], functorch_config.patch({name: True}))


def opaque_objects_last(forward: GraphModule, backward: GraphModule, num_fwd_outputs: int) -> PartitionedGraphs:
    """Put saved random states before saved opaque objects, where AOTAutograd looks for them.

    AOTAutograd saves tensors, then opaque objects (the mesh of a DTensor gradient), then symbolic sizes. Partitioners
    of torch 2.13 append the random states of recomputed attention behind the opaque objects, and the first step fails
    with "expected all tensors_saved_with_vc_check to be Tensors".
    """
    placeholders = list(backward.graph.find_nodes(op="placeholder"))
    states = [node for node in placeholders if node.name.startswith("rng_state_output")]
    if not states:
        return forward, backward
    opaque = [node for node in placeholders[: placeholders.index(states[0])] if _saved_kind(node) == 1]
    for node in reversed(opaque):
        states[-1].append(node)
    values = _outputs(forward.graph)
    forward.graph.output_node().args = (
        (*values[:num_fwd_outputs], *sorted(values[num_fwd_outputs:], key=_saved_kind)),
    )
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()
    return forward, backward


def _saved_kind(node: Node) -> int:
    """Return 0 for a tensor, 1 for an opaque object, 2 for a symbolic size."""
    match node.meta["val"]:
        case torch.Tensor():
            return 0
        case torch.SymInt() | torch.SymFloat() | torch.SymBool() | int() | float():
            return 2
    return 1

"""``torch.compile(model, backend="simplefsdp")``: options in, passes set up, TorchInductor (or aot_eager) called.

::

    Dynamo graph - AOTAutograd joint graph - identify, tag - partition, plan -+- forward  - bucket - lower - order
                                                                              +- backward - bucket - lower - order
"""

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import list_backends, register_backend
from torch.fx import Graph, GraphModule

from inductor_passes.regions import inline_regions
from inductor_passes.scheduling.cost_graph import CostGraph
from inductor_passes.torch_compat.aot_autograd import PartitionedGraphs
from inductor_passes.torch_compat.dtensor import meshes_pickled_without_hash
from inductor_passes.torch_compat.inductor import (
    FREE_AT_LAST_USE,
    NO_OTHER_REORDERING,
    CustomGraphPass,
    CustomPartitionerFn,
    CustomSchedulerPass,
    find_vector_instructions,
    inductor_config,
    joint_graph_passes,
    number_seeds,
    sees_joint_graphs,
    shapes_as_traced,
    unchanged_is_same,
)
from inductor_passes.trace_once import call_block
from simplefsdp.compile.context import compilation_context, source_hash
from simplefsdp.compile.options import PASS_SLOTS, Options, parse_options
from simplefsdp.compile.passes import Passes, direction_of
from simplefsdp.compile.stack_space import with_stack_space
from simplefsdp.frontend.compare_sharding import compare_sharding
from simplefsdp.frontend.eager_resharding import CHANGED_WHILE_UNSHARDED
from simplefsdp.frontend.unshard import unshard
from simplefsdp.hardware.profile import HardwareProfile

log = logging.getLogger("simplefsdp")


@with_stack_space
def simplefsdp(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph that Dynamo captured. ``options``: see ``Options``; errors: see ``parse_options``."""
    parsed = parse_options(options, mode)
    inline_regions(gm)
    _refuse_changed_weights(gm, example_inputs)
    if torch.is_grad_enabled():  # Dynamo also traces the call of the model, which would have compared them.
        infos = (getattr(value, "simple_fsdp_info", None) for value in example_inputs)
        for model in dict.fromkeys(info.model for info in infos if info is not None):
            compare_sharding(model, None)
    # A gather whose gradient ends an accumulation has the name of one whose gradient is only added up.
    ends = [f"{node.args[3:]}" if node.target is unshard else "" for node in gm.graph.nodes]
    nodes = [node.name + end for node, end in zip(gm.graph.nodes, ends, strict=True)]
    passes = Passes(compilation_context(example_inputs, parsed, nodes))
    if parsed.lower_with == "aot_eager":
        if parsed.inductor:
            log.warning("option 'inductor' has no effect with lower_with='aot_eager': %s", ", ".join(parsed.inductor))
        return _aot_eager(gm, example_inputs, passes)
    return _inductor(gm, example_inputs, parsed, passes, _Partitioner(passes))


def trace_cost_graphs(
    step: Callable[..., Any],
    inputs: Sequence[Any],
    profile: HardwareProfile,
    *,
    cast_in_matmuls: bool = False,
    narrows: bool = False,
) -> list[CostGraph] | None:
    """Trace ``step(*inputs)`` as far as there is something to plan, and run and lower nothing.

    Args:
        step: a function without graph breaks, of a sharded model.
        profile: what compute and collectives cost.
        cast_in_matmuls: whether matmuls cast gradients, as they do on a GPU without a memory budget.
        narrows: whether the plan may drop wire formats.

    Returns:
        The forward and the backward graph as their schedule sees them; ``None`` if nothing in ``step`` is trained.

    Raises:
        torch._dynamo.exc.Unsupported: ``step`` has a graph break.
    """
    found: list[list[CostGraph]] = []

    class CostGraphs(_Partitioner):
        def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> PartitionedGraphs:
            graphs = self.passes.partition(gm, joint_inputs, **kwargs)
            if cast_in_matmuls:
                self.passes.cast_in_matmuls(graphs[0].graph, graphs[1].graph, math.inf)
            found.append(self.passes.cost_graphs(*(module.graph for module in graphs)))
            return graphs

    def trace(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        parsed = parse_options({"profile": profile, "plan": "block"})
        passes = Passes(replace(compilation_context(example_inputs, parsed), narrows=narrows))
        _inductor(
            gm,
            example_inputs,
            parsed,
            passes,
            CostGraphs(passes),
            inner_compile=lambda *_, **__: make_boxed_func(lambda *_: None),
            force_disable_caches=True,
        )
        outputs = cast(Sequence[Any], gm.graph.output_node().args[0])
        return lambda *_: [torch.zeros(()) for _ in outputs]  # nobody reads what was not computed

    torch.compile(step, backend=trace, fullgraph=True)(*inputs)
    return found[0] if found else None


def _inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    parsed: Options,
    passes: Passes,
    partitioner: "_Partitioner",
    inner_compile: Callable[..., Any] | None = None,
    **patches: Any,
) -> Callable[..., Any]:
    """Compile a graph with TorchInductor, the passes in the slots of its configuration.

    Args:
        inner_compile: what compiles partitioned graphs; ``None``: TorchInductor.
        patches: more of Inductor's configuration, for this compilation only.
    """
    filled = (_JointGraphPass(passes), partitioner, _PostGradPass(passes), _KernelOrderPass(passes))
    slots: dict[str, Any] = dict(zip(PASS_SLOTS, filled, strict=True))
    defaults: dict[str, Any] = {}
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in example_inputs)
    if passes.given.request is None:
        del slots["_post_fusion_custom_pass"]
    else:
        slots.update(NO_OTHER_REORDERING)
        if on_gpu:
            defaults = FREE_AT_LAST_USE  # the allocator of CPUs is slower than the reuse that this turns off
    # AOTAutograd caches only graphs of functions that it knows to depend on nothing but their arguments and source.
    cacheable = "unsafe_marked_cacheable_functions"
    slots[cacheable] = {
        **parsed.inductor.get(cacheable, inductor_config.unsafe_marked_cacheable_functions),
        **{f"{function.__module__}.{function.__name__}": source_hash().hex() for function in (unshard, call_block)},
    }
    # Seconds to import, so not before it is needed.
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner, select_decomp_table

    from inductor_passes.inductor_order import no_sums_across_matmuls  # and how its operators are lowered

    if inner_compile is None and not on_gpu:
        find_vector_instructions()
    progress = passes.notes.progress
    lower_graph = inner_compile or compile_fx_inner
    is_seen = sees_joint_graphs(parsed.inductor)
    sums_at_once = on_gpu and passes.given.request is not None

    @with_stack_space
    @_garbage_collection_paused()
    def lower(graph: GraphModule, *args: Any, **kwargs: Any) -> Any:  # of backward: when the first backward runs
        progress.begin(f"lowering {direction_of(graph.graph)}")
        try:
            with (
                unchanged_is_same(),
                nullcontext() if is_seen else shapes_as_traced(),
                no_sums_across_matmuls() if sums_at_once else nullcontext(),
            ):
                return lower_graph(graph, *args, **kwargs)
        finally:
            passes.end_stages()

    def prepare(body: GraphModule) -> None:
        joint_graph_passes(body, parsed.inductor)

    patches = {**defaults, **parsed.inductor, **slots, **patches}
    progress.begin("tracing")
    try:
        with (
            _garbage_collection_paused(),
            meshes_pickled_without_hash(),
            passes.tracing(gm, example_inputs, select_decomp_table, None if is_seen else prepare),
        ):
            return cast(Callable[..., Any], compile_fx(gm, example_inputs, config_patches=patches, inner_compile=lower))
    finally:
        passes.end_stages()  # also where the compile cache has the graph, and where there is an error


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Let Python look for no cycles meanwhile: a compilation makes millions of objects and drops few of them.

    The objects are looked through afterwards: device memory that only cycles hold would be freed much later otherwise.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


def _aot_eager(gm: GraphModule, example_inputs: Sequence[Any], passes: Passes) -> Callable[..., Any]:
    def tag_and_partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> PartitionedGraphs:
        passes.identify_and_tag(joint.graph, round_gradients=True)
        return passes.partition_and_plan(joint, inputs, **kwargs)

    def lower_graph(module: GraphModule, _inputs: Any) -> Any:
        passes.order_and_record(module.graph, order=True)
        module.recompile()
        return make_boxed_func(module.forward)

    def lower_inference(graph: GraphModule, inputs: Any) -> Any:
        passes.identify_and_tag(graph.graph, round_gradients=True)
        return lower_graph(graph, inputs)

    lower = aot_autograd(
        fw_compiler=lower_graph,
        inference_compiler=lower_inference,
        partition_fn=tag_and_partition,
        keep_inference_input_mutations=True,
    )
    with passes.tracing(gm, example_inputs):
        return lower(gm, example_inputs)


class _ConfiguredPass:
    """A pass in a slot of Inductor's configuration, which Inductor copies, and pickles for the key of its cache.

    All slots share one ``Passes``. The folder of the report is not part of the key.
    """

    def __init__(self, passes: Passes):
        self.passes = passes

    def __deepcopy__(self, _memo: Any) -> "_ConfiguredPass":
        return self

    def __getstate__(self) -> str:
        return self.passes.given.key

    def uuid(self) -> str:
        return self.passes.given.key


class _JointGraphPass(_ConfiguredPass, CustomGraphPass):
    def __call__(self, graph: Graph) -> None:
        self.passes.identify_and_tag(graph, round_gradients=False)
        if graph.owning_module is not None:
            number_seeds(graph.owning_module)


class _Partitioner(_ConfiguredPass, CustomPartitionerFn):
    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> PartitionedGraphs:
        self.passes.notes.progress.begin("partitioning and planning")
        return self.passes.partition_and_plan(gm, joint_inputs, **kwargs)


class _PostGradPass(_ConfiguredPass, CustomGraphPass):
    def __call__(self, graph: Graph) -> None:
        self.passes.order_and_record(graph, order=False)


class _KernelOrderPass(_ConfiguredPass, CustomSchedulerPass):
    def __call__(self, kernels: list[Any]) -> list[Any]:
        from inductor_passes.inductor_order import order_kernels

        self.passes.notes.progress.begin("generating code and kernels")
        return order_kernels(kernels, self.passes.given.report)


def _refuse_changed_weights(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Raise ``RuntimeError`` if the graph changes a gathered weight in place; Dynamo's fake tensors count versions."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    for node in (node for graph in graphs for node in graph.find_nodes(op="call_function", target=unshard)):
        if node.meta["example_value"]._version:
            key = node.args[1]
            names = [i.fqn for v in example_inputs if (i := getattr(v, "simple_fsdp_info", None)) and i.key == key]
            raise RuntimeError(CHANGED_WHILE_UNSHARDED.format(" or ".join(names)))


if "simplefsdp" not in list_backends():  # the entry point has it where the package is installed
    register_backend(simplefsdp, name="simplefsdp")

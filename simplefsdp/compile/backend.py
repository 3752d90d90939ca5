"""``torch.compile(model, backend="simplefsdp")``: options in, passes set up, TorchInductor (or aot_eager) called.

::

    Dynamo graph - AOTAutograd joint graph - identify, tag - partition, plan -+- forward  - bucket - lower - order
                                                                              +- backward - bucket - lower - order
"""

import copy
import functools
import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import register_backend
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import Graph, GraphModule

import inductor_passes
from inductor_passes.bucket import assign, bucket
from inductor_passes.collectives import GraphParameter, identify, reductions
from inductor_passes.order import order_graph
from inductor_passes.partition import partition
from inductor_passes.runtime.agreement import add_record
from inductor_passes.runtime.graph_dump import DUMP_NAMES, Report
from inductor_passes.runtime.record import is_step, record_graph
from inductor_passes.scheduling.cost_graph import CostGraph
from inductor_passes.scheduling.cost_model import EquivalentGroups, cost_graph_of
from inductor_passes.scheduling.order_items import first_uses, graph_items, last_gradients
from inductor_passes.tag import tag
from inductor_passes.torch_compat.aot_autograd import PartitionedGraphs, is_backward, is_higher_order_body
from inductor_passes.torch_compat.dynamo import compile_id, trace_artifact
from inductor_passes.torch_compat.inductor import (
    NO_OTHER_REORDERING,
    CustomGraphPass,
    CustomPartitionerFn,
    CustomSchedulerPass,
    get_hash_for_files,
    inductor_config,
)
from simplefsdp.analysis.prediction import StepState, predict, step_costs, step_state, timelines
from simplefsdp.analysis.timeline_trace import prediction_files
from simplefsdp.compile.options import PASS_SLOTS, Options, parse_options, profile_of, requested
from simplefsdp.compile.plan_step import (
    SearchRequest,
    choose_unsharded_parameters,
    fits_memory,
    memory_limit,
    reshard_decision,
    search_plan,
    with_reshard_decided,
)
from simplefsdp.frontend.eager_resharding import CHANGED_WHILE_UNSHARDED
from simplefsdp.frontend.sharding import ShardedModel, ShardedParameter, unshard
from simplefsdp.frontend.validation import warn_of_split_buckets, warn_of_whole_parameters
from simplefsdp.hardware.profile import HardwareProfile
from simplefsdp.plan.bucket_plan import BucketPlan, GraphUses
from simplefsdp.plan.grouping import BLOCK, Buckets, GroupingRequest, resolve_plan

log = logging.getLogger("simplefsdp")


@register_backend(name="simplefsdp")
def simplefsdp(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one graph that Dynamo captured. ``options``: see ``Options``; errors: see ``parse_options``."""
    parsed = parse_options(options)
    _refuse_changed_weights(gm, example_inputs)
    passes = passes_for(example_inputs, parsed, [node.name for node in gm.graph.nodes])
    if parsed.lower_with == "aot_eager":
        if parsed.inductor:
            log.warning("option 'inductor' has no effect with lower_with='aot_eager': %s", ", ".join(parsed.inductor))
        return _aot_eager(gm, example_inputs, passes)
    return _inductor(gm, example_inputs, parsed, passes, _Partitioner(passes))


class Traced(Exception):
    """What ``trace_only`` ends with: a forward and a backward graph, as far as their schedules are concerned."""

    def __init__(self, halves: Sequence[CostGraph]):
        super().__init__()
        self.halves = halves


def trace_only(gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any]) -> Callable[..., Any]:
    """A backend that goes as far as there is something to plan, with the profile among ``options``, and compiles
    nothing.

    Raises:
        Traced: always, if the graph is trained.
    """
    parsed = parse_options(options)
    passes = passes_for(example_inputs, parsed)
    return _inductor(gm, example_inputs, parsed, passes, _TracesOnly(passes), force_disable_caches=True)


def _inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    parsed: Options,
    passes: "Passes",
    partitioner: "_Partitioner",
    **patches: Any,
) -> Callable[..., Any]:
    filled = (_JointGraphPass(passes), partitioner, _PostGradPass(passes), _KernelOrderPass(passes))
    slots: dict[str, Any] = dict(zip(PASS_SLOTS, filled, strict=True))
    if passes.request is None:
        del slots["_post_fusion_custom_pass"]
    else:
        slots.update(NO_OTHER_REORDERING)
    # AOTAutograd caches only graphs of functions that it knows to depend on nothing but their arguments and source.
    cacheable = "unsafe_marked_cacheable_functions"
    slots[cacheable] = {
        **parsed.inductor.get(cacheable, inductor_config.unsafe_marked_cacheable_functions),
        f"{unshard.__module__}.{unshard.__name__}": _source_hash().hex(),
    }
    from torch._inductor.compile_fx import compile_fx  # seconds to import, so not before it is needed

    import inductor_passes.inductor_order  # noqa: F401  # how its operators are lowered

    return cast(
        Callable[..., Any], compile_fx(gm, example_inputs, config_patches={**parsed.inductor, **slots, **patches})
    )


def _aot_eager(gm: GraphModule, example_inputs: Sequence[Any], passes: "Passes") -> Callable[..., Any]:
    def tag_and_partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> PartitionedGraphs:
        passes.on_joint(joint.graph)
        return passes.on_partition(joint, inputs, **kwargs)

    def lower_half(half: GraphModule, _inputs: Any) -> Any:
        passes.on_each_half(half.graph, order=True)
        half.recompile()
        return make_boxed_func(half.forward)

    def lower_inference(graph: GraphModule, inputs: Any) -> Any:
        passes.on_joint(graph.graph)
        return lower_half(graph, inputs)

    lower = aot_autograd(
        fw_compiler=lower_half,
        inference_compiler=lower_inference,
        partition_fn=tag_and_partition,
        keep_inference_input_mutations=True,
    )
    return lower(gm, example_inputs)


@dataclass(frozen=True)
class Passes:
    """The passes of one compilation, with all that they depend on."""

    params: dict[int, GraphParameter]
    request: GroupingRequest | SearchRequest | BucketPlan | None
    buckets: Buckets
    """That a request asks for, or those of ``block``, of all parameters."""
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """FQN and shape of all parameters of the models, in registration order."""
    about: tuple[str, ...]
    """What ranks must have in common, besides the collectives."""
    groups: tuple[str, ...]
    """Names of all process groups of the parameters."""
    state: StepState
    """Of this graph's parameters."""
    profile: HardwareProfile | None
    alike: EquivalentGroups
    """Of the parameters' meshes."""
    summaries: list[str]
    """What was planned, for the log."""
    warnings: list[str]
    """What makes it worse than planned, for the log."""
    key: str
    """For the compile cache: all that the passes depend on, and their own source."""
    report: Report | None

    def on_joint(self, graph: Graph) -> None:
        """Before partitioning; also for inference graphs."""
        if is_higher_order_body(graph):
            return
        kind = "joint" if is_backward(graph) else "inference"
        before, after = DUMP_NAMES[kind]
        self._write(before, graph)
        missed = identify(graph, self.params)
        tag(graph, self.params)
        self._write(after, graph)
        if missed:
            self.warnings.append(
                f"no bucket for the gradients of {', '.join(missed)}: their reductions were not recognised"
            )
        if kind == "inference":
            self._plan(graph, Graph(), self.params)

    def on_partition(self, joint: GraphModule, inputs: Any, **kwargs: Any) -> PartitionedGraphs:
        """In place of torch's partitioner."""
        undecided = any(param.reshard is None for param in self.params.values())
        halves, params = self._keep(joint, inputs, **kwargs) if undecided else (None, self.params)
        forward, backward = halves or partition(joint, inputs, **kwargs)
        self._plan(forward.graph, backward.graph, params)
        return forward, backward

    def _keep(
        self, joint: GraphModule, inputs: Any, **kwargs: Any
    ) -> tuple[PartitionedGraphs, dict[int, GraphParameter]]:
        """The halves in which what the planner chooses stays whole, and what it chose."""
        assert isinstance(self.request, SearchRequest)
        resharded = partition(GraphModule(joint, copy.deepcopy(joint.graph)), inputs, **kwargs)
        resident, predictable = self.state.resident_bytes, self._predictable(*(half.graph for half in resharded))
        undecided = [param.fqn for param in self.params.values() if param.reshard is None]
        kept = choose_unsharded_parameters(self.request, predictable, resident, undecided)
        if kept:
            params = with_reshard_decided(self.params, kept)
            tag(joint.graph, params)
            halves = partition(joint, inputs, **kwargs)
            # What is computed of a kept weight alone was not foreseen.
            if fits_memory(self.request, self._predictable(*(half.graph for half in halves)), resident):
                return halves, params
        return resharded, with_reshard_decided(self.params, ())

    def _predictable(self, forward: Graph, backward: Graph) -> list[CostGraph]:
        """What there is to schedule in both, if there is a profile."""
        if self.profile is None:
            return []
        given = {node.name for node in forward.find_nodes(op="placeholder")}
        return [cost_graph_of(graph, self.profile, given, self.alike) for graph in (forward, backward)]

    def _plan(self, forward: Graph, backward: Graph, params: Mapping[int, GraphParameter]) -> None:
        items = graph_items(backward)[1]
        followed = frozenset(c.fqns[0] for c in reductions(backward) if c.all_reduce_after)
        uses = GraphUses(first_uses(graph_items(forward)[1]), first_uses(items), last_gradients(items), followed)
        before = len(uses.forward) + len(uses.backward) + len(uses.reductions)
        if self.request is None:
            self.summaries.append(f"plan none: {before} collectives")
            return
        whole = {param.fqn for param in params.values() if param.reshard is False}
        kept = [fqn for fqn, _ in self.parameters if fqn in whole]
        halves = self._predictable(forward, backward)
        if isinstance(self.request, BucketPlan):
            plan = self.request
            plan.check_fits(dict(self.parameters), kept, {param.fqn for param in self.params.values()})
            plan.check_order(uses)
        elif isinstance(self.request, SearchRequest):
            resident = self.state.resident_bytes
            plan = search_plan(self.request, halves, resident, self.buckets, uses, self.parameters, kept)
        else:
            plan = resolve_plan(self.request.prefetch, self.buckets, uses, self.parameters, kept)
        predicted = ""
        if self.profile is not None:
            limit = memory_limit(self.request, self.state.resident_bytes)
            costs, played = step_costs(halves, self.state, self.profile, limit), timelines(plan, halves)
            prediction = predict(plan, costs, played)
            trace_artifact("simplefsdp_prediction", prediction.to_json)
            predicted = f", predicted to take {prediction}"
            log.debug("plan %s is predicted to take %s", plan.hash, prediction)
            if self.report is not None:
                for name, text in prediction_files(prediction, costs, played).items():
                    self.report.write_text(name, text)
        self.summaries.append(f"plan {plan.hash}: {before} -> {plan.collectives(uses)} collectives{predicted}")
        trace_artifact("simplefsdp_plan", plan.to_json)
        assign(forward, plan.forward, plan.reductions)
        assign(backward, plan.backward, plan.reductions)
        if self.report is not None:
            self.report.write_text("plan.json", plan.to_json())

    def on_each_half(self, graph: Graph, *, order: bool = False) -> None:
        """After partitioning: the forward, the backward or the inference graph. ``order``: no kernels are made of it,
        which would be put in order."""
        if is_higher_order_body(graph):
            return
        direction = "backward" if is_backward(graph) else "forward"
        before, bucketed, unordered, ordered, _ = DUMP_NAMES[direction]
        self._write(before, graph)
        bucket(graph)
        self._write(bucketed, graph)
        if order and self.request is not None:
            self._write(unordered, graph)
            order_graph(graph)
            self._write(ordered, graph)
        found = record_graph(direction, self.about, self.groups, filter(is_step, graph.nodes))
        if direction == "forward":
            found = replace(found, summary=self.summaries[-1], warnings=tuple(self.warnings))
        if not add_record(graph, found, self.report):
            for warning in found.warnings:
                log.warning(warning)

    def _write(self, step: str, graph: Graph) -> None:
        if self.report is not None:
            self.report.write(step, graph)


class _ConfiguredPass:
    """In a slot of Inductor's configuration, which is copied, and pickled for the key of the compile cache. All slots
    share their passes, and where the report goes is not in the key."""

    def __init__(self, passes: Passes):
        self.passes = passes

    def __deepcopy__(self, _memo: Any) -> "_ConfiguredPass":
        return self

    def __getstate__(self) -> str:
        return self.passes.key

    def uuid(self) -> str:
        return self.passes.key


class _JointGraphPass(_ConfiguredPass, CustomGraphPass):
    def __call__(self, graph: Graph) -> None:
        self.passes.on_joint(graph)


class _Partitioner(_ConfiguredPass, CustomPartitionerFn):
    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> PartitionedGraphs:
        return self.passes.on_partition(gm, joint_inputs, **kwargs)


class _TracesOnly(_Partitioner):
    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> PartitionedGraphs:
        forward, backward = partition(gm, joint_inputs, **kwargs)
        raise Traced(self.passes._predictable(forward.graph, backward.graph))


class _PostGradPass(_ConfiguredPass, CustomGraphPass):
    def __call__(self, graph: Graph) -> None:
        self.passes.on_each_half(graph)


class _KernelOrderPass(_ConfiguredPass, CustomSchedulerPass):
    def __call__(self, kernels: list[Any]) -> list[Any]:
        from inductor_passes.inductor_order import order_kernels

        return order_kernels(kernels, self.passes.report)


def passes_for(example_inputs: Sequence[Any], options: Options, nodes: Sequence[str] = ()) -> Passes:
    """``nodes``: names of Dynamo's graph, to tell apart the reports of graphs with the same parameters."""
    found: dict[int, ShardedParameter] = {
        index: info
        for index, value in enumerate(example_inputs)
        if (info := getattr(value, "simple_fsdp_info", None)) is not None
    }
    # Two models in one graph may use the same FQNs.
    models: list[ShardedModel] = list(dict.fromkeys(info.model for info in found.values()))
    prefix = {model: f"model{i}:" if len(models) > 1 else "" for i, model in enumerate(models)}
    values = [example_inputs[index] for index in found]
    device = torch.device(values[0].device_mesh.device_type) if values else None
    profile = profile_of(options, device)
    request = requested(options, profile, device)
    wrap = BLOCK if isinstance(request, SearchRequest) else request
    buckets = []
    for model in models:
        of_model = wrap.buckets(tuple(fqn for fqn, _ in model.parameters)) if isinstance(wrap, GroupingRequest) else []
        warn_of_split_buckets(model, of_model, frozenset(i.fqn for i in found.values() if i.model is model))
        buckets += [tuple(prefix[model] + fqn for fqn in fqns) for fqns in of_model]
    parameters = [(prefix[model] + fqn, shape) for model in models for fqn, shape in model.parameters]
    params = {
        index: GraphParameter(
            prefix[info.model] + info.fqn,
            reshard_decision(info.communication.reshard_after_forward, prefix[info.model] + info.fqn, request),
            info.communication.param_dtype or example_inputs[index].dtype,
            tuple(group.name for group in info.communication.groups),
        )
        for index, info in found.items()
    }
    warn_of_whole_parameters(example_inputs, bool(found))
    about = (
        f"simplefsdp {_source_hash().hex()[:16]}",
        *(_line(params[index], info, example_inputs[index]) for index, info in found.items()),
        f"lower_with {options.lower_with!r}",
        *(f"inductor {name}={_stable(value)}" for name, value in sorted(options.inductor.items())),
        f"plan {_plan_line(request)}",
    )
    # Torch's own key knows only the shapes of whole parameters, and ranks share a cache.
    shapes = [tuple(example_inputs[index]._local_tensor.shape) for index in params]
    alike = _groups_alike(values)
    points = request.prefetch if isinstance(request, GroupingRequest) else None
    asked = options.report_dir is not None, profile, sorted(alike.items())
    inputs = repr((sorted(params.items()), points, buckets, parameters, shapes, about, asked))
    key = hashlib.sha256(_source_hash() + inputs.encode()).hexdigest()
    report = None
    if options.report_dir is not None:
        writes = not dist.is_initialized() or dist.get_rank() == 0
        folder = Path(options.report_dir) / f"graph_{compile_id()}" if writes else None
        shapes_of_inputs = [tuple(value.shape) for value in example_inputs if isinstance(value, Tensor)]
        graph = repr((nodes, shapes_of_inputs, torch.is_grad_enabled()))
        report = Report(hashlib.sha256((key + graph).encode()).hexdigest(), folder)
    groups = dict.fromkeys(group.name for info in found.values() for group in info.communication.groups)
    state = step_state((i, v.dtype, v.requires_grad) for i, v in zip(found.values(), values, strict=True))
    names = tuple(groups)
    return Passes(
        params, request, tuple(buckets), tuple(parameters), about, names, state, profile, alike, [], [], key, report
    )


def _groups_alike(values: Iterable[Any]) -> EquivalentGroups:
    """Of the meshes of these shards."""
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for mesh in dict.fromkeys(value.device_mesh for value in values):
        for dim in range(mesh.ndim):
            groups = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
            found |= {tuple(group): groups for group in groups}
    return found


def _plan_line(request: GroupingRequest | SearchRequest | BucketPlan | None) -> str:
    if isinstance(request, SearchRequest):
        return f"{request.name} {hashlib.sha256(repr(request).encode()).hexdigest()[:16]} ({request.profile.name})"
    return request.hash if isinstance(request, BucketPlan) else request.name if request else "none"


def _line(param: GraphParameter, info: ShardedParameter, value: Any) -> str:
    groups = {name: group and group.ranks for name, group in info.communication._asdict().items() if "group" in name}
    trained = "trained" if value.requires_grad else "frozen"
    return f"parameter {param.fqn}: {value.dtype} {trained} {info.communication._replace(**groups)}"


def _stable(value: Any) -> str:
    """``repr`` without addresses."""
    uuid = getattr(value, "uuid", None)
    return f"{type(value).__qualname__} {uuid()}" if callable(uuid) else re.sub(r" at 0x\w+", "", repr(value))


def _refuse_changed_weights(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Raise if a gathered weight is changed in place, as eager does; Dynamo's fake tensors count versions."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    for node in (node for graph in graphs for node in graph.find_nodes(op="call_function", target=unshard)):
        if node.meta["example_value"]._version:
            key = node.args[1]
            names = [i.fqn for v in example_inputs if (i := getattr(v, "simple_fsdp_info", None)) and i.key == key]
            raise RuntimeError(CHANGED_WHILE_UNSHARDED.format(" or ".join(names)))


@functools.cache
def _source_hash() -> bytes:
    folders = Path(__file__).parents[1], Path(inductor_passes.__path__[0])
    return get_hash_for_files(tuple(sorted(str(file) for folder in folders for file in folder.rglob("*.py"))))

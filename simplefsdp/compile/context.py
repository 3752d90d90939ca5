"""Inputs of a compilation: the sharded parameters of a graph, the request for a plan, and the key for the cache.

Nothing here changes while the passes run; what they note down is in a ``CompilationLog``.
"""

import functools
import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import inductor_passes
from inductor_passes.collectives import GraphParameter
from inductor_passes.runtime.agreement import held_bytes
from inductor_passes.runtime.graph_dump import Report
from inductor_passes.scheduling.cost_model import EquivalentGroups
from inductor_passes.torch_compat.distributed import GROUPING_NCCL, issues_groups, issues_groups_one_by_one
from inductor_passes.torch_compat.dynamo import compile_id
from inductor_passes.torch_compat.inductor import get_hash_for_files, uses_cpp_wrapper
from simplefsdp.analysis.optimizer_costs import state_of_parameters
from simplefsdp.analysis.prediction import StepState
from simplefsdp.compile.options import Options, profile_of, requested
from simplefsdp.compile.plan_step import PlanRequest, SearchRequest, reshard_decision
from simplefsdp.frontend.gather_hooks import has_hooks
from simplefsdp.frontend.sharding import ShardedModel, ShardedParameter
from simplefsdp.frontend.validation import warn_of_split_buckets, warn_of_whole_parameters
from simplefsdp.hardware.profile import HardwareProfile
from simplefsdp.plan.bucket_plan import BucketPlan, WireFormats
from simplefsdp.plan.grouping import BLOCK, Buckets, GroupingRequest

log = logging.getLogger("simplefsdp")


@dataclass(frozen=True)
class CompilationContext:
    """Everything that the passes of one compilation depend on."""

    params: dict[int, GraphParameter]
    """The sharded parameters among the graph's inputs, by input position."""
    request: PlanRequest | None
    """The request for a plan; ``None`` for ``plan="none"``: no buckets and no order."""
    buckets: Buckets
    """The buckets that the request asks for, or those of ``block``; they cover all parameters of the models."""
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """FQN and shape of all parameters of the models, in registration order."""
    common_facts: tuple[str, ...]
    """Facts that must be the same on all ranks, besides the collectives, one line each."""
    groups: tuple[str, ...]
    """Names of all process groups of the parameters."""
    state: StepState
    """Memory and work of a step for this graph's parameters, outside of the graph."""
    profile: HardwareProfile | None
    cast_in_matmuls: bool
    """Whether matmuls may make gradients in the dtype of their reduction."""
    casts_before_gathers: bool
    """Whether weights are gathered, and kept, in the dtype in which they are read."""
    compile_once: bool
    """Whether compute that repeats is traced and compiled once."""
    wire: tuple[WireFormats, ...]
    """The wire formats of the models' parameters."""
    narrows: bool
    """Whether a plan may drop wire formats, or have milder ones."""
    equivalent_groups: EquivalentGroups
    """The process groups of the parameters' meshes."""
    key: str
    """A hash of all the above and of this project's source, for the compile cache."""
    report: Report | None
    """Where graphs are dumped; ``None``: nowhere. Not part of the key."""


def compilation_context(
    example_inputs: Sequence[Any], options: Options, nodes: Sequence[str] = ()
) -> CompilationContext:
    """Return what the passes of a graph with these inputs depend on.

    Args:
        example_inputs: the graph's inputs; sharded parameters are recognised by ``simple_fsdp_info``.
        options: as given to ``torch.compile``.
        nodes: names of the nodes of Dynamo's graph, which tell the reports of graphs with the same parameters apart.

    Raises:
        ValueError: the plan or profile that an option names is not valid, or an option needs a profile.
    """
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
    buckets = _buckets(request, prefix, found)
    parameters = [(prefix[model] + fqn, shape) for model in models for fqn, shape in model.parameters]
    params = {
        index: GraphParameter(
            prefix[info.model] + info.fqn,
            reshard_decision(info.communication.reshard_after_forward, prefix[info.model] + info.fqn, request),
            info.communication.param_dtype or example_inputs[index].dtype,
            tuple(group.name for group in info.communication.groups),
            info.communication.gather_format,
            info.communication.reduce_format,
            info.communication.two_steps,
            info.communication.is_exchanged,
        )
        for index, info in found.items()
    }
    warn_of_whole_parameters(example_inputs, bool(found))
    common_facts = (
        f"simplefsdp {source_hash().hex()[:16]}",
        *(_parameter_line(params[index], info, example_inputs[index]) for index, info in found.items()),
        f"lower_with {options.lower_with!r}",
        *(f"inductor {name}={_stable(value)}" for name, value in sorted(options.inductor.items())),
        f"plan {_request_line(request)}",
    )
    # Torch's own key knows only the shapes of whole parameters, and ranks share a cache.
    shapes = [tuple(example_inputs[index]._local_tensor.shape) for index in params]
    equivalent = _equivalent_groups(values)
    prefetch = request.prefetch if isinstance(request, GroupingRequest) else None
    compiles_once = options.compile_once and not uses_cpp_wrapper(options.inductor)
    wire = _wire(params)
    state = _step_state(models, values)
    narrow = options.wire == "auto"
    asked = (
        options.report_dir is not None,
        profile,
        options.cast_in_matmuls,
        options.cast_before_gather,
        compiles_once,
        narrow,
        sorted(equivalent.items()),
        state,
    )
    groups = dict.fromkeys(group.name for info in found.values() for group in info.communication.groups)
    grouping = [*map(issues_groups, groups)]
    inputs = repr((sorted(params.items()), prefetch, buckets, parameters, shapes, common_facts, asked, grouping))
    key = hashlib.sha256(source_hash() + inputs.encode()).hexdigest()
    might_group = profile is not None and profile.member_s is not None
    if (might_group or isinstance(request, BucketPlan)) and any(map(issues_groups_one_by_one, groups)):
        _say_that_groups_are_not_issued()
    return CompilationContext(
        params=params,
        request=request,
        buckets=buckets,
        parameters=tuple(parameters),
        common_facts=common_facts,
        groups=tuple(groups),
        state=state,
        profile=profile,
        cast_in_matmuls=_casts_in_matmuls(options, device),
        casts_before_gathers=options.cast_before_gather and request is not None,
        compile_once=compiles_once,
        wire=wire,
        narrows=narrow,
        equivalent_groups=equivalent,
        key=key,
        report=_report(options, key, example_inputs, nodes),
    )


def _step_state(models: Sequence[ShardedModel], values: Sequence[Any]) -> StepState:
    """Return the state of a step for a graph with these parameters: memory of their models, and work of their own.

    Memory is also what other graphs of the step hold for their backward, and gradients that this has made by then.
    """
    if not models:
        return StepState()
    state = state_of_parameters(values)
    own = {id(value) for value in values}
    others = state_of_parameters(p for model in models for p in model.live_parameters() if id(p) not in own)
    besides = others.resident_bytes + others.gradient_bytes + held_bytes()
    return state._replace(resident_bytes=state.resident_bytes + besides)


def _wire(params: Mapping[int, GraphParameter]) -> tuple[WireFormats, ...]:
    """Return the wire formats of the graph's parameters that have one."""
    every = (
        WireFormats(param.fqn, param.gather_format, param.reduce_format, two_steps and two_steps.between_format)
        for param in params.values()
        for two_steps in [param.two_steps]
    )
    return tuple(dict.fromkeys(each for each in every if each.gather or each.reduce))


def _casts_in_matmuls(options: Options, device: torch.device | None) -> bool:
    """Return whether matmuls may make gradients in the dtype of their reduction."""
    return options.cast_in_matmuls and options.lower_with == "inductor" and device == torch.device("cuda")


@functools.cache
def _say_that_groups_are_not_issued() -> None:
    """Say once why no bucket is grouped, or why those of a given plan are slow."""
    log.warning(
        "this NCCL backend issues the collectives of a group one by one, so buckets are better copied into one buffer "
        "and out of it, which planners do; init_process_group(%r) issues groups",
        GROUPING_NCCL,
    )


def _buckets(
    request: PlanRequest | None, prefix: Mapping[ShardedModel, str], found: Mapping[int, ShardedParameter]
) -> Buckets:
    """The buckets that a request asks for, or those of ``block`` for a plan that is searched.

    Args:
        prefix: of FQNs, for each model of the graph.
        found: the sharded parameters among the graph's inputs.
    """
    grouping = BLOCK if isinstance(request, SearchRequest) else request
    buckets: list[tuple[str, ...]] = []
    for model in prefix:
        fqns = tuple(fqn for fqn, _ in model.parameters)
        of_model = grouping.buckets(fqns) if isinstance(grouping, GroupingRequest) else ()
        warn_of_split_buckets(model, of_model, frozenset(i.fqn for i in found.values() if i.model is model))
        buckets += [tuple(prefix[model] + fqn for fqn in members) for members in of_model]
    return tuple(buckets)


def _report(options: Options, key: str, example_inputs: Sequence[Any], nodes: Sequence[str]) -> Report | None:
    if options.report_dir is None:
        return None
    writes = not dist.is_initialized() or dist.get_rank() == 0
    folder = Path(options.report_dir) / f"graph_{compile_id()}" if writes else None
    shapes = [tuple(value.shape) for value in example_inputs if isinstance(value, Tensor)]
    graph = repr((nodes, shapes, torch.is_grad_enabled()))
    return Report(hashlib.sha256((key + graph).encode()).hexdigest(), folder)


def _equivalent_groups(shards: Iterable[Any]) -> EquivalentGroups:
    """For each process group of the shards' meshes, all groups of the same mesh dimension."""
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for mesh in dict.fromkeys(shard.device_mesh for shard in shards):
        for dim in range(mesh.ndim):
            groups = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
            found |= {tuple(group): groups for group in groups}
    return found


def _request_line(request: PlanRequest | None) -> str:
    if isinstance(request, SearchRequest):
        return f"{request.name} {hashlib.sha256(repr(request).encode()).hexdigest()[:16]} ({request.profile.name})"
    return request.hash if isinstance(request, BucketPlan) else request.name if request else "none"


def _parameter_line(param: GraphParameter, info: ShardedParameter, value: Any) -> str:
    communication = info.communication
    groups: dict[str, Any] = {
        name: group and group.ranks for name, group in communication._asdict().items() if "group" in name
    }
    if (two_steps := communication.two_steps) is not None:
        groups["two_steps"] = two_steps._replace(inside="", between="")
    trained = "trained" if value.requires_grad else "frozen"
    return f"parameter {param.fqn}: {_kind(value)} {trained} {communication._replace(**groups)}"


def _kind(value: Any) -> str:
    """Return the dtype of a parameter; for shards that are tensor subclasses also what torch's own key leaves out."""
    local = value._local_tensor
    if not (has_hooks(type(local)) and hasattr(local, "__tensor_flatten__")):
        return str(value.dtype)
    names, constants = local.__tensor_flatten__()
    inner = [(name, getattr(local, name).dtype, tuple(getattr(local, name).shape)) for name in names]
    return f"{value.dtype} {type(local).__module__}.{type(local).__qualname__} {inner} {_stable(constants)}"


def _stable(value: Any) -> str:
    """Return the ``repr`` of a value without addresses, so that every process gets the same text."""
    uuid = getattr(value, "uuid", None)
    return f"{type(value).__qualname__} {uuid()}" if callable(uuid) else re.sub(r" at 0x\w+", "", repr(value))


@functools.cache
def source_hash() -> bytes:
    """Return a hash of all source files of this project, sub-packages included."""
    folders = Path(__file__).parents[1], Path(inductor_passes.__path__[0])
    return get_hash_for_files(tuple(sorted(str(file) for folder in folders for file in folder.rglob("*.py"))))

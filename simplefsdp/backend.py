"""``torch.compile(model, backend="simplefsdp")``: options in, passes set up, TorchInductor (or aot_eager) called.

::

    Dynamo graph - AOTAutograd joint graph - identify, tag - partition -+- forward  - bucket - lower
                                                                        +- backward - bucket - lower
"""

import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import register_backend
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule
from torch.nn import Parameter

import inductor_passes
from inductor_passes._compat import (
    CustomGraphPass,
    CustomPartitionerFn,
    Halves,
    compile_id,
    get_hash_for_files,
    inductor_config,
    inductor_options,
    is_backward,
)
from inductor_passes.bucket import bucket
from inductor_passes.collectives import GraphParameter, identify
from inductor_passes.partition import partition
from inductor_passes.recompute import tag
from inductor_passes.report import Report

from . import sharding
from ._messages import unknown
from .plan import Buckets, block_buckets, single_buckets
from .recompute import CHANGED_WHILE_WHOLE
from .sharding import ShardedModel, ShardedParameter, unshard

log = logging.getLogger("simplefsdp")

_PLANS = {"auto": block_buckets, "block": block_buckets, "none": single_buckets}
_LATER_PLANS = ("greedy",)
_LOWERINGS = ("inductor", "aot_eager")


@dataclass(frozen=True)
class Options:
    """What ``torch.compile(..., backend="simplefsdp", options={...})`` understands."""

    plan: str = "auto"
    """``"block"``: one bucket per repeated block, one for what precedes the first and one for what follows the last.
    ``"none"``: no buckets, nothing moved. ``"auto"``: ``"block"``, until there is a planner."""
    memory_budget: None = None
    """Not there yet."""
    profile: None = None
    """Not there yet."""
    report_dir: str | None = None
    """Folder for the graphs before and after each pass, as text, written by rank 0, which then does not use
    the compile cache: a cached artifact has no passes to show."""
    lower_with: str = "inductor"
    """``"aot_eager"``: no decompositions and no fusion, the same collectives; for numerics work."""
    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Inductor configuration for this compilation only."""


def parse_options(options: Mapping[str, Any] | None) -> Options:
    """Check ``options`` and fill in defaults.

    Raises:
        ValueError: an unknown option, plan, lowering or Inductor option (with the nearest valid one).
        TypeError: an option's value is of another type.
        NotImplementedError: an option or plan that is not there yet.
    """
    given = dict(options or {})
    valid = [f.name for f in fields(Options)]
    for name in given:
        if name not in valid:
            raise ValueError(unknown("option", name, valid))
    for name in ("memory_budget", "profile"):
        if given.get(name) is not None:
            raise NotImplementedError(f"option {name!r}={given[name]!r}: needs a planner, which is not there yet")
    parsed = Options(**given)
    if not isinstance(parsed.plan, str) or parsed.plan in _LATER_PLANS:
        raise NotImplementedError(f"option 'plan'={parsed.plan!r}: not there yet (there is: {', '.join(_PLANS)})")
    if parsed.plan not in _PLANS:
        raise ValueError(unknown("plan", parsed.plan, _PLANS))
    if parsed.lower_with not in _LOWERINGS:
        raise ValueError("option 'lower_with': " + unknown("lowering", parsed.lower_with, _LOWERINGS))
    if parsed.report_dir is not None and not isinstance(parsed.report_dir, str | Path):
        raise TypeError(f"option 'report_dir': expected a path, found {parsed.report_dir!r}")
    if not isinstance(parsed.inductor, Mapping):
        raise TypeError(f"option 'inductor': expected a dict of Inductor options, found {parsed.inductor!r}")
    for name in parsed.inductor:
        if name in _PASS_SLOTS:
            raise ValueError(f"option 'inductor': {name!r} is used by simplefsdp itself")
        if name not in inductor_options():
            raise ValueError("option 'inductor': " + unknown("Inductor option", name, inductor_options()))
    return parsed


_PASS_SLOTS = ("joint_custom_post_pass", "custom_partitioner_fn", "post_grad_custom_post_pass")


@register_backend(name="simplefsdp")
def simplefsdp(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one graph that Dynamo captured. ``options``: see ``Options``; errors: see ``parse_options``."""
    parsed = parse_options(options)
    _say_what_auto_is(parsed.plan)
    _refuse_changed_weights(gm, example_inputs)
    passes = passes_for(example_inputs, parsed)
    if parsed.lower_with == "aot_eager":
        return _aot_eager(gm, example_inputs, passes)
    slots: dict[str, Any] = dict(zip(_PASS_SLOTS, (_OnJoint(passes), _Partitioner(), _OnEachHalf(passes)), strict=True))
    # AOTAutograd caches only graphs of functions that it knows to depend on nothing but their arguments and source.
    slots["unsafe_marked_cacheable_functions"] = {
        **inductor_config.unsafe_marked_cacheable_functions,
        f"{unshard.__module__}.{unshard.__name__}": _source_hash().hex(),
    }
    from torch._inductor.compile_fx import compile_fx  # seconds to import, so not before it is needed

    return cast(Callable[..., Any], compile_fx(gm, example_inputs, config_patches={**parsed.inductor, **slots}))


def _aot_eager(gm: GraphModule, example_inputs: Sequence[Any], passes: "Passes") -> Callable[..., Any]:
    def tag_and_partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> Halves:
        passes.on_joint(joint.graph)
        return partition(joint, inputs, **kwargs)

    def lower_half(half: GraphModule, _inputs: Any) -> Any:
        passes.on_each_half(half.graph)
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
    buckets: Buckets
    shapes: tuple[tuple[int, ...], ...]
    """Of this rank's shards: torch's own key knows only those of the whole parameters, and ranks share a cache."""
    report: Report | None

    def on_joint(self, graph: Graph) -> None:
        """Before partitioning; also for inference graphs."""
        kind = "joint" if is_backward(graph) else "forward"
        self._write(f"1_{kind}_before_identify", graph)
        missed = identify(graph, self.params)
        tag(graph, self.params)
        self._write(f"2_{kind}_after_identify", graph)
        if missed:
            log.warning("no bucket for the gradients of %s: their reductions were not recognised", ", ".join(missed))

    def on_each_half(self, graph: Graph) -> None:
        """After partitioning: the forward, the backward or the inference graph."""
        first, kind = (5, "backward") if is_backward(graph) else (3, "forward")
        self._write(f"{first}_{kind}_before_bucket", graph)
        bucket(graph, self.buckets)
        self._write(f"{first + 1}_{kind}_after_bucket", graph)

    def uuid(self) -> str | None:
        """Key for the compile cache: all that the passes depend on, and their own source."""
        if self.report is not None:
            return None
        inputs = repr((sorted(self.params.items()), self.buckets, self.shapes))
        return hashlib.sha256(_source_hash() + inputs.encode()).hexdigest()

    def _write(self, step: str, graph: Graph) -> None:
        if self.report is not None:
            self.report.write(step, graph)


class _OnJoint(CustomGraphPass):
    def __init__(self, passes: Passes):
        self.passes = passes

    def __call__(self, graph: Graph) -> None:
        self.passes.on_joint(graph)

    def uuid(self) -> str | None:
        return self.passes.uuid()


class _Partitioner(CustomPartitionerFn):
    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> Halves:
        return partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> bytes:
        return _source_hash()


class _OnEachHalf(_OnJoint):
    def __call__(self, graph: Graph) -> None:
        self.passes.on_each_half(graph)


def passes_for(example_inputs: Sequence[Any], options: Options) -> Passes:
    found: dict[int, ShardedParameter] = {
        index: info
        for index, value in enumerate(example_inputs)
        if (info := getattr(value, "simple_fsdp_info", None)) is not None
    }
    # Two models in one graph may use the same FQNs.
    models: list[ShardedModel] = list(dict.fromkeys(info.model for info in found.values()))
    prefix = {model: f"model{i}:" if len(models) > 1 else "" for i, model in enumerate(models)}
    buckets = [
        tuple(prefix[model] + fqn for fqn in fqns) for model in models for fqns in _PLANS[options.plan](model.fqns)
    ]
    params = {
        index: GraphParameter(
            prefix[info.model] + info.fqn,
            info.communication.reshard_after_forward,
            info.communication.param_dtype or example_inputs[index].dtype,
        )
        for index, info in found.items()
    }
    _warn_of_parameters_that_are_not_sharded(example_inputs, bool(found))
    report = None
    if options.report_dir is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        report = Report(Path(options.report_dir) / f"graph_{compile_id()}")
    shapes = tuple(tuple(example_inputs[index]._local_tensor.shape) for index in params)
    return Passes(params, tuple(buckets), shapes, report)


def _warn_of_parameters_that_are_not_sharded(example_inputs: Sequence[Any], some_are: bool) -> None:
    """Their gradients would differ between the ranks."""
    missed = [
        tuple(value.shape)
        for value in example_inputs
        if isinstance(value, Parameter) and value.requires_grad and not isinstance(value, DTensor)
        if not getattr(value, "simple_fsdp_ignored", False)
    ]
    if missed and not some_are:
        log.warning("no parameter of this graph is sharded; call simple_fsdp(model) before torch.compile")
    elif missed:
        log.warning(
            "%d parameters of this graph are not sharded and their gradients not reduced (shapes %s); were they added "
            "after simple_fsdp()? If that is meant, name them in ignored_params",
            len(missed),
            missed[:5],
        )


def _refuse_changed_weights(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Raise if a gathered weight is changed in place, as eager does; Dynamo's fake tensors count versions."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    for node in (node for graph in graphs for node in graph.find_nodes(op="call_function", target=unshard)):
        if node.meta["example_value"]._version:
            key = node.args[1]
            names = [i.fqn for v in example_inputs if (i := getattr(v, "simple_fsdp_info", None)) and i.key == key]
            raise RuntimeError(CHANGED_WHILE_WHOLE.format(" or ".join(names)))


@functools.cache
def _source_hash() -> bytes:
    files = [Path(__file__), Path(sharding.__file__), *Path(inductor_passes.__path__[0]).glob("*.py")]
    return get_hash_for_files(tuple(sorted(map(str, files))))


@functools.cache
def _say_what_auto_is(plan: str) -> None:
    if plan == "auto":
        log.warning(
            "plan='auto' means 'block' until there is a planner; pass options={'plan': 'block'} to silence this"
        )

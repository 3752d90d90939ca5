"""Checks of ``simple_fsdp``, before anything is changed and before any collective; and warnings of compilations."""

import functools
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from inductor_passes.ops.wire_formats import DTYPES, REDUCE_FORMATS
from inductor_passes.torch_compat.dtensor import concatenate_meshes
from simplefsdp.frontend.embedding_lookup import LOOKUPS
from simplefsdp.frontend.gather_hooks import has_hooks
from simplefsdp.frontend.other_tools import parallel_already
from simplefsdp.frontend.parametrization import ShardedModule
from simplefsdp.frontend.sharding import ShardedModel
from simplefsdp.frontend.wire_format import WireFormat, sends_less_to_replicas
from simplefsdp.text.messages import fqn_range, unknown

log = logging.getLogger("simplefsdp")

MODES = ("fully_shard", "hybrid_shard", "replicate")


def check_types(
    model: object,
    mesh: object,
    mp_policy: object,
    reshard_after_forward: object,
    shard_placement_fn: object,
    ignored_params: object,
    offload_policy: object,
    check_initial_weights: object,
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    if isinstance(model, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
        raise TypeError(
            f"model: {type(model).__name__} has no forward of its own; pass the module that calls its members"
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh or None, found {type(mesh).__name__}")
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy: expected torch.distributed.fsdp.MixedPrecisionPolicy, found {type(mp_policy).__name__}"
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(mp_policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"mp_policy: {name}: expected a floating-point torch.dtype or None, found {dtype!r}")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn: expected a function of a parameter, found {shard_placement_fn!r}")
    if ignored_params is not None and not isinstance(ignored_params, Iterable):
        raise TypeError(f"ignored_params: expected parameters, found {ignored_params!r}")
    if not isinstance(offload_policy, OffloadPolicy | None):
        raise TypeError(
            "offload_policy: expected torch.distributed.fsdp.CPUOffloadPolicy or None, found "
            f"{offload_policy if isinstance(offload_policy, type) else type(offload_policy).__name__}"
        )
    if not isinstance(check_initial_weights, bool) and check_initial_weights != "exact":
        raise TypeError(f"check_initial_weights: expected True, False or 'exact', found {check_initial_weights!r}")
    if isinstance(reshard_after_forward, dict):
        wrong = {k: v for k, v in reshard_after_forward.items() if not (isinstance(k, str) and _is_reshard(v))}
        if wrong:
            raise TypeError(f"reshard_after_forward: expected {{glob: True, False or 'auto'}}, found {wrong!r}")
    elif isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        raise TypeError(
            f"reshard_after_forward: {_RESHARD}, found {reshard_after_forward!r}; "
            "gathering again from a smaller group is not supported. Use hybrid_shard on a mesh whose last dimension "
            "has that size"
        )
    elif not _is_reshard(reshard_after_forward):
        raise TypeError(f"reshard_after_forward: {_RESHARD}, found {reshard_after_forward!r}")


_RESHARD = "expected True, False, 'auto' or {glob: one of them}"


def _is_reshard(value: object) -> bool:
    return isinstance(value, bool) or value == "auto"


def check_wire(wire: object, mp_policy: MixedPrecisionPolicy) -> None:
    by_glob: dict[Any, Any] = wire if isinstance(wire, dict) else {} if wire is None else {"*": wire}
    for glob, form in by_glob.items():
        if not isinstance(glob, str) or not isinstance(form, WireFormat):
            found = {glob: form} if isinstance(wire, dict) else wire
            raise TypeError(f"wire: expected a WireFormat or {{glob: WireFormat}}, found {found!r}")
    dtype = mp_policy.reduce_dtype
    if dtype not in (None, *DTYPES) and any(form.reduce for form in by_glob.values()):
        raise ValueError(f"wire: gradients are reduced in {dtype}, which has no wire format; {_ENCODABLE}")


def check_embedding_lookup(embedding_lookup: object) -> None:
    choices = embedding_lookup.values() if isinstance(embedding_lookup, dict) else [embedding_lookup]
    globs = embedding_lookup if isinstance(embedding_lookup, dict) else ()
    if not all(isinstance(text, str) for text in (*choices, *globs)):
        raise TypeError(f"embedding_lookup: expected 'gather', 'exchange' or {{glob: one}}, found {embedding_lookup!r}")
    for choice in choices:
        if choice not in LOOKUPS:
            raise ValueError("embedding_lookup: " + unknown("choice", str(choice), LOOKUPS))


def check_wire_format(
    fqn: str, param: nn.Parameter, form: WireFormat, mode: str, replicas: int, mp_policy: MixedPrecisionPolicy
) -> None:
    """Raise ``ValueError`` if the weight or the gradient of a parameter cannot travel in its format.

    Args:
        replicas: number of ranks that hold the same shard.
    """
    asked = " and ".join(repr(name) for name in (form.gather, form.reduce, form.between_nodes) if name)
    if not asked:
        return
    if has_hooks(type(param)):
        raise ValueError(
            f"wire: {fqn}: a {type(param).__name__} says itself what is gathered of it, and cannot travel as {asked}; "
            "give it WireFormat(), which changes nothing"
        )
    if mode == "replicate":
        raise ValueError(f"wire: {fqn}: mode 'replicate' gathers and scatters nothing that {asked} could be for")
    if param.dtype not in DTYPES:
        raise ValueError(f"wire: {fqn}: a {param.dtype} parameter cannot travel as {asked}; {_ENCODABLE}")
    if form.error_feedback and mode != "hybrid_shard":
        raise ValueError(
            f"wire: {fqn}: error_feedback needs mode 'hybrid_shard', where replicas round sums of their shards; in "
            f"mode {mode!r} ranks round whole gradients, and errors would take as much memory as those"
        )
    dtype = mp_policy.reduce_dtype
    between = form.between_nodes or (form.reduce if form.error_feedback else None)
    if between and replicas > 1 and not sends_less_to_replicas(between, replicas, dtype):
        option = "between_nodes" if form.between_nodes else "reduce"
        less = [name for name in REDUCE_FORMATS if sends_less_to_replicas(name, replicas, dtype)]
        raise ValueError(
            f"wire: {fqn}: {option}={between!r} sends no less among {replicas} replicas than their all-reduce in "
            f"{dtype or torch.float32}; what does: {', '.join(map(repr, less)) or 'no format'}"
        )


_ENCODABLE = "torch.float32, torch.bfloat16 and torch.float16 can; give the others WireFormat(), which changes nothing"


def check_mode(mode: str | None, mesh: DeviceMesh | None) -> str:
    """Return the mode; from the mesh where ``mode`` is ``None``."""
    if mode is not None and mode not in MODES:
        raise ValueError(unknown("mode", mode, MODES))
    if mesh is None:
        if mode == "hybrid_shard":
            raise ValueError(
                "mode 'hybrid_shard' needs a mesh of 2 dimensions, (replicate, shard), as in "
                "init_device_mesh('cuda', (nodes, gpus), mesh_dim_names=('replicate', 'shard'))"
            )
        return mode or "fully_shard"
    if mesh.ndim > 2:
        raise ValueError(
            f"mesh: found {mesh.ndim} dimensions, expected 1 (fully_shard) or 2 (hybrid_shard); "
            "pass the data-parallel sub-mesh, as in mesh['dp']"
        )
    mode = mode or MODES[mesh.ndim - 1]
    needed = 2 if mode == "hybrid_shard" else 1
    if mesh.ndim != needed:
        raise ValueError(f"mesh: found {mesh.ndim} dimensions, mode {mode!r} needs {needed}")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"mesh: rank {torch.distributed.get_rank()} is not part of {mesh}; call simple_fsdp only on its ranks"
        )
    return mode


_WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel)
_DATA_PARALLEL = (*_WRAPPERS, FSDPModule)


def check_modules(model: nn.Module) -> None:
    """Raise if a module of ``model`` cannot be sharded, naming it and the reason."""
    if isinstance(model, ShardedModule):
        raise ValueError(
            f"model: this {type(model).__name__} is sharded by simple_fsdp already, by itself or as a part; "
            "call it once per module, and on parts before the whole"
        )
    params = {id(param) for param in model.parameters()}
    for name, module in model.named_modules():
        reason = _why_not(module) or _view_of(params, module)
        if reason is not None:
            raise ValueError(f"{name or 'model'} ({type(module).__name__}): {reason}")


@functools.cache
def refuse_other_wrappers() -> None:
    """Let ``DistributedDataParallel`` and ``FullyShardedDataParallel`` raise when they are given a sharded model.

    Both put the model into themselves before they communicate.
    """

    def check(module: nn.Module, _name: str, inner: nn.Module | None) -> None:
        parts = inner.modules() if inner is not None and isinstance(module, _WRAPPERS) else ()
        if any(isinstance(part, ShardedModule) for part in parts):
            raise parallel_already(type(module).__name__)

    register_module_module_registration_hook(check)


def _why_not(module: nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript modules cannot read gathered weights; pass the original module"
    if isinstance(module, torch._dynamo.OptimizedModule):
        return "is compiled already; shard first, then compile"
    if isinstance(module, _DATA_PARALLEL):
        return "is data parallel already; pass the module inside, or leave it out"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.max_norm is not None:
            return (
                "max_norm changes the weight in forward, where it is a gathered copy; renormalise in the loop instead"
            )
        if module.sparse and module.weight.requires_grad:
            return "sparse=True makes sparse gradients, which cannot be reduced; use sparse=False"
    return None


def _view_of(params: set[int], module: nn.Module) -> str | None:
    for name, value in module.__dict__.items():
        if isinstance(value, torch.Tensor) and id(value._base) in params:
            return f"{name!r} is a view of a parameter, which would not see its gradient; make it in forward"
    return None


def check_parameter(fqn: str, param: nn.Parameter) -> None:
    """Raise if ``param`` cannot be sharded, naming it and the reason."""
    if isinstance(param, UninitializedParameter):
        raise ValueError(f"{fqn}: has no shape yet; run the lazy module once before simple_fsdp()")
    if type(param) not in (nn.Parameter, DTensor) and not has_hooks(type(param)):
        raise ValueError(
            f"{fqn}: found a {type(param).__name__}, expected a plain torch.nn.Parameter, or a subclass of "
            "torch.Tensor with fsdp_pre_all_gather and fsdp_post_all_gather. Put it into ignored_params, or replace it "
            "before simple_fsdp()"
        )
    if isinstance(param, DTensor) and has_hooks(type(param._local_tensor)):
        raise ValueError(
            f"{fqn}: is a DTensor of a {type(param._local_tensor).__name__}; tensor parallel parameters are plain "
            "tensors before they are sharded"
        )
    if param.layout is not torch.strided or param.is_quantized:
        kind = param.dtype if param.is_quantized else param.layout
        raise ValueError(f"{fqn}: found {kind}, expected a dense tensor; put it into ignored_params")
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        raise ValueError(f"{fqn}: has gradient hooks, which its shard would lose; register them after simple_fsdp()")
    if param.grad is not None:
        raise ValueError(f"{fqn}: has a gradient, which its shard would lose; zero_grad(set_to_none=True) first")


def check_hooks(
    fqn: str, param: nn.Parameter, mode: str, mesh: DeviceMesh, placements: Sequence[Placement], offloads: bool
) -> None:
    """Raise ``ValueError`` if a parameter that says itself what is gathered of it cannot be sharded so."""
    kind = f"{fqn}: a {type(param).__name__}, which says itself what is gathered of it,"
    if mode == "replicate":
        raise ValueError(f"{kind} cannot be replicated: mode 'replicate' gathers nothing")
    if offloads:
        raise ValueError(f"{kind} cannot be offloaded; put it into ignored_params, or leave out offload_policy")
    if mesh.ndim > 1 and not mesh.mesh_dim_names:
        raise ValueError(
            f"{kind} needs a mesh whose dimensions have names, as in init_device_mesh('cuda', (nodes, gpus), "
            "mesh_dim_names=('replicate', 'shard'))"
        )
    if param.ndim == 0:
        raise ValueError(f"{kind} has 0 dims, and cannot be sharded")
    on, by = next((i, each) for i, each in enumerate(placements) if isinstance(each, Shard))
    rows, ranks = param.shape[by.dim], mesh.size(on)
    if rows % ranks:
        raise ValueError(f"{kind} cannot have shards of different sizes: {rows} rows do not divide by {ranks} ranks")


def check_dtensor(fqn: str, param: DTensor, mesh: DeviceMesh) -> None:
    """Raise for a tensor-parallel parameter that cannot be sharded over ``mesh`` too."""
    overlap = set(param.device_mesh.mesh_dim_names or ()) & set(mesh.mesh_dim_names or ())
    if overlap or param.device_mesh == mesh:
        what = f"dimension {min(overlap)!r}" if overlap else "the mesh"
        raise ValueError(
            f"{fqn}: is a DTensor over {what} that simple_fsdp is to shard over (its mesh: {param.device_mesh}, "
            f"simple_fsdp's: {mesh}); pass the data-parallel part of the mesh"
        )
    try:
        concatenate_meshes(mesh, param.device_mesh)
    except (RuntimeError, TypeError) as error:  # the latter: a mesh without names
        raise ValueError(
            f"{fqn}: is a DTensor over {param.device_mesh}, which is no sibling of simple_fsdp's mesh, {mesh}; make "
            "one mesh with named dimensions and use parts of it, as in mesh = init_device_mesh(device, (dp, tp), "
            "mesh_dim_names=('dp', 'tp')), mesh['dp'] and mesh['tp']"
        ) from error
    if not all(isinstance(placement, Shard | Replicate) for placement in param.placements):
        raise ValueError(f"{fqn}: is a DTensor placed as {param.placements}; expected shards or replicas")


def check_device(fqn: str, param: nn.Parameter, mesh: DeviceMesh, offloads: bool) -> None:
    if param.device.type not in (mesh.device_type, "meta", *(["cpu"] if offloads else [])):
        raise ValueError(
            f"{fqn}: found on device {param.device.type!r}, but mesh is on {mesh.device_type!r}; move the model "
            f"there first (model.to({mesh.device_type!r})) or pass a mesh of its own device"
        )


def check_placement(fqn: str, param: nn.Parameter, found: Any) -> Shard | None:
    """Return what ``shard_placement_fn`` returned for ``param``, with a dim that is not negative."""
    if found is None:
        return None
    if type(found) is not Shard:  # subclasses lay out their shards in other ways
        raise TypeError(f"shard_placement_fn: expected a Shard or None for {fqn}, found {found!r}")
    if not -param.ndim <= found.dim < param.ndim:
        raise ValueError(
            f"shard_placement_fn: found {found!r} for {fqn}, which has {param.ndim} dims (shape {tuple(param.shape)})"
        )
    return Shard(found.dim % param.ndim)


_graphs: weakref.WeakKeyDictionary[ShardedModel, list[frozenset[str]]] = weakref.WeakKeyDictionary()
"""FQNs of the parameters of each graph of a model that has been compiled."""
_warned: weakref.WeakSet[ShardedModel] = weakref.WeakSet()


def warn_of_split_buckets(model: ShardedModel, buckets: Iterable[Sequence[str]], here: frozenset[str]) -> None:
    """Warn, once for a model, of buckets that graph breaks split; ``here``: FQNs of its parameters in this graph."""
    others = _graphs.setdefault(model, [])
    for bucket in buckets:
        part = [fqn for fqn in bucket if fqn in here]
        for other in others:
            apart = [fqn for fqn in bucket if fqn in other]
            if part and apart and not set(part) & set(apart) and model not in _warned:
                _warned.add(model)
                log.warning(
                    "a graph break splits the bucket of %s: %s and %s are in graphs of their own, gathered and reduced "
                    "apart, and hidden by nothing in the other graph; TORCH_LOGS=graph_breaks says where it is",
                    *map(fqn_range, (bucket, apart, part)),
                )
    if here not in others:
        others.append(here)


def warn_of_whole_parameters(example_inputs: Sequence[Any], some_are: bool) -> None:
    """Warn of trained parameters that are not sharded: their gradients would differ between the ranks."""
    missed = [
        tuple(value.shape)
        for value in example_inputs
        if isinstance(value, nn.Parameter) and value.requires_grad and not isinstance(value, DTensor)
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

"""``simple_fsdp``: the one call that shards a model."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from inductor_passes.collectives import TwoSteps
from inductor_passes.torch_compat.dtensor import local_tensor
from inductor_passes.torch_compat.dynamo import inside_torch_compile, skip_code
from simplefsdp.frontend.compare_sharding import CheckInitialWeights, facts, sample
from simplefsdp.frontend.eager_order import compare_before_steps
from simplefsdp.frontend.embedding_lookup import exchanged_embeddings
from simplefsdp.frontend.float8 import unwrap_float8_weights
from simplefsdp.frontend.fsdp_methods import check_divide_factor
from simplefsdp.frontend.gather_hooks import add_mesh, has_hooks
from simplefsdp.frontend.gloo import run_in_order
from simplefsdp.frontend.node_groups import NodeGroups, node_groups, node_size
from simplefsdp.frontend.parametrization import ShardedModule, ShardedModuleState, parametrize, tie_again
from simplefsdp.frontend.sharding import (
    Communication,
    Group,
    ReplacedByShard,
    Reshard,
    ShardedModel,
    ShardedParameter,
    refuse_uses,
    replace_parameter,
    shard,
    shard_further,
    to_offload_device,
)
from simplefsdp.frontend.validation import (
    check_device,
    check_dtensor,
    check_embedding_lookup,
    check_hooks,
    check_mode,
    check_modules,
    check_parameter,
    check_placement,
    check_types,
    check_wire,
    check_wire_format,
    refuse_other_wrappers,
)
from simplefsdp.frontend.wire_format import WireFormat, sends_less_to_replicas
from simplefsdp.plan.grouping import blocks
from simplefsdp.text.messages import matching

Model = TypeVar("Model", bound=nn.Module)
Choice = TypeVar("Choice")


def simple_fsdp(
    model: Model,
    mesh: DeviceMesh | None = None,
    *,
    mode: str | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: Reshard | dict[str, Reshard] = True,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    gradient_divide_factor: float | None = None,
    offload_policy: OffloadPolicy | None = None,
    check_initial_weights: CheckInitialWeights = True,
    wire: WireFormat | dict[str, WireFormat] | None = None,
    ranks_per_node: int | None = None,
    embedding_lookup: str | dict[str, str] = "gather",
) -> Model:
    """Shard ``model``'s parameters over the ranks of ``mesh``, in place, and return it.

    Each parameter becomes a ``DTensor`` under its own name: persistent memory for parameters, gradients and optimizer
    state falls by the number of shards. Reading a parameter inside ``forward`` all-gathers it; its gradient is
    reduce-scattered and averaged over the ranks. Under ``torch.compile(model, backend="simplefsdp")`` these collectives
    are part of the graph: one gather and one reduction per parameter and graph, merged into buckets. Without it they
    run one by one where they are needed (right, but slow: for debugging), and full weights are freed after the module
    that read them, and gathered again in backward.

    No collective runs in this call: every rank must hold the same initial values, as with ``fully_shard``. The first
    forward with gradients compares them (``check_initial_weights``).
    Build the optimizer afterwards, on ``model.parameters()``; one built before raises at its next use. Tied parameters
    stay one parameter, frozen ones stay frozen and are not reduced, buffers are left alone.

    Tensor parallelism comes first (``torch.distributed.tensor.parallel.parallelize_module``): such a parameter, a
    ``DTensor``, is sharded once more, over ``mesh``, and what it was is what ``forward`` reads. Both meshes are parts
    of one, as in ``parallelize_module(model, mesh["tp"], plan)`` and ``simple_fsdp(model, mesh["dp"])``.

    Parts may be sharded first, by calls of their own with their own mesh and policy; the call on the whole then shards
    what is left, and gives all parameters the names they have in it.

    Args:
        model: any module whose parameters are on the mesh's device or on ``meta`` (see ``sharded_init``). Modules with
            sharded parameters, and those that contain them, become instances of subclasses of the same name.
        mesh: 1-D ``DeviceMesh``, or 2-D with dimensions (replicate, shard); ``None``: all ranks of the default process
            group, 1-D.
        mode: ``"fully_shard"``: shards over a 1-D mesh. ``"hybrid_shard"``: shards over the second dimension of a 2-D
            mesh, each shard held once per rank of the first; gradients are reduce-scattered, then all-reduced.
            ``"replicate"``: whole parameters on each rank of a 1-D mesh, gradients all-reduced (data parallel).
            ``None``: ``"fully_shard"`` or ``"hybrid_shard"``, from the mesh.
        mp_policy: ``torch.distributed.fsdp.MixedPrecisionPolicy``. ``param_dtype``: weights are cast to it before
            the gather. ``reduce_dtype``: gradients are cast to it before the reduction; ``None``: as in FSDP2, to that
            of the parameter from torch 2.15 on, and not at all before. ``cast_forward_inputs``:
            floating-point inputs of the model and of its repeated blocks are cast to ``param_dtype``, as FSDP2
            does where ``fully_shard`` is applied per block. ``output_dtype``: the model's floating-point outputs
            are cast to it. Shards, gradients and optimizer state keep the original dtype. Complex and integer
            parameters are not cast.
        reshard_after_forward: ``True`` drops full weights after forward and gathers them again in backward;
            ``False`` keeps them until backward. ``"auto"``: the planner of ``plan="auto"`` keeps those whose second
            gather would cost time, as far as ``memory_budget`` allows, or on a GPU 92 % of its memory; kept weights of
            other graphs (behind a graph break) are not counted. A saved plan says which it keeps; under any other
            plan, and without ``torch.compile``, it is ``True``.
            ``{glob: one of these}`` over FQNs sets it per parameter: the last glob that matches counts, parameters
            matched by none are resharded.
        shard_placement_fn: called with each parameter as it was; returns the ``Shard`` of its dim, uneven ones
            included, or ``None`` for ``Shard(0)``. 0-dim parameters are replicated whatever it returns.
        ignored_params: parameters to leave as they are: whole on every rank, their gradients not reduced.
        gradient_divide_factor: what the sum of all ranks' gradients is divided by; ``None``: the number of ranks.
        offload_policy: ``torch.distributed.fsdp.CPUOffloadPolicy`` keeps shards, gradients and so the optimizer's state
            on CPU (in pinned memory, if it says so and there is a GPU): a shard is copied to the mesh's device when it
            is gathered, its reduced gradient back, and the optimizer steps on CPU. The model may be on CPU, on the
            mesh's device or on ``meta``; its buffers are moved to the mesh's device, ``ignored_params`` are not, and
            ``model.to(device)`` and ``to_empty(device=...)`` move everything but shards. What reduces or gathers shards
            themselves (``full_tensor()``, checkpoints, ``GradScaler``, torch's own ``clip_grad_norm_``) needs a process
            group with a backend for CPU too, as ``"cpu:gloo,cuda:nccl"``. Load whole state dicts by
            ``model.load_state_dict``: torch's ``set_model_state_dict`` takes models on one device only. After a forward
            without a backward, call ``torch.cuda.synchronize()`` before shards in pinned memory are changed in place.
            ``None`` or ``OffloadPolicy()``: everything is on the mesh's device. Predictions leave out the time of these
            copies, and of the optimizer on CPU.
        check_initial_weights: the first call of ``model`` with gradients compares what the ranks have sharded, and how:
            of the values, ``True`` 64 elements of each parameter, at equal distances; ``"exact"`` all of them;
            ``False`` none. The ranks meet at the store of the process group, once; a difference is a ``RuntimeError``
            on all of them, which names the first parameter that differs. Left out are values of parameters on
            ``meta``, what is loaded after sharding, and models under another backend of ``torch.compile``.
        wire: in which format weights and gradients travel: a ``WireFormat`` for all parameters, or ``{glob:
            WireFormat}`` over FQNs, of which the last glob that matches counts. Parameters matched by none, and those
            of 0 dims, travel as they are. Gradients are reduced in float32 where ``mp_policy`` has no
            ``reduce_dtype``.
        ranks_per_node: how many ranks each node has, which are numbered node by node. Gradients in a wire format that
            are fully sharded over several nodes are reduced inside of nodes first, then between them, over process
            groups that this call makes: all ranks must call it. ``None``: what torchrun says (``LOCAL_WORLD_SIZE``),
            else all ranks, and one step.
        embedding_lookup: ``"gather"``: the weight of a ``torch.nn.Embedding`` is gathered as any other. ``"exchange"``:
            weights of embeddings are sharded by columns and stay where they are; ranks exchange tokens for embeddings,
            and gradients of embeddings, which are far fewer bytes where a step has fewer tokens than the vocabulary.
            All ranks must have the same number of tokens in a step, and a compiled graph with another number on one
            rank is an error. Gradients are summed in float32. Other parameters, and embeddings that cannot (tied ones,
            in a hybrid mode, tensor parallel, offloaded, of columns that are no multiple of the ranks), are gathered.
            ``{glob: one of these}`` over FQNs chooses embeddings; one of these that cannot is an error.

    Raises:
        TypeError: an argument is of another type than said above.
        ValueError: a mesh without this rank, of another device than a parameter, of other dimensions than the mode
            needs, or no sibling of a tensor-parallel parameter's; an unknown mode; a dim that a parameter does not
            have; a glob that matches nothing; a wire format that a dtype, a device or a mode cannot have; a module or
            parameter that cannot be sharded (named, with the reason), or is sharded already.
        RuntimeError: no process group; called inside ``torch.compile``.

    Source: SimpleFSDP (arXiv 2411.00284), section 3; numerics of ``torch.distributed.fsdp.fully_shard``.
    """
    if inside_torch_compile():
        raise RuntimeError("simple_fsdp() was called inside torch.compile; shard the model first, then compile it")
    mp_policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    check_types(
        model,
        mesh,
        mp_policy,
        reshard_after_forward,
        shard_placement_fn,
        ignored_params,
        offload_policy,
        check_initial_weights,
    )
    check_wire(wire, mp_policy)
    check_embedding_lookup(embedding_lookup)
    if gradient_divide_factor is not None:
        gradient_divide_factor = check_divide_factor("gradient_divide_factor", gradient_divide_factor)
    if not dist.is_initialized():
        raise RuntimeError(
            "simple_fsdp() found no process group; call torch.distributed.init_process_group() first "
            "(torchrun sets the environment that it reads)"
        )
    mode = check_mode(mode, mesh)
    check_modules(model)
    _relink(model)
    ignored = _ignored(model, ignored_params)
    former = unwrap_float8_weights(model, ignored)
    params = {fqn: param for fqn, param in model.named_parameters() if id(param) not in ignored}
    known = {fqn: info for fqn, param in params.items() if (info := getattr(param, "simple_fsdp_info", None))}
    new = {fqn: param for fqn, param in params.items() if fqn not in known}
    for fqn, param in new.items():
        check_parameter(fqn, param)
    offload = offload_policy if isinstance(offload_policy, CPUOffloadPolicy) else None
    offloads = offload is not None
    mesh = mesh or init_device_mesh(_device_type(new, offloads), (dist.get_world_size(),))
    on_a_gpu = mesh.device_type == "cuda" and torch.cuda.is_available()
    pinned = offload is not None and offload.pin_memory and on_a_gpu
    for fqn, param in new.items():
        check_device(fqn, param, mesh, offloads)
        if isinstance(param, DTensor):
            check_dtensor(fqn, param, mesh)
    placements = {fqn: _placements(fqn, param, mode, shard_placement_fn) for fqn, param in new.items()}
    reshard: dict[str, Reshard] = _per_parameter("reshard_after_forward", reshard_after_forward, list(new), True)
    wire_formats = _per_parameter("wire", wire or WireFormat(), list(new), WireFormat())
    lookups = _per_parameter("embedding_lookup", embedding_lookup, list(new), "gather")
    by_glob = isinstance(embedding_lookup, dict)
    exchanged = exchanged_embeddings(model, new, lookups, by_glob, mode, mesh.size(), offloads)
    wire_formats |= dict.fromkeys(exchanged, WireFormat())
    encodes = any(form.reduce for form in wire_formats.values())
    shard_group, replica_group = _with_others(*_groups(mode, mesh), encodes)
    if shard_group is None:
        exchanged = []
    placements |= dict.fromkeys(exchanged, (Shard(1),))
    for fqn, param in new.items():
        check_wire_format(fqn, param, wire_formats[fqn], mode, replica_group.ranks if replica_group else 1, mp_policy)
        if has_hooks(type(param)):
            check_hooks(fqn, param, mode, mesh, placements[fqn], offloads)
    hooks_group = _hooks_group(mesh) if any(has_hooks(type(param)) for param in new.values()) else None
    narrows = mode == "fully_shard" and shard_group is not None and encodes
    on_node = node_size(ranks_per_node) if narrows or ranks_per_node is not None else 1
    nodes = node_groups(mesh.get_group(), on_node) if narrows else None
    if shard_group is not None and replica_group is not None:
        nodes = NodeGroups(*shard_group, *replica_group)

    sharded_model = ShardedModel(
        tuple((fqn, tuple(param.shape)) for fqn, param in params.items()),
        on_meta={fqn for fqn, param in params.items() if param.is_meta},
    )
    sharded: dict[int, tuple[nn.Parameter, ShardedParameter]] = {}
    made: dict[str, ShardedParameter] = {}
    samples: dict[str, torch.Tensor | None] = {}
    dtypes = {fqn: param.dtype for fqn, param in new.items()}
    for fqn, info in known.items():
        sharded[id(params[fqn])] = params[fqn], replace(info, fqn=fqn, model=sharded_model)
    if mesh.device_type == "cpu":
        for group in mesh.get_all_groups():
            run_in_order(group)
    for fqn, param in new.items():
        own = local_tensor(param)
        dims = [placement.dim for placement in placements[fqn] if isinstance(placement, Shard)]
        comm = Communication(
            shape=tuple(own.shape),
            dim=dims[0] if dims and shard_group is not None else None,
            shard_group=shard_group,
            replica_group=replica_group,
            param_dtype=mp_policy.param_dtype if param.is_floating_point() and id(param) not in former else None,
            reduce_dtype=mp_policy.reduce_dtype if param.is_floating_point() else None,
            divide_factor=gradient_divide_factor,
            reshard_after_forward=reshard[fqn],
            device=mesh.device_type if offloads else None,
            pinned=pinned,
            is_exchanged=fqn in exchanged,
            hooks_group=hooks_group if has_hooks(type(param)) else None,
            **_formats(wire_formats[fqn], param, mp_policy, nodes, mode == "hybrid_shard"),
        )
        samples[fqn] = sample(own, check_initial_weights)
        if isinstance(param, DTensor):
            local, tensor_parallel = shard_further(param, mesh, placements[fqn]), param._spec
        else:
            local, tensor_parallel = shard(param, mesh, placements[fqn]), None
        local = to_offload_device(local, pinned) if offloads else local
        made[fqn] = info = ShardedParameter(fqn, sharded_model, comm, local.placements, tensor_parallel)
        sharded[id(param)] = replace_parameter(param, local, info), info
        if id(param) in former:
            refuse_uses(former[id(param)], sharded[id(param)][0])
    for param in ignored.values():
        param.simple_fsdp_ignored = True  # type: ignore[attr-defined]
    if offloads:
        _move_buffers(model, mesh.device_type)
    _shard_modules(model, sharded, mp_policy)
    for fqn, info in known.items():
        if info.fqn in info.model.uncompared:
            sharded_model.uncompared[fqn] = info.model.uncompared.pop(info.fqn)
    sharded_model.uncompared.update(facts(made, dtypes, samples))
    if isinstance(model, ShardedModule):
        if model._simple_fsdp.model is None:
            model.register_load_state_dict_post_hook(tie_again)
        model._simple_fsdp.model = sharded_model
    compare_before_steps()
    refuse_other_wrappers()
    return model


# Where Dynamo gives up tracing the caller it would try this function next, and fail somewhere inside torch.
skip_code(simple_fsdp.__code__)


def _relink(model: nn.Module) -> None:
    """Tie again what a call on a part untied: its parameter became a shard there, and not where others hold it."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if isinstance(param, ReplacedByShard):
                module._parameters[name] = param.replaced_by


def _groups(mode: str, mesh: DeviceMesh) -> tuple[Group | None, Group | None]:
    """Return the group of ranks that hold different shards, and the group of ranks that hold the same shard."""
    groups = [Group(mesh.get_group(i).group_name, mesh.size(i)) for i in range(mesh.ndim)]
    if mode == "hybrid_shard":
        return groups[1], groups[0]
    return (groups[0], None) if mode == "fully_shard" else (None, groups[0])


def _hooks_group(mesh: DeviceMesh) -> Group:
    """Return the ranks that hold different shards, whose mesh hooks around gathers are given."""
    shards = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1]]
    return Group(add_mesh(shards), shards.size())


def _with_others(
    shard_group: Group | None, replica_group: Group | None, encodes: bool
) -> tuple[Group | None, Group | None]:
    """Return both groups of a parameter, ``None`` in place of one in which this rank is alone: it needs no collective.

    Args:
        encodes: whether gradients have wire formats, in which a group of shards sends them to replicas, however small.
    """
    if replica_group is not None and replica_group.ranks == 1:
        replica_group = None
    if shard_group is not None and shard_group.ranks == 1 and not (encodes and replica_group is not None):
        shard_group = None
    return shard_group, replica_group


def _ignored(model: nn.Module, ignored_params: Iterable[nn.Parameter] | None) -> dict[int, nn.Parameter]:
    ignored = list(ignored_params or ())
    own = {id(param) for param in model.parameters()}
    for param in ignored:
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"ignored_params: expected parameters, found {type(param).__name__}")
        if id(param) not in own:
            raise ValueError(f"ignored_params: a parameter of shape {tuple(param.shape)} is not one of the model's")
        if info := getattr(param, "simple_fsdp_info", None):
            raise ValueError(f"ignored_params: {info.fqn} is sharded already")
    return {id(param): param for param in ignored}


def _device_type(params: dict[str, nn.Parameter], offloads: bool) -> str:
    """Return the device type of a mesh for these parameters."""
    found = {param.device.type for param in params.values()} - {"meta", *(["cpu"] if offloads else [])}
    if len(found) > 1:
        raise ValueError(f"parameters are on several devices: {sorted(found)}; move the model to one first")
    return min(found) if found else ("cuda" if torch.cuda.is_available() else "cpu")


def _move_buffers(model: nn.Module, device_type: str) -> None:
    """Move buffers from CPU to the device; a buffer that several modules hold stays one tensor."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "cpu":
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device_type)
                module._buffers[name] = moved[id(buffer)]


def _placements(
    fqn: str, param: nn.Parameter, mode: str, shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None
) -> tuple[Placement, ...]:
    """Return the placement of a parameter on each dimension of the mesh."""
    chosen = None
    if shard_placement_fn is not None:
        chosen = check_placement(fqn, param, shard_placement_fn(param))
    whole = mode == "replicate" or param.ndim == 0
    placement = Replicate() if whole else (chosen or Shard(0))
    return (Replicate(), placement) if mode == "hybrid_shard" else (placement,)


def _shard_modules(
    model: nn.Module, sharded: dict[int, tuple[nn.Parameter, ShardedParameter]], mp_policy: MixedPrecisionPolicy
) -> None:
    """Replace parameters (by identity, so that tied ones stay one) and parametrize the modules at or above them."""
    cast_inputs = mp_policy.param_dtype if mp_policy.cast_forward_inputs else None
    boundaries = {"", *blocks(tuple(name for name, _ in model.named_parameters()))}
    above = [(name, module) for name, module in model.named_modules() if any(True for _ in module.parameters())]
    for name, module in above:
        own: dict[str, ShardedParameter] = {}
        for attribute, param in module._parameters.items():
            if id(param) in sharded:
                module._parameters[attribute], own[attribute] = sharded[id(param)]
        if isinstance(module, ShardedModule):
            state = replace(module._simple_fsdp, params=own)
        else:
            state = ShardedModuleState(
                params=own,
                cast_inputs=cast_inputs if name in boundaries else None,
                cast_output=mp_policy.output_dtype if module is model else None,
            )
        parametrize(module, state)


def _formats(
    form: WireFormat,
    param: nn.Parameter,
    mp_policy: MixedPrecisionPolicy,
    nodes: NodeGroups | None,
    to_replicas: bool,
) -> dict[str, Any]:
    """Return the fields of ``Communication`` for a wire format: none for what does not travel, or not narrower.

    Args:
        nodes: groups inside of nodes and between them, or of shards and of replicas; ``None``: of one node.
        to_replicas: whether ``nodes`` are replicas.
    """
    if param.ndim == 0:
        return {}
    narrow = (mp_policy.param_dtype or param.dtype).itemsize <= torch.bfloat16.itemsize
    gather = None if form.gather == "bf16" and narrow else form.gather
    two_steps = None
    if nodes is not None and form.reduce is not None:
        between = form.between_nodes or form.reduce
        if not to_replicas or sends_less_to_replicas(between, nodes.nodes, mp_policy.reduce_dtype):
            two_steps = TwoSteps(*nodes, between, to_replicas, form.error_feedback)
    return {"gather_format": gather, "reduce_format": form.reduce, "two_steps": two_steps}


def _per_parameter(
    option: str, value: Choice | dict[str, Choice], fqns: list[str], default: Choice
) -> dict[str, Choice]:
    """Return the choice for each FQN: that of the last glob that matches, or ``default``.

    Args:
        option: the name of the argument, for errors.
        value: one choice for all parameters, or one for each glob.
    """
    if not isinstance(value, dict):
        return dict.fromkeys(fqns, value)
    chosen = dict.fromkeys(fqns, default)
    for pattern, choice in value.items():
        chosen.update(dict.fromkeys(matching(option, "pattern", pattern, fqns), choice))
    return chosen

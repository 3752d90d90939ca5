"""``simple_fsdp``: the one call that shards a model."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from inductor_passes._compat import inside_torch_compile, skip_code

from ._messages import unknown
from .parametrization import State, parametrize
from .plan import blocks
from .sharding import ShardedModel, ShardedParameter, shard

Model = TypeVar("Model", bound=nn.Module)

_MODES = ("fully_shard", "hybrid_shard", "replicate")


def simple_fsdp(
    model: Model,
    mesh: DeviceMesh | None = None,
    *,
    mode: str | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | dict[str, bool] = True,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    gradient_divide_factor: float | None = None,
) -> Model:
    """Shard ``model``'s parameters over the ranks of ``mesh``, in place, and return it.

    Each parameter becomes a ``DTensor`` shard along dim 0 (uneven and empty shards included) under its own name:
    persistent memory for parameters, gradients and optimizer state falls by the number of ranks. Reading a
    parameter inside ``forward`` all-gathers it; its gradient is reduce-scattered and averaged over the ranks.
    Under ``torch.compile(model, backend="simplefsdp")`` these collectives are part of the graph: one gather and one
    reduction per parameter and graph, merged into buckets. Without it they run one by one where they are needed
    (right, but slow: for debugging), and full weights live until backward has used them.

    No collective runs in this call: every rank must hold the same initial values, as with ``fully_shard``.
    Build the optimizer afterwards, on ``model.parameters()``. Tied parameters stay one parameter, frozen ones stay
    frozen and are not reduced.

    Args:
        model: any module whose parameters are on the mesh's device (or on ``meta``). Modules with sharded
            parameters, and those that contain them, become instances of subclasses of the same name.
        mesh: 1-D ``DeviceMesh``; ``None``: all ranks of the default process group.
        mode: ``"fully_shard"``, or ``None`` to take it from the mesh. ``"hybrid_shard"`` and ``"replicate"`` are
            not there yet.
        mp_policy: ``torch.distributed.fsdp.MixedPrecisionPolicy``. ``param_dtype``: weights are cast to it before
            the gather. ``reduce_dtype``: gradients are cast to it before the reduction. ``cast_forward_inputs``:
            floating-point inputs of the model and of its repeated blocks are cast to ``param_dtype``, as FSDP2
            does where ``fully_shard`` is applied per block. ``output_dtype``: the model's floating-point outputs
            are cast to it. Shards, gradients and optimizer state keep the original dtype.
        reshard_after_forward: ``True`` drops full weights after forward and gathers them again in backward;
            ``False`` keeps them until backward. ``{glob: bool}`` over FQNs sets it per parameter: the last glob
            that matches counts, parameters matched by none are resharded. Honoured under ``torch.compile``.
        shard_placement_fn, gradient_divide_factor, ignored_params: not there yet; must be ``None``.

    Raises:
        TypeError: ``model``, ``mesh``, ``mp_policy`` or ``reshard_after_forward`` is of another type.
        ValueError: the mesh has another device than a parameter or too many dimensions; an unknown mode; a glob
            that matches nothing; a 0-dim parameter; a model that is sharded already.
        RuntimeError: no process group; called inside ``torch.compile``.
        NotImplementedError: an argument that is not there yet.

    Source: SimpleFSDP (arXiv 2411.00284), section 3; numerics of ``torch.distributed.fsdp.fully_shard``.
    """
    if inside_torch_compile():
        raise RuntimeError("simple_fsdp() was called inside torch.compile; shard the model first, then compile it")
    mp_policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    _check_types(model, mesh, mp_policy, reshard_after_forward)
    later = {
        "shard_placement_fn": shard_placement_fn,
        "ignored_params": ignored_params,
        "gradient_divide_factor": gradient_divide_factor,
    }
    for option, value in later.items():
        if value is not None:
            raise NotImplementedError(f"{option}={value!r}: not there yet; leave it None")
    if not dist.is_initialized():
        raise RuntimeError(
            "simple_fsdp() found no process group; call torch.distributed.init_process_group() first "
            "(torchrun sets the environment that it reads)"
        )
    params = dict(model.named_parameters())
    for fqn, param in params.items():
        _check_parameter(fqn, param)
    if mesh is None:
        device_types = {p.device.type for p in params.values()} - {"meta"}
        device_type = min(device_types) if device_types else ("cuda" if torch.cuda.is_available() else "cpu")
        if len(device_types) > 1:
            raise ValueError(f"parameters are on several devices: {sorted(device_types)}; move the model to one first")
        _check_mode(mode, 1)
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    _check_mode(mode, mesh.ndim)
    for fqn, param in params.items():
        if param.device.type not in (mesh.device_type, "meta"):
            raise ValueError(
                f"{fqn}: found on device {param.device.type!r}, but mesh is on {mesh.device_type!r}; move the model "
                f"there first (model.to({mesh.device_type!r})) or pass a mesh of its own device"
            )

    facts = _facts(list(params), params, mesh, mp_policy, reshard_after_forward)
    sharded = {id(param): (shard(param, mesh), facts[fqn]) for fqn, param in params.items()}
    _shard_modules(model, sharded, mp_policy)
    return model


# Where Dynamo gives up tracing the caller it would try this function next, and fail somewhere inside torch.
skip_code(simple_fsdp.__code__)


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
            if param is not None:
                module._parameters[attribute], own[attribute] = sharded[id(param)]
        parametrize(
            module,
            State(
                params=own,
                cast_inputs=cast_inputs if name in boundaries else None,
                cast_output=mp_policy.output_dtype if module is model else None,
            ),
        )


def _facts(
    fqns: list[str],
    params: dict[str, nn.Parameter],
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | dict[str, bool],
) -> dict[str, ShardedParameter]:
    model = ShardedModel(tuple(fqns))
    reshard = _per_parameter("reshard_after_forward", reshard_after_forward, fqns)
    return {
        fqn: ShardedParameter(
            fqn=fqn,
            model=model,
            group_name=mesh.get_group().group_name,
            group_size=mesh.size(),
            param_dtype=mp_policy.param_dtype if params[fqn].is_floating_point() else None,
            reduce_dtype=mp_policy.reduce_dtype,
            reshard_after_forward=reshard[fqn],
        )
        for fqn in fqns
    }


def _per_parameter(option: str, value: bool | dict[str, bool], fqns: list[str]) -> dict[str, bool]:
    if isinstance(value, bool):
        return dict.fromkeys(fqns, value)
    chosen = dict.fromkeys(fqns, True)
    for pattern, choice in value.items():
        matched = [fqn for fqn in fqns if fnmatchcase(fqn, pattern)]
        if not matched:
            raise ValueError(f"{option}: " + unknown("pattern", pattern, fqns))
        chosen.update(dict.fromkeys(matched, choice))
    return chosen


def _check_types(model: object, mesh: object, mp_policy: object, reshard_after_forward: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        raise TypeError(
            f"model: {type(model).__name__} has no forward of its own; pass the module that calls its members"
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh or None, found {type(mesh).__name__}")
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy: expected torch.distributed.fsdp.MixedPrecisionPolicy, found {type(mp_policy).__name__}"
        )
    if isinstance(reshard_after_forward, dict):
        wrong = {k: v for k, v in reshard_after_forward.items() if not (isinstance(k, str) and isinstance(v, bool))}
        if not wrong:
            return
        raise TypeError(f"reshard_after_forward: expected {{glob: bool}}, found {wrong!r}")
    if reshard_after_forward == "auto":
        raise NotImplementedError("reshard_after_forward='auto' needs a planner, which is not there yet; use True")
    if not isinstance(reshard_after_forward, bool):
        raise TypeError(
            f"reshard_after_forward: expected True, False or {{glob: bool}}, found {reshard_after_forward!r}"
        )


def _check_mode(mode: str | None, ndim: int) -> None:
    if mode is not None and mode not in _MODES:
        raise ValueError(unknown("mode", mode, _MODES))
    if ndim > 2:
        raise ValueError(
            f"mesh: found {ndim} dimensions, expected 1 (fully_shard) or 2 (hybrid_shard); "
            "pass the data-parallel sub-mesh, as in mesh['dp']"
        )
    found = mode or ("fully_shard", "hybrid_shard")[ndim - 1]
    if found != "fully_shard":
        why = f"mode {found!r}" if mode else f"mesh: {ndim} dimensions mean mode {found!r}, which"
        raise NotImplementedError(f"{why} is not there yet; use a 1-D mesh and mode 'fully_shard'")
    if ndim != 1:
        raise ValueError(f"mesh: found {ndim} dimensions, mode 'fully_shard' needs 1; pass a 1-D mesh")


def _check_parameter(fqn: str, param: nn.Parameter) -> None:
    if getattr(param, "simple_fsdp_info", None) is not None:
        raise ValueError(f"{fqn}: is sharded by simple_fsdp already; call it once per model")
    if isinstance(param, DTensor):
        raise NotImplementedError(f"{fqn}: is a DTensor already; tensor-parallel parameters are not there yet")
    if param.ndim == 0:
        raise ValueError(f"{fqn}: a 0-dim parameter has no dim to shard; make it 1-dim, as in param.reshape(1)")

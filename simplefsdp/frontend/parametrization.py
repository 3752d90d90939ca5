"""Modules whose parameters are shards to the outside and full weights to their own ``forward``.

[Note: reading a parameter]
A module that holds sharded parameters becomes an instance of a subclass that has a property for each of them.
The parameters themselves stay in ``module._parameters`` under their own names, so ``state_dict``,
``named_parameters``, optimizers and checkpoints see DTensors and nothing else. The property returns

- inside a call of any sharded module, in backward, and while torch.compile traces: the full weight (one all-gather);
- elsewhere: the shard, as an ordinary attribute would. Initialisation, ``repr`` or a read on rank 0 alone must not
  communicate. (A parametrized weight, of ``torch.nn.utils.parametrize``, is the result of a call: reading it gathers.)

Calls are counted per thread (see eager_resharding.py).
"""

import copy
import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from inductor_passes.ops.accumulate import receiver_of
from inductor_passes.ops.error_feedback import keep_errors
from inductor_passes.torch_compat.dynamo import get_eval_frame_callback, skip_code
from inductor_passes.torch_compat.modules import (
    global_backward_hooks,
    global_backward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
)
from simplefsdp.frontend import eager_resharding, embedding_lookup
from simplefsdp.frontend.compare_sharding import compare_sharding
from simplefsdp.frontend.fsdp_methods import FSDPMethods
from simplefsdp.frontend.initialization import sharded_init
from simplefsdp.frontend.other_tools import refuse_composable, refusing_methods
from simplefsdp.frontend.sharding import WITHOUT_VALUES, ShardedModel, ShardedParameter, shard
from simplefsdp.frontend.unshard import unshard
from simplefsdp.text.messages import fqn_range


@dataclass
class ShardedModuleState:
    """State of a sharded module, besides its class."""

    params: dict[str, ShardedParameter] = field(default_factory=dict)
    """Sharded parameters by attribute name; empty where only modules below hold parameters."""
    proxies: dict[str, Tensor] = field(default_factory=dict)
    """Proxies that collect full gradients while gradients are not reduced, by attribute name."""
    receivers: dict[str, Tensor] = field(default_factory=dict)
    """The receivers of these proxies, which compiled code has in their place, by attribute name."""
    ending: dict[str, Tensor] = field(default_factory=dict)
    """The proxies whose accumulated gradients are reduced in the next backward, by attribute name."""
    cast_inputs: torch.dtype | None = None
    """Dtype that floating-point arguments of ``forward`` are cast to."""
    cast_output: torch.dtype | None = None
    """Dtype that floating-point results of ``forward`` are cast to."""
    children: tuple[int, ...] = ()
    """``id`` of each child that is known to be sharded as far as it has to be."""
    model: ShardedModel | None = None
    """The model, on the module that was given to ``simple_fsdp``."""


class ShardedModule(nn.Module):
    """Mixed into the class of every module at or above a sharded parameter."""

    _simple_fsdp: ShardedModuleState

    def __new__(cls, *args, **kwargs):
        # Another such module, as a slice of nn.Sequential, is no sharded one, though what it is made of may be.
        return cls._simple_fsdp_base(*args, **kwargs)  # type: ignore[attr-defined]

    def __init_subclass__(cls, **kwargs):
        # What a model's own class does with its subclasses (registries, required arguments) is not for this one.
        pass

    def __call__(self, *args, **kwargs):
        # As nn.Module._call_impl does, which Dynamo would trace, with what calls it, once for each module.
        if torch.compiler.is_compiling() and not (
            self._forward_pre_hooks
            or self._forward_hooks
            or self._backward_pre_hooks
            or self._backward_hooks
            or self._compiled_call_impl
            or global_forward_pre_hooks
            or global_forward_hooks
            or global_backward_pre_hooks
            or global_backward_hooks
        ):
            return self.forward(*args, **kwargs)
        return _call(self, super().__call__, args, kwargs)

    def _apply(self, fn, recurse=True):
        result = super()._apply(lambda tensor: _apply_where_it_is_kept(fn, tensor), recurse)
        attach(self)
        return result

    def apply(self, fn):
        # Its function may draw random numbers.
        with sharded_init():
            return super().apply(fn)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args, **kwargs):
        assign = local_metadata.get("assign_to_params_buffers", False)
        for name, info in self._simple_fsdp.params.items():
            value = state_dict.get(prefix + name)
            param: Any = self._parameters[name]
            whole = isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_meta
            if whole and param is not None and value.shape == param.shape:
                kept_on = "cpu" if info.communication.device else param.device_mesh.device_type
                device = kept_on if assign and param.is_meta else param.device
                state_dict[prefix + name] = shard(value.to(device), param.device_mesh, info.placements)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        attach(self)

    def register_parameter(self, name, param):
        _check_replacement(self, name, param)
        super().register_parameter(name, param)
        if info := getattr(param, "simple_fsdp_info", None):  # tied to another one
            self._simple_fsdp.params[name] = info
        attach(self)

    def __delattr__(self, name):
        if info := self._simple_fsdp.params.get(name):
            raise RuntimeError(
                f"{info.fqn}: cannot be deleted after simple_fsdp() (does something register a parametrization, or "
                "prune?); do it before, or assign None to be rid of the parameter"
            )
        super().__delattr__(name)

    def __deepcopy__(self, memo):
        memo[id(self)] = twin = object.__new__(type(self))
        for param in self._parameters.values():
            # torch copies no DTensor whose local tensor begins inside of a storage, as a gradient in a bucket does.
            if param is not None and (grad := param.grad) is not None and id(grad) not in memo:
                memo[id(grad)] = grad.clone()
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        own = twin._simple_fsdp
        own.ending.clear()  # its backward is not waited for
        own.receivers = {name: receiver_of(proxy) for name, proxy in own.proxies.items()}
        attach(twin)
        return twin

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"a sharded {type(self).__name__} cannot be pickled, as process groups do not outlive their processes; "
            "save model.state_dict() with torch.distributed.checkpoint (and copy with copy.deepcopy())"
        )


def _call(module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    # While Dynamo traces, reads always gather; a stack would be a side effect inside a checkpointed region.
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    state: Any = module._simple_fsdp
    if state.children != (children := tuple(map(id, module._modules.values()))):
        _check_children(module)
        state.children = children
    if (model := state.model) is not None:
        if model.on_meta:
            _check_values(module, model)
        if model.uncompared and torch.is_grad_enabled():
            compare_sharding(model, module)
    # Not inside_torch_compile(): Dynamo would see a Python function called from here, and trace it.
    compiled = module._compiled_call_impl is not None or callable(get_eval_frame_callback())
    call = eager_resharding.enter(compiled)
    try:
        result = function(*args, **kwargs)
        eager_resharding.check_unchanged(call)
        return result
    finally:
        eager_resharding.leave(call)


# Otherwise Dynamo would take these frames for the top of the graph, and the call would not be on the stack where the
# graph breaks further down: what runs between two graphs must still see that it is inside a call.
for _function in (ShardedModule.__call__, _call):
    skip_code(_function.__code__)


def attach(module: nn.Module) -> None:
    """Put the ``ShardedParameter`` of each parameter on it, where the backend finds it by a graph input's identity.

    ``module.to()``, ``to_empty()`` and ``load_state_dict(assign=True)`` exchange parameters, or attributes on them.
    """
    state: Any = module._simple_fsdp
    for name, info in state.params.items():
        if isinstance(param := module._parameters.get(name), DTensor):
            param.simple_fsdp_info = info
            info.model.holders[info.fqn] = weakref.ref(module), name
            local = param._local_tensor
            if info.communication.pinned and not (local.is_meta or local.is_pinned()):
                param._local_tensor = local = local.pin_memory()
            if info.communication.feeds_back and not local.is_meta:
                _keep_errors(info, local)


def _keep_errors(info: ShardedParameter, local: Tensor) -> None:
    """Let the rounding errors of a parameter, zeros at first, be those of the memory that its shard has now."""
    device, errors = info.communication.device or local.device, info.model.errors
    found = errors.get(info.fqn)
    errors[info.fqn] = torch.zeros(local.numel(), device=device) if found is None else found.to(device)
    keep_errors(local, errors[info.fqn])


def tie_again(root: nn.Module, _incompatible_keys: Any = None) -> None:
    """Let modules that held one parameter hold one again, after ``load_state_dict(assign=True)`` gave each its own.

    The parameter that was loaded last counts, as it does where values are copied.
    """
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for name, info in module._simple_fsdp.params.items() if isinstance(module, ShardedModule) else ():
            holders.setdefault(id(info), []).append((module, name))
    for tied in holders.values():
        loaded = [param for module, name in tied if (param := module._parameters[name]) is not None]
        if len({*map(id, loaded)}) > 1:
            last = next((param for param in reversed(loaded) if not param.is_meta), loaded[-1])
            for module, name in tied:
                module._parameters[name] = last


def _apply_where_it_is_kept(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return ``fn(tensor)``, on CPU for an offloaded shard or gradient: ``module.to("cuda")`` moves other tensors."""
    info: ShardedParameter | None = getattr(tensor, "simple_fsdp_info", None)
    if info is not None:
        offloaded = info.communication.device is not None
    else:
        offloaded = (
            isinstance(tensor, DTensor) and tensor.device.type == "cpu" and tensor.device_mesh.device_type != "cpu"
        )
    result = fn(tensor)
    return result.cpu() if offloaded and not result.is_meta else result


@torch.compiler.disable
def _check_values(module: nn.Module, model: ShardedModel) -> None:
    """Raise if a parameter or buffer is on ``meta`` still."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    if without := [name for name, tensor in tensors if tensor.is_meta]:
        raise RuntimeError(WITHOUT_VALUES.format(fqn_range(without)))
    model.on_meta.clear()


@torch.compiler.disable
def _check_children(module: nn.Module) -> None:
    """Raise if a child was added after sharding and has parameters of its own: they would not be reduced."""
    for name, child in module.named_children():
        for fqn, param in child.named_parameters(prefix=name):
            known = isinstance(param, DTensor) or getattr(param, "simple_fsdp_ignored", False)
            if param.requires_grad and not known:
                raise RuntimeError(
                    f"{fqn}: a module added to a sharded {type(module).__name__} is not sharded, nor are its gradients "
                    "reduced; add it before simple_fsdp()"
                )


def _check_replacement(module: ShardedModule, name: str, param: nn.Parameter | None) -> None:
    """Raise unless ``param`` may become ``module``'s parameter ``name``."""
    old = module._parameters.get(name)
    info = module._simple_fsdp.params.get(name)
    if param is None or (info is None and old is not None):
        return
    if info is None:
        raise RuntimeError(
            f"{name}: a parameter added to a sharded {type(module).__name__} would not be sharded, nor its gradient "
            "reduced; add it before simple_fsdp()"
        )
    found = f"a {type(param).__name__} of shape {tuple(param.shape)}"
    offloaded = info.communication.device is not None
    if isinstance(param, DTensor):
        here = not offloaded or param.device.type in ("cpu", "meta")
        if param.placements == info.placements and tuple(param.shape) == info.shape and here:
            return
        found += f" placed as {param.placements}" + f" on {param.device.type}" * offloaded
    raise RuntimeError(
        f"{info.fqn}: {found} was assigned where simple_fsdp() had put a DTensor of shape {info.shape} placed as "
        f"{info.placements}{' on cpu' * offloaded}. Copy the values into the shard (load_state_dict does), or assign "
        "before simple_fsdp()"
    )


def _property(name: str) -> property:
    def get(self):
        param = self._parameters[name]
        if not isinstance(param, DTensor):
            return param  # None, or what torch.func.functional_call put there
        state = self._simple_fsdp
        info = state.params[name]
        # Whatever is read here for each parameter is traced, and checked before each step.
        if torch.compiler.is_compiling() and not state.proxies:
            full = unshard(param, info.key)
            return full if info.tensor_parallel is None else info.as_it_was(full)
        # functional_call may put something computed from the parameter there.
        proxy = state.proxies.get(name) if param.requires_grad and param.is_leaf else None
        if torch.compiler.is_compiling():
            if proxy is None or eager_resharding.checkpoint.is_recomputing:
                # What a checkpoint calls again must save what it saved, also when the accumulation is over.
                return info.as_it_was(unshard(param, info.key, proxy))
            if name in state.ending:
                return info.as_it_was(unshard(param, info.key, proxy, True))
            return info.as_it_was(unshard(param, info.key, None, False, state.receivers[name]))
        try:
            return eager_resharding.read(param, info, proxy)
        except AttributeError as error:
            # nn.Module.__getattr__ would swallow it and return the shard.
            raise RuntimeError(f"reading {name!r} failed: {error}") from error

    # Where Dynamo cannot trace a forward it would try what that calls, and make a graph of a gather alone.
    skip_code(get.__code__)
    return property(get)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of ``module`` other than ``forward`` read full weights when it is called from outside.

    For methods such as ``generate`` and ``encode``. Under ``torch.compile`` every method may read full weights. As
    ``torch.distributed.fsdp``'s function of this name.

    Raises:
        TypeError: ``module`` is not sharded.
        AttributeError: ``module`` has no such method.
    """
    if not isinstance(module, ShardedModule):
        raise TypeError(f"module: expected one that simple_fsdp() has sharded, found a {type(module).__name__}")
    method = getattr(module, method_name)
    if not isinstance(method, types.MethodType):
        raise AttributeError(f"method_name: {method_name!r} is no method of {type(module).__name__}")

    def inside_a_call(self, *args, **kwargs):
        return _call(self, method.__func__.__get__(self), args, kwargs)

    skip_code(inside_a_call.__code__)
    setattr(module, method_name, types.MethodType(functools.wraps(method.__func__)(inside_a_call), module))


def _casting(forward: Callable[..., Any]) -> Callable[..., Any]:
    # In forward and not in a hook: the casts are then part of the compiled graph.
    @functools.wraps(forward)
    def cast_and_forward(self, *args, **kwargs):
        state = self._simple_fsdp
        args, kwargs = _cast((args, kwargs), state.cast_inputs)
        return _cast(forward(self, *args, **kwargs), state.cast_output)

    return cast_and_forward


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tree
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


def _flat_weights(rnn: nn.RNNBase) -> list[Any]:
    # nn.RNNBase keeps a list of its parameters, which would keep them whole.
    return [getattr(rnn, name, None) for name in rnn._flat_weights_names]


_RNN: dict[str, Any] = {
    "_flat_weights": property(_flat_weights, lambda _rnn, _weights: None),
    "__getstate__": object.__getstate__,
    "__setstate__": nn.Module.__setstate__,
    "_update_flat_weights": lambda _rnn: None,
    "flatten_parameters": lambda _rnn: None,
}


@functools.cache
def _sharded_class(base: type[nn.Module], names: tuple[str, ...], casts: bool, exchanges: bool) -> type[nn.Module]:
    # One class per (class, names) and nothing of the instance in it: instances with other policies share it, and
    # torch.compile, which guards on the class, compiles a repeated block once.
    namespace: dict[str, Any] = {name: _property(name) for name in names}
    namespace |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    namespace["_simple_fsdp_base"] = base
    forward = embedding_lookup.forward if exchanges else base.forward
    if casts or exchanges:
        namespace["forward"] = _casting(forward) if casts else forward
    if issubclass(base, nn.RNNBase):
        namespace |= _RNN
    namespace |= refusing_methods(base)
    # Controls last: a model's own method of such a name is the one that its code means.
    return type(base.__name__, (ShardedModule, base, FSDPMethods), namespace)


def parametrize(module: nn.Module, state: ShardedModuleState) -> None:
    """Make reads of ``state.params`` gather while ``module``, or a sharded module above it, is called."""
    casts = state.cast_inputs is not None or state.cast_output is not None
    base = getattr(type(module), "_simple_fsdp_base", type(module))
    module._simple_fsdp = state  # type: ignore[assignment]
    own_forward = module.__dict__.get("forward")
    if casts and own_forward is not None and not isinstance(module, ShardedModule):  # patched, as some libraries do
        forward = _casting(lambda _self, *args, **kwargs: own_forward(*args, **kwargs))
        module.__dict__["forward"] = types.MethodType(forward, module)
        casts = False
    if isinstance(module, nn.RNNBase):
        for name in ("_flat_weights", "_flat_weight_refs"):
            module.__dict__.pop(name, None)
    exchanges = any(info.communication.is_exchanged for info in state.params.values())
    module.__class__ = _sharded_class(base, tuple(state.params), casts, exchanges)  # type: ignore[arg-type]
    refuse_composable(module)
    attach(module)

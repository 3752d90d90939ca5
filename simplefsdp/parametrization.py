"""Modules whose parameters are shards to the outside and full weights to their own ``forward``.

[Note: reading a parameter]
A module that holds sharded parameters becomes an instance of a subclass that has a property for each of them.
The parameters themselves stay in ``module._parameters`` under their own names, so ``state_dict``,
``named_parameters``, optimizers and checkpoints see DTensors and nothing else. The property returns

- inside a call of any sharded module, in backward, and while torch.compile traces: the full weight (one all-gather);
- elsewhere: the shard, as an ordinary attribute would. Initialisation, ``repr`` or a read on rank 0 alone must not
  communicate.

Calls are counted per thread.
"""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from inductor_passes._compat import skip_code

from .sharding import ShardedParameter, unshard


class _Calls(threading.local):
    depth = 0


_calls = _Calls()


@dataclass(frozen=True)
class State:
    """What a sharded module knows besides its class."""

    params: dict[str, ShardedParameter]
    """By attribute name; empty where only modules below hold parameters."""
    cast_inputs: torch.dtype | None = None
    """Dtype that floating-point arguments of ``forward`` are cast to."""
    cast_output: torch.dtype | None = None
    """Dtype that floating-point results of ``forward`` are cast to."""


class ShardedModule(nn.Module):
    """Mixed into the class of every module at or above a sharded parameter."""

    _simple_fsdp: "State"

    def __call__(self, *args, **kwargs):
        # While Dynamo traces, reads always gather; a counter would be a side effect inside a checkpointed region.
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        _calls.depth += 1
        try:
            return super().__call__(*args, **kwargs)
        finally:
            _calls.depth -= 1

    def _apply(self, fn, recurse=True):
        result = super()._apply(fn, recurse)
        attach(self)
        return result

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        attach(self)


# Otherwise Dynamo would take this frame for the top of the graph, and the count would be lost where the graph breaks
# further down: what runs between two graphs must still see that it is inside a call.
skip_code(ShardedModule.__call__.__code__)


def attach(module: nn.Module) -> None:
    """Put what is known of its parameters on them, where the backend looks for it by a graph input's identity.

    ``module.to()``, ``to_empty()`` and ``load_state_dict(assign=True)`` exchange parameters or what is on them.
    """
    state: Any = module._simple_fsdp
    for name, info in state.params.items():
        if isinstance(param := module._parameters.get(name), DTensor):
            param.simple_fsdp_info = info


def _inside_a_call() -> bool:
    # The backward of a checkpointed region may call any function of the user's, not only modules.
    return _calls.depth > 0 or torch._C._current_graph_task_id() != -1


def _read(module: ShardedModule, name: str) -> Tensor:
    param = module._parameters[name]
    if not (torch.compiler.is_compiling() or _inside_a_call()):
        return param  # type: ignore[return-value]
    info = module._simple_fsdp.params[name]
    if not isinstance(param, DTensor):
        raise RuntimeError(
            f"{info.fqn}: found a {type(param).__name__} where simple_fsdp had put a DTensor shard. Was the parameter "
            "assigned after sharding? Copy values into the shard instead, or assign before simple_fsdp()."
        )
    return unshard(param, info)


def _property(name: str) -> property:
    def get(self):
        if torch.compiler.is_compiling():
            return _read(self, name)
        try:
            return _read(self, name)
        except AttributeError as error:
            # nn.Module.__getattr__ would swallow it and return the shard.
            raise RuntimeError(f"reading {name!r} failed: {error}") from error

    return property(get)


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


@functools.cache
def _sharded_class(base: type[nn.Module], names: tuple[str, ...], casts: bool) -> type[nn.Module]:
    # One class per (class, names) and nothing of the instance in it: instances with other policies share it, and
    # torch.compile, which guards on the class, compiles a repeated block once.
    namespace: dict[str, Any] = {name: _property(name) for name in names}
    namespace |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    if casts:
        namespace["forward"] = _casting(base.forward)
    return type(base.__name__, (ShardedModule, base), namespace)


def parametrize(module: nn.Module, state: State) -> None:
    """Make reads of ``state.params`` gather while ``module``, or a sharded module above it, is called."""
    casts = state.cast_inputs is not None or state.cast_output is not None
    module._simple_fsdp = state  # type: ignore[assignment]
    module.__class__ = _sharded_class(type(module), tuple(state.params), casts)  # type: ignore[arg-type]
    attach(module)

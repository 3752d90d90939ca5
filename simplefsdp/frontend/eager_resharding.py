"""Eager mode: gather a weight where it is read, free it when the module is done, gather it again in backward.

[Note: calls]
The calls of sharded modules form a stack. A weight is gathered at most once while the innermost call that read it
lasts, and freed when that call ends. Values that autograd saves for backward would keep a weight alive. So the
outermost call installs hooks that save, in place of any view of a gathered weight, the parameter and the geometry of
the view. In backward the first use gathers the weight again and the last use frees it; nothing else is computed again.

All reads of a parameter in one outermost call share an unsharded proxy, so that their gradients are summed before one
reduction. Whether a collective is issued depends on the program alone, never on reference counts: ranks would diverge.

Under ``torch.compile`` none of this runs; the passes do the same.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from inductor_passes.torch_compat.autograd import (
    after_backward,
    dispatch_modes,
    in_backward,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks,
    temporarily_clear_interpreter_stack,
    without_dispatch_modes,
)
from inductor_passes.torch_compat.dtensor import DTensorSpec
from simplefsdp.frontend.eager_order import note_gather, note_reduction
from simplefsdp.frontend.sharding import ShardedParameter, all_gather
from simplefsdp.frontend.unshard import gather, unsharded_proxy

_Key = tuple[int, bool, bool, int]


@dataclass(eq=False)
class _Outermost:
    """State that all calls inside one outermost call share."""

    proxies: dict[int, Tensor] = field(default_factory=dict)
    """Unsharded proxies of the parameters read so far, by ``id`` of the parameter."""
    weights: dict[int, "_SavedWeight"] = field(default_factory=dict)
    """Weights that backward may need, by ``id`` of the parameter."""
    storages: dict[int, tuple[StorageWeakRef, "_SavedWeight", int]] = field(default_factory=dict)
    """Gathered weights and their versions, by storage; the reference keeps the address from being used again."""
    pack: Callable[[Tensor], Any] | None = None
    """The pack hook on saved tensors that this library pushed; ``None``: it pushed none."""


@dataclass(frozen=True, eq=False)
class _GatheredWeight:
    """A gathered weight, and its version when it was gathered."""

    tensor: Tensor
    fqn: str
    version: int
    storage: int

    @classmethod
    def of(cls, tensor: Tensor, fqn: str) -> "_GatheredWeight":
        return cls(tensor, fqn, _version(tensor), tensor.untyped_storage()._cdata)

    def check_unchanged(self) -> None:
        """Raise ``RuntimeError`` if the weight was changed in place: the shard would not change."""
        if (_version(self.tensor), self.tensor.untyped_storage()._cdata) != (self.version, self.storage):
            raise RuntimeError(CHANGED_WHILE_UNSHARDED.format(self.fqn))


CHANGED_WHILE_UNSHARDED = (
    "{}: was changed in place while it was unsharded; that is a gathered copy, and the change would be lost. Change "
    "the shard, outside of forward and under torch.no_grad()"
)


@dataclass(frozen=True, eq=False)
class _UnshardedWeight:
    """A weight that ``module.unshard()`` gathered, and what it depends on."""

    param: DTensor
    full: _GatheredWeight
    proxy: Tensor | None
    requires_grad: bool
    versions: tuple[int, int]


@dataclass(eq=False)
class _Call:
    outermost: _Outermost
    gathered: dict[_Key, "_GatheredWeight"] = field(default_factory=dict)
    was_recomputing: bool = False
    """The value of ``checkpoint.is_recomputing`` before this call."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.held: dict[int, _UnshardedWeight] = {}
        """Weights that ``module.unshard()`` gathered, by ``id`` of the parameter."""
        self.kept: WeakSet[_SavedWeight] = WeakSet()
        """Weights that ``reshard_after_forward=False`` keeps for backward."""
        self.stop_watching: Callable[[], None] = lambda: None


_thread = _Thread()


class _Checkpoint:
    """Whether the current call of a sharded module belongs to an activation checkpoint.

    Both calls of a checkpointed function must compute the same, however parameters are set in between, so a call that
    backward makes again, or may make again, takes no part in the end of an accumulation.

    [Note: process-wide, unlike the calls]
    Dynamo guards on ``is_recomputing`` where compiled code depends on it. Dynamo cannot guard on an attribute of a
    ``threading.local``, so this is one flag for the process: ``enter`` sets it and ``leave`` restores it. Backward may
    call a checkpointed function on another thread, as the autograd engine does for each GPU; the thread that called
    ``backward`` waits meanwhile, so calls of two threads never overlap. Two threads that train at once are not
    supported (nor are they by FSDP2).
    """

    is_recomputing = False


checkpoint = _Checkpoint()


class _SavedWeight:
    """A weight that backward needs: it is gathered again there, or was kept since forward."""

    def __init__(self, param: DTensor, info: ShardedParameter):
        self.param, self.info = param, info
        self.dtype = info.communication.param_dtype or param.dtype
        self.versions = _versions(param)
        self.saved = self.unused = 0
        self.full: Tensor | None = None
        """The weight while it is kept, or gathered again; or a view of it, as what is read is found by its memory."""

    def save(self, view: Tensor) -> "_SavedView":
        """Return what autograd saves in place of a view of the weight."""
        self.saved += 1
        if not self.info.communication.reshard_after_forward and self.full is None:
            with without_dispatch_modes():  # as in _gather
                self.full = view.detach()
        return _SavedView(self, view.size(), view.stride(), int(view.storage_offset()))

    def get(self) -> Tensor:
        full = self._gather() if self.full is None else self.full
        if not in_backward():  # somebody inspects the graph
            return full
        if self.unused == 0:
            self.full, self.unused = full, self.saved
            # A branch that backward does not take would keep it.
            after_backward(self.drop)
        self.unused -= 1
        if self.unused == 0:
            self.drop()
        return full

    def _gather(self) -> Tensor:
        if _versions(self.param) != self.versions:
            raise RuntimeError(
                f"{self.info.fqn}: was changed between forward and backward, which needs the weight that forward used; "
                "call backward before changing parameters"
            )
        note_gather(self.info)
        with torch.no_grad():
            return all_gather(self.param._local_tensor, self.info.communication)

    def drop(self) -> None:
        self.full, self.unused = None, 0


@dataclass(frozen=True)
class _SavedView:
    """A placeholder that is saved for backward in place of a view of a gathered weight."""

    weight: _SavedWeight
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def get(self) -> Tensor:
        return self.weight.get().as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, eq=False)
class _SavedDTensor:
    """A placeholder in place of a ``DTensor`` whose local tensor is a view of a gathered weight."""

    local: _SavedView
    spec: DTensorSpec

    def get(self) -> DTensor:
        return DTensor(self.local.get(), self.spec, requires_grad=False)


@torch.compiler.disable
def enter(compiled: bool) -> _Call:
    """Begin the call of a sharded module; ``compiled``: Dynamo sees the functions that the module calls."""
    calls = _thread.calls
    if calls:
        call = _Call(calls[-1].outermost)
    else:
        call = _Call(_Outermost())
        # Only the innermost hooks run, so the user's must not be covered, nor the compiler's.
        if not (compiled or saved_tensors_hooks() is not None or in_backward()):
            storages = call.outermost.storages
            call.outermost.pack = lambda tensor: _pack(storages, tensor)
            push_saved_tensors_hooks(call.outermost.pack, _unpack)
    calls.append(call)
    call.was_recomputing = checkpoint.is_recomputing
    checkpoint.is_recomputing = in_backward() or not _only_ours(call.outermost)
    return call


def _only_ours(outermost: _Outermost) -> bool:
    hooks = saved_tensors_hooks()
    return hooks is None or hooks[0] is outermost.pack


@torch.compiler.disable
def leave(call: _Call) -> None:
    """End the call of a sharded module, whether it returned or raised."""
    _thread.calls.pop()
    checkpoint.is_recomputing = call.was_recomputing
    if not _thread.calls:
        _drop_held()
        if call.outermost.pack is not None:
            pop_saved_tensors_hooks()
        call.outermost.proxies.clear()


@torch.compiler.disable
def check_unchanged(call: _Call) -> None:
    """Raise if a weight was changed in place during ``call``."""
    for full in call.gathered.values():
        full.check_unchanged()
    if len(_thread.calls) == 1:
        for held in _thread.held.values():
            held.full.check_unchanged()


@torch.compiler.disable
def read(param: DTensor, info: ShardedParameter, proxy: Tensor | None) -> Tensor:
    """Return the full weight inside a call, in backward or while ``unshard`` holds it; elsewhere ``param``, the shard.

    Args:
        proxy: where the gradient flows if it is not reduced.
    """
    if (held := _thread.held.get(id(param))) is not None:
        if held.proxy is not proxy or held.requires_grad != param.requires_grad or held.versions != _versions(param):
            raise RuntimeError(f"{info.fqn}: was changed since unshard(); call unshard() after such changes")
        return info.as_it_was(held.full.tensor)
    # The backward of a checkpointed region may call any function of the user's, not only modules.
    if not _thread.calls:
        return info.as_it_was(_gather(param, info, _Outermost(), proxy)) if in_backward() else param
    # Selective checkpointing counts operators, under a mode of its own: what it recomputes must gather as its forward.
    key = (id(param), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dispatch_modes())
    for call in reversed(_thread.calls):
        if key in call.gathered:
            return info.as_it_was(call.gathered[key].tensor)
    call = _thread.calls[-1]
    full = _gather(param, info, call.outermost, proxy)
    call.gathered[key] = _GatheredWeight.of(full, info.fqn)
    return info.as_it_was(full)


def hold_unsharded(params: list[tuple[DTensor, ShardedParameter, Tensor | None]]) -> None:
    """Gather weights and keep them until ``release_unsharded``, the end of the next call or an optimizer's step."""
    outermost = _Outermost()
    if not _thread.held:
        # Fused and foreach optimizers do not change a shard's version.
        _thread.stop_watching = register_optimizer_step_post_hook(lambda *_: _drop_held()).remove
    with torch.inference_mode(False), torch.enable_grad():  # who uses them later may want gradients
        for param, info, proxy in params:
            full = _GatheredWeight.of(_gather(param, info, outermost, proxy), info.fqn)
            _thread.held[id(param)] = _UnshardedWeight(param, full, proxy, param.requires_grad, _versions(param))


def release_unsharded(params: list[DTensor]) -> None:
    released = [held for param in params if (held := _thread.held.pop(id(param), None))]
    if not _thread.held:
        _drop_held()
    for held in released:
        held.full.check_unchanged()


def _drop_held() -> None:
    _thread.held.clear()
    _thread.stop_watching()
    _thread.stop_watching = lambda: None


@temporarily_clear_interpreter_stack()  # of torch.func: the weight is the same for all of its levels
def _gather(param: DTensor, info: ShardedParameter, outermost: _Outermost, proxy: Tensor | None) -> Tensor:
    comm = info.communication
    note_gather(info)
    if not (torch.is_grad_enabled() and param.requires_grad):
        full = all_gather(param._local_tensor, comm)
    else:
        if proxy is None:
            proxy = outermost.proxies.get(id(param))
        if proxy is None:
            with without_dispatch_modes():  # selective checkpointing would count what its recomputation need not do
                proxy = outermost.proxies[id(param)] = unsharded_proxy(param, comm)
                proxy.register_hook(lambda _gradient: note_reduction(info))
        full = gather(param, comm, proxy)
    if comm.hooks_group is not None:  # what autograd saves of such a weight is its own, and stays until backward
        return full
    storage = full.untyped_storage()
    if storage._cdata != param._local_tensor.untyped_storage()._cdata:
        saved = outermost.weights.setdefault(id(param), _SavedWeight(param, info))
        outermost.storages[storage._cdata] = StorageWeakRef(storage), saved, _version(full)
        if not comm.reshard_after_forward:
            _thread.kept.add(saved)
    return full


def drop_kept(params: list[DTensor]) -> None:
    """Free weights that are kept for backward, which gathers them again."""
    dropped = set(map(id, params))
    for saved in [*_thread.kept]:
        if id(saved.param) in dropped:
            saved.drop()


def _versions(param: DTensor) -> tuple[int, int]:
    return param._version, param._local_tensor._version


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _pack(storages: dict[int, tuple[StorageWeakRef, _SavedWeight, int]], tensor: Tensor) -> Any:
    if type(tensor) is DTensor:
        local = _pack(storages, tensor._local_tensor)
        return _SavedDTensor(local, tensor._spec) if isinstance(local, _SavedView) else tensor
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return tensor
    _, weight, version = storages.get(tensor.untyped_storage()._cdata, (None, None, 0))
    # A weight that was changed in place, or is seen as another type, could not be had back by gathering.
    if (
        weight is None
        or tensor._version != version
        or tensor.dtype is not weight.dtype
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return tensor
    return weight.save(tensor)


def _unpack(saved: Any) -> Tensor:
    return saved.get() if isinstance(saved, _SavedView | _SavedDTensor) else saved

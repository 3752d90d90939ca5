"""Gradient accumulation: full gradients are added up on each rank, and reduced together with the last micro-batch.

[Note: proxies]
A parameter whose gradients are added up has a *proxy*: a leaf of the shape of the full weight, without the memory of
one. Every read of the parameter in eager mode sends its gradient to the proxy, and autograd adds the gradients up in
``proxy.grad``: the unsharded accumulated gradient. Compiled code adds them there itself, for the gradient of the
proxy's *receiver* (``inductor_passes/ops/accumulate.py``).

The next backward after ``set_requires_gradient_sync(True)`` ends the accumulation. Code that is compiled for this
backward adds ``proxy.grad`` to each gradient as it comes, and reduces the sum in the bucket that the plan has for it
(``inductor_passes/ops/accumulate.py``). In eager mode, and where forward ran before the switch was set, gradients go to
the proxies once more. In both cases the first gradient that comes arranges that, at the end of this backward, whatever
is left in the proxies is reduced together (also for parameters that this backward did not reach), and that all proxies
are removed. Where a reentrant checkpoint has begun this backward in another one, in which a gradient has come before,
the end is that of the other. A graph that was made earlier may still hold a proxy; the backward of that graph is
followed by a reduction of its own.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from inductor_passes.ops.accumulate import check_complete, is_taken, offer, received, receiver_of, restore, withdraw
from inductor_passes.torch_compat.autograd import after_backward, current_backward, is_nested
from inductor_passes.torch_compat.dtensor import dtensor
from simplefsdp.frontend.eager_order import note_reduction
from simplefsdp.frontend.gather_hooks import plain_stand_in
from simplefsdp.frontend.sharding import ShardedParameter, all_reduce_max, reduce_coalesced, sum_dtype


@dataclass(frozen=True)
class ShardedAttribute:
    """A sharded parameter as an attribute of a module."""

    name: str
    param: DTensor
    params: dict[str, ShardedParameter]
    """All sharded parameters of the module, by attribute name."""
    proxies: dict[str, Tensor]
    """The proxies of the module, by attribute name."""
    receivers: dict[str, Tensor]
    """The receivers of these proxies, by attribute name."""
    ending: dict[str, Tensor]
    """Proxies whose accumulation ends with the next backward, by attribute name."""

    @property
    def info(self) -> ShardedParameter:
        return self.params[self.name]

    @property
    def proxy(self) -> Tensor | None:
        return self.proxies.get(self.name)


def sharded_attributes(root: Any) -> list[ShardedAttribute]:
    """Return every sharded parameter below ``root``; a tied one as often as it is held."""
    states: list[tuple[Any, Any]] = [
        (module, state)
        for module in cast(nn.Module, root).modules()
        if (state := module.__dict__.get("_simple_fsdp")) is not None
    ]
    return [
        ShardedAttribute(name, param, state.params, state.proxies, state.receivers, state.ending)
        for module, state in states
        for name in state.params
        if (param := module._parameters[name]) is not None
    ]


def begin_accumulation(found: list[ShardedAttribute]) -> None:
    """Add up gradients from now on, to what was added up before and has not been reduced."""
    check_complete()
    proxies: dict[int, Tensor] = {}
    receivers: dict[int, Tensor] = {}
    for each in found:
        if each.proxy is not None and (ending := _endings.pop(each.proxy, None)) is not None:
            ending.forget(each.proxy)
        each.ending.pop(each.name, None)
        proxy = proxies[id(each.param)] = each.proxies[each.name] = proxies.get(id(each.param), _proxy(each))
        receiver = receivers.get(id(proxy), each.receivers.get(each.name))
        receivers[id(proxy)] = each.receivers[each.name] = receiver_of(proxy) if receiver is None else receiver
        _accumulated[each.param] = each.proxies[each.name]
    _check_optimizers()


def reduce_in_next_backward(found: list[ShardedAttribute]) -> None:
    """Reduce what was added up in the next backward that adds to it, and from then on in every backward."""
    check_complete()
    if ended := [each for each in found if each.proxy is not None and each.proxy not in _endings]:
        _LastBackward(ended)


def reduce_now(found: list[ShardedAttribute]) -> None:
    """Reduce what was added up, and go on adding up. A collective: every rank must call it."""
    _reduce(_distinct([(each, each.proxy) for each in found if each.proxy is not None]))


class _LastBackward:
    """The end of an accumulation, due with the next backward."""

    def __init__(self, found: list[ShardedAttribute]):
        self.found = [(each, proxy) for each in found if (proxy := each.proxy) is not None]
        self.hooks: dict[int, list[Any]] = {}
        self.backwards: set[int] = set()
        """The backwards that have reached a proxy and are not over: one in another, or one that has failed."""
        for each, proxy in _distinct(self.found):
            hooks = self.hooks[id(proxy)] = []
            if proxy.requires_grad:  # called too where the gradient is None, as it has been taken
                leaves = proxy, each.receivers[each.name]
                hooks += [leaf.register_post_accumulate_grad_hook(self._came) for leaf in leaves]
            if each.param.requires_grad:
                offer(proxy)
                hooks.append(each.param.register_post_accumulate_grad_hook(functools.partial(_received, proxy)))
        for each, proxy in self.found:
            _endings[proxy] = self
            if each.param.requires_grad:
                each.ending[each.name] = proxy

    def forget(self, proxy: Tensor) -> None:
        """Leave out a proxy whose accumulation goes on."""
        self.found = [member for member in self.found if member[1] is not proxy]
        for hook in self.hooks.pop(id(proxy)):
            hook.remove()
        withdraw(proxy)

    def _came(self, _leaf: Tensor) -> None:
        backward = current_backward()
        if backward in self.backwards:
            return
        if not is_nested():
            self.backwards.clear()
        self.backwards.add(backward)
        after_backward(functools.partial(self._finish, backward))

    def _finish(self, backward: int) -> None:
        self.backwards.discard(backward)
        if is_nested() and (self.backwards or any(is_taken(proxy) for _, proxy in self.found)):
            return  # the backward around it comes here, too
        ended = _distinct(self.found)
        receivers = {id(proxy): each.receivers[each.name] for each, proxy in ended}
        for each, proxy in self.found:
            each.proxies.pop(each.name, None)
            each.receivers.pop(each.name, None)
            each.ending.pop(each.name, None)
            _endings.pop(proxy, None)
            _accumulated.pop(each.param, None)
        for _, proxy in ended:
            self.forget(proxy)
        _reduce(ended)
        for each, proxy in ended:
            if proxy.requires_grad:
                late = functools.partial(_reduce_late, each, proxy)
                for leaf in (proxy, receivers[id(proxy)]):
                    leaf.register_post_accumulate_grad_hook(late)


_endings: Any = WeakTensorKeyDictionary()
"""The last backward that each proxy waits for."""

_accumulated: Any = WeakTensorKeyDictionary()
"""The proxy of each parameter whose gradients are added up."""


def check_reduced(parameters: Iterable[Any]) -> None:
    """Raise ``RuntimeError`` if the gradient of one of these parameters was added up and has not been reduced."""
    for param in parameters if _accumulated else ():
        if (proxy := _accumulated.get(param)) is not None:
            restore(proxy)
            if proxy.grad is not None:
                raise RuntimeError(
                    f"{param.simple_fsdp_info.fqn}: its gradient was added up and never reduced; "
                    "set_requires_gradient_sync(True) comes before the last backward, not after it"
                )


@functools.cache
def _check_optimizers() -> None:
    """Let every optimizer of this process call ``check_reduced`` before each step, or after the step's closure.

    Trainers such as Lightning's run the last backward in a closure that they give to ``step``.
    """

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        def check_parameters() -> None:
            check_reduced(param for group in optimizer.param_groups for param in group["params"])

        by_name = "closure" in kwargs
        closure = kwargs["closure"] if by_name else next(iter(args[1:]), None)  # behind the optimizer itself
        if not callable(closure):
            check_parameters()
            return None

        def checked() -> Any:
            loss = closure()
            check_parameters()
            return loss

        return (args, {**kwargs, "closure": checked}) if by_name else ((args[0], checked, *args[2:]), kwargs)

    register_optimizer_step_pre_hook(check)


def _proxy(each: ShardedAttribute) -> Tensor:
    """Return a leaf of the shape and dtype of the full gradient, without the memory of one."""
    if each.proxy is not None:
        return each.proxy
    comm = each.info.communication
    dtype = sum_dtype(comm, each.param.dtype)
    local = plain_stand_in(each.param._local_tensor)
    leaf = local.new_empty((), dtype=dtype, device=comm.device).expand(comm.shape)
    return leaf.requires_grad_(dtype.is_floating_point or dtype.is_complex)


def _distinct(members: list[tuple[ShardedAttribute, Tensor]]) -> list[tuple[ShardedAttribute, Tensor]]:
    """Return each proxy once, with one of the attributes that hold its parameter."""
    return list({id(proxy): (each, proxy) for each, proxy in members}.values())


def _reduce(members: list[tuple[ShardedAttribute, Tensor]]) -> None:
    """Add accumulated gradients, averaged over the ranks, to the gradients of parameters that any rank has one for."""
    _add_reduced([member for member, on_any in zip(members, _on_any_rank(members), strict=True) if on_any])


def _add_reduced(members: list[tuple[ShardedAttribute, Tensor]]) -> None:
    full = []
    for each, proxy in members:
        whole, proxy.grad = torch.zeros_like(proxy) if proxy.grad is None else proxy.grad, None
        note_reduction(each.info)
        full.append((whole, each.info.communication, plain_stand_in(each.param._local_tensor)))
    with torch.no_grad():
        for (each, _), local in zip(members, reduce_coalesced(full), strict=True):
            gradient = dtensor(local, each.param.device_mesh, each.info.placements, each.param.shape)
            each.param.grad = gradient if each.param.grad is None else each.param.grad + gradient


def _on_any_rank(members: list[tuple[ShardedAttribute, Tensor]]) -> list[bool]:
    """Return whether any rank has a gradient for each member: a reduction must not depend on this rank alone."""
    found = [proxy.grad is not None for _, proxy in members]
    communications = [each.info.communication for each, _ in members]
    for groups in dict.fromkeys((comm.shard_group, comm.replica_group) for comm in communications):
        together = [i for i, comm in enumerate(communications) if (comm.shard_group, comm.replica_group) == groups]
        bits = torch.tensor([found[i] for i in together], dtype=torch.int32, device=members[together[0]][1].device)
        for group in groups:
            if group is not None:
                bits = all_reduce_max(bits, group)
        for i, bit in zip(together, bits.tolist(), strict=True):
            found[i] = bool(bit)
    return found


def _received(proxy: Tensor, _param: Tensor) -> None:
    received(proxy)


def _reduce_late(each: ShardedAttribute, proxy: Tensor, _leaf: Tensor) -> None:
    _add_reduced([(each, proxy)])

"""What FSDP2's ``FSDPModule`` lets a training loop change between steps, under the same names."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from inductor_passes._compat import dtensor, inside_torch_compile, skip_code

from . import recompute
from .sharding import ShardedParameter, all_reduce_max, reduce, reduced_in


class Controls:
    """Methods of every sharded module. Each acts on all sharded parameters below the module, those of parts that were
    sharded by calls of their own included."""

    def unshard(self) -> None:
        """Gather the weights now, and keep them whole until ``reshard()``, the end of the next call of a sharded module
        or the next step of an optimizer.

        Every rank must call it. Meanwhile reading an attribute (``model.output.weight``) gives the full weight, also
        outside of a call; ``parameters()`` and ``state_dict()`` still give shards. Compiled code gathers by itself.
        """
        recompute.hold([(each.param, each.info, each.stand) for each in _sharded(self)])

    def reshard(self) -> None:
        """Drop the weights that ``unshard()`` gathered."""
        recompute.release([each.param for each in _sharded(self)])

    def set_reshard_after_forward(self, reshard_after_forward: bool) -> None:
        """Whether full weights are dropped after forward. Compiled code is compiled again for it."""
        _check_outside("set_reshard_after_forward")
        _change(self, reshard_after_forward=_check_bool("reshard_after_forward", reshard_after_forward))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of all ranks' gradients by ``factor``, and no longer by the number of ranks.

        Compiled code is compiled again for it.
        """
        _check_outside("set_gradient_divide_factor")
        _change(self, divide_factor=check_divide_factor("factor", factor))

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether gradients are reduced in backward; ``False``: each rank adds up its own full ones, without
        communication (gradient accumulation).

        Full gradients are kept in ``reduce_dtype``, apart from ``param.grad``: they take the memory of the whole
        parameters. ``True`` reduces what was added up so far (a collective: every rank must call it) and adds it to
        ``param.grad``; what a forward before that call still owes is reduced in its backward. Compiled code is compiled
        once for each setting.
        """
        _check_outside("set_requires_gradient_sync")
        _check_bool("requires_gradient_sync", requires_gradient_sync)
        found = _sharded(self)
        recompute.release([each.param for each in found])
        if not requires_gradient_sync:
            stands: dict[int, Tensor] = {}
            for each in found:
                stands[id(each.param)] = each.stands[each.name] = stands.get(id(each.param), _stand(each))
            return
        ended = {id(each.param): (each, each.stands.pop(each.name)) for each in found if each.stand is not None}
        for (each, stand), wanted in zip(ended.values(), _on_any_rank(list(ended.values())), strict=True):
            if wanted:
                full = torch.zeros_like(stand) if stand.grad is None else stand.grad
                _add_reduced(each.param, each.info, full)
            stand.grad = None
            stand.register_post_accumulate_grad_hook(functools.partial(_reduce_late, each.param, each.info))


def _check_outside(method: str) -> None:
    if inside_torch_compile():
        raise RuntimeError(f"{method}() was called inside torch.compile; call it between calls of what is compiled")


# Dynamo would trace them, and where it gives up run them by half.
for _method in (
    Controls.set_reshard_after_forward,
    Controls.set_gradient_divide_factor,
    Controls.set_requires_gradient_sync,
):
    skip_code(_method.__code__)


@dataclass(frozen=True)
class _Sharded:
    """A sharded parameter as an attribute of a module."""

    name: str
    param: DTensor
    params: dict[str, ShardedParameter]
    stands: dict[str, Tensor]

    @property
    def info(self) -> ShardedParameter:
        return self.params[self.name]

    @property
    def stand(self) -> Tensor | None:
        return self.stands.get(self.name)


def _sharded(root: Any) -> list[_Sharded]:
    """Every sharded parameter below ``root``; a tied one as often as it is held."""
    states: list[tuple[Any, Any]] = [
        (module, module._simple_fsdp) for module in cast(nn.Module, root).modules() if isinstance(module, Controls)
    ]
    return [
        _Sharded(name, param, state.params, state.stands)
        for module, state in states
        for name in state.params
        if (param := module._parameters[name]) is not None
    ]


def _change(root: Controls, **policy: Any) -> None:
    changed: dict[int, ShardedParameter] = {}
    for each in _sharded(root):
        if id(each.param) not in changed:
            comm = each.info.communication._replace(**policy)
            changed[id(each.param)] = replace(each.info, communication=comm)
        each.params[each.name] = each.param.simple_fsdp_info = changed[id(each.param)]  # type: ignore[attr-defined]


def _stand(each: _Sharded) -> Tensor:
    """A leaf of the shape of the full gradient, without its memory."""
    if each.stand is not None:
        return each.stand
    comm = each.info.communication
    dtype = reduced_in(comm, each.param.dtype) or comm.param_dtype or each.param.dtype
    leaf = each.param._local_tensor.new_empty((), dtype=dtype).expand(comm.shape)
    return leaf.requires_grad_(dtype.is_floating_point or dtype.is_complex)


def _on_any_rank(ended: list[tuple[_Sharded, Tensor]]) -> list[bool]:
    """Whether each has a gradient on any rank: whether it is reduced must not depend on this rank alone."""
    found = [stand.grad is not None for _, stand in ended]
    communications = [each.info.communication for each, _ in ended]
    for groups in dict.fromkeys((comm.shard_group, comm.replica_group) for comm in communications):
        members = [i for i, comm in enumerate(communications) if (comm.shard_group, comm.replica_group) == groups]
        bits = torch.tensor([found[i] for i in members], dtype=torch.int32, device=ended[members[0]][1].device)
        for group in groups:
            if group is not None:
                bits = all_reduce_max(bits, group)
        for i, bit in zip(members, bits.tolist(), strict=True):
            found[i] = bool(bit)
    return found


def _reduce_late(param: DTensor, info: ShardedParameter, stand: Tensor) -> None:
    full, stand.grad = stand.grad, None
    assert full is not None
    _add_reduced(param, info, full)


def _add_reduced(param: DTensor, info: ShardedParameter, full: Tensor) -> None:
    local = reduce(full, info.communication, param._local_tensor)
    gradient = dtensor(local, param.device_mesh, info.placements, param.shape)
    param.grad = gradient if param.grad is None else param.grad + gradient


def _check_bool(option: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{option}: expected True or False, found {value!r}")
    return value


def check_divide_factor(option: str, factor: Any) -> float:
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise TypeError(f"{option}: expected a number, found {factor!r}")
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"{option}: expected a positive number, found {factor!r}")
    return float(factor)

"""Initial values of shards, without gathering: the same weights as initialising the whole model.

::

    with torch.device("meta"):
        model = Model()
    simple_fsdp(model)
    model.to_empty(device="cuda")
    torch.manual_seed(0)
    with sharded_init():
        model.reset_parameters()
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from inductor_passes.torch_compat.dtensor import StridedShard
from simplefsdp.frontend.sharding import shard


class sharded_init(TorchDispatchMode):
    """Draw random values of shards for the whole parameter, inside this context, and keep this rank's part.

    Random operators on ``DTensor`` parameters (``nn.init.normal_(layer.weight)``, ``reset_parameters()``, ...) then
    give the shards of what they would give on the whole model in one process, bit for bit, if all ranks enter with the
    state of that process's generator (``torch.manual_seed`` right before). One parameter at a time is whole; nothing
    is communicated. ``model.apply(fn)`` of a sharded model does this by itself.

    It does not hold where initialisation reads values of other parameters' shards, draws on another device than the
    single process did, or uses functions that DTensor lacks (``nn.init.eye_``: it says so). Buffers are left alone:
    after ``to_empty`` whatever computes them must be called again.

    Raises:
        RuntimeError: a random operator that depends on a shard's values (``bernoulli(p)``, dropout).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else None
        if not isinstance(target, DTensor):
            return func(*args, **kwargs)
        whole = functools.partial(torch.empty, dtype=target.dtype, device=target._local_tensor.device)
        if func is torch.ops.aten.new_empty.default:  # to be filled, worked on, and copied
            return whole(args[1])
        if func is torch.ops.aten.copy_.default and not isinstance(args[1], DTensor):
            return _copy_own_part(target, args[1].expand(target.shape))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        in_place = func._schema.is_mutable
        pure = in_place or func.overloadpacket.__name__.endswith("_like")
        if not pure or any(isinstance(arg, Tensor) for arg in args[1:]):
            raise RuntimeError(f"{func}: depends on the values of a shard; in sharded_init() only pure draws are right")
        drawn = func(whole(target.shape), *args[1:], **kwargs)
        return _copy_own_part(target, drawn) if in_place else drawn


def _copy_own_part(target: DTensor, full: Tensor) -> DTensor:
    """Copy this rank's part of ``full`` into ``target``."""
    if not all(isinstance(p, Shard | Replicate | StridedShard) for p in target.placements):
        raise RuntimeError(f"found a DTensor placed as {target.placements}; expected shards or replicas")
    part = shard(full, target.device_mesh, target.placements)
    target._local_tensor.copy_(part._local_tensor)
    return target

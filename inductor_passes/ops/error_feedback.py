"""Error feedback: what a rank lost by rounding is added to what it rounds next (Seide et al., Interspeech 2014).

Errors are state of a parameter, and of the rank: replicas that hold the same shard round different sums. Code that
rounds the sums of a shard finds its errors by the memory of the shard, which eager and compiled code both have.
"""

import weakref

import torch
from torch import Tensor

_errors: weakref.WeakValueDictionary[tuple[int, int], Tensor] = weakref.WeakValueDictionary()
"""Errors by the storage of their shard and the place in it. Who owns the shard owns its errors."""


def keep_errors(shard: Tensor, errors: Tensor) -> None:
    """Let ``errors`` be those of ``shard`` for as long as somebody holds them.

    Args:
        errors: (shard.numel(),), float32, contiguous; in the order in which sums of the shard are encoded.
    """
    _errors[_place(shard)] = errors


def errors_of(shard: Tensor, device: torch.device) -> Tensor:
    """Return the errors of a shard, which the caller changes; zeros that are soon forgotten, if nobody keeps any.

    Args:
        device: of the sums; an offloaded shard is on another.
    """
    found = _errors.get(_place(shard))
    return torch.zeros(shard.numel(), device=device) if found is None else found


def _place(shard: Tensor) -> tuple[int, int]:
    return shard.untyped_storage()._cdata, int(shard.storage_offset())

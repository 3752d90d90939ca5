"""All-gathers of shards that are cast and padded on the way into the part of the result that this rank sends.

::

    gathered:  | rank 0's part | rank 1's part | ... |      a rank writes its shards into its own part, which it sends

So what is sent takes no memory beside what is received, and the backend finds this rank's part in its place, as with
``all_gather_copy_in`` of torch's FSDP2. The operators have the names of the functional collectives of torch that they
carry out, ``_c10d_functional.all_gather_into_tensor`` and its coalesced form, and are awaited by the same
``wait_tensor``. A cast or pad in front of torch's would be a kernel of its own, which TorchInductor has to compile for
each shape, with a buffer of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_passes.ops.pack import LIBRARY, buffer_dtype, buffer_sizes
from inductor_passes.torch_compat.distributed import gather_into, rank_in
from inductor_passes.torch_compat.library import as_dtypes


def all_gather_into_tensor(
    shards: Sequence[Tensor], numels: Sequence[int], dtypes: Sequence[torch.dtype], ranks: int, group: str
) -> Tensor:
    """Gather shards into one buffer and return it; each rank's part of it holds that rank's shards, one by one.

    The buffer has the members' dtype and shape (ranks * sum of numels,) if they have one dtype; else it holds bytes,
    (ranks * sum of sizes, each rounded up to 16,).

    Args:
        shards: of any shape and strides.
        numels: elements that each shard is padded to with zeros: the same on every rank.
        dtypes: what each shard is cast to.
        ranks: number of ranks of the process group.
        group: name of the process group.
    """
    dtypes = as_dtypes(dtypes)
    gathered = _one_buffer(shards, numels, dtypes, ranks)
    own = _own_part(gathered, ranks, group)
    parts = own.split(buffer_sizes(numels, dtypes))
    _copy(shards, [part.view(dtype) for part, dtype in zip(parts, dtypes, strict=True)])
    gather_into([gathered], [own], group)
    return gathered


def all_gather_into_tensor_coalesced(
    shards: Sequence[Tensor], numels: Sequence[int], dtypes: Sequence[torch.dtype], ranks: int, group: str
) -> list[Tensor]:
    """Gather shards by one coalesced collective and return the gathered tensors.

    The arguments are those of ``all_gather_into_tensor``. A shard that needs no cast, no padding and no other strides
    is sent from where it lies. What is gathered of a padded shard is (ranks * numel,); of others, (ranks * rows, ...).
    """
    dtypes = as_dtypes(dtypes)
    gathered = _one_for_each(shards, numels, dtypes, ranks)
    sent = list(shards)
    for i, (shard, numel, whole) in enumerate(zip(shards, numels, gathered, strict=True)):
        if shard.dtype is not whole.dtype or shard.numel() != numel or not shard.is_contiguous():
            sent[i] = _own_part(whole.view(-1), ranks, group)
    copied = [i for i, shard in enumerate(shards) if sent[i] is not shard]
    _copy([shards[i] for i in copied], [sent[i] for i in copied])
    gather_into(gathered, sent, group)
    return gathered


def _own_part(gathered: Tensor, ranks: int, group: str) -> Tensor:
    numel = gathered.numel() // ranks
    return gathered.narrow(0, rank_in(group) * numel, numel)


def _copy(shards: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Copy each shard into its part, and zeros behind it."""
    into = []
    for shard, part in zip(shards, parts, strict=True):
        part[shard.numel() :].zero_()
        into.append(part[: shard.numel()].view(shard.shape))
    if into:
        torch._foreach_copy_(into, list(shards))


def _one_buffer(shards: Sequence[Tensor], numels: Sequence[int], dtypes: Sequence[torch.dtype], ranks: int) -> Tensor:
    return shards[0].new_empty(ranks * sum(buffer_sizes(numels, dtypes)), dtype=buffer_dtype(dtypes))


def _one_for_each(
    shards: Sequence[Tensor], numels: Sequence[int], dtypes: Sequence[torch.dtype], ranks: int
) -> list[Tensor]:
    shapes = [shard.shape if shard.numel() == numel else (numel,) for shard, numel in zip(shards, numels, strict=True)]
    return [
        shard.new_empty((ranks * shape[0], *shape[1:]), dtype=dtype)
        for shard, shape, dtype in zip(shards, shapes, dtypes, strict=True)
    ]


def _without_group(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator's kernel for tensors without values: it allocates what the operator returns."""
    return lambda shards, numels, dtypes, ranks, _group: allocate(shards, numels, as_dtypes(dtypes), ranks)


_ARGUMENTS = "(Tensor[] shards, int[] numels, ScalarType[] dtypes, int ranks, str group)"
for _operator, _result, _allocate in (
    (all_gather_into_tensor, "Tensor", _one_buffer),
    (all_gather_into_tensor_coalesced, "Tensor[]", _one_for_each),
):
    # Shards of any strides will do: Inductor may lay them out as it likes.
    LIBRARY.define(f"{_operator.__name__}{_ARGUMENTS} -> {_result}", tags=(torch.Tag.flexible_layout,))
    LIBRARY.impl(_operator.__name__, _operator, "CompositeExplicitAutograd")
    LIBRARY.impl(_operator.__name__, _without_group(_allocate), "Meta")

GATHER_SHARDS = torch.ops.simplefsdp.all_gather_into_tensor.default
GATHER_SHARDS_GROUP = torch.ops.simplefsdp.all_gather_into_tensor_coalesced.default
GATHERS_OF_SHARDS = (GATHER_SHARDS, GATHER_SHARDS_GROUP)

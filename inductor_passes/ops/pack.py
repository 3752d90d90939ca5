"""The copies that a packed bucket costs: operators that take its weights out of one buffer, or put its gradients in.

Shards are put into a gather's buffer by the operator that gathers them (``gather_shards.py``).

::

    rank r's part of a gather's buffer:   | shard 0 | 0 | shard 1 | 0 | ...       padded to the same size on every rank
    row r of a reduction's buffer:        | rows of gradient 0 that are rank r's | those of gradient 1 | ...

They are operators, not ATen nodes for Inductor to lower, because there is nothing to fuse them with (a matmul's weight
is read, and its gradient written, as a whole) and a copy kernel for each shape of bucket is what compile time went
into. Casting and padding are part of the copy: one pass over the bytes. Packing order is that of the arguments.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from inductor_passes.torch_compat.library import as_dtypes

LIBRARY = torch.library.Library("simplefsdp", "DEF")
"""Library of the operators that this project puts into graphs."""
_ALIGNMENT = 16
"""Alignment in bytes of members with different dtypes, so that a vectorised copy may be used."""


def unpack_weights(buffer: Tensor, ranks: int, numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return the gathered members of a bucket: each (ranks * numel,), in an allocation of its own."""
    dtypes = as_dtypes(dtypes)
    rows = buffer.view(ranks, buffer.numel() // ranks)
    out = [buffer.new_empty(ranks, numel, dtype=dtype) for numel, dtype in zip(numels, dtypes, strict=True)]
    if len(set(dtypes)) == 1:
        torch.split_with_sizes_copy(rows, list(numels), dim=1, out=out)  # one kernel on CUDA, as in FSDP2
    else:
        into = [each.view(buffer.dtype) for each in out]
        parts = rows.split(buffer_sizes(numels, dtypes), dim=1)
        torch._foreach_copy_(into, [part[:, : each.shape[1]] for part, each in zip(parts, into, strict=True)])
    return [each.view(-1) for each in out]


def pack_gradients(gradients: Sequence[Tensor], ranks: int, dtype: torch.dtype, divisor: float = 1.0) -> Tensor:
    """Return a reduction's input, (ranks * sum of ceil(rows / ranks) * size of a row,); row r is what rank r will own.

    Each gradient is cut along dim 0, into as many rows for each rank, and padded with zeros behind the last. All are
    divided by ``divisor``.
    """
    packed = _packed(gradients, ranks, dtype)
    return packed if divisor == 1 else packed.div_(divisor)


def _packed(gradients: Sequence[Tensor], ranks: int, dtype: torch.dtype) -> Tensor:
    chunks = [-(-gradient.shape[0] // ranks) * gradient.shape[1:].numel() for gradient in gradients]
    contiguous = all(gradient.is_contiguous() for gradient in gradients)
    # On CUDA, torch.cat launches a kernel for each few gradients.
    if contiguous and not gradients[0].is_cuda and all(g.dtype is dtype and not g.shape[0] % ranks for g in gradients):
        return torch.cat([g.view(ranks, g.numel() // ranks) for g in gradients], dim=1).view(-1)
    buffer = gradients[0].new_empty(ranks, sum(chunks), dtype=dtype)
    if contiguous and _has_a_kernel(buffer, gradients):
        return torch._chunk_cat(list(gradients), 0, ranks, out=buffer).view(-1)  # one kernel, as in FSDP2
    into, taken = [], []
    for part, gradient in zip(buffer.split(chunks, dim=1), gradients, strict=True):
        row = gradient.shape[1:]
        rows = part.shape[1] // max(1, row.numel())
        whole = gradient.shape[0] // rows if rows else 0  # ranks all of whose rows there are
        into.append(part[:whole].view(whole, rows, *row))
        taken.append(gradient[: whole * rows].unflatten(0, (whole, rows)))
        if whole < ranks:
            part[whole:].zero_()
            rest = gradient[whole * rows :]
            into.append(part[whole, : rest.numel()].view(rest.shape))
            taken.append(rest)
    torch._foreach_copy_(into, taken)
    return buffer.view(-1)


def _has_a_kernel(buffer: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Return whether ``torch._chunk_cat`` has one kernel for these gradients; else it pads and casts first."""
    casts = {(gradient.dtype, buffer.dtype) for gradient in gradients}
    same = casts == {(buffer.dtype, buffer.dtype)} or casts == {(torch.bfloat16, torch.float32)}
    return buffer.is_cuda and same and all(gradient.numel() for gradient in gradients)


def buffer_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the dtype of a buffer for members of these dtypes: bytes if they have several."""
    return dtypes[0] if len(set(dtypes)) == 1 else torch.uint8


def buffer_sizes(numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[int]:
    """Return the elements of the buffer that each member takes, with what aligns the next one."""
    if len(set(dtypes)) == 1:
        return list(numels)
    sizes = [numel * dtype.itemsize for numel, dtype in zip(numels, dtypes, strict=True)]
    return [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]


_SCHEMAS = {
    unpack_weights: "(Tensor buffer, int ranks, int[] numels, ScalarType[] dtypes) -> Tensor[]",
    pack_gradients: "(Tensor[] gradients, int ranks, ScalarType dtype, float divisor=1.0) -> Tensor",
}
for _function, _schema in _SCHEMAS.items():
    # Inputs of any strides will do: Inductor may lay them out as it likes.
    LIBRARY.define(_function.__name__ + _schema, tags=(torch.Tag.flexible_layout,))
    LIBRARY.impl(_function.__name__, _function, "CompositeExplicitAutograd")

UNPACK_WEIGHTS = torch.ops.simplefsdp.unpack_weights.default
PACK_GRADIENTS = torch.ops.simplefsdp.pack_gradients.default

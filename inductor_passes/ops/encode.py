"""Operators that put the members of a bucket into a buffer in a wire format, and take them out again.

::

    rank r's part of a gather's buffer:   | shard 0, encoded | shard 1, encoded | ...
    row r of a reduction's buffer:        | rows of gradient 0 that are rank r's, encoded | those of gradient 1 | ...

A gradient travels by an all-to-all instead of a reduce-scatter: row r goes to rank r, which adds up what it gets. A
block belongs to one member and one rank, so a member has the same bits whatever it shares a bucket with. Casting,
padding and packing are part of the encoding (``wire_formats.py``).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from inductor_passes.ops.pack import LIBRARY
from inductor_passes.ops.wire_formats import FORMATS, decode, decode_sum, encode
from inductor_passes.torch_compat.library import as_dtypes


def encode_shards(shards: Sequence[Tensor], numels: Sequence[int], wire_format: str) -> Tensor:
    """Return the bytes that this rank sends: each shard, zero-padded to its number of elements, in a wire format."""
    buffer = _encoded_shards(shards, numels, wire_format)
    for part, shard, numel in zip(_parts(buffer, 1, numels, wire_format), shards, numels, strict=True):
        encode(_padded(shard, numel).view(1, numel), part, FORMATS[wire_format])
    return buffer


def decode_weights(
    buffer: Tensor, ranks: int, numels: Sequence[int], wire_format: str, dtype: torch.dtype | int
) -> list[Tensor]:
    """Return the gathered members of a bucket in ``dtype``: each (ranks * numel,), in an allocation of its own."""
    out = _weights(buffer, ranks, numels, wire_format, dtype)
    for part, each in zip(_parts(buffer, ranks, numels, wire_format), out, strict=True):
        decode(part, each.view(ranks, -1), FORMATS[wire_format])
    return out


def encode_gradients(
    gradients: Sequence[Tensor], ranks: int, wire_format: str, dtype: torch.dtype | int, divisor: float = 1.0
) -> Tensor:
    """Return an all-to-all's input: row r has the rows of all gradients that rank r will own, in a wire format.

    Each gradient is rounded to ``dtype``, divided by ``divisor``, cut along dim 0 into as many rows for each rank, and
    padded with zeros behind the last.
    """
    buffer = _encoded_gradients(gradients, ranks, wire_format, dtype, divisor)
    (dtype,) = as_dtypes([dtype])
    chunks = [_chunk(gradient, ranks) for gradient in gradients]
    parts = _parts(buffer, ranks, chunks, wire_format)
    for part, gradient, chunk in zip(parts, gradients, chunks, strict=True):
        if gradient.dtype.itemsize > dtype.itemsize or divisor != 1:
            gradient = gradient.to(dtype)
        gradient = gradient if divisor == 1 else gradient / divisor
        encode(_padded(gradient, ranks * chunk).view(ranks, chunk), part, FORMATS[wire_format])
    return buffer


def decode_sums(
    buffer: Tensor, ranks: int, numels: Sequence[int], wire_format: str, dtype: torch.dtype | int, mean: bool
) -> Tensor:
    """Return the sum, or the mean, of what all ranks sent: the reduced members one after the other, (sum of numels,).

    Sums are taken in float32, in the order of the ranks, and rounded to ``dtype`` once.
    """
    out = _sums(buffer, ranks, numels, wire_format, dtype, mean)
    for part, each in zip(_parts(buffer, ranks, numels, wire_format), out.split(list(numels)), strict=True):
        decode_sum(part, each, FORMATS[wire_format], float(ranks) if mean else 1.0)
    return out


def _parts(buffer: Tensor, ranks: int, numels: Sequence[int], wire_format: str) -> tuple[Tensor, ...]:
    """Return the encoded members of a buffer, each (ranks, bytes)."""
    return buffer.view(ranks, -1).split([FORMATS[wire_format].nbytes(numel) for numel in numels], dim=1)


def _padded(x: Tensor, numel: int) -> Tensor:
    flat = x.reshape(-1)
    return flat if flat.numel() == numel else functional.pad(flat, (0, numel - flat.numel()))


def _chunk(gradient: Tensor, ranks: int) -> int:
    """Return the number of elements of each rank's part."""
    return -(-gradient.shape[0] // ranks) * gradient.shape[1:].numel()


def _encoded_shards(shards: Sequence[Tensor], numels: Sequence[int], wire_format: str) -> Tensor:
    return shards[0].new_empty(sum(map(FORMATS[wire_format].nbytes, numels)), dtype=torch.uint8)


def _weights(
    buffer: Tensor, ranks: int, numels: Sequence[int], _wire_format: str, dtype: torch.dtype | int
) -> list[Tensor]:
    (dtype,) = as_dtypes([dtype])
    return [buffer.new_empty(ranks * numel, dtype=dtype) for numel in numels]


def _encoded_gradients(
    gradients: Sequence[Tensor], ranks: int, wire_format: str, _dtype: torch.dtype | int, _divisor: float = 1.0
) -> Tensor:
    nbytes = sum(FORMATS[wire_format].nbytes(_chunk(gradient, ranks)) for gradient in gradients)
    return gradients[0].new_empty(ranks * nbytes, dtype=torch.uint8)


def _sums(
    buffer: Tensor, _ranks: int, numels: Sequence[int], _wire_format: str, dtype: torch.dtype | int, _mean: bool
) -> Tensor:
    (dtype,) = as_dtypes([dtype])
    return buffer.new_empty(sum(numels), dtype=dtype)


_SCHEMAS: dict[Callable[..., Any], tuple[str, Callable[..., Any]]] = {
    encode_shards: ("(Tensor[] shards, int[] numels, str wire_format) -> Tensor", _encoded_shards),
    decode_weights: (
        "(Tensor buffer, int ranks, int[] numels, str wire_format, ScalarType dtype) -> Tensor[]",
        _weights,
    ),
    encode_gradients: (
        "(Tensor[] gradients, int ranks, str wire_format, ScalarType dtype, float divisor=1.0) -> Tensor",
        _encoded_gradients,
    ),
    decode_sums: (
        "(Tensor buffer, int ranks, int[] numels, str wire_format, ScalarType dtype, bool mean) -> Tensor",
        _sums,
    ),
}
for _function, (_schema, _fake) in _SCHEMAS.items():
    # Inputs of any strides will do: Inductor may lay them out as it likes.
    LIBRARY.define(_function.__name__ + _schema, tags=(torch.Tag.flexible_layout,))
    LIBRARY.impl(_function.__name__, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"simplefsdp::{_function.__name__}", _fake, lib=LIBRARY)

ENCODE_SHARDS = torch.ops.simplefsdp.encode_shards.default
DECODE_WEIGHTS = torch.ops.simplefsdp.decode_weights.default
ENCODE_GRADIENTS = torch.ops.simplefsdp.encode_gradients.default
DECODE_SUMS = torch.ops.simplefsdp.decode_sums.default

"""Operators that put the members of a bucket into a buffer in a wire format, and take them out again.

::

    rank r's part of a gather's buffer:   | shard 0, encoded | shard 1, encoded | ...
    row r of a reduction's buffer:        | rows of gradient 0 that are rank r's, encoded | those of gradient 1 | ...

A gradient travels by an all-to-all instead of a reduce-scatter: row r goes to rank r, which adds up what it gets. A
block belongs to one member and one rank, so a member has the same bits whatever it shares a bucket with. Casting,
padding and packing are part of the encoding (``wire_formats.py``).

[Note: reductions in two steps]
Over several nodes the first all-to-all stays inside of them. Rank p of a node gets, from each rank of its node, the
rows of the ranks that have place p on any node; it adds them up and encodes the sums again. A second all-to-all, among
the ranks with place p, brings one sum from each node to the rank that owns it. Between nodes each sum travels once for
a whole node, as in a reduce-scatter, and not once for each of its ranks (ZeRO++, arXiv 2306.10013, section 3.3)::

    rows by place, then node - all_to_all inside - sum and encode - rows by node - all_to_all between - sum

In hybrid shard the ranks with different shards take the place of a node. Each replica needs the sums over all of them,
so the second collective is an all-gather of each replica's own. A replica's sums are rounded once, where an all-reduce
rounds at every rank on the way, and all replicas add up the same bytes in the same order::

    rows by rank - all_to_all among shards - sum and encode - all_gather among replicas - sum

There a replica may add what it lost by rounding its sums to the sums of the next step (``error_feedback.py``).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_passes.ops.error_feedback import errors_of
from inductor_passes.ops.pack import LIBRARY
from inductor_passes.ops.wire_formats import FORMATS, decode, decode_sum, encode, encode_sum
from inductor_passes.torch_compat.library import as_dtypes


def encode_shards(shards: Sequence[Tensor], numels: Sequence[int], wire_format: str) -> Tensor:
    """Return the bytes that this rank sends: each shard, zero-padded to its number of elements, in a wire format."""
    buffer = _encoded_shards(shards, numels, wire_format)
    encode(
        [shard.contiguous() for shard in shards], _parts(buffer, numels, wire_format, 1), numels, FORMATS[wire_format]
    )
    return buffer


def decode_weights(
    buffer: Tensor, ranks: int, numels: Sequence[int], wire_format: str, dtype: torch.dtype | int
) -> list[Tensor]:
    """Return the gathered members of a bucket in ``dtype``: each (ranks * numel,), in an allocation of its own."""
    out = _weights(buffer, ranks, numels, wire_format, dtype)
    rows = [each.view(ranks, numel) for each, numel in zip(out, numels, strict=True)]
    decode(_parts(buffer, numels, wire_format, ranks), rows, FORMATS[wire_format])
    return out


def encode_gradients(
    gradients: Sequence[Tensor],
    ranks: int,
    wire_format: str,
    dtype: torch.dtype | int,
    divisor: float = 1.0,
    nodes: int = 1,
) -> Tensor:
    """Return an all-to-all's input: row r has the rows of all gradients that rank r will own, in a wire format.

    Each gradient is rounded to ``dtype``, divided by ``divisor``, cut along dim 0 into as many rows for each rank, and
    padded with zeros behind the last. Over several ``nodes`` rows are in the order of the ranks' places on their node,
    those of one place in the order of the nodes (see [Note: reductions in two steps]).
    """
    buffer = _encoded_gradients(gradients, ranks, wire_format, dtype, divisor, nodes)
    (dtype,) = as_dtypes([dtype])
    chunks = [_chunk(gradient, ranks) for gradient in gradients]
    parts = _parts(buffer, chunks, wire_format, ranks // nodes, nodes)
    contiguous = [gradient.contiguous() for gradient in gradients]
    encode(contiguous, [part.transpose(0, 1) for part in parts], chunks, FORMATS[wire_format], dtype, divisor)
    return buffer


def encode_sums(
    buffer: Tensor,
    ranks: int,
    nodes: int,
    numels: Sequence[int],
    wire_format: str,
    into: str,
    shards: Sequence[Tensor] | None = None,
) -> Tensor:
    """Return the second all-to-all's input: row n has what node n gets of the sums over the ranks of this node.

    Args:
        buffer: what the first all-to-all brought, from ``ranks`` ranks the rows for each of ``nodes`` nodes.
        numels: number of values of each member that one rank will own.
        wire_format: the format of ``buffer``.
        into: the format of the result.
        shards: the shard of each member, where its errors are fed back (``error_feedback.py``); of one node only.
    """
    out = _encoded_sums(buffer, ranks, nodes, numels, wire_format, into)
    sent, sums = _parts(buffer, numels, wire_format, ranks, nodes), _parts(out, numels, into, nodes)
    errors = [errors_of(shard, buffer.device) for shard in shards or ()]
    encode_sum(sent, sums, numels, FORMATS[wire_format], FORMATS[into], errors)
    return out


def decode_sums(
    buffer: Tensor, ranks: int, numels: Sequence[int], wire_format: str, dtype: torch.dtype | int, divisor: float
) -> Tensor:
    """Return the sum over ``divisor`` of what ranks sent: the reduced members one after the other, (sum of numels,).

    Sums are taken in float32, in the order of the ranks, and rounded to ``dtype`` once.
    """
    out = _sums(buffer, ranks, numels, wire_format, dtype, divisor)
    decode_sum(_parts(buffer, numels, wire_format, ranks), out.split(list(numels)), FORMATS[wire_format], divisor)
    return out


def _parts(buffer: Tensor, numels: Sequence[int], wire_format: str, *rows: int) -> tuple[Tensor, ...]:
    """Return the encoded members of a buffer, each (*rows, bytes)."""
    return buffer.view(*rows, -1).split([FORMATS[wire_format].nbytes(numel) for numel in numels], dim=-1)


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
    gradients: Sequence[Tensor],
    ranks: int,
    wire_format: str,
    _dtype: torch.dtype | int,
    _divisor: float = 1.0,
    _nodes: int = 1,
) -> Tensor:
    nbytes = sum(FORMATS[wire_format].nbytes(_chunk(gradient, ranks)) for gradient in gradients)
    return gradients[0].new_empty(ranks * nbytes, dtype=torch.uint8)


def _encoded_sums(
    buffer: Tensor,
    _ranks: int,
    nodes: int,
    numels: Sequence[int],
    _wire_format: str,
    into: str,
    _shards: Sequence[Tensor] | None = None,
) -> Tensor:
    return buffer.new_empty(nodes * sum(map(FORMATS[into].nbytes, numels)))


def _sums(
    buffer: Tensor, _ranks: int, numels: Sequence[int], _wire_format: str, dtype: torch.dtype | int, _divisor: float
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
        "(Tensor[] gradients, int ranks, str wire_format, ScalarType dtype, float divisor=1.0, int nodes=1) -> Tensor",
        _encoded_gradients,
    ),
    encode_sums: (
        "(Tensor buffer, int ranks, int nodes, int[] numels, str wire_format, str into, Tensor[]? shards=None)"
        " -> Tensor",
        _encoded_sums,
    ),
    decode_sums: (
        "(Tensor buffer, int ranks, int[] numels, str wire_format, ScalarType dtype, float divisor) -> Tensor",
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
ENCODE_SUMS = torch.ops.simplefsdp.encode_sums.default
DECODE_SUMS = torch.ops.simplefsdp.decode_sums.default

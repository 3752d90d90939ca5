"""Gathers and reductions in a wire format, one parameter at a time; ``inductor_passes/bucket.py`` makes the same of
buckets.

::

    shard - encode - all_gather - wait - decode -> full weight
    full gradient - encode - all_to_all - wait - decode and sum -> reduced shard

Over several nodes, and among replicas, a gradient travels in two steps (``inductor_passes/ops/encode.py``).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from inductor_passes.collectives import TwoSteps
from inductor_passes.ops.encode import DECODE_SUMS, DECODE_WEIGHTS, ENCODE_GRADIENTS, ENCODE_SHARDS, ENCODE_SUMS

_c10d = torch.ops._c10d_functional


class _Thread(threading.local):
    passes_encode = False
    """Whether this thread traces for the backend of this library, whose passes encode whole buckets."""


_thread = _Thread()


@contextmanager
def encoded_by_passes() -> Iterator[None]:
    """Let collectives that are traced meanwhile be plain: the passes have the formats from the parameters."""
    before, _thread.passes_encode = _thread.passes_encode, True
    try:
        yield
    finally:
        _thread.passes_encode = before


def encodes_here() -> bool:
    """Return whether a collective that has a wire format is encoded where it is issued."""
    return not _thread.passes_encode


def all_gather(shard: Tensor, numel: int, ranks: int, group: str, wire_format: str, dtype: torch.dtype) -> Tensor:
    """Return all ranks' shards in ``dtype``, (ranks * numel,), each zero-padded to ``numel`` elements."""
    gathered = _c10d.wait_tensor(
        _c10d.all_gather_into_tensor(ENCODE_SHARDS([shard], [numel], wire_format), ranks, group)
    )
    return DECODE_WEIGHTS(gathered, ranks, [numel], wire_format, dtype)[0]


def reduce_scatter(
    rows: Tensor,
    divisor: float,
    ranks: int,
    group: str,
    wire_format: str,
    two_steps: TwoSteps | None,
    shard: Tensor,
) -> Tensor:
    """Return this rank's rows of the sum of all ranks' ``rows`` over ``divisor``; with replicas, of the sum over these
    too.

    The number of rows is divisible by ``ranks``, as for ``reduce_scatter_tensor``; the result has the dtype of
    ``rows``.

    Args:
        shard: of the parameter, whose errors are fed back where ``two_steps`` says so.
    """
    shape, numels = (rows.shape[0] // ranks, *rows.shape[1:]), [rows.numel() // ranks]
    sent = ENCODE_GRADIENTS([rows], ranks, wire_format, rows.dtype, 1.0, two_steps.parts if two_steps else 1)
    if two_steps is not None:
        received = exchange(sent, two_steps.ranks, two_steps.inside)
        options = two_steps.ranks, two_steps.parts, numels, wire_format, two_steps.between_format
        sent = ENCODE_SUMS(received, *options, [shard] if two_steps.feeds_back else None)
        group, ranks, wire_format = two_steps.between, two_steps.nodes, two_steps.between_format
    if two_steps is not None and two_steps.to_replicas:
        received = _c10d.wait_tensor(_c10d.all_gather_into_tensor(sent, ranks, group))
    else:
        received = exchange(sent, ranks, group)
    return DECODE_SUMS(received, ranks, numels, wire_format, rows.dtype, divisor).view(shape)


def exchange(sent: Tensor, ranks: int, group: str) -> Tensor:
    """Return what the ranks of ``group`` sent to this one, as many bytes each."""
    splits = [sent.numel() // ranks] * ranks
    return _c10d.wait_tensor(_c10d.all_to_all_single(sent, splits, splits, group))

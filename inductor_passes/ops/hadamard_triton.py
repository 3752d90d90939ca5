"""The Walsh-Hadamard transform on a GPU: a kernel that reads and writes each block once.

The Hadamard matrix of order 2^k is a Kronecker product, so a block is transformed four bits of the index at a time: 16
neighbours are multiplied by the matrix of order 16, on tensor cores, and the index is turned by four bits, which
brings the next ones into their place (HadaCore, arXiv 2412.08832). Turned by all of its bits, it is what it was.

Tensor cores multiply bfloat16. A float32 is the sum of three of them, of eight bits each, whose products with 1 and -1
are exact, and sums are float32: nothing is rounded to fewer bits than float32 has before the result is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Number of values of a program, unless a block has more."""
_COPIED = 64
"""Number of blocks that are copied together."""
LONGEST = 1 << 14
"""Number of values up to which a program has a whole block."""
MULTIPLIED_IN = tl.bfloat16
"""Dtype of products. Triton's interpreter has none in bfloat16; those of the same numbers in float32 are the same."""


@triton.jit
def _cut(x):
    """Return float32 numbers to the first eight bits, as many as bfloat16 has, and what is left."""
    first = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return first, tl.where(x == first, 0.0, x - first)  # an Inf leaves nothing


@triton.jit
def _multiplied(x, bits: tl.constexpr, is_narrow: tl.constexpr, dtype: tl.constexpr):
    """Multiply neighbours of rows, (rows, 16), 2^bits at a time, by the Hadamard matrix of that order.

    ``is_narrow``: ``x`` has bfloat16 values.
    """
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    common = i & j & ((1 << bits) - 1)
    common ^= common >> 2
    common ^= common >> 1
    matrix = tl.where((i >> bits) == (j >> bits), 1 - 2 * (common & 1), 0).to(dtype)
    first, rest = _cut(x)
    total = tl.dot(first.to(dtype), matrix)
    if not is_narrow:
        second, third = _cut(rest)
        total = tl.dot(second.to(dtype), matrix, total)
        total = tl.dot(third.to(dtype), matrix, total)
    return total


@triton.jit
def _step(
    values,
    blocks: tl.constexpr, size: tl.constexpr, bits: tl.constexpr, is_narrow: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Transform blocks of ``size`` along the last bits of their index, and turn the index by as many."""
    rows = _multiplied(tl.reshape(values, (blocks * size // 16, 16)), bits, is_narrow, dtype)
    return tl.permute(tl.reshape(rows, (blocks, size >> bits, 1 << bits)), (0, 2, 1))


@triton.jit(do_not_specialize=["scale"])
def hadamard_kernel(
    x, out, total, scale,
    blocks: tl.constexpr, size: tl.constexpr, power: tl.constexpr, halves: tl.constexpr, is_narrow: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Transform some blocks of ``size`` of ``total`` values; or with ``halves`` half a block of twice as many.

    Blocks are seen as 2^power values: those of less than 16 are zero behind theirs, and transformed by the same matrix.
    """
    width: tl.constexpr = 1 << power
    program = tl.program_id(0)
    place = tl.arange(0, blocks * width)
    exists = place % width < size
    if width > size:
        place = place // width * size + place % width
    place += program.to(tl.int64) * (blocks * size)
    exists &= place < total
    values = tl.load(x + place, exists, 0.0).to(tl.float32)
    if halves:  # their sum is transformed into the first half, their difference into the second
        is_second = program % 2
        other = tl.load(x + place + (1 - 2 * is_second) * size).to(tl.float32)
        values = tl.where(is_second == 1, other - values, values + other)
    for step in tl.static_range((power + 3) // 4):
        values = _step(values, blocks, width, min(4, power - 4 * step), is_narrow and step == 0 and not halves, dtype)
    values = tl.reshape(values, (blocks * width,)) * scale
    tl.store(out + place, values.to(out.dtype.element_ty), exists)


def transform(x: Tensor, out: Tensor, block: int, scale: float) -> None:
    """Write the transform of each ``block`` neighbours of a contiguous tensor into ``out``, which may be ``x``.

    Of blocks longer than ``LONGEST`` two programs read each, so these are copied, some at a time, if ``out`` is ``x``.
    """
    if block <= LONGEST or x.data_ptr() != out.data_ptr():
        _launch(x, out, block, scale)
        return
    for some in x.view(-1, block).split(_COPIED):
        _launch(some.clone(), some, block, scale)


def _launch(x: Tensor, out: Tensor, block: int, scale: float) -> None:
    size = min(block, LONGEST)
    width = max(size, 16)
    blocks = max(1, TILE // width)
    if x.numel():
        hadamard_kernel[(triton.cdiv(x.numel(), blocks * size),)](
            x, out, x.numel(), scale, blocks, size, width.bit_length() - 1, block > size, x.dtype is torch.bfloat16,
            MULTIPLIED_IN, num_warps=warps(blocks * width),
        )  # fmt: skip


def warps(values: int) -> int:
    """Return the number of warps of a program with so many values."""
    return max(4, values // 512)

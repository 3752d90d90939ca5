"""Wire formats on a GPU: one kernel for each bucket and each way, with the bits of ``wire_formats.cpp``.

A program takes some blocks of one row of a member, which it finds in tables: tuples that have a number for each member
of the bucket. Casts, padding, rotation, scales, rounding and packing happen in registers;
encoded values are read and written as words of four bytes, as which the rows of a buffer are aligned.

Kernels are built without fused multiply-adds, which would round sums of ranks otherwise than a CPU does.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = tl.constexpr(128)
_INT8, _INT4, _FP8, _BF16 = (tl.constexpr(kind) for kind in range(4))
BLOCKS = 16
"""Number of blocks of a program, unless it holds more than one value for each of what it encodes."""
MEMBERS = 64
"""Members of a kernel at most: a kernel's arguments have 4 KB."""
_RAISED = tl.constexpr(1 << 48)
"""Added to numbers in tables; see ``_table``."""


@triton.jit
def _rotated(x, blocks: tl.constexpr):
    """Multiply blocks, (blocks, 128), by the normalised Hadamard matrix: sums and differences of neighbours, which then
    lie 64 apart, seven times, so that each value is back in its place."""
    for _ in tl.static_range(7):
        a, b = tl.split(tl.reshape(x, (blocks, 64, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (blocks, 128))
    return x * 0.08838834764831845


@triton.jit
def _uniform(x, scale):
    """Return numbers of [0, 1) that are hashes of the bits of values, of their places in their blocks and of scales."""
    place = tl.arange(0, 128).to(tl.uint32)[None, :]
    of_scale = scale.to(tl.uint32, bitcast=True)[:, None]
    h = x.to(tl.uint32, bitcast=True) * 0x9E3779B1 + of_scale * 0x85EBCA77 + place * 0xC2B2AE3D
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return ((h ^ (h >> 16)) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _words(x, blocks: tl.constexpr, kind: tl.constexpr, stochastic: tl.constexpr):
    """Return the words of quantised blocks, and their scales."""
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # As an integer a NaN is larger than an Inf, and that is larger than any number.
    most = tl.max(magnitude, 1).to(tl.float32, bitcast=True)
    largest: tl.constexpr = 448.0 if kind == _FP8 else 127.0 if kind == _INT8 else 7.0
    scale = most * (1 / largest)
    inverse = tl.where(scale < 1.17549435e-38, 0.0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale))
    x = x * inverse[:, None]
    x = tl.where(x < -largest, -largest, x)
    x = tl.where(x > largest, largest, x)
    place = tl.arange(0, 4)
    if kind == _FP8:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Float8 e4m3, to the nearest, ties to even: what is small is denormal, which adding 2^14 rounds.
        small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        code = tl.where(magnitude < 0x3C800000, small, normal)
        code = tl.where(magnitude > 0x7F800000, 0x7F, code) | ((bits >> 24) & 0x80)
    elif stochastic:
        x += _uniform(x, scale)
        code = x.to(tl.int32)
        code = tl.minimum(code - (x < code.to(tl.float32)).to(tl.int32), 127 if kind == _INT8 else 7)
    else:
        # Adding and taking away 1.5 x 2^23 rounds to the nearest integer, ties to even.
        code = (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    if kind == _INT4:  # a byte has a value of the first half of its block, and one of the second
        halves = tl.reshape((code + 8) & 15, (blocks, 2, 16, 4)) << (8 * place)[None, None, None, :]
        words = tl.sum(tl.sum(halves, 3) << (4 * tl.arange(0, 2))[None, :, None], 1)
    else:
        words = tl.sum(tl.reshape(code & 0xFF, (blocks, 32, 4)) << (8 * place)[None, None, :], 2)
    return words, scale


@triton.jit
def _values(words, blocks: tl.constexpr, kind: tl.constexpr):
    """Return the values of words, (blocks, 128), before they are scaled."""
    place = 8 * tl.arange(0, 4)
    if kind == _INT4:
        halves = words[:, None, :, None] >> (place[None, :] + 4 * tl.arange(0, 2)[:, None])[None, :, None, :]
        x = (tl.reshape(halves & 15, (blocks, 128)) - 8).to(tl.float32)
    else:
        code = tl.reshape(words[:, :, None] >> place[None, None, :], (blocks, 128)) & 0xFF
        if kind == _INT8:
            x = ((code ^ 0x80) - 0x80).to(tl.float32)
        else:  # exponents are 120 less than those of a float, also for what is denormal
            number = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
            number = tl.where((code & 0x7F) == 0x7F, 0x7FC00000, number.to(tl.int32, bitcast=True))
            x = (number | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _places(first, blocks: tl.constexpr):
    """Return the places of the values of some blocks in their row."""
    return (first + tl.arange(0, blocks))[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]


@triton.jit
def _read(row, first, numel, blocks: tl.constexpr, kind: tl.constexpr):
    """Return some blocks of an encoded row of ``numel`` values, from block ``first`` on."""
    if kind == _BF16:
        place = _places(first, blocks)
        x = tl.load(row.to(tl.pointer_type(tl.bfloat16)) + place, place < numel, 0.0).to(tl.float32)
    else:
        size: tl.constexpr = 16 if kind == _INT4 else 32
        block, count = first + tl.arange(0, blocks), tl.cdiv(numel, _BLOCK)
        exists = block < count
        words = tl.load(row + block[:, None] * size + tl.arange(0, size)[None, :], exists[:, None], 0)
        scale = tl.load(row + count * size + block, exists, 0).to(tl.float32, bitcast=True)
        x = _values(words, blocks, kind) * scale[:, None]
    return x


@triton.jit
def _write(x, row, first, numel, blocks: tl.constexpr, kind: tl.constexpr, stochastic: tl.constexpr):
    """Encode some blocks of a row of ``numel`` values; return what they are decoded to."""
    if kind == _BF16:
        place = _places(first, blocks)
        tl.store(row.to(tl.pointer_type(tl.bfloat16)) + place, x.to(tl.bfloat16), place < numel)
        x = x.to(tl.bfloat16).to(tl.float32)
    else:
        size: tl.constexpr = 16 if kind == _INT4 else 32
        words, scale = _words(x, blocks, kind, stochastic)
        block, count = first + tl.arange(0, blocks), tl.cdiv(numel, _BLOCK)
        exists = block < count
        tl.store(row + block[:, None] * size + tl.arange(0, size)[None, :], words, exists[:, None])
        tl.store(row + count * size + block, scale.to(tl.int32, bitcast=True), exists)
        x = _values(words, blocks, kind) * scale[:, None]
    return x


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x if dtype == tl.float32 else x.to(dtype).to(tl.float32)


@triton.jit
def _divided(x, divisor):
    return tl.div_rn(x, tl.full(x.shape, divisor, tl.float32))


@triton.jit
def _sum(sent, first, numel, ranks, stride, blocks: tl.constexpr, kind: tl.constexpr):
    """Return the sums over the ranks of some blocks of rows that are ``stride`` words apart, in the ranks' order."""
    total = _read(sent, first, numel, blocks, kind)
    for rank in range(1, ranks):
        total += _read(sent + tl.cast(rank, tl.int64) * stride, first, numel, blocks, kind)
    return total


@triton.jit
def _of_member(table, begins):
    """Return the number of a table for the member that this program works on, plus ``_RAISED``.

    Kernels take ``_RAISED`` away themselves: Triton loses hints about a value that a function has returned.

    Args:
        begins: the table of each member's first program.
    """
    program = (tl.program_id(0).to(tl.int64) + _RAISED) << 4
    found = table[0]
    for i in tl.static_range(1, len(table)):
        found = tl.where(program >= begins[i], table[i], found)
    return found >> 4


@triton.jit
def _first_block(begins, blocks: tl.constexpr):
    return (tl.program_id(0) - (_of_member(begins, begins) - _RAISED).to(tl.int32)) * blocks


@triton.jit(do_not_specialize=["per", "outer", "inner", "divisor"])
def encode_kernel(
    begins, addresses, totals, numels, offsets, out, per, outer, inner, divisor,
    values: tl.constexpr, in_sixteens: tl.constexpr, divides: tl.constexpr, dtype: tl.constexpr,
    kind: tl.constexpr, rotates: tl.constexpr, stochastic: tl.constexpr, blocks: tl.constexpr,
):  # fmt: skip
    """Encode row ``tl.program_id(1)`` of ``values`` at an address, which are zero behind the first ``total``.

    Row ``i`` goes to word ``i // per * outer + i % per * inner + offset`` of ``out``.
    """
    row, first = tl.program_id(1).to(tl.int64), _first_block(begins, blocks)
    source = (_of_member(addresses, begins) - _RAISED).to(tl.pointer_type(values))
    numel, total = (_of_member(numels, begins) - _RAISED).to(tl.int32), _of_member(totals, begins) - _RAISED
    if in_sixteens:
        source, numel, total = tl.multiple_of(source, 16), tl.multiple_of(numel, 16), tl.multiple_of(total, 16)
    place = _places(first, blocks)
    x = tl.load(source + row * numel + place, (place < numel) & (row * numel + place < total), 0.0).to(tl.float32)
    x = _rounded(x, dtype)
    if divides:
        x = _rounded(_divided(x, divisor), dtype)
    if rotates:
        x = _rotated(x, blocks)
    out += row // per * outer + row % per * inner + _of_member(offsets, begins) - _RAISED
    _write(x, out, first, numel, blocks, kind, stochastic)


@triton.jit(do_not_specialize=["stride"])
def decode_kernel(
    begins, addresses, numels, offsets, rows, stride,
    values: tl.constexpr, in_sixteens: tl.constexpr, kind: tl.constexpr, blocks: tl.constexpr,
):  # fmt: skip
    """Decode row ``tl.program_id(1)`` of rows that are ``stride`` words apart to an address."""
    row, first = tl.program_id(1).to(tl.int64), _first_block(begins, blocks)
    out = (_of_member(addresses, begins) - _RAISED).to(tl.pointer_type(values))
    numel = (_of_member(numels, begins) - _RAISED).to(tl.int32)
    if in_sixteens:
        out, numel = tl.multiple_of(out, 16), tl.multiple_of(numel, 16)
    x = _read(rows + row * stride + (_of_member(offsets, begins) - _RAISED), first, numel, blocks, kind)
    place = _places(first, blocks)
    tl.store(out + row * numel + place, x.to(values), place < numel)


@triton.jit(do_not_specialize=["ranks", "stride", "divisor"])
def decode_sum_kernel(
    begins, addresses, numels, offsets, sent, ranks, stride, divisor,
    values: tl.constexpr, in_sixteens: tl.constexpr, divides: tl.constexpr, kind: tl.constexpr, rotates: tl.constexpr,
    blocks: tl.constexpr,
):  # fmt: skip
    """Add up what ranks sent, ``stride`` words apart; divide the sums, rotate them back and round them once."""
    first = _first_block(begins, blocks)
    out = (_of_member(addresses, begins) - _RAISED).to(tl.pointer_type(values))
    numel = (_of_member(numels, begins) - _RAISED).to(tl.int32)
    if in_sixteens:
        out, numel = tl.multiple_of(out, 16), tl.multiple_of(numel, 16)
    x = _sum(sent + (_of_member(offsets, begins) - _RAISED), first, numel, ranks, stride, blocks, kind)
    if divides:
        x = _divided(x, divisor)
    if rotates:
        x = _rotated(x, blocks)
    place = _places(first, blocks)
    tl.store(out + place, x.to(values), place < numel)


@triton.jit(do_not_specialize=["ranks", "stride", "apart", "apart_out"])
def encode_sum_kernel(
    begins, numels, offsets, offsets_out, addresses, totals, sent, out, ranks, stride, apart, apart_out,
    feeds_back: tl.constexpr, in_sixteens: tl.constexpr, kind: tl.constexpr, rotates: tl.constexpr, into: tl.constexpr,
    into_rotates: tl.constexpr, stochastic: tl.constexpr, blocks: tl.constexpr,
):  # fmt: skip
    """Encode sums over the ranks again, of row ``tl.program_id(1)`` of those that are ``apart`` words apart in what one
    rank sent, and ``apart_out`` words in the result. They stay rotated where both formats rotate and nothing is fed
    back: errors, ``total`` at an address, are of the values as they are."""
    row, first = tl.program_id(1).to(tl.int64), _first_block(begins, blocks)
    numel = (_of_member(numels, begins) - _RAISED).to(tl.int32)
    out += row * apart_out + _of_member(offsets_out, begins) - _RAISED
    x = _sum(sent + row * apart + (_of_member(offsets, begins) - _RAISED), first, numel, ranks, stride, blocks, kind)
    place = _places(first, blocks)
    if rotates and (feeds_back or not into_rotates):
        x = tl.where(place < numel, _rotated(x, blocks), 0.0)
    if feeds_back:
        errors = (_of_member(addresses, begins) - _RAISED).to(tl.pointer_type(tl.float32))
        total = (_of_member(totals, begins) - _RAISED).to(tl.int32)
        if in_sixteens:
            errors, total = tl.multiple_of(errors, 16), tl.multiple_of(total, 16)
        x += tl.load(errors + place, place < total, 0.0)
        exact = x
    if into_rotates and (feeds_back or not rotates):
        x = _rotated(x, blocks)
    x = _write(x, out, first, numel, blocks, into, stochastic)
    if feeds_back:
        if into_rotates:
            x = _rotated(x, blocks)
        error = exact - x
        tl.store(errors + place, tl.where(tl.abs(error) < float("inf"), error, 0.0), place < total)


Form = tuple[int, bool, bool]
"""A kind of encoding, whether it rotates, and whether it rounds stochastically: ``wire_formats.Form``."""


def encode(
    values: Sequence[Tensor],
    out: Sequence[Tensor],
    numels: Sequence[int],
    form: Form,
    dtype: torch.dtype,
    divisor: float,
) -> None:
    """Do ``wire_formats.encode`` for contiguous tensors of one dtype."""
    words, offsets = _words_of(out)
    per, outer = words.shape[-2], words.stride(0) if words.ndim == 3 else 0
    totals = [each.numel() for each in values]
    tables = [each.data_ptr() for each in values], totals, numels, offsets
    _launch(
        encode_kernel, numels, out[0].shape[:-1].numel(), tables, words, per, outer, words.stride(-2), divisor,
        _DTYPES[values[0].dtype], _in_sixteens(values, [*totals, *numels]), divisor != 1, _DTYPES[dtype], *form,
    )  # fmt: skip


def decode(rows: Sequence[Tensor], out: Sequence[Tensor], kind: int) -> None:
    """Do ``wire_formats.decode`` for results of one dtype."""
    words, offsets = _words_of(rows)
    numels = [each.shape[1] for each in out]
    _launch(
        decode_kernel, numels, len(out[0]), ([each.data_ptr() for each in out], numels, offsets), words,
        words.stride(0), _DTYPES[out[0].dtype], _in_sixteens(out, numels), kind,
    )  # fmt: skip


def decode_sum(rows: Sequence[Tensor], out: Sequence[Tensor], form: Form, divisor: float) -> None:
    """Do ``wire_formats.decode_sum`` for results of one dtype."""
    words, offsets = _words_of(rows)
    numels = [each.numel() for each in out]
    _launch(
        decode_sum_kernel, numels, 1, ([each.data_ptr() for each in out], numels, offsets), words, len(words),
        words.stride(0), divisor, _DTYPES[out[0].dtype], _in_sixteens(out, numels), divisor != 1, *form[:2],
    )  # fmt: skip


def encode_sum(
    rows: Sequence[Tensor],
    out: Sequence[Tensor],
    numels: Sequence[int],
    form: Form,
    into: Form,
    errors: Sequence[Tensor],
) -> None:
    """Do ``wire_formats.encode_sum``."""
    (words, offsets), (words_out, offsets_out) = _words_of(rows), _words_of(out)
    addresses, totals = ([read(each) for each in errors] or [0] * len(out) for read in (Tensor.data_ptr, Tensor.numel))
    tables = numels, offsets, offsets_out, addresses, totals
    _launch(
        encode_sum_kernel, numels, len(out[0]), tables, words, words_out, len(words), words.stride(0), words.stride(1),
        words_out.stride(0), bool(errors), _in_sixteens(errors, totals), *form[:2], *into,
        blocks=BLOCKS // 2 if errors else BLOCKS,  # a program has to hold exact and rounded values
    )  # fmt: skip


_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _words_of(members: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Return the first member of a buffer as words, and by how many words each lies behind it."""
    first = members[0].data_ptr()
    return members[0].view(torch.int32), [(each.data_ptr() - first) // 4 for each in members]


def _in_sixteens(values: Iterable[Tensor], numbers: Iterable[int]) -> bool:
    """Return whether addresses and numbers are multiples of 16, so that values are read and written by 16 bytes."""
    return not any(number % 16 for number in (*(each.data_ptr() for each in values), *numbers))


def _table(numbers: Iterable[int], length: int) -> tuple[int, ...]:
    """Return numbers as a table of ``length``, filled up with one that no program comes to.

    Triton would build a kernel for each pattern of numbers that are 1, that have 64 bits or that are multiples of 16;
    these all have 64 bits and are multiples of 16.
    """
    given = [*numbers]
    return tuple((number + _RAISED.value) << 4 for number in [*given, *[1 << 40] * (length - len(given))])


def _launch(
    kernel: Any,
    numels: Sequence[int],
    rows: int,
    tables: Sequence[Sequence[int]],
    *args: Any,
    blocks: int = BLOCKS,
) -> None:
    """Run ``kernel`` over all blocks of ``rows`` rows of each member's number of values."""
    for start in range(0, len(numels), MEMBERS):
        part = slice(start, start + MEMBERS)
        *begins, programs = accumulate((triton.cdiv(numel, 128 * blocks) for numel in numels[part]), initial=0)
        if programs and rows:
            length = triton.next_power_of_2(len(begins))
            of_members = [_table(table, length) for table in (begins, *(table[part] for table in tables))]
            kernel[programs, rows](*of_members, *args, blocks, num_warps=4, enable_fp_fusion=False)

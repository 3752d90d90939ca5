"""Formats in which weights and gradients travel: blocks of 128 values with a scale each, and their arithmetic.

::

    a row of a member:  | block 0 | block 1 | ... | scale 0 | scale 1 | ...        integers or float8, then float32
    bf16:               | values, two bytes each |

A block's scale is its largest magnitude over the largest number of the format, so a value is off by at most half a step
of its own block. What does not fill a block is padded with zeros. A block that holds an Inf or a NaN has such a scale:
all of it is decoded as Inf or NaN, and never as a number. A format that rotates multiplies each block by the normalised
Hadamard matrix of order 128 first, which spreads an outlier over its block; sums are taken of rotated values and
rotated back once (SDP4Bit, arXiv 2410.15526).

Values are rounded to the nearest. A stochastic format rounds a value up with a probability of its distance from the
number below, so that the expected result is the value and errors of many gradients cancel. Its random numbers are a
hash of the bits of the scaled value, of its place in the block and of the scale: the same values are rounded alike on
every rank and in every run, and no generator has a state.

On a GPU each way is one kernel for a bucket (``wire_formats_triton.py``). On a CPU large tensors
go through ``wire_formats.cpp``, one pass over the bytes. Both have the bits of the functions here.
"""

import ctypes
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from inductor_passes.torch_compat.inductor import load_cpp

BLOCK = 128
"""Number of values with one scale."""
_COMPILED_FROM = 1 << 13
"""Number of values from which C++ is used on a CPU: compiling it takes seconds, once."""
_SMALLEST = torch.finfo(torch.float32).tiny
_MASK = 0xFFFFFFFF


class Encoding(NamedTuple):
    """How values are encoded."""

    bits: int
    """Bits of a value, without its share of the scale."""
    largest: float | None
    """Magnitude that the largest value of a block is scaled to; ``None``: values are not scaled."""
    rotates: bool = False
    """Whether blocks are rotated before they are quantised."""
    is_stochastic: bool = False
    """Whether values are rounded stochastically."""

    def nbytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` encoded values, a multiple of 4."""
        if self.largest is None:
            return -(-numel * self.bits // 32) * 4
        return blocks(numel) * (BLOCK * self.bits // 8 + 4)


_QUANTIZED = {"fp8": Encoding(8, 448.0), "int8": Encoding(8, 127.0), "int4": Encoding(4, 7.0)}
_BF16 = Encoding(16, None)
GATHER_FORMATS = {"bf16": _BF16, "fp8": _QUANTIZED["fp8"], "int8": _QUANTIZED["int8"]}
"""Formats of weights, by name, the least harmful first."""
_TO_NEAREST = {
    **_QUANTIZED,
    **{f"{name}-hadamard": each._replace(rotates=True) for name, each in _QUANTIZED.items()},
}
REDUCE_FORMATS = {
    "bf16-fp32sum": _BF16,
    **_TO_NEAREST,
    **{
        f"{name}-stochastic": each._replace(is_stochastic=True)
        for name, each in _TO_NEAREST.items()
        if name.startswith("int")
    },
}
"""Formats of gradients, by name. Ranks exchange encoded parts and add up what they get in float32, so that each
gradient is rounded once, however many ranks there are."""
FORMATS = {**GATHER_FORMATS, **REDUCE_FORMATS}
LEVELS = (16, 8, 4)
"""Bits of a value, the least harmful first."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of tensors that can be encoded."""


def milder(wire_format: str, bits: int, formats: Mapping[str, Encoding]) -> str:
    """Return the format of ``bits`` bits that takes the place of one with fewer; one with as many stays as it is.

    Of two formats of 8 bits the integers are nearer to gradients and weights. What rotates, or rounds stochastically,
    gives way to what does.

    Args:
        formats: ``GATHER_FORMATS`` or ``REDUCE_FORMATS``.
    """
    given = formats[wire_format]
    if given.bits >= bits:
        return wire_format
    properties = (bits, given.rotates, given.is_stochastic) if bits < _BF16.bits else (bits, False, False)
    return [name for name, each in formats.items() if (each.bits, each.rotates, each.is_stochastic) == properties][-1]


def blocks(numel: int) -> int:
    """Return the number of blocks of ``numel`` values."""
    return -(-numel // BLOCK)


def encode(
    values: Sequence[Tensor],
    out: Sequence[Tensor],
    numels: Sequence[int],
    encoding: Encoding,
    dtype: torch.dtype = torch.float32,
    divisor: float = 1.0,
) -> None:
    """Encode the members of a bucket: rows of some values of each contiguous tensor, each into one of ``out``.

    Args:
        values: may be fewer than ``out`` has place for; what is missing behind the last is zero.
        out: parts of one buffer, (..., bytes), contiguous in the last dim, with one or two leading dims.
        numels: number of values of a row, by member.
        dtype: what wider values are rounded to before they are encoded, and all are divided in.
        divisor: what values are divided by.
    """
    for own in {each.dtype: None for each in values}:
        members = [i for i, each in enumerate(values) if each.dtype is own]
        to = dtype if own.itemsize > dtype.itemsize or divisor != 1 else torch.float32
        if _in_triton(values[0]):
            sources, targets, sizes = ([of[i] for i in members] for of in (values, out, numels))
            _triton().encode(sources, targets, sizes, form_of(encoding), to, divisor)
        else:
            for i in members:
                rounded = values[i] if to is torch.float32 and divisor == 1 else _over(values[i].to(to), divisor)
                _encode(rounded, out[i], numels[i], encoding)


def _encode(values: Tensor, out: Tensor, numel: int, encoding: Encoding) -> None:
    values = _padded(values.view(-1), out.shape[:-1].numel() * numel).view(*out.shape[:-1], numel)
    if encoding.largest is None:
        out.view(torch.bfloat16)[..., :numel].copy_(values)
        return
    if _in_cpp(values):
        for place in _places(values.shape[:-2]):
            memory, into = _memory(values[place]), out[place]
            _cpp().encode(*memory, len(into), numel, into.data_ptr(), into.stride(0), *form_of(encoding))
        return
    quantized, scales = _parts(out, encoding)
    scales.copy_(quantize(functional.pad(values, (0, -numel % BLOCK)).unflatten(-1, (-1, BLOCK)), quantized, encoding))


def decode(rows: Sequence[Tensor], out: Sequence[Tensor], encoding: Encoding) -> None:
    """Decode each member's rows of bytes into rows of values, (rows, numel), contiguous, in the dtype of ``out``."""
    if _in_triton(out[0]):
        _triton().decode(rows, out, form_of(encoding).kind)
        return
    for encoded, values in zip(rows, out, strict=True):
        numel = values.shape[1]
        if encoding.largest is None:
            values.copy_(encoded.view(torch.bfloat16)[:, :numel])
        elif _in_cpp(values):
            memory, kind = _memory(values), form_of(encoding).kind
            _cpp().decode(encoded.data_ptr(), encoded.stride(0), len(encoded), numel, *memory, kind)
        else:
            values.copy_(_values(*_parts(encoded, encoding), encoding).flatten(1)[:, :numel])


def decode_sum(rows: Sequence[Tensor], out: Sequence[Tensor], encoding: Encoding, divisor: float) -> None:
    """Write, for each member, the sum over the ranks of decoded rows, (ranks, bytes), over ``divisor``.

    Ranks are added in their order, in float32, and sums rounded to the dtype of ``out`` once.

    Args:
        out: (numel,) each, contiguous, of one dtype.
    """
    if _in_triton(out[0]):
        _triton().decode_sum(rows, out, form_of(encoding), divisor)
        return
    for encoded, sums in zip(rows, out, strict=True):
        numel = len(sums)
        if encoding.largest is None:
            sums.copy_(_over(_added(row[:numel].float() for row in encoded.view(torch.bfloat16)), divisor))
        elif _in_cpp(sums):
            memory, form = _memory(sums), form_of(encoding)[:2]
            _cpp().decode_sum(encoded.data_ptr(), encoded.stride(0), len(encoded), numel, *memory, *form, divisor)
        else:
            total = _over(_added(_values(*_parts(encoded, encoding), encoding)), divisor)
            sums.copy_((_rotated(total) if encoding.rotates else total).view(-1)[:numel])


def encode_sum(
    rows: Sequence[Tensor],
    out: Sequence[Tensor],
    numels: Sequence[int],
    encoding: Encoding,
    into: Encoding,
    errors: Sequence[Tensor] = (),
) -> None:
    """Encode, for each member, the sums over the ranks of ``rows``, (ranks, some, bytes), into ``out``, (some, bytes).

    Sums are taken in float32. They stay rotated where both formats rotate.

    Args:
        numels: number of values of a row, by member.
        encoding: the format of ``rows``.
        into: the format of ``out``.
        errors: float32, (at most numel,), of each member, of one row: they are added to the first of the sums, which
            are then rotated back, and become what rounding takes from these; 0 where that is no number.
    """
    if _in_triton(rows[0]):
        _triton().encode_sum(rows, out, numels, form_of(encoding), form_of(into), errors)
        return
    if not errors and encoding.rotates and into.rotates:
        encoding, into = encoding._replace(rotates=False), into._replace(rotates=False)
        numels = [blocks(numel) * BLOCK for numel in numels]  # also of what fills up the last block
    fed_back: Sequence[Tensor | None] = errors or [None] * len(out)
    for sent, encoded, numel, error in zip(rows, out, numels, fed_back, strict=True):
        sums = sent.new_empty(len(encoded), numel, dtype=torch.float32)
        for i, each in enumerate(sums):
            decode_sum([sent[:, i]], [each], encoding, 1.0)
        exact = sums[0, : len(error)].add_(error) if error is not None else None
        _encode(sums, encoded, numel, into)
        if exact is not None:
            decode_sum([encoded], [decoded := torch.empty_like(sums[0])], into, 1.0)
            torch.sub(exact, decoded[: len(exact)], out=error).nan_to_num_(0.0, 0.0, 0.0)


def quantize(values: Tensor, quantized: Tensor, encoding: Encoding) -> Tensor:
    """Write blocks of ``values``, (..., blocks, 128), into ``quantized``, (..., blocks, bytes); return their scales."""
    x = values.float()
    if encoding.rotates:
        x = _rotated(x)
    assert encoding.largest is not None
    scale = x.abs().amax(-1) * (1 / encoding.largest)
    # Where the scale is too small to have an inverse all values are, too.
    inverse = torch.where(scale < _SMALLEST, 0.0, 1 / scale)
    x = (x * inverse.unsqueeze(-1)).clamp(-encoding.largest, encoding.largest)
    if encoding.largest == _QUANTIZED["fp8"].largest:
        quantized.copy_(x.to(torch.float8_e4m3fn).view(torch.uint8))
        return scale
    if encoding.is_stochastic:
        # Adding a number just below one may round up to the next integer.
        x = (x + _uniform(x, scale.unsqueeze(-1))).floor().clamp(max=encoding.largest)
    x = x.round().to(torch.int8)
    if encoding.bits == 4:
        x = x.add(8).view(torch.uint8)
        quantized.copy_(x[..., : BLOCK // 2] | (x[..., BLOCK // 2 :] << 4))
    else:
        quantized.copy_(x.view(torch.uint8))
    return scale


def _uniform(x: Tensor, scale: Tensor) -> Tensor:
    """Return a number of [0, 1) for each value of the blocks ``x``, (..., 128): a hash of its bits, place and scale.

    Source: the finaliser of MurmurHash3, 32 bits; the multipliers before it are those of xxHash.
    """

    def bits(x: Tensor) -> Tensor:
        return x.contiguous().view(torch.int32).to(torch.int64) & _MASK

    place = torch.arange(BLOCK, device=x.device)
    h = (bits(x) * 0x9E3779B1 + bits(scale) * 0x85EBCA77 + place * 0xC2B2AE3D) & _MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & _MASK
    return ((h ^ (h >> 16)) >> 8).to(torch.float32) * 2.0**-24


def _added(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of ``terms`` in their order."""
    return functools.reduce(torch.add, terms)


def _over(x: Tensor, divisor: float) -> Tensor:
    return x if divisor == 1 else x / divisor


def _padded(x: Tensor, numel: int) -> Tensor:
    return x if x.numel() == numel else functional.pad(x, (0, numel - x.numel()))


def _values(quantized: Tensor, scales: Tensor, encoding: Encoding) -> Tensor:
    """Return decoded blocks, (..., blocks, 128); still rotated, if the format rotates."""
    if encoding.bits == 4:
        x = torch.cat([quantized & 15, quantized >> 4], -1).view(torch.int8).sub(8)
    else:
        x = quantized.view(torch.float8_e4m3fn if encoding.largest == _QUANTIZED["fp8"].largest else torch.int8)
    return x.float() * scales.unsqueeze(-1)


def _parts(rows: Tensor, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Return views of encoded rows: quantised values, (..., blocks, bytes of a block), and scales, (..., blocks)."""
    size = BLOCK * encoding.bits // 8
    count = rows.shape[-1] // (size + 4)
    values, scales = rows.split([count * size, count * 4], dim=-1)
    return values.unflatten(-1, (count, size)), scales.view(torch.float32)


def _places(shape: torch.Size) -> Iterable[tuple[int, ...]]:
    """Return all indices into leading dims of this shape."""
    return itertools.product(*map(range, shape))


def _rotated(x: Tensor) -> Tensor:
    """Return the product of each block, (..., 128), with the normalised Hadamard matrix, which is its own inverse."""
    width = 1
    while width < BLOCK:  # in the order of wire_formats.cpp
        a, b = x.unflatten(-1, (-1, 2, width)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        width *= 2
    return x * BLOCK**-0.5


class Form(NamedTuple):
    """An encoding, as kernels in C++ and Triton know it."""

    kind: int
    """Number of the numbers that values become: int8, int4, float8, bfloat16."""
    rotates: bool
    is_stochastic: bool


_LARGEST = [_QUANTIZED[name].largest for name in ("int8", "int4", "fp8")] + [None]


def form_of(encoding: Encoding) -> Form:
    return Form(_LARGEST.index(encoding.largest), encoding.rotates, encoding.is_stochastic)


def _in_cpp(values: Tensor) -> bool:
    return values.device.type == "cpu" and values.numel() >= _COMPILED_FROM


def _in_triton(x: Tensor) -> bool:
    return x.is_cuda


def _memory(x: Tensor) -> tuple[int, int]:
    """Return the address of a contiguous tensor and the number of its dtype in C++."""
    assert x.is_contiguous()
    return x.data_ptr(), DTYPES.index(x.dtype)


def _triton() -> Any:
    """Return the module of the kernels for GPUs."""
    from inductor_passes.ops import wire_formats_triton  # Triton is not there without a GPU

    return wire_formats_triton


@functools.cache
def _cpp() -> ctypes.CDLL:
    """Return the functions of ``wire_formats.cpp``, compiled as TorchInductor's own kernels are."""
    library = load_cpp(Path(__file__).with_suffix(".cpp").read_text(), vectorized=True)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.encode.argtypes = [pointer, number, number, number, pointer, *[number] * 4]
    library.decode.argtypes = [pointer, number, number, number, pointer, number, number]
    library.decode_sum.argtypes = [pointer, *[number] * 3, pointer, *[number] * 3, ctypes.c_float]
    return library

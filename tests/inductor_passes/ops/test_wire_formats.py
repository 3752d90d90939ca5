"""Encoding is as exact as a format can be, the same by any kernel, and never makes a number of what is none."""

from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from inductor_passes.ops import wire_formats
from inductor_passes.ops.wire_formats import (
    BLOCK,
    FORMATS,
    GATHER_FORMATS,
    LEVELS,
    REDUCE_FORMATS,
    decode,
    decode_sum,
    encode,
    milder,
)

QUANTIZED = [name for name, form in FORMATS.items() if form.largest is not None]
STEP = {"fp8": 2**-4, "int8": 1 / 254, "int4": 1 / 14}
"""Half a step between neighbouring numbers of a format, relative to a block's largest value (fp8: to the value)."""


def sent(values: Tensor, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The rows of ``values`` after a journey."""
    form = FORMATS[name]
    encoded = torch.empty(len(values), form.nbytes(values.shape[1]), dtype=torch.uint8)
    encode([values], [encoded], [values.shape[1]], form)
    out = torch.empty(values.shape, dtype=dtype)
    if name in GATHER_FORMATS:
        decode([encoded], [out], form)
    else:
        for row, into in zip(encoded, out, strict=True):
            decode_sum([row.unsqueeze(0)], [into], form, 1.0)
    return out


def summed(values: Tensor, name: str, divisor: float = 1.0) -> Tensor:
    """The sum of the rows, over ``divisor``, as the rank that owns it gets it."""
    form = FORMATS[name]
    encoded = torch.empty(len(values), form.nbytes(values.shape[1]), dtype=torch.uint8)
    encode([values], [encoded], [values.shape[1]], form)
    out = torch.empty(values.shape[1])
    decode_sum([encoded], [out], form, divisor)
    return out


def blocks(values: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK))
    return padded.unflatten(1, (-1, BLOCK))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(FORMATS)),
    rows=st.integers(1, 3),
    numel=st.integers(1, 400),
    exponent=st.integers(-20, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_a_value_is_off_by_at_most_half_a_step_of_its_block(name, rows, numel, exponent, dtype, seed):
    if dtype is torch.float16:
        exponent = max(-4, min(exponent, 4))
    values = (torch.randn(rows, numel, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent).to(dtype)
    found, exact = sent(values, name), values.float()
    if FORMATS[name].largest is None:
        torch.testing.assert_close(found, exact, rtol=2**-8, atol=0)
        return
    largest = blocks(exact).abs().amax(-1, keepdim=True)
    error = blocks(found - exact).abs()
    base = name.removesuffix("-stochastic").removesuffix("-hadamard")
    error = error / 2 if FORMATS[name].is_stochastic else error  # to either neighbour
    if FORMATS[name].rotates:  # the largest rotated value is at most sqrt(128) times the largest, and so is the error
        assert (error.norm(dim=-1) <= STEP[base] * BLOCK * 1.01 * largest.squeeze(-1)).all()
    elif base == "fp8":
        smallest = largest / 448 * 2**-9  # of float8 e4m3, below which steps do not shrink
        assert (error <= STEP[base] * blocks(exact).abs() * 1.001 + smallest).all()
    else:
        assert (error <= STEP[base] * 1.001 * largest).all()


@pytest.mark.subprocess
@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(FORMATS)),
    rows=st.integers(1, 19),
    numel=st.integers(1, 300),
    exponent=st.sampled_from([-140, -126, -30, 0, 30, 100]),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16, torch.float16])] * 2),
    seed=st.integers(0, 99),
)
def test_the_code_in_cpp_gives_the_bits_of_the_functions(name, rows, numel, exponent, dtypes, seed):
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(rows, numel, generator=generator) * 2.0**exponent).to(dtypes[0])
    found = []
    for threshold in (1 << 62, 0):
        with mock.patch.object(wire_formats, "_COMPILED_FROM", threshold):
            form = FORMATS[name]
            encoded = torch.zeros(rows, form.nbytes(numel), dtype=torch.uint8)
            encode([values], [encoded], [values.shape[1]], form)
            out = torch.empty(numel if name in REDUCE_FORMATS else (rows, numel), dtype=dtypes[1])
            if name in REDUCE_FORMATS:
                decode_sum([encoded], [out], form, 3.0)
            else:
                decode([encoded], [out], form)
        found.append((encoded, out))
    (plain, plain_out), (in_cpp, cpp_out) = found
    if values.isfinite().all():
        assert torch.equal(plain, in_cpp)
    torch.testing.assert_close(cpp_out, plain_out, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("threshold", [0, 1 << 62], ids=["cpp", "torch"])
def test_what_is_no_number_does_not_arrive_as_one(monkeypatch, name, value, threshold):
    monkeypatch.setattr(wire_formats, "_COMPILED_FROM", threshold)
    values = torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    values[0, 130] = value
    found = sent(values, name)[0] if name in GATHER_FORMATS else summed(values, name)
    assert not found[130].isfinite()
    others = [*range(128), *range(256, 300)]
    torch.testing.assert_close(found[others], values[0, others], rtol=0, atol=0.7)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-40, 1e-38])
def test_zeros_stay_zeros_and_tiny_numbers_become_no_larger(name, magnitude):
    values = torch.full((1, 200), magnitude)
    found = sent(values, name)
    assert (found.abs() <= 12 * magnitude).all()


@pytest.mark.parametrize("numel", [0, 1, 127, 128, 129])
@pytest.mark.parametrize("name", FORMATS)
def test_encoded_values_have_the_size_that_is_said(name, numel):
    form = FORMATS[name]
    count = -(-numel // BLOCK)
    assert form.nbytes(numel) == (-(-numel // 2) * 4 if form.bits == 16 else count * (16 * form.bits + 4))


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_rotation_halves_the_error_of_heavy_tails(name):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 1 << 14, generator=generator)
    values[torch.rand(values.shape, generator=generator) < 0.01] *= 50
    plain, rotated = (relative(summed(values, n), values.sum(0)) for n in (name, f"{name}-hadamard"))
    assert rotated < plain / 2


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].is_stochastic])
def test_what_is_rounded_stochastically_is_right_on_average(name):
    """Errors of many sums have no mean, while those of rounding to the nearest add up where values stay the same."""
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(64 * BLOCK, generator=generator)
    values = base + 1e-4 * torch.randn(400, len(base), generator=generator)  # gradients of a step after another
    errors = {one: sent(values, one) - values for one in (name, name.removesuffix("-stochastic"))}
    stochastic, to_nearest = (error.mean(0).norm() / error.norm(dim=1).mean() for error in errors.values())
    assert stochastic < 1.2 / 400**0.5  # as the mean of independent errors
    assert to_nearest > 5 * stochastic
    # A value is rounded up as often as it is far from the number below.
    mean = errors[name].mean()
    assert mean.abs() < 4 * errors[name].std() / errors[name].numel() ** 0.5


def test_the_same_values_are_rounded_alike():
    values = torch.randn(2, 3 * BLOCK, generator=torch.Generator().manual_seed(0))
    values[1] = values[0]
    first, second = sent(values, "int4-stochastic")
    assert torch.equal(first, second)
    # The same value at two places of a block, or in two blocks of other scales, is not.
    equal = torch.full((1, 8 * BLOCK), 0.4)
    equal[0, ::BLOCK] = torch.arange(1.0, 9.0)
    found = sent(equal, "int4-stochastic")[0].unflatten(0, (8, BLOCK))[:, 1:]
    assert all(len(each.unique()) > 1 for each in found[:4])


@pytest.mark.parametrize("ranks", [2, 8, 20])
def test_a_sum_in_bf16_fp32sum_has_the_error_of_one_rounding(ranks):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(ranks, 1000, generator=generator)
    exact = values.double().sum(0)
    allowed = values.abs().double().sum(0) * 2**-8 * 1.001
    assert ((summed(values, "bf16-fp32sum") - exact).abs() <= allowed).all()
    of_one_rounding = relative(values.bfloat16().double().sum(0), exact)
    assert relative(summed(values, "bf16-fp32sum").double(), exact) == pytest.approx(of_one_rounding, rel=1e-3)
    in_turn = values.bfloat16()
    total = in_turn[0]
    for row in in_turn[1:]:
        total = total + row
    assert ranks == 2 or relative(total.double(), exact) > of_one_rounding


def test_formats_of_gathers_and_reductions_come_by_harm():
    values = torch.randn(2, 1 << 12, generator=torch.Generator().manual_seed(0))
    errors = [relative(sent(values, name), values) for name in ("bf16", "int8", "fp8")]
    assert errors == sorted(errors)
    errors = [relative(summed(values, name), values.sum(0)) for name in ("bf16-fp32sum", "int8", "int4")]
    assert errors == sorted(errors)
    assert set(REDUCE_FORMATS) - set(GATHER_FORMATS) == {
        "bf16-fp32sum",
        "int4",
        *(name for name in FORMATS if "-hadamard" in name or "-stochastic" in name),
    }


def test_a_milder_format_has_more_bits_and_rotates_as_before():
    assert [milder("int4-hadamard", bits, REDUCE_FORMATS) for bits in LEVELS] == [
        "bf16-fp32sum",
        "int8-hadamard",
        "int4-hadamard",
    ]
    assert [milder("int4-hadamard-stochastic", bits, REDUCE_FORMATS) for bits in LEVELS] == [
        "bf16-fp32sum",
        "int8-hadamard-stochastic",
        "int4-hadamard-stochastic",
    ]
    assert [milder("int4-stochastic", bits, REDUCE_FORMATS) for bits in LEVELS[1:]] == [
        "int8-stochastic",
        "int4-stochastic",
    ]
    assert [milder("int4", bits, REDUCE_FORMATS) for bits in LEVELS] == ["bf16-fp32sum", "int8", "int4"]
    assert [milder("fp8", bits, GATHER_FORMATS) for bits in LEVELS] == ["bf16", "fp8", "fp8"]
    for formats in (GATHER_FORMATS, REDUCE_FORMATS):
        for name in formats:
            assert formats[milder(name, LEVELS[0], formats)].bits == LEVELS[0]
            assert milder(name, LEVELS[-1], formats) == name

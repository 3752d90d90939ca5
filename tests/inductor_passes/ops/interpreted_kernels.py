"""Kernels of the wire formats for GPUs, run by Triton's interpreter, against the functions on a CPU, bit by bit.

``test_wire_formats_triton.py`` runs this module in a process of its own, whose Triton is the interpreter.
"""

from collections.abc import Iterator
from unittest import mock

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from inductor_passes.ops import wire_formats, wire_formats_triton
from inductor_passes.ops.encode import decode_sums, decode_weights, encode_gradients, encode_shards, encode_sums
from inductor_passes.ops.wire_formats import (
    BLOCK,
    DTYPES,
    FORMATS,
    GATHER_FORMATS,
    REDUCE_FORMATS,
    decode,
    decode_sum,
    encode,
    encode_sum,
)
from tests.interpreter import convert_bfloat16_as_a_gpu_does

convert_bfloat16_as_a_gpu_does()

NUMEL = st.one_of(st.integers(1, 300), st.integers(2040, 2060))  # a program takes 16 blocks, of 2048 values
EXPONENT = st.sampled_from([-140, -126, -30, 0, 30, 100])
DTYPE = st.sampled_from(DTYPES)


def both() -> Iterator[None]:
    """Go through a loop twice: on a CPU, and by Triton."""
    yield
    with mock.patch.object(wire_formats, "_in_triton", return_value=True):
        yield


def random(*shape: int, seed: int, exponent: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(list(FORMATS)),
    leading=st.sampled_from([(1,), (3,), (2, 3)]),
    numel=NUMEL,
    missing=st.integers(0, 200),
    exponent=EXPONENT,
    dtypes=st.tuples(DTYPE, DTYPE),
    divisor=st.sampled_from([1.0, 3.0, 64.0]),
    seed=st.integers(0, 99),
)
def test_encoded_bits_are_those_of_a_cpu(name, leading, numel, missing, exponent, dtypes, divisor, seed):
    form, rows = FORMATS[name], torch.Size(leading).numel()
    values = random(max(1, rows * numel - missing), seed=seed, exponent=exponent).to(dtypes[0])
    if not (values.to(dtypes[1]) / divisor).isfinite().all():
        values = torch.zeros_like(values)
    found = []
    for _ in both():
        buffer = torch.zeros(*leading[::-1], form.nbytes(numel) + 12, dtype=torch.uint8)  # others lie beside it
        encode([values], [buffer[..., 4:-8].movedim(0, -2)], [numel], form, dtypes[1], divisor)
        found.append(buffer)
    assert torch.equal(*found)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(GATHER_FORMATS)),
    rows=st.integers(1, 3),
    numel=NUMEL,
    exponent=EXPONENT,
    dtype=DTYPE,
    seed=st.integers(0, 99),
)
def test_decoded_bits_are_those_of_a_cpu(name, rows, numel, exponent, dtype, seed):
    form = FORMATS[name]
    encoded = torch.zeros(rows, form.nbytes(numel), dtype=torch.uint8)
    encode([random(rows, numel, seed=seed, exponent=exponent)], [encoded], [numel], form)
    found = []
    for _ in both():
        decode([encoded], [out := torch.empty(rows, numel, dtype=dtype)], form)
        found.append(out)
    torch.testing.assert_close(*found, rtol=0, atol=0)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(REDUCE_FORMATS)),
    into=st.sampled_from(list(REDUCE_FORMATS)),
    ranks=st.integers(1, 5),
    numel=NUMEL,
    dtype=DTYPE,
    divisor=st.sampled_from([1.0, 3.0]),
    missing=st.integers(0, 200),
    bad=st.sampled_from([0.0, float("inf"), float("nan")]),
    seed=st.integers(0, 99),
)
def test_bits_of_sums_are_those_of_a_cpu(name, into, ranks, numel, dtype, divisor, missing, bad, seed):
    form = FORMATS[name]
    sent = torch.zeros(ranks, 2, form.nbytes(numel), dtype=torch.uint8)
    encode([random(ranks, 2, numel, seed=seed)], [sent], [numel], form)
    with_bad = random(ranks, 1, numel, seed=seed)
    with_bad[0, 0, numel // 2] += bad
    encode([with_bad], [fed := torch.zeros(ranks, 1, form.nbytes(numel), dtype=torch.uint8)], [numel], form)
    sums, again, errors, fed_back = [], [], [], []
    for _ in both():
        decode_sum([sent[:, 1]], [out := torch.empty(numel, dtype=dtype)], form, divisor)
        sums.append(out)
        bytes_ = torch.zeros(2, FORMATS[into].nbytes(numel), dtype=torch.uint8)
        encode_sum([sent], [bytes_], [numel], form, FORMATS[into])
        again.append(bytes_)
        error = random(max(0, numel - missing), seed=seed + 1)
        errors.append(error)
        fed_back.append(torch.zeros(1, FORMATS[into].nbytes(numel), dtype=torch.uint8))
        encode_sum([fed], fed_back[-1:], [numel], form, FORMATS[into], [error])
    assert torch.equal(*sums)
    assert torch.equal(*again)
    assert torch.equal(*errors)
    assert errors[0].isfinite().all()
    assert bad or torch.equal(*fed_back)


@settings(max_examples=10, deadline=None)
@given(
    # Even sizes: nothing is written to the two bytes behind an odd number of bfloat16.
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 350).map(lambda n: 2 * n)), min_size=1, max_size=5),
    wire_format=st.sampled_from(list(REDUCE_FORMATS)),
    into=st.sampled_from(list(REDUCE_FORMATS)),
    nodes=st.integers(1, 3),
    dtypes=st.tuples(DTYPE, DTYPE, DTYPE),
    divisor=st.sampled_from([1.0, 3.0]),
    at_once=st.sampled_from([1, 2, 64]),
)
def test_bits_of_buckets_are_those_of_a_cpu(shapes, wire_format, into, nodes, dtypes, divisor, at_once):
    """Members of several sizes and dtypes, shards that may be empty, one kernel for some or for all."""
    among = 2
    gradients = [random(*shape, seed=i).to(dtypes[i % 2]) for i, shape in enumerate(shapes)]
    numels = [-(-rows // (among * nodes)) * columns for rows, columns in shapes]
    shards = [gradient[: len(gradient) // 2] for gradient in gradients]
    sizes = [shard.numel() + 6 for shard in shards]
    gather_format = wire_format if wire_format in GATHER_FORMATS else "bf16"
    found = []
    for _ in both():
        with mock.patch.object(wire_formats_triton, "MEMBERS", at_once):
            sent = encode_shards(shards, sizes, gather_format)
            weights = decode_weights(torch.cat([sent, sent]), 2, sizes, gather_format, dtypes[2])
            parts = encode_gradients(gradients, among * nodes, wire_format, dtypes[2], divisor, nodes)
            again = encode_sums(parts, among, nodes, numels, wire_format, into)
            sums = decode_sums(again, nodes, numels, into, dtypes[2], divisor)
        found.append([sent, *weights, parts, again, sums])
    for on_cpu, by_triton in zip(*found, strict=True):
        assert torch.equal(on_cpu, by_triton)


def test_what_is_no_number_does_not_arrive_as_one():
    for name, form in FORMATS.items():
        for bad in (float("inf"), float("-inf"), float("nan")):
            values = random(3 * BLOCK, seed=0)
            values[BLOCK + 5] = bad
            sent, out = torch.zeros(1, form.nbytes(3 * BLOCK), dtype=torch.uint8), torch.empty(3 * BLOCK)
            with mock.patch.object(wire_formats, "_in_triton", return_value=True):
                encode([values], [sent], [3 * BLOCK], form)
                decode_sum([sent], [out], form, 1.0)
            assert not out[BLOCK + 5].isfinite(), name
            assert out.view(3, BLOCK)[::2].isfinite().all(), name

"""Members of a bucket come out of it as they would alone, whatever else is in it."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from inductor_passes.ops.encode import DECODE_SUMS, DECODE_WEIGHTS, ENCODE_GRADIENTS, ENCODE_SHARDS, ENCODE_SUMS
from inductor_passes.ops.wire_formats import GATHER_FORMATS, REDUCE_FORMATS

SHAPE = st.tuples(st.integers(1, 9), st.integers(1, 60))


def made(shape: tuple[int, int], seed: int, turned: bool = False) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.t().contiguous().t() if turned else x


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SHAPE, st.booleans()), min_size=1, max_size=4), st.integers(1, 3), st.data())
def test_gathered_weights_are_those_of_every_member_alone(members, ranks, data):
    form = data.draw(st.sampled_from(list(GATHER_FORMATS)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    numels = [shape[0] * shape[1] for shape, _ in members]
    # The last rank has a row less, where there is one.
    shards = [
        [
            made((shape[0] - (rank == ranks - 1), shape[1]), 10 * rank + i, turned)
            for i, (shape, turned) in enumerate(members)
        ]
        for rank in range(ranks)
    ]
    gathered = torch.cat([ENCODE_SHARDS(of, numels, form) for of in shards])
    together = DECODE_WEIGHTS(gathered, ranks, numels, form, dtype)
    for i, numel in enumerate(numels):
        alone = torch.cat([ENCODE_SHARDS([of[i]], [numel], form) for of in shards])
        (weight,) = DECODE_WEIGHTS(alone, ranks, [numel], form, dtype)
        assert torch.equal(together[i], weight)
        assert weight.dtype is dtype
        for rank in range(ranks):
            shard = shards[rank][i].flatten()
            part = weight[rank * numel : (rank + 1) * numel].float()
            torch.testing.assert_close(part[: len(shard)], shard, rtol=0.07, atol=0.02)
            assert not part[len(shard) :].any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SHAPE, st.booleans()), min_size=1, max_size=4), st.integers(1, 3), st.booleans(), st.data())
def test_reduced_gradients_are_those_of_every_member_alone(members, ranks, mean, data):
    form = data.draw(st.sampled_from(list(REDUCE_FORMATS)))
    gradients = [
        [made(shape, 10 * rank + i, turned) for i, (shape, turned) in enumerate(members)] for rank in range(ranks)
    ]
    chunks = [-(-shape[0] // ranks) * shape[1] for shape, _ in members]
    sends = [ENCODE_GRADIENTS(of, ranks, form, torch.float32).view(ranks, -1) for of in gradients]
    for rank in range(ranks):
        received = torch.cat([send[rank] for send in sends])
        together = DECODE_SUMS(received, ranks, chunks, form, torch.float32, float(ranks) if mean else 1.0).split(
            chunks
        )
        for i, chunk in enumerate(chunks):
            alone = torch.cat(
                [ENCODE_GRADIENTS([of[i]], ranks, form, torch.float32).view(ranks, -1)[rank] for of in gradients]
            )
            part = DECODE_SUMS(alone, ranks, [chunk], form, torch.float32, float(ranks) if mean else 1.0)
            assert torch.equal(together[i], part)
            total = sum(of[i] for of in gradients).flatten()[rank * chunk : (rank + 1) * chunk]
            expected = torch.zeros(chunk)
            expected[: len(total)] = total / ranks if mean else total
            norms = sum(of[i].norm() for of in gradients)
            assert (part - expected).norm() <= 0.25 * norms


def reduced_in_two_steps(gradients, among, nodes, chunks, form, between):
    """Return what each rank owns of the sums over all ranks, one tensor a rank; ``gradients``: a list for each rank."""
    ranks = among * nodes
    sent = [ENCODE_GRADIENTS(of, ranks, form, torch.float32, 1.0, nodes).view(among, -1) for of in gradients]
    inside = [[*range(node * among, (node + 1) * among)] for node in range(nodes)]
    received = [torch.cat([sent[peer][rank % among] for peer in inside[rank // among]]) for rank in range(ranks)]
    sums = [ENCODE_SUMS(each, among, nodes, chunks, form, between).view(nodes, -1) for each in received]
    second = [
        torch.cat([sums[node * among + rank % among][rank // among] for node in range(nodes)]) for rank in range(ranks)
    ]
    return [DECODE_SUMS(each, nodes, chunks, between, torch.float32, 1.0).split(chunks) for each in second]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(SHAPE, st.booleans()), min_size=1, max_size=3), st.integers(1, 3), st.integers(1, 3), st.data()
)
def test_in_two_steps_each_rank_gets_its_own_sums_and_each_member_has_the_bits_it_has_alone(
    members, among, nodes, data
):
    form, between = (data.draw(st.sampled_from(list(REDUCE_FORMATS))) for _ in range(2))
    ranks = among * nodes
    gradients = [
        [made(shape, 10 * rank + i, turned) for i, (shape, turned) in enumerate(members)] for rank in range(ranks)
    ]
    chunks = [-(-shape[0] // ranks) * shape[1] for shape, _ in members]
    together = reduced_in_two_steps(gradients, among, nodes, chunks, form, between)
    for i, chunk in enumerate(chunks):
        alone = reduced_in_two_steps([[of[i]] for of in gradients], among, nodes, [chunk], form, between)
        total = sum(of[i] for of in gradients).flatten()
        norms = sum(of[i].norm() for of in gradients)
        for rank in range(ranks):
            assert torch.equal(together[rank][i], alone[rank][0])
            expected = torch.zeros(chunk)
            own = total[rank * chunk : (rank + 1) * chunk]
            expected[: len(own)] = own
            assert (together[rank][i] - expected).norm() <= 0.4 * norms


@pytest.mark.parametrize("form", ["bf16-fp32sum", "int8", "int4-hadamard"])
def test_two_steps_round_the_sums_of_a_node_once_more(form):
    gradients = [[made((8, 4096), rank)] for rank in range(8)]
    exact = sum(of[0].double() for of in gradients).flatten()
    sent = torch.stack([ENCODE_GRADIENTS(of, 8, form, torch.float32).view(8, -1) for of in gradients])
    errors = []
    two = reduced_in_two_steps(gradients, 4, 2, [4096], form, form)
    for rank in range(8):
        one = DECODE_SUMS(sent[:, rank].reshape(-1), 8, [4096], form, torch.float32, 1.0)
        own = exact[rank * 4096 : (rank + 1) * 4096]
        errors.append([(found.double() - own).norm() for found in (one, two[rank][0])])
    one_error, two_errors = torch.tensor(errors).norm(dim=0)
    # Eight roundings of gradients, and two of sums over four of them, which are twice as large.
    assert 1.3 * one_error < two_errors < 1.5 * one_error


def test_gradients_are_rounded_to_the_dtype_of_the_reduction_and_divided():
    gradient = made((4, 100), 0)
    for dtype in (torch.bfloat16, torch.float16):
        direct = ENCODE_GRADIENTS([gradient], 2, "int8", dtype, 4.0)
        assert torch.equal(direct, ENCODE_GRADIENTS([gradient.to(dtype) / 4], 2, "int8", dtype))
    wider = ENCODE_GRADIENTS([gradient.bfloat16()], 2, "int8", torch.float32)
    assert torch.equal(wider, ENCODE_GRADIENTS([gradient.bfloat16().float()], 2, "int8", torch.float32))


@pytest.mark.parametrize("form", [*GATHER_FORMATS, *REDUCE_FORMATS])
def test_operators_are_traced_with_the_shapes_that_they_have(form):
    shards, numels = [made((3, 50), 0), made((2, 7), 1)], [150, 21]
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(shard) for shard in shards]
        if form in GATHER_FORMATS:
            encoded = ENCODE_SHARDS(fake, numels, form)
            sizes = [(w.shape, w.dtype) for w in DECODE_WEIGHTS(encoded, 1, numels, form, torch.bfloat16)]
        else:
            encoded = ENCODE_GRADIENTS(fake, 2, form, torch.float32)
            reduced = DECODE_SUMS(encoded, 2, [100, 7], form, torch.float32, 2.0)
            sizes = [(reduced.shape, reduced.dtype)]
    if form in GATHER_FORMATS:
        real = ENCODE_SHARDS(shards, numels, form)
        found = [(w.shape, w.dtype) for w in DECODE_WEIGHTS(real, 1, numels, form, torch.bfloat16)]
    else:
        real = ENCODE_GRADIENTS(shards, 2, form, torch.float32)
        out = DECODE_SUMS(real, 2, [100, 7], form, torch.float32, 2.0)
        found = [(out.shape, out.dtype)]
    assert (encoded.shape, encoded.dtype) == (real.shape, real.dtype)
    assert sizes == found

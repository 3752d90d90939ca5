"""Error feedback: rounding takes something from the sums of one step, which is added to those of the next."""

import gc

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from inductor_passes.ops.encode import DECODE_SUMS, ENCODE_GRADIENTS, ENCODE_SUMS
from inductor_passes.ops.error_feedback import errors_of, keep_errors
from inductor_passes.ops.wire_formats import REDUCE_FORMATS

RANKS = 3


def _sent(gradients: list[torch.Tensor], into: str, shards: list[torch.Tensor] | None) -> list[torch.Tensor]:
    """Return what replicas decode of the sums over ranks that all have these gradients, by member."""
    numels = [gradient.numel() for gradient in gradients]
    row = ENCODE_GRADIENTS(gradients, 1, "bf16-fp32sum", torch.float32)
    bytes_ = ENCODE_SUMS(row.repeat(RANKS), RANKS, 1, numels, "bf16-fp32sum", into, shards)
    return [*DECODE_SUMS(bytes_, 1, numels, into, torch.float32, 1.0).split(numels)]


def _gradients(numels: list[int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).bfloat16().float() for numel in numels]


@settings(max_examples=30, deadline=None)
@given(
    into=st.sampled_from(list(REDUCE_FORMATS)),
    numels=st.lists(st.one_of(st.integers(1, 300), st.just(9000)), min_size=1, max_size=3),
    missing=st.integers(0, 3),
    steps=st.integers(1, 5),
)
def test_nothing_is_lost_but_the_last_error(into: str, numels: list[int], missing: int, steps: int) -> None:
    shards = [torch.zeros(max(0, numel - missing)) for numel in numels]
    errors = [torch.zeros_like(shard) for shard in shards]
    for shard, error in zip(shards, errors, strict=True):
        keep_errors(shard, error)
    sums, found = ([torch.zeros(numel) for numel in numels] for _ in range(2))
    for step in range(steps):
        gradients = _gradients(numels, step)
        for total, gradient in zip(sums, gradients, strict=True):
            total += RANKS * gradient
        for total, sent in zip(found, _sent(gradients, into, shards), strict=True):
            total += sent
    for exact, total, error in zip(sums, found, errors, strict=True):
        torch.testing.assert_close(total[: len(error)] + error, exact[: len(error)], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("into", ["bf16-fp32sum", "fp8", "int8", "int4", "int4-hadamard"])
def test_the_mean_of_steps_with_the_same_gradient_has_an_error_that_shrinks_with_their_number(into: str) -> None:
    (gradient,) = _gradients([1000], 0)
    shard, errors = torch.zeros(1000), torch.zeros(1000)
    keep_errors(shard, errors)

    def error_of_mean(steps: int, shards: list[torch.Tensor] | None) -> float:
        mean = torch.stack([_sent([gradient], into, shards)[0] for _ in range(steps)]).mean(0)
        return float((mean / RANKS - gradient).norm())

    without = error_of_mean(16, None)
    errors.zero_()
    assert error_of_mean(1, [shard]) == pytest.approx(without)
    errors.zero_()
    assert error_of_mean(16, [shard]) < without / 8


def test_what_is_no_number_leaves_no_error_behind() -> None:
    shard, errors = torch.zeros(300), torch.zeros(300)
    keep_errors(shard, errors)
    for into in REDUCE_FORMATS:
        for bad in (float("inf"), float("nan")):
            (gradient,) = _gradients([300], 1)
            gradient[130] = bad
            (sent,) = _sent([gradient], into, [shard])
            assert not sent[130].isfinite(), into
            assert errors.isfinite().all(), into
            assert errors[:128].any() or into == "bf16-fp32sum", into


def test_errors_belong_to_a_shard_and_not_to_its_neighbour_or_to_what_comes_after_it() -> None:
    memory = torch.zeros(8)
    first, second = memory[:4], memory[4:]
    keep_errors(first, errors := torch.ones(4))
    assert errors_of(first.view(2, 2), memory.device) is errors
    assert not errors_of(second, memory.device).any()
    assert errors_of(second, memory.device) is not errors_of(second, memory.device)
    del errors
    gc.collect()
    assert not errors_of(first, memory.device).any()

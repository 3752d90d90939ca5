"""Gathers of shards send what FSDP2 would, from this rank's part of what they return."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from inductor_passes.ops import gather_shards
from inductor_passes.ops.gather_shards import (
    GATHER_SHARDS,
    GATHER_SHARDS_GROUP,
    all_gather_into_tensor,
    all_gather_into_tensor_coalesced,
)
from inductor_passes.ops.pack import UNPACK_WEIGHTS
from tests.inductor_passes.ops.test_pack import SHAPE, numbered, turned

DTYPE = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8])
MEMBERS = st.lists(st.tuples(SHAPE, DTYPE, st.booleans()), min_size=1, max_size=5)


def shards_of(members: list[Any], ranks: int) -> list[list[Tensor]]:
    """Each rank's shards: one row less than the first rank's, where there is one."""
    return [
        [
            (turned if turn else Tensor.clone)(numbered([max(0, shape[0] - bool(rank)), *shape[1:]], 10 * rank))
            for shape, _, turn in members
        ]
        for rank in range(ranks)
    ]


def padded(shard: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    flat = shard.flatten().to(dtype)
    return torch.cat([flat, flat.new_zeros(numel - len(flat))])


def given_and_expected(
    members: list[Any], ranks: int
) -> tuple[list[list[Tensor]], list[int], list[torch.dtype], list[Tensor]]:
    """Each rank's shards, the arguments that ranks have in common, and the gathered members, flat."""
    shards = shards_of(members, ranks)
    numels, dtypes = [torch.Size(shape).numel() for shape, _, _ in members], [dtype for _, dtype, _ in members]
    expected = [
        torch.cat([padded(of[i], numel, dtype) for of in shards])
        for i, (numel, dtype) in enumerate(zip(numels, dtypes, strict=True))
    ]
    return shards, numels, dtypes, expected


def gathered(op: Callable[..., Any], shards: list[list[Tensor]], numels: list[int], dtypes: list[Any]) -> Any:
    """The result of ``op`` on the last of the ranks, when each rank has sent what ``op`` sends there."""
    sent: list[list[Tensor]] = []

    def gather_into(results: list[Tensor], parts: list[Tensor], _group: str) -> None:
        sent.append([part.clone().flatten() for part in parts])
        for i, (whole, part) in enumerate(zip(results, parts, strict=True)):
            assert part.is_contiguous()
            is_own_part = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            if is_own_part and part.numel():
                assert part.storage_offset() == (len(sent) - 1) * part.numel()
            if len(sent) == len(shards):
                whole.view(-1).copy_(torch.cat([of[i] for of in sent]))

    with mock.patch.multiple(gather_shards, gather_into=gather_into, rank_in=lambda _group: len(sent)):
        return [op(of, numels, dtypes, len(shards), "0") for of in shards][-1]


@settings(max_examples=200, deadline=None)
@given(MEMBERS, st.integers(1, 4))
def test_shards_of_all_ranks_are_cast_padded_and_unpacked(members: list[Any], ranks: int) -> None:
    shards, numels, dtypes, expected = given_and_expected(members, ranks)
    buffer = gathered(GATHER_SHARDS, shards, numels, dtypes)
    assert buffer.dtype is (dtypes[0] if len(set(dtypes)) == 1 else torch.uint8)
    unpacked = UNPACK_WEIGHTS(buffer, ranks, numels, dtypes)
    torch.testing.assert_close(unpacked, expected, rtol=0, atol=0)
    assert not any(weight.data_ptr() % 16 for weight in unpacked)


@settings(max_examples=200, deadline=None)
@given(MEMBERS, st.integers(1, 4))
def test_a_group_gathers_each_shard_for_itself(members: list[Any], ranks: int) -> None:
    shards, numels, dtypes, expected = given_and_expected(members, ranks)
    results = gathered(GATHER_SHARDS_GROUP, shards, numels, dtypes)
    torch.testing.assert_close([result.flatten() for result in results], expected, rtol=0, atol=0)


@pytest.mark.parametrize("operator", [all_gather_into_tensor, all_gather_into_tensor_coalesced])
def test_dtypes_may_be_numbers_as_operators_get_them_before_torch_2_12(operator: Callable[..., Any]) -> None:
    bfloat16 = 15
    found = [gathered(operator, [[torch.ones(2)]], [2], [dtype]) for dtype in (bfloat16, torch.bfloat16)]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_what_needs_no_change_is_sent_from_where_it_lies() -> None:
    whole, cast, short, strided = torch.ones(2, 3), torch.ones(2, 3).double(), torch.ones(1, 3), torch.ones(3, 2).t()
    sent: list[Tensor] = []
    with mock.patch.multiple(gather_shards, gather_into=lambda _, parts, __: sent.extend(parts), rank_in=lambda _: 1):
        results = GATHER_SHARDS_GROUP([whole, cast, short, strided], [6] * 4, [torch.float32] * 4, 2, "0")
    assert [result.shape for result in results] == [(4, 3), (4, 3), (12,), (4, 3)]
    owners = [result.untyped_storage().data_ptr() for result in results]
    assert sent[0].data_ptr() == whole.data_ptr()
    assert [part.untyped_storage().data_ptr() for part in sent[1:]] == owners[1:]


@pytest.mark.parametrize("op", [GATHER_SHARDS, GATHER_SHARDS_GROUP])
@pytest.mark.usefixtures("one_of_four")
def test_fake_tensors_have_the_shapes_of_real_ones(op: Any) -> None:
    x = torch.randn(4, 3)
    arguments = [x, x[:1]], [12, 6], [torch.float32, torch.bfloat16], 4, "0"
    torch.library.opcheck(op, arguments, test_utils="test_faketensor")

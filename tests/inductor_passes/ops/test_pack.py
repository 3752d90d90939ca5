"""Packing moves every value of a gradient to where FSDP2 would have it."""

from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from inductor_passes.ops import pack as copies
from inductor_passes.ops.pack import PACK_GRADIENTS, UNPACK_WEIGHTS

SHAPE = st.lists(st.integers(0, 5), min_size=1, max_size=3)


def numbered(shape: list[int], start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the strides of a transposed tensor."""
    return tensor.t().contiguous().t() if tensor.ndim == 2 else tensor


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(SHAPE, st.booleans()), min_size=1, max_size=5), st.integers(1, 4), st.booleans(), st.booleans()
)
def test_gradients_are_packed_as_fsdp2_does(members, ranks, cast, as_on_cuda):
    gradients = [numbered(shape, 100 * i) for i, (shape, _) in enumerate(members)]
    dtype = torch.float64 if cast else torch.float32
    given_as = [turned(g) if turn else g for g, (_, turn) in zip(gradients, members, strict=True)]
    one_kernel = as_on_cuda and not cast and all(gradient.numel() for gradient in gradients)
    with mock.patch.object(copies, "_has_a_kernel", return_value=one_kernel):
        packed = PACK_GRADIENTS(given_as, ranks, dtype)
    not_empty = [gradient for gradient in gradients if gradient.numel()]
    expected = torch._chunk_cat(not_empty, 0, ranks) if not_empty else torch.empty(0)
    torch.testing.assert_close(packed, expected.flatten().to(dtype), rtol=0, atol=0)
    divided = PACK_GRADIENTS(given_as, ranks, dtype, 8.0)
    torch.testing.assert_close(divided, packed / 8, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("on_cuda", "gradients", "buffer", "has"),
    [
        (True, [torch.float32, torch.float32], torch.float32, True),
        (True, [torch.bfloat16, torch.bfloat16], torch.float32, True),
        (True, [torch.bfloat16, torch.float32], torch.float32, False),
        (True, [torch.float16], torch.float32, False),
        (False, [torch.float32], torch.float32, False),
    ],
)
def test_gradients_of_one_dtype_on_cuda_are_packed_by_one_kernel_of_torch(on_cuda, gradients, buffer, has):
    given_as = [torch.empty(3, 2, dtype=dtype) for dtype in gradients]
    into = mock.Mock(is_cuda=on_cuda, dtype=buffer)
    assert copies._has_a_kernel(into, given_as) is has
    assert not copies._has_a_kernel(into, [*given_as, given_as[0][:0]])


def test_fake_tensors_have_the_shapes_of_real_ones():
    x, only = torch.randn(4, 3), "test_faketensor"
    torch.library.opcheck(UNPACK_WEIGHTS, (torch.randn(36), 2, [12, 6], [torch.float32] * 2), test_utils=only)
    torch.library.opcheck(PACK_GRADIENTS, ([x, x[:1]], 3, torch.float64, 2.0), test_utils=only)

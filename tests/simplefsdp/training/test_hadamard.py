"""``hadamard_transform`` is the product with Sylvester's matrix, for all sizes, and its own adjoint."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from simplefsdp import hadamard_transform

EPSILON = 2.0**-24
ORDERS = [2**power for power in range(1, 16)]


def sylvester(order: int) -> torch.Tensor:
    """Entry (i, j) is -1 to the number of bits that i and j have in common, as in ``scipy.linalg.hadamard``."""
    common = torch.arange(order).unsqueeze(1) & torch.arange(order)
    parity = torch.zeros_like(common)
    while common.any():
        parity ^= common & 1
        common = common >> 1
    return 1.0 - 2.0 * parity.double()


@pytest.mark.parametrize("order", ORDERS)
def test_the_transform_is_the_product_with_the_matrix(order: int) -> None:
    rows = 3 if order <= 4096 else 1
    x = torch.randn(rows, order, generator=torch.Generator().manual_seed(order))
    if order <= 4096:
        expected = x.double() @ sylvester(order)
    else:  # as a Kronecker product: the whole matrix would have a billion entries
        outer, inner = sylvester(order // 4096), sylvester(4096)
        expected = (outer @ x.double().view(rows, order // 4096, 4096) @ inner).view(rows, order)
    allowed = 4 * EPSILON * order.bit_length() * x.double().norm(dim=1, keepdim=True)
    error = (hadamard_transform(x, normalize=False).double() - expected).abs()
    assert (error <= allowed).all()
    normalized = (hadamard_transform(x).double() - expected / order**0.5).abs()
    assert (normalized <= allowed / order**0.5 * 2).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [2, 128, 512, 4096])
def test_narrow_dtypes_are_rounded_once(dtype: torch.dtype, order: int) -> None:
    x = torch.randn(4, order, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = hadamard_transform(x)
    assert found.dtype is dtype
    assert torch.equal(found, hadamard_transform(x.float()).to(dtype))


@settings(max_examples=60, deadline=None)
@given(
    leading=st.lists(st.integers(0, 3), max_size=2),
    power=st.integers(1, 11),
    blocks=st.integers(1, 3),
    normalize=st.booleans(),
    turned=st.booleans(),
)
@example(leading=[2], power=8, blocks=1, normalize=False, turned=True)  # a box of two sides, whose rows are apart
def test_blocks_are_transformed_one_by_one_whatever_the_strides(leading, power, blocks, normalize, turned):
    block = 2**power
    x = torch.randn(*leading, blocks * block)
    if turned:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    found = hadamard_transform(x, block, normalize)
    expected = (x.double().unflatten(-1, (blocks, block)) @ sylvester(block)).flatten(-2)
    expected = expected / block**0.5 if normalize else expected
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    assert found.shape == x.shape
    if x.is_contiguous():
        again = x.clone()
        assert hadamard_transform(again, block, normalize, inplace=True) is again
        assert torch.equal(again, found)


def test_the_normalized_transform_is_its_own_inverse_and_its_own_gradient() -> None:
    x = torch.randn(5, 256, requires_grad=True)
    torch.testing.assert_close(hadamard_transform(hadamard_transform(x)), x, rtol=1e-5, atol=1e-5)
    weights = torch.randn(5, 256)
    (grad,) = torch.autograd.grad((hadamard_transform(x, 64) * weights).sum(), x)
    torch.testing.assert_close(grad, hadamard_transform(weights, 64), rtol=0, atol=0)


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_it_is_compiled_as_one_operator(backend: str) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return (hadamard_transform(2 * x, 32) ** 3).sum()

    x = torch.randn(3, 64, requires_grad=True)
    expected = torch.autograd.grad(loss(x), x)
    found = torch.autograd.grad(torch.compile(loss, backend=backend, fullgraph=True)(x), x)
    torch.testing.assert_close(found, expected)


def test_the_operators_pass_torchs_own_checks() -> None:
    torch.library.opcheck(torch.ops.simplefsdp.hadamard.default, (torch.randn(2, 8, requires_grad=True), 4, 0.5))
    torch.library.opcheck(torch.ops.simplefsdp.hadamard_.default, (torch.randn(2, 8), 4, 0.5))


def test_an_outlier_spreads_over_its_block() -> None:
    x = torch.zeros(1, 128)
    x[0, 17] = 100.0
    assert hadamard_transform(x).abs().max() == pytest.approx(100 / 128**0.5)


@pytest.mark.parametrize(
    ("x", "arguments", "error", "message"),
    [
        (torch.ones(2, 48), {}, ValueError, "the last dim of x: expected a power of two from 2 to 32768, found 48"),
        (torch.ones(2, 48), {"block": 12}, ValueError, "block: expected a power of two from 2 to 32768, found 12"),
        (torch.ones(2, 48), {"block": 32}, ValueError, "block: 32 does not divide the last dim of x, which is 48"),
        (torch.ones(2, 65536), {}, ValueError, "the last dim of x: expected a power of two from 2 to 32768"),
        (torch.ones(2, 1), {}, ValueError, "found 1"),
        (torch.tensor(1.0), {}, ValueError, "x: expected at least one dim"),
        (
            torch.ones(2, 4, dtype=torch.float64),
            {},
            TypeError,
            "x: expected a tensor in float32, bfloat16 or float16, found",
        ),
        (torch.ones(4, 2).t(), {"inplace": True, "block": 2}, ValueError, "inplace: expected a contiguous x"),
        (torch.ones(2, 4, requires_grad=True), {"inplace": True}, RuntimeError, "inplace: x needs a gradient"),
    ],
)
def test_bad_input_is_named(x: torch.Tensor, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hadamard_transform(x, **arguments)

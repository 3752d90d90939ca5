"""The Hadamard transform's kernel for GPUs, run by Triton's interpreter, against products with the matrix.

``test_hadamard_triton.py`` runs this module in a process of its own, whose Triton is the interpreter.
"""

import pytest
import torch
import triton.language as tl

from inductor_passes.ops import hadamard, hadamard_triton
from tests.interpreter import convert_bfloat16_as_a_gpu_does

convert_bfloat16_as_a_gpu_does()
hadamard_triton.MULTIPLIED_IN = tl.float32

ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""How far a value may be off, relative to the largest of its block: in float32 some roundings, otherwise one."""


def transformed(x: torch.Tensor, block: int, *, in_place: bool) -> torch.Tensor:
    out = x.clone() if in_place else torch.empty_like(x)
    hadamard_triton.transform(out if in_place else x, out, block, block**-0.5)
    return out


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("power", [1, 2, 3, 4, 5, 7, 9, 12, 13])
def test_blocks_are_multiplied_by_the_matrix(
    power: int, dtype: torch.dtype, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hadamard_triton, "LONGEST", 1 << 12)  # two programs share a block of 2^13
    block = 1 << power
    x = torch.randn(3, 2 * block, generator=torch.Generator().manual_seed(power)).to(dtype)
    whole = hadamard.hadamard_matrix(block, x.device).double()
    expected = (x.double().view(-1, block) @ whole * block**-0.5).view_as(x)
    found = transformed(x, block, in_place=in_place)
    assert found.dtype is dtype
    assert (found.double() - expected).abs().max() <= ROUNDING[dtype] * expected.abs().max()


def test_numbers_keep_all_bits_of_float32_whatever_their_size() -> None:
    x = torch.tensor([[1.0, 2.0**-23, 3e38, -1e-37, 0.0, 1e-40, 7.0, -7.0]])
    for i, value in enumerate(x[0]):
        alone = torch.zeros(1, 8)
        alone[0, i] = value
        hadamard_triton.transform(alone, out := torch.empty_like(alone), 8, 1.0)
        assert torch.equal(out.abs(), value.abs().expand(1, 8))


@pytest.mark.parametrize("block", [2, 8, 32])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_spoils_its_block_alone(bad: float, block: int) -> None:
    x = torch.ones(3, block)
    x[1, 1] = bad
    finite = transformed(x, block, in_place=False).isfinite()
    assert not finite[1].any()
    assert finite[::2].all()

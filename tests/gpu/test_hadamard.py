"""The Hadamard transform on a GPU, against that on a CPU in float32."""

import pytest
import torch

from simplefsdp import hadamard_transform
from simplefsdp.null_gpu.launch import null_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or null_device() is not None, reason="needs a GPU")

ROUNDING = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""How far a value may be off, relative to the largest: in float32 some roundings, otherwise one."""


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("block", [2, 16, 64, 128, 4096, 16384, 32768])
def test_a_gpu_transforms_as_a_cpu(block: int, dtype: torch.dtype, inplace: bool) -> None:
    x = torch.randn(5, 32768, generator=torch.Generator().manual_seed(block)).to(dtype)
    expected = hadamard_transform(x.float(), block).double()
    found = hadamard_transform(x.cuda(), block, inplace=inplace)
    assert found.dtype is dtype
    assert (found.cpu().double() - expected).abs().max() <= ROUNDING[dtype] * expected.abs().max()

"""The gradient of an embedding's weight on a GPU: many rows of one token are added up in the same order in each run."""

import pytest
import torch

from inductor_passes.ops.add_rows import add_rows
from simplefsdp.null_gpu.launch import null_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or null_device() is not None, reason="needs a GPU")

WORDS, COLUMNS = 37, 65


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_sums_are_those_of_a_cpu_and_equal_in_each_run(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1 << 16, COLUMNS, generator=generator).to(dtype)
    tokens = torch.randint(WORDS, (len(rows),), generator=generator, dtype=index_dtype)
    expected = add_rows(rows.double(), tokens, WORDS, 3)
    found = [add_rows(rows.cuda(), tokens.cuda(), WORDS, 3).cpu() for _ in range(8)]
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-4, atol=1e-3)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)

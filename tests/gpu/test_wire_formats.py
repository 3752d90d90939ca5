"""Kernels of the wire formats on a GPU, against the functions on a CPU."""

import pytest
import torch
from torch import Tensor

from inductor_passes.ops.wire_formats import (
    BLOCK,
    FORMATS,
    GATHER_FORMATS,
    REDUCE_FORMATS,
    decode,
    decode_sum,
    encode,
    encode_sum,
)
from simplefsdp.null_gpu.launch import null_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or null_device() is not None, reason="needs a GPU")

ROWS = 17


def received(values: Tensor, name: str) -> Tensor:
    """Each row after a gather, or the sum of the rows after a reduction, on the device of ``values``."""
    form = FORMATS[name]
    encoded = values.new_empty(len(values), form.nbytes(values.shape[1]), dtype=torch.uint8)
    encode([values], [encoded], [values.shape[1]], form)
    if name in GATHER_FORMATS and name != "bf16":
        decode([encoded], [out := values.new_empty(values.shape, dtype=torch.float32)], form)
    else:
        decode_sum([encoded], [out := values.new_empty(values.shape[1], dtype=torch.float32)], form, float(ROWS))
    return out.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [100, 128, 5000, 1 << 17])
@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_encodes_and_decodes_as_a_cpu(name: str, numel: int, dtype: torch.dtype) -> None:
    """A few values or rotated blocks may differ, as those of kernels that divide with other roundings do."""
    values = torch.randn(ROWS, numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    on_cpu, on_gpu = received(values, name), received(values.cuda(), name)
    different = (on_cpu - on_gpu).abs() > 1e-5 * on_cpu.abs().max()
    assert FORMATS[name].rotates or different.float().mean() < 0.01
    assert torch.linalg.vector_norm(on_cpu - on_gpu) < 0.01 * torch.linalg.vector_norm(on_cpu)


@pytest.mark.parametrize("name", REDUCE_FORMATS)
def test_a_gpu_keeps_the_errors_that_a_cpu_keeps(name: str) -> None:
    numel, form = 5000, FORMATS["bf16-fp32sum"]
    values = torch.randn(3, 1, numel, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    for device in ("cpu", "cuda"):
        sent = torch.zeros(3, 1, form.nbytes(numel), dtype=torch.uint8, device=device)
        encode([values.to(device)], [sent], [numel], form)
        errors = torch.full((numel - 8,), 0.25, device=device)
        into = torch.zeros(1, FORMATS[name].nbytes(numel), dtype=torch.uint8, device=device)
        encode_sum([sent], [into], [numel], form, FORMATS[name], [errors])
        decode_sum([into], [sums := torch.empty(numel, device=device)], FORMATS[name], 1.0)
        exact = values.float().sum(0)[0, :-8] + 0.25
        torch.testing.assert_close(sums.cpu()[:-8] + errors.cpu(), exact, rtol=1e-4, atol=1e-4)
        found.append(errors.cpu())
    assert torch.linalg.vector_norm(found[0] - found[1]) < 0.1 * torch.linalg.vector_norm(found[0])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.largest is not None])
def test_a_gpu_makes_no_numbers_of_a_block_that_holds_none(name: str, bad: float) -> None:
    values = torch.randn(ROWS, 3 * BLOCK)
    values[4, BLOCK + 5] = bad
    finite = received(values.cuda(), name).isfinite().view(-1, 3, BLOCK)
    assert not finite[4 if len(finite) > 1 else 0, 1].any()
    assert finite[:, ::2].all()

"""The Hadamard transform asks a GPU for one kernel, whatever the length of a block."""

import pytest
import torch

from simplefsdp import hadamard_transform
from simplefsdp.null_gpu.log import Copy, Kernel, Recorder, host_waits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("block", "inplace", "copies"), [(16, False, 0), (4096, True, 0), (1 << 15, False, 0), (1 << 15, True, 1)]
)
def test_a_transform_is_one_kernel(block: int, inplace: bool, copies: int, dtype: torch.dtype) -> None:
    x = torch.empty(3, 1 << 15, dtype=dtype, device="cuda")
    hadamard_transform(x, block, inplace=inplace)  # builds it
    recorder = Recorder()
    with recorder.recording():
        hadamard_transform(x, block, inplace=inplace)
    events = recorder.take()
    kernels = [event.what for event in events if isinstance(event.what, Kernel)]
    assert [kernel.name for kernel in kernels] == ["hadamard_kernel"]
    assert len([event for event in events if isinstance(event.what, Copy)]) == copies
    assert not host_waits(events)

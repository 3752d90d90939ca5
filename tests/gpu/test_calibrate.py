"""A GPU is measured within its data sheet, and near its built-in profile where calls are large."""

import pytest
import torch

from simplefsdp.calibration.calibrate import calibrate
from simplefsdp.hardware.catalog import built_in, name_for
from simplefsdp.null_gpu.launch import null_device

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(not torch.cuda.is_available() or null_device() is not None, reason="needs a GPU"),
]


def test_a_gpu_is_measured_near_its_built_in_profile() -> None:
    name = name_for(torch.cuda.get_device_name(), 8)
    if name is None:
        pytest.skip("this GPU has no built-in profile")
    expected = built_in(name)
    found = calibrate(torch.device("cuda", 0), expected.network)
    (_, matmul) = found.matmul["bfloat16"][-1]
    assert matmul == pytest.approx(expected.matmul["bfloat16"][-1][1], rel=0.25)
    assert all(rate < 1.25 * expected.matmul["bfloat16"][-1][1] for _, rate in found.matmul["bfloat16"])
    (_, memory) = found.memory[-1]
    assert memory == pytest.approx(expected.memory[-1][1], rel=0.25)
    assert all(later > 0.9 * earlier for (_, earlier), (_, later) in zip(found.memory, found.memory[1:], strict=False))
    assert found.launch_s < 20e-6
    assert found.contention == expected.contention

import pytest

from simplefsdp.null_gpu.launch import null_device
from tests.null_gpu.steps import CASES, Step, run_step

if null_device() is None:  # these tests need a CUDA build of torch: make test-gpu-structure
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in CASES])
def step(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Step:
    """A logged step of each case of ``CASES``; tests of one case run in one process."""
    return run_step(request.param, tmp_path_factory.mktemp("report"))

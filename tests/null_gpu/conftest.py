import functools
from collections.abc import Callable

import pytest

from simplefsdp.null_gpu.launch import null_device
from tests.null_gpu.steps import CASES, Step, run_step

if null_device() is None:  # these tests need a CUDA build of torch: make test-gpu-structure
    collect_ignore_glob = ["test_*.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let pytest-xdist run the tests of a case in one process, which compiles the case once for all of them."""
    for item in items:
        if isinstance(item, pytest.Function) and "logged_step" in item.fixturenames:
            (name,) = (item.callspec.params[fixture] for fixture in ("step", "steps") if fixture in item.fixturenames)
            item.add_marker(pytest.mark.xdist_group(name.removesuffix("-flat")))


@pytest.fixture(scope="session")
def logged_step(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Step]:
    """``run_step``, which runs a case once for all modules: those of one case run one after the other."""

    @functools.lru_cache(maxsize=2)
    def logged(name: str) -> Step:
        return run_step(name, tmp_path_factory.mktemp("report"))

    return logged


@pytest.fixture(scope="session", params=CASES)
def step(request: pytest.FixtureRequest, logged_step: Callable[[str], Step]) -> Step:
    """A logged step of each case of ``CASES``."""
    return logged_step(request.param)

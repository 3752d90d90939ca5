import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

from tests.ranks import Ranks, fake_group

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What was calibrated on this machine would change what plan="auto" is. Processes of tests inherit it.
_cache = tempfile.TemporaryDirectory()
os.environ["XDG_CACHE_HOME"] = _cache.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases that have TorchInductor compile with g++ are slow."""
    for item in items:
        case = getattr(item, "callspec", None)
        if case and "inductor" in case.params.values():
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture
def one_of_four() -> Iterator[None]:
    """This process as rank 0 of 4, with a fake process group."""
    with fake_group(4):
        yield

import functools
import hashlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.ranks import Ranks, be_frugal, fake_group

be_frugal()
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What was calibrated on this machine would change what plan="auto" is. Processes of tests inherit it.
_cache = tempfile.TemporaryDirectory()
os.environ["XDG_CACHE_HOME"] = _cache.name
# No test asserts a time: machines are shared.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


_STARTED = time.monotonic()
_LEFT_OUT = pytest.StashKey[Counter[str]]()
"""Number of deselected tests, by folder."""


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "skip, and list, slow tests and tests on real ranks that would start later than this"
    parser.addoption("--long-until", type=float, metavar="SECONDS", help=text)
    text = (
        "run the files in an order drawn from this text; needs --no-loadscope-reorder where several processes run them"
    )
    parser.addoption("--order-drawn-from", metavar="TEXT", help=text)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that takes long and for which no time is left."""
    limit = item.config.getoption("--long-until")
    if limit and time.monotonic() - _STARTED > limit and {"slow", "ranks"} & _marks(item):
        pytest.skip(f"takes long, and the {limit:.0f} s of --long-until have passed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by what they cost; cases in which TorchInductor compiles with g++ are slow. Order their files."""
    if drawn_from := config.getoption("--order-drawn-from"):
        items.sort(key=lambda item: hashlib.sha256(f"{drawn_from} {item.location[0]}".encode()).digest())
    for item in items:
        case = getattr(item, "callspec", None)
        if case and "inductor" in case.params.values():
            item.add_marker(pytest.mark.slow)
        if {"two_ranks", "four_ranks"}.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.ranks)
        if not _marks(item) & {"slow", "ranks", "subprocess", "compile"}:
            item.add_marker(pytest.mark.unit)


def _marks(item: pytest.Item) -> set[str]:
    return {mark.name for mark in item.iter_markers()}


_costs: Counter[str] = Counter()
"""How often this process has called ``torch.compile``, and started another process that is no compiler."""


def _count_processes(event: str, arguments: tuple[Any, ...]) -> None:
    """Count forks and processes of Python's, not those of compilers and of TorchInductor's ``python -c``.

    Whichever test needs a library in C++ first builds it.
    """
    runs_python = event == "subprocess.Popen" and [*arguments[1]][:1] == [sys.executable] and arguments[1][1] != "-c"
    if event == "os.fork" or runs_python:
        _costs["subprocess"] += 1


def _counted(compile_: Any) -> Any:
    @functools.wraps(compile_)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _costs["compile"] += 1
        return compile_(*args, **kwargs)

    return counted


sys.addaudithook(_count_processes)
torch.compile = _counted(torch.compile)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a unit test that calls ``torch.compile`` or starts a process: its marks must say so."""
    before = _costs.copy()
    result = yield
    if "unit" in _marks(item) and (found := _costs - before):
        pytest.fail(f"a test that is not marked as {' and '.join(found)}: {dict(found)} calls")
    return result


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Remember the tests that ``-m`` or ``-k`` leaves out."""
    for item in items:
        folder = item.path.parent.relative_to(item.config.rootpath).as_posix()
        item.config.stash.setdefault(_LEFT_OUT, Counter())[folder] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send what a worker of pytest-xdist left out to its controller."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(_LEFT_OUT, None) or {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the number of left out tests from a worker; all workers collect, and leave out, the same tests."""
    if left_out := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[_LEFT_OUT] = Counter(left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many tests were left out, by folder, and for which ones no time was left."""
    for report in terminalreporter.stats.get("skipped", []):
        if "--long-until" in str(report.longrepr):
            terminalreporter.write_line(f"no time was left: {report.nodeid}")
    if left_out := config.stash.get(_LEFT_OUT, None):
        folders = ", ".join(f"{folder} {count}" for folder, count in sorted(left_out.items()))
        terminalreporter.write_line(f"left out: {left_out.total()} tests ({folders}); make test-all runs all of them")


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

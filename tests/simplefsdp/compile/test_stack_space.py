"""Space for the frames of functions that are called while a graph is compiled."""

import resource
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from simplefsdp import simple_fsdp
from simplefsdp.compile import backend
from simplefsdp.compile.stack_space import with_stack_space
from tests.models import PROFILE, batch, tiny_llama

CALLS = 100


def nothing() -> None:
    """Return at once: a call of this function is a frame and nothing else."""


nothing.__code__ = nothing.__code__.replace(co_stacksize=100)  # larger than a frame of what follows


def faults(depth: int) -> int:
    """Return the number of pages that calls make the system map, so many frames below the caller's."""
    if depth:
        return faults(depth - 1)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(CALLS):
        nothing()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def most_faults() -> int:
    """Return that number at the worst of the depths that a chunk of 16 KiB has."""
    return max(faults(depth) for depth in range(200))


def has_space() -> bool:
    return most_faults() < CALLS // 4


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="later Pythons may keep the chunk")
def test_calls_at_the_end_of_a_chunk_map_pages_and_with_space_they_do_not() -> None:
    assert most_faults() >= CALLS
    assert with_stack_space(has_space)()


def test_a_function_with_space_is_that_function() -> None:
    @with_stack_space
    def add(a: int, *, b: int = 2) -> int:
        """Return the sum."""
        if a < 0:
            raise ValueError("a")
        return a + b

    assert (add(1), add(1, b=3)) == (3, 4)
    assert (add.__name__, add.__doc__) == ("add", "Return the sum.")
    with pytest.raises(ValueError, match="a"):
        add(-1)


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_graphs_are_planned_and_lowered_with_space(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, bool] = {}

    def measured(name: str) -> Callable[..., Any]:
        function = getattr(backend, name)

        def measure(*args: Any) -> Any:
            found[name] = has_space()
            return function(*args)

        return measure

    for name in ("inline_regions", "unchanged_is_same"):  # the first in planning, and in lowering
        monkeypatch.setattr(backend, name, measured(name))
    model = simple_fsdp(tiny_llama())
    torch._dynamo.reset()
    torch.compile(model, backend="simplefsdp", options={"lower_with": "aot_eager"})(*batch(0, 0))
    assert found == {"inline_regions": True}
    assert backend.trace_cost_graphs(model, batch(0, 0), PROFILE) is not None
    assert found == {"inline_regions": True, "unchanged_is_same": True}

"""Blocks that are traced and compiled once ask a GPU for what blocks that are compiled one by one ask for."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from simplefsdp.null_gpu.log import Collective, Event, Kernel, Matmul, Wait
from tests.null_gpu.steps import FLAT_CASES, LLAMA, Step

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=FLAT_CASES)
def steps(request: pytest.FixtureRequest, logged_step: Callable[[str], Step]) -> tuple[Step, Step]:
    """A logged step with blocks that are compiled once, and one with blocks that are compiled one by one."""
    return logged_step(request.param.removesuffix("-flat")), logged_step(request.param)


def requests(events: Sequence[Event]) -> list[Any]:
    """Return what streams are asked for: collectives, waits for them, and the kernels between, in any order.

    Kernels are counted, as they have other names elsewhere; matmuls by their sizes.
    """
    found: list[Any] = [Counter()]
    for event in events:
        match event.what:
            case Matmul() as matmul:
                found[-1][matmul[1:]] += 1
            case Kernel():
                found[-1]["kernel"] += 1
            case Collective() as call:
                found += [(call.operation, call.ranks, call.dtype, call.elements), Counter()]
            case Wait():
                found += ["wait", Counter()]
    return found


def test_collectives_and_waits_are_at_the_same_places_among_the_kernels(steps: tuple[Step, Step]) -> None:
    shared, flat = steps
    assert shared.plans == flat.plans
    for direction in ("forward", "backward"):
        asked = requests(getattr(flat, direction))
        assert "wait" in asked
        assert sum(isinstance(each, Counter) and len(each) > 1 for each in asked) >= LLAMA.layers
        assert requests(getattr(shared, direction)) == asked


def test_the_peak_of_the_allocator_is_the_same_within_2_percent(steps: tuple[Step, Step]) -> None:
    shared, flat = steps
    assert shared.peak_bytes == pytest.approx(flat.peak_bytes, rel=0.02)


def test_a_kernel_of_a_body_is_generated_once(steps: tuple[Step, Step]) -> None:
    """Kernels are compared without their names; two bodies may have a kernel in common, which each has for itself."""
    shared, flat = (kernels(step) for step in steps)
    assert len(shared) <= len(flat) + 1
    if steps[0].name == "block":
        assert len(shared) == len(set(shared))


def kernels(step: Step) -> list[str]:
    """Return the functions of a step's kernels, without their names."""
    (codes,) = step.codes
    found = [body for code in codes for body in re.findall(r"def triton_\w+(\(.*?)''', device_str", code, re.DOTALL)]
    assert found
    return found

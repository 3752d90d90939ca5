"""Copies of a rehearsed collective on a GPU, on a machine without one."""

from pathlib import Path

import pytest

from tests.interpreter import interpreted

pytestmark = pytest.mark.subprocess


@pytest.mark.slow
def test_triton_interprets_the_kernel_that_copies() -> None:
    interpreted(Path(__file__).with_name("interpreted_moves.py"), tests=1)

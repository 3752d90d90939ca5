"""Tests of kernels by Triton's interpreter, which a process uses for all of its kernels or for none."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def interpreted(module: Path, tests: int) -> None:
    """Run the tests of a module, of which there are so many, in a process whose Triton is the interpreter."""
    pytest.importorskip("triton", reason="needs Triton")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", str(module)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(rf"\b{tests} passed", done.stdout), done.stdout

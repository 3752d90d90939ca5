"""Mistakes that people make, and the error of each: it names the parameter, option or file, and says what is expected.

``misuses.txt`` has a call, and below it the error. ``EXPECTTEST_ACCEPT=1`` writes the errors anew, to be read.
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import simplefsdp
from simplefsdp.cli.main import main
from tests.models import PROFILE
from tests.ranks import fake_group

GOLDEN = Path(__file__).with_name("misuses.txt")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def sharded() -> Any:
    return simplefsdp.simple_fsdp(net())


def trained() -> nn.Module:
    model = sharded()
    model(torch.ones(2, 8)).sum().backward()
    return model


def compiled(**options: Any) -> None:
    torch._dynamo.reset()
    options = {"lower_with": "aot_eager", **options}
    torch.compile(sharded(), backend="simplefsdp", options=options)(torch.ones(2, 8))


def command(*arguments: str) -> None:
    """Run ``simplefsdp *arguments``; an exit raises ``SystemExit`` with the last line of the message."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(printed):
        patch.setattr(sys, "argv", ["simplefsdp", *arguments])
        try:
            main()
        except SystemExit as end:
            message = end.code if isinstance(end.code, str) else printed.getvalue().rstrip().split("\n")[-1]
            raise SystemExit(message) from None


def file(text: str) -> str:
    """Return the name of a file in the current folder that has this text."""
    name = f"file_{len(os.listdir())}.json"
    Path(name).write_text(text)
    return name


def happens(call: str) -> str:
    """Return the error that a call raises, its type and first line; or that there is none."""
    names = {name: getattr(simplefsdp, name) for name in simplefsdp.__all__} | NAMES
    try:
        eval(call, dict(names))
    except BaseException as error:
        cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
        return f"{type(cause).__name__}: {str(cause).splitlines()[0]}"
    return "no error"


NAMES: dict[str, Any] = {
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
    "PROFILE": PROFILE,
    "Shard": Shard,
    "init_device_mesh": init_device_mesh,
    "nn": nn,
    "optim": optim,
    "torch": torch,
}
_helpers: tuple[Callable[..., Any], ...] = (net, sharded, trained, compiled, command, file)
NAMES |= {helper.__name__: helper for helper in _helpers}


@pytest.mark.compile
def test_a_misuse_is_told_in_words_that_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls = [line for line in GOLDEN.read_text().splitlines() if line and not line.startswith(" ")]
    assert len(calls) == len(set(calls)) >= 80
    found = []
    for call in calls:
        with contextlib.nullcontext() if call.startswith("command(") else fake_group(4):
            found.append(f"{call}\n    {happens(call)}\n")
    if os.environ.get("EXPECTTEST_ACCEPT"):
        GOLDEN.write_text("".join(found))
    assert "".join(found) == GOLDEN.read_text()
    assert not any("\n    no error\n" in each for each in found)

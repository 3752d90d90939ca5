"""Frames that Python evaluates while Dynamo compiles."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_passes.torch_compat.dynamo import frames_evaluated_by_python
from tests.frames import python_evaluates_frames


@pytest.mark.compile
def test_frames_are_evaluated_by_python_within_a_backend_and_by_dynamo_afterwards() -> None:
    compiled: list[torch.fx.GraphModule] = []

    def count(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled.append(gm)
        return gm.forward

    @torch.compile(backend=count)
    def inner(x: Tensor) -> Tensor:
        return x + 2

    def backend(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        assert not python_evaluates_frames()
        with frames_evaluated_by_python():
            assert python_evaluates_frames()
        assert not python_evaluates_frames()
        with pytest.raises(KeyError), frames_evaluated_by_python():
            raise KeyError
        assert not python_evaluates_frames()
        with frames_evaluated_by_python():  # a compiled function is compiled and run as ever
            assert torch.equal(inner(torch.ones(2)), torch.full((2,), 3.0))
        assert not python_evaluates_frames()
        return gm.forward

    @torch.compile(backend=backend)
    def outer(x: Tensor) -> Tensor:
        return x * 2

    assert torch.equal(outer(torch.ones(2)), torch.full((2,), 2.0))
    assert len(compiled) == 1
    assert torch.equal(inner(torch.ones(2)), torch.full((2,), 3.0))
    assert len(compiled) == 1

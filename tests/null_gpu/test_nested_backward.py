"""Autograd runs the backward of a GPU on a thread of its own, which is not in another backward for that."""

import threading

import torch
from torch import Tensor

from inductor_passes.torch_compat.autograd import is_nested


def test_a_backward_is_nested_in_another_on_the_thread_of_a_gpu() -> None:
    found: list[tuple[bool, bool]] = []

    def note(_gradient: Tensor | None = None) -> None:
        found.append((is_nested(), threading.current_thread() is threading.main_thread()))

    def begin_another(_gradient: Tensor) -> None:
        note()
        with torch.enable_grad():
            inner = torch.ones(1, device="cuda", requires_grad=True).clone()
            inner.register_hook(note)
            inner.sum().backward()
        note()

    x = torch.ones(1, device="cuda", requires_grad=True).clone()
    x.register_hook(begin_another)
    x.sum().backward()
    assert found == [(False, False), (True, False), (False, False)]

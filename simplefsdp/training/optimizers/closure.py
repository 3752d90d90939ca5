"""The closure that a step may be given."""

from collections.abc import Callable
from typing import Any

import torch


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call the closure, if any, with gradients, and return the loss that it computes."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()

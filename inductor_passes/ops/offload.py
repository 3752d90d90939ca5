"""The two copies of an offloaded parameter: its shard, on CPU, to where it is gathered, and its reduced gradient back.

::

    shard on CPU - to_device - [pad] - [cast] - all_gather - wait -> ...
    ... - reduction - wait - [slice] - [cast] - to_host -> gradient of the shard, on CPU

They are operators so that a graph shows them and Inductor leaves them alone; the passes put the first with the gather
that it prepares, the second behind the wait whose result it takes. Both run on the current stream.
"""

import torch
from torch import Tensor

from inductor_passes.ops.pack import LIBRARY


def to_device(shard: Tensor, device: str) -> Tensor:
    """Return a copy on the current device of a type. The host does not wait if ``shard`` is pinned."""
    return torch.empty_like(shard, device=device).copy_(shard, non_blocking=True)


def to_host(gradient: Tensor, pinned: bool) -> Tensor:
    """Return a contiguous copy on CPU. The host waits for it: an optimizer's hook may read the copy at once, or another
    gradient be added to it."""
    return torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=pinned).copy_(gradient)


def _shape_on_device(shard: Tensor, device: str) -> Tensor:
    return torch.empty_like(shard, device=device)


def _shape_on_host(gradient: Tensor, _pinned: bool) -> Tensor:
    return torch.empty(gradient.shape, dtype=gradient.dtype)


for _function, _schema, _fake in (
    (to_device, "(Tensor shard, str device) -> Tensor", _shape_on_device),
    (to_host, "(Tensor gradient, bool pinned) -> Tensor", _shape_on_host),
):
    LIBRARY.define(_function.__name__ + _schema, tags=(torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe))
    LIBRARY.impl(_function.__name__, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"simplefsdp::{_function.__name__}", _fake, lib=LIBRARY)

TO_DEVICE = torch.ops.simplefsdp.to_device.default
TO_HOST = torch.ops.simplefsdp.to_host.default

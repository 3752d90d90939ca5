"""Functional collectives that write into a given tensor, as Inductor's own bucketing passes issue them.

Before torch 2.15 ``_c10d_functional.all_gather_into_tensor_out`` and its twin look for a process group's C++ backend,
which one written in Python does not have. These kernels, in force from the first rehearsal of a process on, ask the
group itself, of whatever kind it is.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work, _resolve_process_group
from torch.distributed import ProcessGroup

from inductor_passes.torch_compat.distributed import OUT_FORMS_REACH_PYTHON_GROUPS


@functools.cache
def shim() -> torch.library.Library | None:
    """None where torch needs none."""
    if OUT_FORMS_REACH_PYTHON_GROUPS:
        return None
    library = torch.library.Library("_c10d_functional", "IMPL")
    for device in ("CPU", "CUDA"):
        library.impl("all_gather_into_tensor_out", _all_gather, device)
        library.impl("reduce_scatter_tensor_out", _reduce_scatter, device)
    return library


def _all_gather(source: Tensor, _size: int, name: Any, *, out: Tensor) -> Tensor:
    _register_work(out, _group(name).allgather_into_tensor_coalesced([out], [source.contiguous()]))
    return out


def _reduce_scatter(source: Tensor, op: str, _size: int, name: Any, *, out: Tensor) -> Tensor:
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp(getattr(dist.ReduceOp.RedOpType, op.upper()))
    _register_work(out, _group(name).reduce_scatter_tensor_coalesced([out], [source.contiguous()], options))
    return out


def _group(name: Any) -> Any:
    return name if isinstance(name, ProcessGroup) else _resolve_process_group(name)

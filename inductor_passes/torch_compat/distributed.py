"""Process groups, by the names under which functional collectives know them."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import _register_work

from inductor_passes.torch_compat.version import VERSION

OUT_FORMS_REACH_PYTHON_GROUPS = VERSION >= (2, 15)
"""Whether the out forms of functional collectives reach process groups in Python; before 2.15 they need C++."""


GROUPING_NCCL = "nccl-legacy" if VERSION >= (2, 15) else "nccl"
"""The backend of NCCL's that issues coalesced collectives as one group."""


def default_store() -> Any:
    """Return the store that all ranks were initialised with."""
    return torch.distributed.distributed_c10d._get_default_store()


def group_ranks(name: str) -> list[int]:
    """Return the global ranks of the process group that functional collectives call ``name``."""
    return torch.distributed.get_process_group_ranks(_group(name))


def rank_in(name: str) -> int:
    """Return this rank's number in the process group called ``name``."""
    return int(_group(name).rank())


def gather_into(gathered: Sequence[Tensor], sent: Sequence[Tensor], name: str) -> None:
    """Begin to gather, over the process group called ``name``, what each rank sends; ``wait_tensor`` waits for it.

    It is what ``_c10d_functional.all_gather_into_tensor_coalesced`` does with tensors that it allocates.

    Args:
        gathered: for each tensor that is sent, one that is as large as those of all ranks, one after the other.
        sent: contiguous tensors of any shape; each may be this rank's part of what is gathered.
    """
    whole, parts = ([tensor.view(-1) for tensor in tensors] for tensors in (gathered, sent))
    work = _group(name).allgather_into_tensor_coalesced(whole, parts)
    for tensor in gathered:
        _register_work(tensor, work)


def is_single_process_group(name: str) -> bool:
    """Return whether this process alone plays one rank of many in the process group called ``name``."""
    return torch.distributed.get_backend(_group(name)) in ("fake", "rehearsal")


def group_timeout_s(name: str) -> float:
    """Return the seconds for which the process group called ``name`` waits for a rank; gloo's default if it says none.

    All backends that torch brings keep the ``timeout`` of ``init_process_group`` and ``new_group`` in their options.
    """
    group = _group(name)
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout = getattr(options, "_timeout", None) or torch.distributed.distributed_c10d.default_pg_timeout
    return float(timeout.total_seconds())


def issues_groups(name: str) -> bool:
    """Return whether the process group called ``name`` issues coalesced collectives together, and copies nothing.

    The NCCL backend that torch 2.15 made the default issues them one by one; ``GROUPING_NCCL`` issues them as one group
    of NCCL's. gloo copies gathers into one buffer and out of it, and clones and reduces gradients one by one.
    """
    backend = torch.distributed.get_backend(_group(name))
    return backend == GROUPING_NCCL or is_single_process_group(name)


def issues_groups_one_by_one(name: str) -> bool:
    """Return whether the process group called ``name`` is NCCL's, and issues coalesced collectives one by one."""
    return "nccl" in torch.distributed.get_backend(_group(name)) and not issues_groups(name)


def new_groups_are_split(group: torch.distributed.ProcessGroup) -> bool:
    """Return whether ``new_group`` would split a communicator off that of the whole world, for which all ranks come.

    So it is where the world's process group is bound to a device: by ``init_process_group(device_id=...)``, or by the
    NCCL backend that torch 2.15 made the default. ``split_group`` then splits it off that of ``group``.
    """
    world: Any = torch.distributed.group.WORLD
    device = world.bound_device_id
    return device is not None and bool(group._get_backend(device).supports_splitting)


def _group(name: str) -> Any:
    return torch.distributed.distributed_c10d._resolve_process_group(cast(Any, name))

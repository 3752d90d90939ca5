"""One rank of many on the null GPU, with NCCL and no other rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from inductor_passes.runtime import agreement
from simplefsdp.null_gpu.launch import null_device
from simplefsdp.null_gpu.log import Collective, Recorder


@contextmanager
def null_rank(ranks: int, backend: str = "nccl") -> Iterator[Recorder]:
    """This process as rank 0 of ``ranks`` with a backend of NCCL's; yields the recorder of what it launches.

    Three things are not as on a GPU: attention by cuDNN is switched off, because cuDNN finds that there is no driver;
    compiled graphs are not compared with those of other ranks, because there are none; and NCCL is told how many ranks
    sub-groups have, which it would learn from those ranks.

    Raises:
        RuntimeError: the process does not run under the null GPU.
    """
    if null_device() is None:
        raise RuntimeError("null GPU: start this process with python -m simplefsdp.null_gpu")
    torch.cuda.set_device(0)
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    recorder = Recorder()

    torchs_split_group = dist.split_group

    def split_group(*, split_ranks: list[list[int]], **kwargs: Any) -> Any:
        recorder.expect_split(len(split_ranks[0]))
        return torchs_split_group(split_ranks=split_ranks, **kwargs)

    dist.init_process_group(backend, rank=0, world_size=ranks, store=dist.HashStore())
    try:
        with (
            mock.patch.object(agreement, "is_single_process_group", return_value=True),
            mock.patch.object(device_mesh, "split_group", split_group),
            mock.patch.object(dist, "split_group", split_group),
        ):
            yield recorder
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        dist.destroy_process_group()


def communicators(recorder: Recorder) -> dict[int, tuple[int, ...]]:
    """Return the ranks of each of NCCL's communicators, by its number in the log, of all groups that were made so far.

    One all-reduce of each group is asked for, whose log has the number.
    """
    found: dict[int, tuple[int, ...]] = {}
    for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
        if dist.get_rank() not in ranks:
            continue
        recorder.take()
        with recorder.recording():
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        calls = [event.what for event in recorder.take() if isinstance(event.what, Collective)]
        found.update((call.communicator, tuple(ranks)) for call in calls)
    return found

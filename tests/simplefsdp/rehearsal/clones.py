"""A real world in which every rank holds the same data: processes that all believe to be one rank, over gloo."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tests.ranks import METHOD


class ClonesGroup(dist.ProcessGroup):
    """A process group with the collectives of FSDP2 and DDP, whose data went through gloo; not asynchronous."""

    def __init__(self, gloo: Any, rank: int, size: int):
        super().__init__(rank, size)
        self.gloo, self._rank, self._size, self._name = gloo, rank, size, ""

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return "clones"

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, _desc: str) -> None:
        pass

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], sources: Sequence[Tensor], _: Any = None
    ) -> Any:
        for output, source in zip(outputs, sources, strict=True):
            self.gloo.allgather([list(output.flatten().chunk(self._size))], [source.clone()]).wait()
        return _Done()

    def allgather(self, outputs: list[list[Tensor]], sources: list[Tensor], _: Any = None) -> Any:
        self.gloo.allgather(outputs, sources).wait()
        return _Done(outputs)

    def _allgather_base(self, output: Tensor, source: Tensor, _: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([output], [source])

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], sources: Sequence[Tensor], options: Any
    ) -> Any:
        for output, source in zip(outputs, sources, strict=True):
            total = source.clone()
            self.allreduce([total], options)
            output.copy_(total.flatten().chunk(self._size)[self._rank].view_as(output))
        return _Done()

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: Any) -> Any:
        return self.reduce_scatter_tensor_coalesced([output], [source], options)

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> Any:
        for tensor in tensors:
            self.gloo.allreduce([tensor]).wait()
            if options.reduceOp == dist.ReduceOp.AVG:
                tensor.div_(self._size)
        return _Done(list(tensors))

    def broadcast(self, tensors: Sequence[Tensor], _: Any) -> Any:
        return _Done(list(tensors))

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


class _Done(dist._Work):
    def __init__(self, outputs: Any = None):
        super().__init__()
        self._outputs = outputs

    def wait(self, _timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._outputs)
        return future


def run_as_clones(fn: Callable[[], Any], rank: int, size: int, folder: Path) -> Any:
    """``fn()`` in ``size`` processes that are all rank ``rank``; what the first of them returned."""
    mp.start_processes(_run, (fn, rank, size, folder), nprocs=size, start_method=METHOD)
    return torch.load(folder / "result")


def _run(process: int, fn: Callable[[], Any], rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"

    def create(_options: Any, _: Any) -> ClonesGroup:
        gloo = dist.ProcessGroupGloo(dist.FileStore(str(folder / "store"), size), process, size, timedelta(seconds=60))
        return ClonesGroup(gloo, rank, size)

    dist.Backend.register_backend("clones", create, extended_api=True, devices=["cpu"])
    dist.init_process_group("clones", rank=rank, world_size=size, store=dist.HashStore())
    found = fn()
    if process == 0:
        torch.save(found, folder / "result")
    dist.destroy_process_group()

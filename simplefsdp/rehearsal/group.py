"""One rank of N: a process group whose other ranks are clones of this one, and whose network is a model.

    with rehearsal.world(ranks=64, network="h100-8-nodes") as world:
        ...                                    # FSDP2, DDP, DTensor, simple_fsdp, compiled or not
        world.collectives()                    # what was issued, when, and for how long the step waited

The same through torch's own door, with what init_process_group wants besides::

    dist.init_process_group("rehearsal", rank=0, world_size=64, store=dist.HashStore(), pg_options="h100-8-nodes")

What is real: this rank's kernels, memory, streams, compiled code, and the code of whatever data parallelism runs on it.
What a collective costs is ``Network.seconds``, and in a group of collectives ``Network.member_s`` more for each further
one. A collective or group occupies the channel of its process group, one after the other, while channels of different
process groups do not know of each other. Data moves when that time is over.

What is not modelled: the values of other ranks (each contributes what this one does, so a sum over N ranks is N times
this rank's tensor, rounded once; a scatter from another rank gives zeros); ranks that come late; collectives of two
groups sharing a cable; on CUDA, the streaming multiprocessors that a real collective takes away from compute, unless
``multiprocessors`` says how many; point-to-point messages, which are refused.
"""

import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from simplefsdp.hardware.profile import Network
from simplefsdp.hardware.profile import network as find_network
from simplefsdp.rehearsal.channel import CpuChannel, Job, Move
from simplefsdp.rehearsal.out_forms import shim


class Collective(NamedTuple):
    """A recorded collective; times in seconds of ``time.perf_counter()``."""

    kind: str
    """One of ``simplefsdp.hardware.profile.KINDS``."""
    group: str
    ranks: tuple[int, ...]
    nbytes: int
    """Bytes of the whole tensors: an all-gather's output, a reduce-scatter's input."""
    fqns: tuple[str, ...]
    """FQNs of the parameters whose shards are gathered, where the collective reads the shards themselves."""
    issued: float
    started: float
    finished: float
    """When the collective is done by the network's model; ``moved``: when the data had moved, later if this machine was
    too slow."""
    moved: float
    waited: float | None
    """When a wait for the collective first began; ``None``: nobody waited."""
    blocked: float
    """Seconds that the wait took: exposed communication, where compute waits. On CUDA a stream waits; FSDP2 has some
    streams of its own for that."""


class _Issued(NamedTuple):
    kind: str
    group: "RehearsalGroup"
    nbytes: int
    fqns: tuple[str, ...]
    job: Job


class World:
    """A rehearsed world: the network and the record that all its process groups share.

    ``network`` may be changed between steps; with ``None`` communication costs nothing. The record grows until
    ``forget()``.
    """

    def __init__(self, network: Network | None, multiprocessors: int = 1):
        self.network = network
        self.multiprocessors = multiprocessors
        self.before_first: Callable[[], object] | None = None
        """Called before the next collective, once."""
        self._issued: list[_Issued] = []
        self._channels: list[Any] = []
        self._fqns: dict[int, tuple[weakref.ref[torch.nn.Parameter], str]] = {}
        shim()

    def name_parameters(self, model: torch.nn.Module) -> None:
        """Record collectives that read a parameter's shard itself with the FQN of the parameter from now on."""
        for fqn, param in model.named_parameters():
            local = param.to_local() if isinstance(param, dist.tensor.DTensor) else param
            if local.numel():
                self._fqns[local.untyped_storage().data_ptr()] = weakref.ref(param), fqn

    def collectives(self) -> list[Collective]:
        """Return all collectives since the last ``forget()``, in the order of their issue, once they are done."""
        found = []
        for kind, group, nbytes, fqns, job in self._issued:
            while not job.done():
                time.sleep(1e-4)
            what = (kind, group.group_name, group.ranks, nbytes, fqns)
            found.append(Collective(*what, *job.times(), job.waited, job.blocked))
        return found

    def forget(self) -> None:
        """Clear the record."""
        self._issued.clear()

    def channel(self, device: torch.device) -> Any:
        """Return a new channel for collectives of tensors on ``device``."""
        if device.type == "cpu":
            self._channels.append(CpuChannel())
        else:
            from simplefsdp.rehearsal.cuda import CudaChannel  # needs triton

            self._channels.append(CudaChannel(device, self.multiprocessors))
        return self._channels[-1]

    def close(self) -> None:
        """Close all channels; collectives that are still under way are given up."""
        for channel in self._channels:
            channel.close()

    def seconds(self, kind: str, ranks: Sequence[int], nbytes: int, members: int = 1) -> float:
        """Return how long a collective, or a group of ``members`` collectives, takes."""
        if self.network is None:
            return 0.0
        return self.network.seconds(kind, ranks, nbytes) + (members - 1) * (self.network.member_s or 0.0)

    def issued(self, kind: str, group: "RehearsalGroup", nbytes: int, moves: Sequence[Move], job: Job) -> None:
        pointers = dict.fromkeys(move.source.untyped_storage().data_ptr() for move in moves)
        known = (self._fqns[pointer] for pointer in pointers if pointer in self._fqns)
        fqns = tuple(fqn for param, fqn in known if param() is not None)
        self._issued.append(_Issued(kind, group, nbytes, fqns, job))


_world: World | None = None  # of the default process group, which there is one of, too


def current_world() -> World:
    """Return the world of the default process group."""
    assert _world is not None
    return _world


@contextmanager
def world(ranks: int, network: Network | str | None, *, rank: int = 0, multiprocessors: int = 1) -> Iterator[World]:
    """This process as rank ``rank`` of ``ranks`` on ``network`` (or its name): the default process group.

    ``multiprocessors``: how many a collective keeps busy on CUDA while it runs (NCCL: 16 by default).

    Raises:
        ValueError: a number of ranks that is not positive or more than the network has; a rank outside of the world;
            an unknown network.
    """
    global _world
    chosen = find_network(network) if isinstance(network, str) else network
    _check(ranks, rank, chosen)
    dist.init_process_group(
        "rehearsal", rank=rank, world_size=ranks, store=dist.HashStore(), pg_options=World(chosen, multiprocessors)
    )
    here = _world
    assert here is not None
    try:
        yield here
    finally:
        _world = None
        dist.destroy_process_group()
        here.close()


def _check(ranks: int, rank: int, network: Network | None) -> None:
    if ranks < 1:
        raise ValueError(f"ranks: expected a positive number, found {ranks}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: {rank} is outside of a world of {ranks} ranks")
    if network is not None and ranks > network.ranks:
        raise ValueError(f"ranks: {ranks}, but network {network.name!r} has {network.ranks}")


class Work(dist._Work):
    """The work of one collective; ``result()`` returns the tensors that the collective writes."""

    def __init__(self, job: Job, outputs: Sequence[Tensor]):
        super().__init__()
        self._job, self._outputs = job, list(outputs)

    def wait(self, _timeout: timedelta | None = None) -> bool:
        self._job.wait()
        return True

    def synchronize(self) -> None:
        self._job.wait()

    def is_completed(self) -> bool:
        return self._job.done()

    def is_success(self) -> bool:
        return self._job.done()

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        return self._job.future(self._outputs)


class RehearsalGroup(ProcessGroup):
    """A process group whose collectives are moves on a channel."""

    def __init__(self, world: World, rank: int, ranks: Sequence[int], name: str):
        super().__init__(rank, len(ranks))
        self.world, self.ranks = world, tuple(ranks)
        self._rank, self._name, self._desc = rank, name, "undefined"
        self._channels: dict[torch.device, Any] = {}

    # What torch asks of a process group written in Python.

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self.ranks)

    def name(self) -> str:
        return "rehearsal"

    getBackendName = name

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    # Gathers

    def _allgather_base(self, output: Tensor, source: Tensor, _options: Any = None) -> Work:
        return self.allgather_into_tensor_coalesced([output], [source])

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], sources: Sequence[Tensor], _options: Any = None
    ) -> Work:
        moves = [Move(output, source) for output, source in zip(outputs, sources, strict=True)]
        nbytes = sum(output.nbytes for output in outputs)
        return self._issue("all_gather", nbytes, moves, parts=self.size(), members=len(moves))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], sources: Sequence[Tensor], _options: Any = None) -> Work:
        self._one_for_each_rank("all_gather", *outputs)
        moves = [Move(o, source) for tensors, source in zip(outputs, sources, strict=True) for o in tensors]
        return self._issue("all_gather", sum(move.out.nbytes for move in moves), moves)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], sources: Sequence[Tensor], _options: Any = None
    ) -> Work:
        return self.allgather([list(o) for o in zip(*outputs, strict=True)], sources)

    def gather(self, outputs: Sequence[Sequence[Tensor]], sources: Sequence[Tensor], _options: Any = None) -> Work:
        self._one_for_each_rank("gather", *outputs)
        moves = [Move(o, source) for tensors, source in zip(outputs, sources, strict=False) for o in tensors]
        return self._issue("broadcast", sum(source.nbytes for source in sources) * self.size(), moves, sources)

    # Reductions

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: Any) -> Work:
        return self.reduce_scatter_tensor_coalesced([output], [source], options)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], sources: Sequence[Tensor], options: Any
    ) -> Work:
        for output, source in zip(outputs, sources, strict=True):
            self._same("reduce_scatter", source.numel(), output.numel() * self.size())
            _check_contiguous("reduce_scatter", source)
        moves = [
            self._reduced(output, source.view(-1).narrow(0, self._rank * output.numel(), output.numel()), options)
            for output, source in zip(outputs, sources, strict=True)
        ]
        return self._issue("reduce_scatter", sum(source.nbytes for source in sources), moves, members=len(moves))

    def reduce_scatter(self, outputs: Sequence[Tensor], sources: Sequence[Sequence[Tensor]], options: Any) -> Work:
        self._one_for_each_rank("reduce_scatter", *sources)
        moves = [self._reduced(o, s[self._rank], options) for o, s in zip(outputs, sources, strict=True)]
        return self._issue("reduce_scatter", sum(t.nbytes for tensors in sources for t in tensors), moves)

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Work:
        options = options or dist.AllreduceOptions()
        moves = [self._reduced(tensor, tensor, options) for tensor in tensors]
        return self._issue("all_reduce", sum(tensor.nbytes for tensor in tensors), moves)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], options: Any = None) -> Work:
        return self.allreduce(tensors, options)

    def reduce(self, tensors: Sequence[Tensor], options: Any) -> Work:
        reduced = tensors if options.rootRank == self._rank else ()
        moves = [self._reduced(tensor, tensor, options) for tensor in reduced]
        return self._issue("broadcast", sum(tensor.nbytes for tensor in tensors), moves, tensors)

    # All-to-all: rank j, a clone, sends what this rank would send to rank `self._rank` if it were rank j. Where it must
    # send another number of elements (ranks that own or route other things), it repeats or cuts what this rank sends.

    def alltoall_base(
        self, output: Tensor, source: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], _options: Any = None
    ) -> Work:
        for tensor, splits in ((output, out_splits), (source, in_splits)):
            if not splits and tensor.shape[0] % self.size():
                raise ValueError(f"rehearsal: all_to_all over {self.size()} ranks: {tensor.shape[0]} rows")
        outputs = output.split(list(out_splits) or output.shape[0] // self.size())
        sources = source.split(list(in_splits) or source.shape[0] // self.size())
        return self.alltoall(outputs, sources)

    def alltoall(self, outputs: Sequence[Tensor], sources: Sequence[Tensor], _options: Any = None) -> Work:
        self._one_for_each_rank("all_to_all", outputs, sources)
        sent = sources[self._rank] if sources[self._rank].numel() else max(sources, key=Tensor.numel)
        moves = []
        for output in outputs:
            if sent.numel() and output.shape != sent.shape:
                parts = output.view(-1).split(sent.numel())
                moves += [Move(part, sent.view(-1)[: part.numel()]) for part in parts]
            elif sent.numel():
                moves.append(Move(output, sent))
            else:
                output.zero_()
        nbytes = max(sum(tensor.nbytes for tensor in tensors) for tensors in (sources, outputs))
        return self._issue("all_to_all", nbytes, moves)

    # From one rank to others

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Work:
        """Broadcast: a clone has what this rank has, so nothing moves, but the collective takes its time."""
        if options.rootRank != self._rank and tensors[0].dtype == torch.int64:
            _refuse_objects_from_elsewhere(options.rootRank)
        return self._issue("broadcast", sum(tensor.nbytes for tensor in tensors), [], tensors)

    def scatter(self, outputs: Sequence[Tensor], sources: Sequence[Sequence[Tensor]], _options: Any) -> Work:
        """Scatter: zeros, if another rank has the tensors."""
        self._one_for_each_rank("scatter", *sources)
        own = [tensors[self._rank] for tensors in sources] or [torch.zeros_like(output) for output in outputs]
        for output, source in zip(outputs, own, strict=True):
            self._same("scatter", output.numel(), source.numel())
        moves = [Move(output, source) for output, source in zip(outputs, own, strict=True)]
        return self._issue("broadcast", sum(output.nbytes for output in outputs) * self.size(), moves)

    def barrier(self, opts: Any = None) -> Work:  # noqa: ARG002
        return self._issue("broadcast", 0, [])

    def _refuse(self, *_args: Any) -> Work:
        raise NotImplementedError("rehearsal: send and recv between two ranks: there is only one rank here")

    send = recv = recv_anysource = _refuse

    # Names of torch 2.13 and later

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def _reduced(self, output: Tensor, source: Tensor, options: Any) -> Move:
        return Move(output, source, _factor(options.reduceOp, self.size(), source.dtype))

    def _same(self, kind: str, found: int, expected: int) -> None:
        if found != expected:
            raise ValueError(f"rehearsal: {kind} over {self.size()} ranks: {found} elements where {expected} belong")

    def _one_for_each_rank(self, kind: str, *lists: Sequence[Tensor]) -> None:
        for tensors in lists:
            if len(tensors) != self.size():
                raise ValueError(f"rehearsal: {kind} over {self.size()} ranks: a list of {len(tensors)} tensors")

    def _issue(
        self,
        kind: str,
        nbytes: int,
        moves: Sequence[Move],
        outputs: Sequence[Tensor] = (),
        parts: int = 1,
        members: int = 1,
    ) -> Work:
        """Issue a collective, or a group of collectives as one transfer, and return its work.

        Args:
            parts: how often each source fits into its output.
            members: number of collectives of the group.
        """
        if self.world.before_first is not None:
            before, self.world.before_first = self.world.before_first, None
            before()
        outputs = outputs or [move.out for move in moves]
        for out, source, _ in moves:
            self._same(kind, out.numel(), parts * source.numel())
            _check_contiguous(kind, out, source)
            if (out.dtype, out.device) != (source.dtype, source.device):
                raise ValueError(
                    f"rehearsal: {kind}: from {source.dtype} on {source.device} to {out.dtype} on {out.device}"
                )
        device = outputs[0].device if outputs else _default_device()
        if device not in self._channels:
            self._channels[device] = self.world.channel(device)
        job = self._channels[device].issue(self.world.seconds(kind, self.ranks, nbytes, members), moves)
        self.world.issued(kind, self, nbytes, moves, job)
        return Work(job, outputs)


def _refuse_objects_from_elsewhere(root: int) -> None:
    """Refuse a broadcast of objects: torch sends their sizes first, into memory that no rank of a rehearsal writes."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in ("broadcast_object_list", "scatter_object_list"):
            raise NotImplementedError(
                f"rehearsal: {frame.f_code.co_name} from rank {root}: nobody is there to say what; be that rank"
            )


def _check_contiguous(kind: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"rehearsal: {kind}: expected contiguous tensors, found strides {tensor.stride()}")


def _default_device() -> torch.device:
    """Return the device of a barrier: where the work is."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _factor(op: ReduceOp, ranks: int, dtype: torch.dtype) -> float:
    """Return the factor that turns one of ``ranks`` equal values into their reduction."""
    if op == ReduceOp.SUM:
        return 1 if dtype == torch.bool else ranks
    if op == ReduceOp.PREMUL_SUM:
        factor: Any = op.__getstate__()
        return ranks * factor[1]
    if any(op == same for same in (ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR)):
        return 1
    raise NotImplementedError(f"rehearsal: a reduction by {op}")


def _create(options: Any, world: Any) -> RehearsalGroup:
    """Create a process group for ``init_process_group`` (whose ``pg_options`` is the world) and ``new_group``."""
    global _world
    if options.group_id == "0" or world is not None or _world is None:
        if not isinstance(world, World):
            world = World(find_network(world) if isinstance(world, str) else world)
        _check(options.group_size, options.group_rank, world.network)
        _world = world
    ranks = options.global_ranks_in_group or range(options.group_size)
    return RehearsalGroup(_world, options.group_rank, ranks, options.group_id)


dist.Backend.register_backend("rehearsal", _create, extended_api=True, devices=["cpu", "cuda"])

"""A model under a system of data parallelism, stepped and measured as one rank of a rehearsed world."""

import atexit
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_passes.torch_compat.dtensor import local_tensor
from simplefsdp.hardware.profile import Network
from simplefsdp.plan.grouping import block_of
from simplefsdp.rehearsal.group import Collective, World
from simplefsdp.rehearsal.lower_bounds import Phase, lower_bound_s, phase_of, simulate
from simplefsdp.rehearsal.systems import System, cross_entropy
from simplefsdp.rehearsal.workload import Workload


class RecordedStep(NamedTuple):
    """A recorded step."""

    seconds: float
    loss: float
    parts: tuple[Phase, ...]
    """Phases: forward and backward of each micro-batch, and the rest."""
    collectives: list[Collective]


@dataclass(frozen=True)
class TimingResult:
    """Times and memory of one system on one workload; seconds and bytes."""

    system: str
    step_s: float
    """Median of ``steps_s``."""
    steps_s: tuple[float, ...]
    """Seconds of all steps, in the order of the rounds."""
    tokens_per_s: float
    """Tokens per second of this device."""
    mfu: float | None
    """Share of the device's dense bf16 peak that ``flops_per_token`` stand for; None where either is not known."""
    peak_bytes: int
    resident_bytes: Mapping[str, int]
    """Bytes of the peak that are parameters and optimizer state, by name."""
    collectives: int
    communication_s: float
    exposed_s: float
    compute_s: float
    """Seconds of compute in a step whose communication costs nothing."""
    l1_s: float | None
    l2_s: float | None
    """Seconds of the step by the schedule without losses; ``None`` where the record does not show compute
    (``System.own_streams``, on CUDA)."""
    first_step_s: float
    late_s: float
    """How much later than modelled data moved, at worst: large if this machine was too busy for the rehearsal."""


class TrainingRun:
    """A model, sharded by a system, with its optimizer (AdamW, fused) and its loss.

    Args:
        ends_late: switch gradient reduction on between the last forward and its backward.
    """

    def __init__(self, name: str, system: System, workload: Workload, world: World, *, ends_late: bool = False):
        self.name, self.system, self.workload, self.world = name, system, workload, world
        self._ends_late = ends_late
        torch.manual_seed(0)
        with torch.device("meta"):
            self.model: Any = workload.build()
        if not system.sharded:
            materialize(self.model, workload.device)
        self._forward = system.wrap(self.model, workload.parallelism)
        if system.sharded:
            materialize(self.model, workload.device)
        world.name_parameters(self.model)
        self._loss: Callable[..., Tensor] = torch.compile(cross_entropy) if system.compiled else cross_entropy
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._steps = 0
        self.first_step_s = 0.0

    def step(self, network: Network | None) -> RecordedStep:
        """Run one step on ``network``, from an idle device to an idle device, and return its record."""
        last = self.workload.micro_batches - 1
        batches = [self.workload.tokens((last + 1) * self._steps + i) for i in range(last + 1)]
        device = self.workload.device
        self.world.network = network
        self.world.forget()
        start_clock(device)
        started = time.perf_counter()
        marks = [mark(device)]
        for i, tokens in enumerate(batches):
            if last:
                self.model.set_requires_gradient_sync(i == last and not self._ends_late)
            loss = self._loss(self._forward(tokens[:, :-1]), tokens[:, 1:])
            if last:
                self.model.set_requires_gradient_sync(i == last)
            marks.append(mark(device))
            loss.backward()
            marks.append(mark(device))
        self._optimizer.step()
        self._optimizer.zero_grad()
        marks.append(mark(device))
        finish(device)
        seconds = time.perf_counter() - started
        if self._steps == 0:
            self.first_step_s = seconds
        self._steps += 1
        collectives = self.world.collectives()
        times = [when() for when in marks]
        parts = tuple(phase_of(begin, end, collectives) for begin, end in itertools.pairwise(times))
        return RecordedStep(seconds, loss.item(), parts, collectives)

    def resident_bytes(self) -> dict[str, int]:
        """Return the bytes of what lives from step to step, after the first step."""
        state = [v for values in self._optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
        return {
            "parameters": _bytes([*self.model.parameters(), *self.model.buffers()]),
            "optimizer": _bytes(state),
        }

    def peak_bytes(self) -> int:
        """Return the most bytes alive at any time in a step, without those of the compiler and the runtime."""
        if self.workload.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.step(None)
            return torch.cuda.max_memory_allocated()
        return sum(self.resident_bytes().values()) + profiled_peak_bytes(lambda: self.step(None))


def measure(
    runs: Sequence[TrainingRun], network: Network, rounds: int, progress: Callable[[], Any]
) -> list[TimingResult]:
    """Step all runs in turn, on ``network`` and on one that costs nothing; return their results.

    The first step of each run must have been made, and its memory should be in use by now (two steps).

    Args:
        progress: called after each step.
    """
    real: dict[str, list[RecordedStep]] = {run.name: [] for run in runs}
    free: dict[str, list[RecordedStep]] = {run.name: [] for run in runs}
    for i in range(rounds):
        order = runs if i % 2 == 0 else runs[::-1]
        for run in order:
            for steps, chosen in ((real, network), (free, None)):
                steps[run.name].append(run.step(chosen))
                progress()
    return [_result(run, network, real[run.name], free[run.name]) for run in runs]


def _result(
    run: TrainingRun, network: Network, real: Sequence[RecordedStep], free: Sequence[RecordedStep]
) -> TimingResult:
    seconds = statistics.median(step.seconds for step in real)
    # The free step whose compute is the median one, not a mixture of several.
    typical = sorted(free, key=lambda step: sum(compute for compute, _ in step.parts))[len(free) // 2]
    workload = run.workload
    opaque = run.system.own_streams and workload.device.type == "cuda"
    free_s = statistics.median(step.seconds for step in free)
    compute = free_s if opaque else sum(compute for compute, _ in typical.parts)
    waits_seen = all(c.waited is not None for c in real[0].collectives)  # DDP waits for futures
    if workload.device.type == "cuda" or not waits_seen:  # on CUDA waits are on several streams
        exposed = max(0.0, seconds - free_s)
    else:
        exposed = statistics.median(sum(c.blocked for c in step.collectives) for step in real)
    tokens = workload.batch * workload.seq / workload.tensor_parallel
    return TimingResult(
        system=run.name,
        step_s=seconds,
        steps_s=tuple(step.seconds for step in real),
        tokens_per_s=tokens / seconds,
        mfu=mfu(run.model, workload, tokens / seconds),
        peak_bytes=run.peak_bytes(),
        resident_bytes=run.resident_bytes(),
        collectives=len(real[0].collectives),
        communication_s=sum(c.finished - c.started for c in real[0].collectives),
        exposed_s=exposed,
        compute_s=compute,
        l1_s=None if opaque else lower_bound_s(typical.parts, network),
        l2_s=None if opaque else simulate(typical.parts, network)[0],
        first_step_s=run.first_step_s,
        late_s=max((c.moved - c.finished for step in real for c in step.collectives), default=0.0),
    )


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a model (or its shards) on the meta device memory on ``device``, with values like those of a fresh one.

    Parameters become normal, std 0.02, those of one dimension 1; buffers what ``reset_parameters`` of their modules
    makes of them, or zeros. This allocates no more than the model itself.
    """
    model.to_empty(device=device)
    with torch.no_grad():
        for param in model.parameters():
            local = local_tensor(param)
            if local.is_floating_point():
                local.normal_(std=0.02) if param.ndim > 1 else local.fill_(1)
        for module in model.modules():
            for buffer in module.buffers(recurse=False):
                buffer.zero_()
            reset = getattr(module, "reset_parameters", None)
            if reset and module._buffers and not list(module.parameters()):
                reset()


@contextmanager
def fresh_compile_cache() -> Iterator[None]:
    """Use an empty compile cache, in memory and on disk, whose files stay until the process ends."""
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    with fresh_cache(dir=folder.name, delete=False):
        yield


def profiled_peak_bytes(step: Callable[[], Any]) -> int:
    """Return the most bytes on CPU that ``step`` holds beyond those alive before, from the allocator's own events."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes lines of its own to stderr
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events: Any = profile.profiler
    changes = [(e.start_ns(), e.nbytes()) for e in events.kineto_results.events() if e.name() == "[memory]"]
    if not changes:
        raise RuntimeError("the profiler saw no allocation")
    alive = peak = 0
    for _, change in sorted(changes):
        alive += change
        peak = max(peak, alive)
    return peak


PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bf16 FLOP/s from NVIDIA's data sheets, by a part of the device's name."""


def mfu(model: nn.Module, workload: Workload, tokens_per_s: float) -> float | None:
    if workload.device.type != "cuda":
        return None
    flops = flops_per_token(model, workload.seq)
    device = torch.cuda.get_device_name(workload.device)
    peak = next((peak for name, peak in PEAK_FLOPS.items() if name in device), None)
    return flops * tokens_per_s / peak if flops and peak else None


def flops_per_token(model: nn.Module, seq: int) -> int | None:
    """``6 (N - N_embedding) + 6 layers heads 2 head_dim seq`` (PaLM, arXiv 2204.02311, appendix B), no recomputation.

    None for a model whose ``config`` has none of the usual names.
    """
    config = getattr(model, "config", None)
    layers = getattr(config, "layers", None) or getattr(config, "num_hidden_layers", None)
    shape = attention_shape(config)
    if not layers or shape is None:
        return None
    _, heads, head_dim = shape
    tied = len(list(model.parameters())) != len(list(model.named_parameters(remove_duplicate=False)))
    embeddings = 0 if tied else sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    weights = sum(param.numel() for param in model.parameters()) - embeddings
    return 6 * weights + 12 * layers * heads * head_dim * seq


def attention_shape(config: Any) -> tuple[int, int, int] | None:
    """Return a model's width, heads and width of a head; None if its ``config`` has none of the usual names."""
    heads = getattr(config, "heads", None) or getattr(config, "num_attention_heads", None)
    dim = getattr(config, "dim", None) or getattr(config, "hidden_size", None)
    return (dim, heads, getattr(config, "head_dim", None) or dim // heads) if heads and dim else None


def estimated_step_bytes(workload: Workload, system: System) -> dict[str, int]:
    """Return about how many bytes a step needs, from fake tensors: nothing is allocated.

    ``"state"``: this rank's parameters, gradients and two moments of the optimizer; ``"whole"``: the two largest of the
    repeated blocks and of what is around them, gathered; ``"saved"``: what forward leaves for backward without a
    compiler, in the compute dtype (0 where a model cannot be built of fake tensors).
    """
    mesh, policy, *_ = workload.parallelism
    shards = mesh.size(mesh.ndim - 1) if system.sharded else 1
    compute = policy.param_dtype or torch.float32
    with torch.device("meta"):
        model = workload.build()
    state = 0
    whole: dict[str | None, int] = {}
    for fqn, param in model.named_parameters():
        local = local_tensor(param)
        rows, of_a_row = (local.shape[0], local[0].numel()) if local.ndim else (1, 1)
        state += 4 * local.element_size() * -(-rows // shards) * of_a_row
        whole[block_of(fqn)] = whole.get(block_of(fqn), 0) + local.numel() * compute.itemsize
    gathered = sum(sorted(whole.values())[-2:]) if system.sharded else 0
    return {"state": state, "whole": gathered, "saved": _saved_bytes(workload, compute)}


def _saved_bytes(workload: Workload, dtype: torch.dtype) -> int:
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        tensors.append(tensor)
        return tensor

    tensors: list[Tensor] = []  # or their storages' addresses would be used again
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model = workload.build()
            tokens = torch.zeros((workload.batch, workload.seq), dtype=torch.int64)
            cross_entropy(model(tokens), tokens)
    except Exception:
        return 0
    finally:
        torch.set_default_dtype(default)
    return sum(saved.values()) - sum(saved.get(p.untyped_storage()._cdata, 0) for p in model.parameters())


def available_bytes(device: torch.device) -> int:
    """Return the bytes of memory that are free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def start_clock(device: torch.device) -> None:
    """Start the clock of a step on an idle device, before its first ``mark``."""
    finish(device)
    if device.type == "cuda":
        from simplefsdp.rehearsal.cuda import restart_clock  # needs triton

        restart_clock()


def mark(device: torch.device) -> Callable[[], float]:
    """Return a function that tells when the device came to this point (``time.perf_counter()``), once it has."""
    if device.type == "cpu":
        now = time.perf_counter()
        return lambda: now
    from simplefsdp.rehearsal.cuda import clock  # needs triton

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return lambda: clock(event)


def finish(device: torch.device) -> None:
    """Wait until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = [local_tensor(tensor.detach()).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

"""A training step under a system on a GPU that is not there: what it asks of the GPU, its peak memory, simulated time.

The null GPU (``simplefsdp/null_gpu/``) runs torch's own CUDA, Triton and NCCL code; kernels return at once. Counts,
order and the allocator's peak are those of a GPU, times are those of a profile.
"""

import gc
import gzip
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from inductor_passes.torch_compat.dtensor import local_tensor
from simplefsdp.analysis.prediction import Prediction, collected_predictions
from simplefsdp.hardware.profile import HardwareProfile
from simplefsdp.null_gpu.clock import BUCKET_COPIES, SimulatedStep, Sizes, last_step, noting_triton_bytes, simulate
from simplefsdp.null_gpu.log import Collective, Event, Kernel, Matmul, Recorder, Wait, host_waits
from simplefsdp.null_gpu.rank import communicators
from simplefsdp.rehearsal.systems import System, cross_entropy
from simplefsdp.rehearsal.timing import attention_shape, mfu
from simplefsdp.rehearsal.workload import Workload
from simplefsdp.text.tables import markdown_table
from simplefsdp.text.trace_events import complete, counter, named

_WARM_UP, _LOGGED = 2, 3
"""Steps that are not logged, which compile and make the optimizer's state, and steps that are; the last counts."""


@dataclass(frozen=True)
class SimulatedResult:
    """A step of a system: what it asked of a GPU, and what that takes."""

    system: str
    simulated: SimulatedStep
    tokens_per_s: float
    """Tokens per second of this device."""
    mfu: float | None
    """Share of the device's dense bf16 peak that ``flops_per_token`` stand for; None where either is not known."""
    peak_bytes: int
    """The most bytes that torch's allocator had given away at one time."""
    kernels: int
    copies: int
    """Kernels that only copy members of a bucket into its buffer or out of it."""
    collectives: int
    """Collectives, which NCCL carries out by one kernel each: a group of several is one."""
    stream_waits: int
    """How often a stream was told to wait for another."""
    host_waits: int
    memory: tuple[tuple[float, int], ...]
    """Bytes that torch's allocator had given away, from a time on; seconds since the step's begin."""
    predicted: Prediction | None
    """The compiler's prediction of its plan; None for systems that have no plan of this library."""

    def figures(self) -> dict[str, Any]:
        """Return the result without the step's spans and its memory over time, for JSON."""
        step = self.simulated._asdict()
        del step["spans"], step["reached_s"]
        figures = {name: value for name, value in vars(self).items() if name not in ("simulated", "memory")} | step
        return figures | {"predicted": self.predicted and self.predicted.figures()}


def simulate_system(
    name: str,
    system: System,
    workload: Workload,
    recorder: Recorder,
    profile: HardwareProfile,
    *,
    host_factor: float = 1.0,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    after_step: Callable[[Any], None] = lambda _: None,
) -> SimulatedResult:
    """Train some steps of a system on the null GPU and return what the last asked for and takes.

    Args:
        recorder: of ``null_rank``, in which this is called.
        profile: rates of the device and its network.
        host_factor: CPU time of the GPU's host for each second of this machine's.
        forward_context: makes the context of each forward, such as autocast.
        after_step: called with the model at the end of each step.

    Raises:
        ValueError: the model's ``config`` does not say how many heads there are and how wide they are.
    """
    torch.compiler.reset()
    gc.collect()  # or the memory of a system that was simulated before would count
    with torch.device("meta"):
        model: Any = workload.build()
    config = model.config
    if not system.sharded:
        model.to_empty(device="cuda")
    forward = system.wrap(model, workload.parallelism)
    if system.sharded:
        model.to_empty(device="cuda")
    loss_of: Callable[..., Tensor] = torch.compile(cross_entropy) if system.compiled else cross_entropy
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(workload.batch, workload.seq, dtype=torch.int64, device="cuda")

    def output() -> Any:
        with forward_context():
            return forward(tokens)

    def step() -> None:
        loss_of(output(), tokens).backward()  # nobody keeps the logits
        optimizer.step()
        optimizer.zero_grad()
        after_step(model)

    # Kernels come from their caches; the plan is made anew, for its prediction.
    plans_anew = functorch_config.patch(enable_autograd_cache=False)
    with plans_anew, _embeddings_that_do_not_ask_the_device(), collected_predictions() as predictions:
        for _ in range(_WARM_UP):
            step()
        groups = communicators(recorder)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory._record_memory_history(context=None)
        alive = torch.cuda.memory_allocated()
        recorder.take()
        with recorder.recording(), noting_triton_bytes(recorder):
            for _ in range(_LOGGED):
                recorder.note("step")
                step()
            recorder.note("step")
        events = recorder.take()
        allocations = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
    local = sum(local_tensor(param).numel() for param in model.parameters())
    sizes = _sizes(config, workload, local)
    simulated = simulate(events, profile, sizes, host_factor=host_factor, groups=groups)
    logged = events[slice(*last_step(events))]
    tokens_per_s = workload.batch * workload.seq / workload.tensor_parallel / simulated.step_s
    return SimulatedResult(
        name,
        simulated,
        tokens_per_s,
        mfu(model, workload, tokens_per_s),
        torch.cuda.max_memory_allocated(),
        **_requests(logged),
        memory=_memory(alive, allocations, logged, simulated.reached_s),
        predicted=predictions[-1] if predictions else None,
    )


def _requests(step: Sequence[Event]) -> dict[str, int]:
    kernels = [event.what for event in step if isinstance(event.what, Kernel | Matmul)]
    calls = [(i, event.what) for i, event in enumerate(step) if isinstance(event.what, Collective)]
    return {
        "kernels": len(kernels),
        "copies": sum(isinstance(what, Kernel) and any(n in what.name for n in BUCKET_COPIES) for what in kernels),
        "collectives": len({("group", call.group) if call.group else ("call", i) for i, call in calls}),
        "stream_waits": sum(isinstance(event.what, Wait) for event in step),
        "host_waits": len(host_waits(step)),
    }


def _sizes(config: Any, workload: Workload, local_parameters: int) -> Sizes:
    shape = attention_shape(config)
    if shape is None:
        raise ValueError("the model's config has no dim or hidden_size, or no heads or num_attention_heads")
    dim, heads, head_dim = shape
    heads //= workload.tensor_parallel
    return Sizes(workload.batch, workload.seq, dim, heads, head_dim, workload.vocab_size, local_parameters)


def _memory(
    alive: int, allocations: Sequence[Mapping[str, Any]], step: Sequence[Event], reached_s: Sequence[float]
) -> tuple[tuple[float, int], ...]:
    """Return the memory of a step over its simulated time: it changes when the stream of compute is where the host was.

    Args:
        alive: bytes before the first of ``allocations``.
        allocations: the trace of torch's allocator, of this step and what was before it.
        step: the events of the step.
    """
    times = [event.time_us for event in step]
    found: list[tuple[float, int]] = []
    for change in allocations:
        if change["action"] in ("alloc", "free_completed"):
            alive += change["size"] if change["action"] == "alloc" else -change["size"]
            at = bisect_left(times, change["time_us"])
            if 0 < at < len(times):
                found.append((reached_s[at], alive))
    return tuple(found)


def _embedding_backward(gradient: Tensor, tokens: Tensor, rows: int, *_settings: Any) -> Tensor:
    out = gradient.new_zeros(rows, gradient.shape[-1])
    return out.index_add_(0, tokens.flatten(), gradient.flatten(0, -2))


@contextmanager
def _embeddings_that_do_not_ask_the_device() -> Iterator[None]:
    """Meanwhile backward of an embedding, outside of compiled code, does not ask the device's memory how often to loop.

    Torch's own does, and a null GPU has no values to be asked for.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("embedding_dense_backward", _embedding_backward, "CUDA", allow_override=True)
        yield


def write_trace(result: SimulatedResult, path: Path) -> None:
    """Write a step for Perfetto: streams, communicators, waits of the stream of compute, and memory over time."""
    spans = result.simulated.spans
    tracks = sorted({span.track for span in spans}, key=lambda track: (track != "stream 0", track != "waits", track))
    events = [named("process_name", 0, f"{result.system}, simulated")]
    events += [named("thread_name", number, track) for number, track in enumerate(tracks)]
    for track, name, kind, start, end, nbytes in spans:
        event = complete(tracks.index(track), name, kind, start, end - start)
        events.append(event | {"args": {"bytes": nbytes}} if nbytes else event)
    events += [counter("memory", at, nbytes) for at, nbytes in result.memory]
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def simulated_table(found: Sequence[SimulatedResult]) -> str:
    """Return a table in Markdown with one row for each system.

    Ratios are to the first system, those of what was predicted to the row's own step and peak.
    """
    first = found[0]
    times = "step, ms", "to the first", "tokens/s a device", "MFU", "exposed, ms", "compute, ms"
    of_copies = "copies of buckets, ms", "copied, GB"
    others = "channel, ms", "host, ms", "host late, ms"
    counts = "kernels", "copies", "collectives", "stream waits", "host waits"
    rows = []
    for each in found:
        step = each.simulated
        copying = sum(step.kernels_s.get(copy, 0.0) for copy in ("copy in", "copy out", "format"))
        rows.append(
            [
                each.system,
                _ms(step.step_s),
                f"{step.step_s / first.simulated.step_s:.3f}x",
                f"{each.tokens_per_s:,.0f}",
                "-" if each.mfu is None else f"{each.mfu:.1%}",
                _ms(step.exposed_s),
                _ms(step.compute_s),
                _ms(copying),
                f"{step.copied_bytes / 1e9:.2f}",
                _ms(step.communication_s),
                _ms(step.host_s),
                _ms(step.host_bound_s),
                f"{each.peak_bytes / 2**30:.2f}",
                f"{each.peak_bytes / first.peak_bytes:.3f}x",
                *map(str, (each.kernels, each.copies, each.collectives, each.stream_waits, each.host_waits)),
                *_predicted(each),
            ]
        )
    predicted = "predicted step", "predicted peak"
    header = ["system", *times, *of_copies, *others, "peak, GiB", "to the first", *counts, *predicted]
    unknown = {each.system: each.simulated.unknown for each in found if each.simulated.unknown}
    notes = [f"{system}: kernels of unknown size: {_counts(counts)}" for system, counts in unknown.items()]
    return "\n\n".join([markdown_table(header, rows), *notes])


def _predicted(result: SimulatedResult) -> tuple[str, str]:
    if result.predicted is None:
        return "-", "-"
    step = result.predicted.step_s / result.simulated.step_s
    return f"{step:.3f}x", f"{result.predicted.peak_bytes / result.peak_bytes:.3f}x"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{number} x {name}" for name, number in counts.most_common())

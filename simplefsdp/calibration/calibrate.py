"""Measure what this device reaches, and under torchrun the network between its ranks: a ``HardwareProfile``.

    simplefsdp calibrate --network h100-8-nodes --out profile.json
    torchrun --nproc-per-node 2 -m simplefsdp calibrate

What was measured with its network is kept, and ``plan="auto"`` finds it where as many ranks train on such a device. On
CPUs of one node, under torchrun, it runs this command by itself.
"""

import argparse
import fcntl
import json
import logging
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from simplefsdp import rehearsal
from simplefsdp.api import simple_fsdp
from simplefsdp.calibration.measure_network import LinkFit, measure_network
from simplefsdp.hardware.profile import Curve, HardwareProfile, Network, flat, load_profile, network, save
from simplefsdp.plan.grouping import manual_plan

log = logging.getLogger("simplefsdp")

_c10d = torch.ops._c10d_functional
_VERSION = 2
"""Of what is measured."""
_REPEATS = 15
_UNSTEADY = 0.15
"""By how much calls may vary (``_Clock.spreads``) on a machine that does nothing else."""
_COLD_BYTES = 64 << 20
"""Operands are taken in turn from so many bytes: in a step they were last touched a while ago."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    add("--threads", type=int, default=1, help="of compute on cpu")
    add("--network", help="name or JSON file of the network between such devices (default: measured, under torchrun)")
    add("--out", type=Path, help="JSON file for the profile (default: where this user's profiles are kept)")


def run(args: argparse.Namespace) -> None:
    """``simplefsdp calibrate``: measure this device, print the profile, and keep it.

    Under torchrun all ranks measure at once, as they train; the numbers of rank 0 count, and a rank of each node keeps
    them.

    Raises:
        ValueError: an argument is not valid; names it.
    """
    if args.threads < 1:
        raise ValueError(f"--threads: expected a positive number, found {args.threads}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: cuda, but torch sees no GPU here")
    ranks, local_rank, local_ranks = (
        int(os.environ.get(name, value))
        for name, value in (("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
    )
    if args.network is None and ranks == 1:
        raise ValueError("--network: missing (it is measured under torchrun, with several ranks)")
    torch.set_num_threads(args.threads)
    device = torch.device(args.device, local_rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    path = args.out or _cache_path(device, ranks if args.network is None else 1)
    profile = calibrate(device, network(args.network or "cpu-bandwidth"))
    fits: dict[str, dict[str, LinkFit]] = {}
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if args.network is None:
            measured, fits = measure_network(device, local_ranks)
            profile = replace(profile, network=measured)
        of_rank_0 = [profile]
        dist.broadcast_object_list(of_rank_0)
        profile = of_rank_0[0]
        dist.destroy_process_group()
    if local_rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(profile, path)
    if int(os.environ.get("RANK", "0")) == 0:
        print("\n".join([*_lines(profile, fits), f"kept in {path}"]))


def _lines(profile: HardwareProfile, fits: Mapping[str, Mapping[str, LinkFit]]) -> Iterator[str]:
    for kind in ("matmul", "attention"):
        for dtype, curve in getattr(profile, kind).items():
            rates = ", ".join(f"{rate / 1e9:.0f} at {size:.0e}" for size, rate in curve)
            yield f"{kind}, {dtype}, GFLOP/s by operations: {rates}"
    yield "memory, GB/s by bytes: " + ", ".join(f"{rate / 1e9:.1f} at {size:.0e}" for size, rate in profile.memory)
    yield (
        f"a kernel: {1e6 * profile.launch_s:.1f} us, a collective: {1e6 * profile.collective_launch_s:.1f} us and "
        f"{1e12 * profile.collective_s_per_byte:.0f} us a MB, a parameter: {1e6 * profile.parameter_s:.1f} us a step"
    )
    for level, found in fits.items():
        for kind, (alpha, per_byte, error) in found.items():
            yield (
                f"{kind}, {level} nodes: {1e6 * alpha:.0f} us and {1e-9 / per_byte:.2f} GB/s, within {error:.0%} of "
                "what all sizes took"
            )


def calibrated_profile(device: torch.device, network: Network) -> HardwareProfile:
    """The profile of ``device`` that this user's cache has, or else ``calibrate`` makes and keeps, with ``network``."""
    path = _cache_path(device)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save(calibrate(device, network), path)
    return replace(load_profile(path), network=network)


def cached_profile_path(device: torch.device, ranks: int) -> Path | None:
    """The file of what ``torchrun -m simplefsdp calibrate`` measured here with so many ranks, if it has."""
    path = _cache_path(device, ranks)
    return path if ranks > 1 and path.exists() else None


def measure_on_first_use(device: torch.device, ranks: int) -> Path | None:
    """The file that ``kept_with_network`` finds from now on; None but for CPUs of one node, where torchrun has started
    all ``ranks``.

    The first of them that comes runs the command, for a minute. Others that come wait for it, and who does not come is
    not waited for: nothing here is a collective.

    Raises:
        RuntimeError: the command failed.
    """
    here = os.environ.get("LOCAL_WORLD_SIZE") == str(ranks) and dist.get_backend() not in ("fake", "rehearsal")
    if device.type != "cpu" or ranks == 1 or not here:
        return None
    path = _cache_path(device, ranks)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _measure_in_own_processes(path, ranks)
    except OSError as error:
        log.warning("calibrate: nothing can be kept in %s: %s", path.parent, error)
        return None
    return path


def _measure_in_own_processes(path: Path, ranks: int) -> None:
    launch = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}"
    command = f"{launch} -m simplefsdp calibrate --device cpu --threads {torch.get_num_threads()}"
    log.warning(
        "plan: measuring this CPU and the network between %d ranks, once, for a minute; it is kept in %s. "
        "options={'plan': 'block'} needs none of it",
        ranks,
        path,
    )
    environment = {
        # An error of theirs is not one of this process.
        **{name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")},
        "PYTHONPATH": os.pathsep.join(folder or os.curdir for folder in sys.path),
    }
    arguments = [sys.executable, *command.split()]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            "option 'plan': measuring this CPU failed (options={'plan': 'block'} needs none of it). "
            f"python {command}:\n{done.stderr[-2000:]}"
        )


def _cache_path(device: torch.device, ranks: int = 1) -> Path:
    """Another file for what may change the numbers. ``ranks``: between which the network was measured."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "simplefsdp"
    if device.type == "cuda":
        what = torch.cuda.get_device_name(device)
    else:
        what = f"cpu {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads"
    with_network = f" {ranks} ranks" if ranks > 1 else ""
    name = f"profile {_VERSION} {what} torch {torch.__version__}{with_network}.json"
    return folder / re.sub(r"[^\w.]+", "-", name)


def calibrate(device: torch.device, network: Network) -> HardwareProfile:
    """The profile of ``device``, with as many threads as torch uses now; it takes about a minute.

    The network is as given, its collectives are not measured. There must be no process group yet: what collectives and
    parameters cost besides is measured in rehearsals, on CPU; a GPU computes meanwhile.
    """
    clock = _Clock(device)
    dtypes = [torch.float32] if device.type == "cpu" else [torch.bfloat16, torch.float32]
    call = _call_s(clock)
    profile = HardwareProfile(
        f"{device.type} here",
        f"measured, torch {torch.__version__}, {torch.get_num_threads()} threads",
        matmul={_name(dtype): _matmul(clock, dtype, call) for dtype in dtypes},
        attention={_name(dtype): _attention(clock, dtype, call) for dtype in dtypes},
        memory=_memory(clock),
        launch_s=_launch_s(clock),
        collective_launch_s=0.0,
        contention=0.0,
        network=network,
    )
    if device.type == "cpu":
        launch, per_byte = _collective_launch_s(clock), _collective_s_per_byte()
        profile = replace(profile, collective_launch_s=launch, collective_s_per_byte=per_byte)
        profile = replace(profile, parameter_s=_parameter_s(clock, profile))
    if (spread := statistics.median(clock.spreads)) > _UNSTEADY:
        log.warning(
            "calibrate: of the same call, a quarter of the repeats took %.0f %% longer than the median; measure again "
            "when nothing else runs here",
            100 * spread,
        )
    return profile


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Clock:
    """Takes the time of calls on a device, and remembers how much it varied."""

    def __init__(self, device: torch.device):
        self.device = device
        self.spreads: list[float] = []
        """Of each call that was timed: by how much a quarter of its repeats took longer than the median."""

    def seconds(self, call: Callable[[int], object]) -> float:
        """Median of one ``call(i)``; ``i`` counts up."""
        call(0)
        once = self._time(call, range(1))
        count = max(1, min(200, int(0.01 / max(once, 1e-9))))
        times = sorted(self._time(call, range(r * count, (r + 1) * count)) / count for r in range(1, _REPEATS + 1))
        median = statistics.median(times)
        self.spreads.append(times[3 * len(times) // 4] / median - 1)
        return median

    def _time(self, call: Callable[[int], object], numbers: range) -> float:
        self._finish()
        begin = time.perf_counter()
        for i in numbers:
            call(i)
        self._finish()
        return time.perf_counter() - begin

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _several(shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> list[list[Tensor]]:
    """Sets of operands, of ``_COLD_BYTES`` together."""
    nbytes = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
    count = max(1, min(64, _COLD_BYTES // nbytes))
    return [[torch.randn(shape, device=device, dtype=dtype) for shape in shapes] for _ in range(count)]


def _call_s(clock: _Clock) -> float:
    """Of an operator called from Python."""
    a, out = torch.ones(8, 8, device=clock.device), torch.empty(8, 8, device=clock.device)
    return clock.seconds(lambda _: torch.mm(a, a, out=out))


def _launch_s(clock: _Clock) -> float:
    """Of a kernel in a compiled graph."""
    pairs = 32

    @torch.compile
    def chain(value: Tensor, weight: Tensor) -> Tensor:
        for _ in range(pairs):
            value = silu(value @ weight)
        return value

    value, weight = torch.zeros(8, 8, device=clock.device), torch.zeros(8, 8, device=clock.device)
    return clock.seconds(lambda _: chain(value, weight)) / (2 * pairs)


def _matmul(clock: _Clock, dtype: torch.dtype, launch: float) -> Curve:
    """Of a batch of tokens with a weight, twice as wide: forward and both gradients, a third of the time each."""
    curve = []
    on_cpu = clock.device.type == "cpu"
    for rows in (16, 32, 64, 128, 256, 512, 1024) if on_cpu else (128, 256, 512, 1024, 2048, 4096, 8192):
        shapes = [(rows, 2 * rows), (2 * rows, 2 * rows), (rows, 2 * rows), (2 * rows, 2 * rows)]
        sets = _several(shapes, clock.device, dtype)

        def layer(i: int, sets: list[list[Tensor]] = sets) -> None:
            tokens, weight, out, gradient = sets[i % len(sets)]
            torch.mm(tokens, weight.t(), out=out)
            torch.mm(tokens, weight, out=out)
            torch.mm(out.t(), tokens, out=gradient)

        curve.append(_rate(3 * 8.0 * rows**3, clock.seconds(layer), 3 * launch, 3))
    return tuple(curve)


def _attention(clock: _Clock, dtype: torch.dtype, launch: float) -> Curve:
    """Causal, of 8 heads of 64, forward."""
    curve = []
    on_cpu = clock.device.type == "cpu"
    for seq in (64, 128, 256, 512, 1024, 2048) if on_cpu else (256, 512, 1024, 2048, 4096, 8192):
        sets = _several([(1, 8, seq, 64)] * 3, clock.device, dtype)

        def attend(i: int, sets: list[list[Tensor]] = sets) -> Tensor:
            query, key, value = sets[i % len(sets)]
            return scaled_dot_product_attention(query, key, value, is_causal=True)

        curve.append(_rate(4.0 * 8 * 64 * seq**2, clock.seconds(attend), launch))
    return tuple(curve)


def _memory(clock: _Clock) -> Curve:
    """Of a gated activation, as TorchInductor compiles it; what calling that costs does not count."""

    @torch.compile(dynamic=True)
    def gated(one: Tensor, other: Tensor) -> Tensor:
        return silu(one) * other

    curve: list[tuple[float, float]] = []
    call = 0.0
    for numel in (1 << n for n in (4, *range(14, 25, 2))):
        sets = _several([(numel,)] * 2, clock.device, torch.float32)

        def run(i: int, sets: list[list[Tensor]] = sets) -> Tensor:
            return gated(*sets[i % len(sets)])

        seconds = clock.seconds(run)
        if call:
            curve.append(_rate(12.0 * numel, seconds, call))
        else:
            call = seconds
    return tuple(curve)


def _rate(size: float, seconds: float, launch: float, calls: int = 1) -> tuple[float, float]:
    """A point of a curve: of ``calls`` together of ``size``, whose launches are not counted."""
    return size / calls, size / max(seconds - launch, 0.1 * seconds)


def _collective_launch_s(clock: _Clock) -> float:
    """Of issuing and awaiting a collective whose communication costs nothing."""
    shard = torch.ones(64)
    with rehearsal.world(2, None):
        return clock.seconds(lambda _: _c10d.wait_tensor(_gather(shard)))


def _gather(shard: Tensor) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    return _c10d.all_gather_into_tensor(shard, group.size(), group.group_name)


def _collective_s_per_byte() -> float:
    """By how much longer matmuls take while another core moves the data of a gather of 8 MiB, for each of its bytes."""
    shard, tokens, weight = torch.ones(1 << 18), torch.ones(256, 512), torch.ones(512, 512)
    whole = 8 * shard.nbytes

    def layer(gathers: bool) -> float:
        begin = time.perf_counter()
        under_way = _gather(shard) if gathers else shard
        for _ in range(8):
            torch.mm(tokens, weight)
        ended = time.perf_counter()
        if gathers:
            _c10d.wait_tensor(under_way)
        return ended - begin

    with rehearsal.world(8, flat("fast", 8, alpha_s=1e-6, bandwidth_bytes_per_s=8e9)):
        layer(True)
        more = [layer(True) - layer(False) for _ in range(4 * _REPEATS)]
    return max(0.0, statistics.median(more) / whole)


def _parameter_s(clock: _Clock, profile: HardwareProfile) -> float:
    """Of a step of a model of small parameters, what is left if its graphs take what they are predicted to."""
    free = replace(profile, network=flat("free", 2, alpha_s=1e-9, bandwidth_bytes_per_s=1e15))
    with rehearsal.world(2, None), tempfile.TemporaryDirectory() as folder:
        model = simple_fsdp(nn.Sequential(*(nn.Linear(8, 8) for _ in range(12))))
        options: Any = {"plan": manual_plan(["*"]), "profile": free, "report_dir": folder}
        compiled = torch.compile(model, backend="simplefsdp", options=options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        tokens = torch.ones(8, 8)

        def step(_: int) -> None:
            compiled(tokens).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step(0)
        seconds = clock.seconds(step)
        (predicted,) = (json.loads(path.read_text()) for path in Path(folder).glob("*/prediction.json"))
        torch._dynamo.reset()
    graphs = predicted["forward_s"] + predicted["backward_s"]
    return max(0.0, (seconds - graphs) / len(list(model.parameters())))

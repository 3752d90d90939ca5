"""Measure what a device reaches, as a ``HardwareProfile``."""

import json
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from simplefsdp import rehearsal
from simplefsdp.api import simple_fsdp
from simplefsdp.hardware.cache import cache_path
from simplefsdp.hardware.catalog import Contention, contention_for
from simplefsdp.hardware.profile import Curve, HardwareProfile, Network, device_memory_bytes, flat, load_profile, save
from simplefsdp.plan.grouping import manual_plan

log = logging.getLogger("simplefsdp")

_c10d = torch.ops._c10d_functional
_REPEATS = 15
_UNSTEADY = 0.15
"""How much the times of calls may vary (``_Clock.spreads``) on a machine that does nothing else."""
_CYCLES_PER_S = 2e9
"""Clock rate of a GPU, roughly, to make a kernel that spins for some seconds."""
_COLD_BYTES = 64 << 20
"""Operands are taken in turn from so many bytes, as operands of a step were last touched a while ago."""


def calibrated_profile(device: torch.device, network: Network) -> HardwareProfile:
    """Return the cached profile of ``device``, or calibrate and cache one, with ``network`` in place of its network."""
    path = cache_path(device)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save(calibrate(device, network), path)
    return replace(load_profile(path), network=network)


def calibrate(device: torch.device, network: Network) -> HardwareProfile:
    """Measure ``device``, with as many threads as torch uses now, and return its profile; it takes about a minute.

    The network is as given; its collectives are not measured, and what they take from a GPU's compute is assumed. There
    must be no process group yet: the host's costs of collectives and parameters are measured in rehearsals, on CPU; a
    GPU computes meanwhile.
    """
    clock = _Clock(device)
    dtypes = [torch.float32] if device.type == "cpu" else [torch.bfloat16, torch.float32]
    call = _call_s(clock)
    on_gpu = device.type == "cuda"
    contention = contention_for(torch.cuda.get_device_name(device)) if on_gpu else Contention("", 0.0)
    profile = HardwareProfile(
        f"{device.type} here",
        f"measured, torch {torch.__version__}, {torch.get_num_threads()} threads. {contention.source}".removesuffix(
            ". "
        ),
        matmul={_name(dtype): _matmul(clock, dtype, call) for dtype in dtypes},
        attention={_name(dtype): _attention(clock, dtype, call) for dtype in dtypes},
        memory=_memory(clock),
        launch_s=_launch_s(clock),
        collective_launch_s=0.0,
        contention=contention.contention,
        network=network,
        matmul_contention=contention.matmul_contention,
        device_bytes=device_memory_bytes(device),
    )
    if not on_gpu:
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
    """Measures the time of calls on a device, and how much it varies."""

    def __init__(self, device: torch.device):
        self.device = device
        self.spreads: list[float] = []
        """For each timed call, the part of the median by which the slowest quarter of its repeats took longer."""

    def seconds(self, call: Callable[[int], object]) -> float:
        """Return the median seconds of one ``call(i)``; ``i`` counts up."""
        call(0)
        one_call = self._time(call, range(1))
        # A GPU's queue holds 1024 kernels, and a call launches up to 64.
        count = max(1, min(12 if self.device.type == "cuda" else 200, int(0.01 / max(one_call, 1e-9))))
        times = sorted(self._time(call, range(r * count, (r + 1) * count)) / count for r in range(1, _REPEATS + 1))
        median = statistics.median(times)
        self.spreads.append(times[3 * len(times) // 4] / median - 1)
        return median

    def _time(self, call: Callable[[int], object], numbers: range) -> float:
        if self.device.type == "cuda":
            return self._time_on_gpu(call, numbers)
        begin = time.perf_counter()
        for i in numbers:
            call(i)
        return time.perf_counter() - begin

    def _time_on_gpu(self, call: Callable[[int], object], numbers: range) -> float:
        """Return what the GPU takes: it begins when the host has launched everything, and waits for no launch."""
        began = time.perf_counter()
        call(numbers[0])
        host_s = 2 * (time.perf_counter() - began) * len(numbers) + 1e-3
        torch.cuda.synchronize(self.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(host_s * _CYCLES_PER_S))
        begin.record()
        for i in numbers:
            call(i)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3


def _several(shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return sets of operands, ``_COLD_BYTES`` together."""
    nbytes = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
    count = max(1, min(64, _COLD_BYTES // nbytes))
    return [[torch.randn(shape, device=device, dtype=dtype) for shape in shapes] for _ in range(count)]


def _call_s(clock: _Clock) -> float:
    """Seconds of calling an operator from Python."""
    a, out = torch.ones(8, 8, device=clock.device), torch.empty(8, 8, device=clock.device)
    return clock.seconds(lambda _: torch.mm(a, a, out=out))


def _launch_s(clock: _Clock) -> float:
    """Seconds of launching a kernel in a compiled graph."""
    pairs = 32

    @torch.compile
    def chain(value: Tensor, weight: Tensor) -> Tensor:
        for _ in range(pairs):
            value = silu(value @ weight)
        return value

    value, weight = torch.zeros(8, 8, device=clock.device), torch.zeros(8, 8, device=clock.device)
    return clock.seconds(lambda _: chain(value, weight)) / (2 * pairs)


def _matmul(clock: _Clock, dtype: torch.dtype, launch: float) -> Curve:
    """Rates of matmuls of tokens and a weight twice as wide: forward and both gradients, a third of the time each."""
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
    """Rates of causal attention: on a CPU forward with 8 heads of 64, on a GPU with 32 of 128, forward and backward.

    Backward has five matmuls where forward has two. On a GPU its kernels are slower.
    """
    curve = []
    on_cpu = clock.device.type == "cpu"
    heads, head_dim = (8, 64) if on_cpu else (32, 128)
    for seq in (64, 128, 256, 512, 1024, 2048) if on_cpu else (256, 512, 1024, 2048, 4096, 8192):
        sets = _several([(1, heads, seq, head_dim)] * 3, clock.device, dtype)

        def attend(i: int, sets: list[list[Tensor]] = sets) -> Tensor:
            query, key, value = sets[i % len(sets)]
            return scaled_dot_product_attention(query, key, value, is_causal=True)

        def attend_and_back(i: int, sets: list[list[Tensor]] = sets) -> object:
            query, key, value = (each.requires_grad_() for each in sets[i % len(sets)])
            out = scaled_dot_product_attention(query, key, value, is_causal=True)
            return torch.autograd.grad(out, (query, key, value), out.detach())

        flops = 4.0 * heads * head_dim * seq**2
        if on_cpu:
            curve.append(_rate(flops, clock.seconds(attend), launch))
        else:
            curve.append((flops, _rate(3.5 * flops, clock.seconds(attend_and_back), 2 * launch)[1]))
    return tuple(curve)


def _memory(clock: _Clock) -> Curve:
    """Rates of a gated activation as TorchInductor compiles it, without the time of the call."""

    @torch.compile(dynamic=True)
    def gated(one: Tensor, other: Tensor) -> Tensor:
        return silu(one) * other

    # A GPU's kernel works in portions that suit the tensors which it was compiled for.
    gated(*_several([(1 << 24,)] * 2, clock.device, torch.float32)[0])
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
    """Return a point of a curve: the rate of ``calls`` of together ``size``, without their launches."""
    return size / calls, size / max(seconds - launch, 0.1 * seconds)


def _collective_launch_s(clock: _Clock) -> float:
    """Seconds of issuing and awaiting a collective whose communication costs nothing."""
    shard = torch.ones(64)
    with rehearsal.world(2, None):
        return clock.seconds(lambda _: _c10d.wait_tensor(_gather(shard)))


def _gather(shard: Tensor) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    return _c10d.all_gather_into_tensor(shard, group.size(), group.group_name)


def _collective_s_per_byte() -> float:
    """Return how much longer matmuls take, for each byte that another core moves for a gather of 8 MiB."""
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
    """Seconds for each parameter of a step of small parameters, beyond the predicted time of its graphs."""
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
        torch.compiler.reset()
    graphs = predicted["forward_s"] + predicted["backward_s"]
    return max(0.0, (seconds - graphs) / len(list(model.parameters())))

"""Measure what this device reaches: a ``HardwareProfile``."""

import argparse
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from . import rehearsal
from .hardware import Curve, HardwareProfile, Network, load_profile, network, save

_c10d = torch.ops._c10d_functional
_REPEATS = 5
_COLD_BYTES = 64 << 20
"""Operands are taken in turn from so many bytes: in a step they were last touched a while ago."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    add("--threads", type=int, default=1, help="of compute on cpu")
    add("--network", default="cpu-bandwidth", help="name or JSON file of the network between such devices")
    add("--out", type=Path, help="JSON file for the profile (default: where this user's profiles are kept)")


def run(args: argparse.Namespace) -> None:
    """``simplefsdp calibrate``: measure this device, print the profile, and keep it.

    Raises:
        ValueError: an argument is not valid; names it.
    """
    if args.threads < 1:
        raise ValueError(f"--threads: expected a positive number, found {args.threads}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: cuda, but torch sees no GPU here")
    chosen = network(args.network)
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    path = args.out or _kept_at(device)
    profile = calibrate(device, chosen)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(profile, path)
    for kind in ("matmul", "attention"):
        for dtype, curve in getattr(profile, kind).items():
            rates = ", ".join(f"{rate / 1e9:.0f} at {size:.0e}" for size, rate in curve)
            print(f"{kind}, {dtype}, GFLOP/s by operations: {rates}")
    print("memory, GB/s by bytes: " + ", ".join(f"{rate / 1e9:.1f} at {size:.0e}" for size, rate in profile.memory))
    print(f"a kernel: {1e6 * profile.launch_s:.1f} us, a collective: {1e6 * profile.collective_launch_s:.1f} us")
    print(f"kept in {path}")


def kept(device: torch.device, network: Network) -> HardwareProfile:
    """The profile of ``device`` that this user's cache has, or else ``calibrate`` makes and keeps, with ``network``."""
    path = _kept_at(device)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save(calibrate(device, network), path)
    return replace(load_profile(path), network=network)


def _kept_at(device: torch.device) -> Path:
    """Another file for what may change the numbers."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "simplefsdp"
    if device.type == "cuda":
        what = torch.cuda.get_device_name(device)
    else:
        what = f"cpu {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads"
    return folder / re.sub(r"[^\w.]+", "-", f"profile {what} torch {torch.__version__}.json")


def calibrate(device: torch.device, network: Network) -> HardwareProfile:
    """The profile of ``device``, with as many threads as torch uses now; it takes about half a minute.

    The network is as given, its collectives are not measured. There must be no process group yet: what issuing a
    collective costs is measured in a rehearsal.
    """
    dtypes = [torch.float32] if device.type == "cpu" else [torch.bfloat16, torch.float32]
    call = _call_s(device)
    return HardwareProfile(
        f"{device.type} here",
        f"measured, torch {torch.__version__}, {torch.get_num_threads()} threads",
        matmul={_name(dtype): _matmul(device, dtype, call) for dtype in dtypes},
        attention={_name(dtype): _attention(device, dtype, call) for dtype in dtypes},
        memory=_memory(device),
        launch_s=_launch_s(device),
        collective_launch_s=_collective_launch_s() if device.type == "cpu" else 0.0,
        contention=0.0,
        network=network,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _seconds(call: Callable[[int], object], device: torch.device) -> float:
    """Median of one ``call(i)``; ``i`` counts up."""
    call(0)
    once = _time(call, range(1), device)
    count = max(1, min(200, int(0.01 / max(once, 1e-9))))
    return statistics.median(
        _time(call, range(r * count, (r + 1) * count), device) / count for r in range(1, _REPEATS + 1)
    )


def _time(call: Callable[[int], object], numbers: range, device: torch.device) -> float:
    _finish(device)
    begin = time.perf_counter()
    for i in numbers:
        call(i)
    _finish(device)
    return time.perf_counter() - begin


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _several(shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> list[list[Tensor]]:
    """Sets of operands, of ``_COLD_BYTES`` together."""
    nbytes = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
    count = max(1, min(64, _COLD_BYTES // nbytes))
    return [[torch.randn(shape, device=device, dtype=dtype) for shape in shapes] for _ in range(count)]


def _call_s(device: torch.device) -> float:
    """Of an operator called from Python."""
    a, out = torch.ones(8, 8, device=device), torch.empty(8, 8, device=device)
    return _seconds(lambda _: torch.mm(a, a, out=out), device)


def _launch_s(device: torch.device) -> float:
    """Of a kernel in a compiled graph."""
    pairs = 32

    @torch.compile
    def chain(value: Tensor, weight: Tensor) -> Tensor:
        for _ in range(pairs):
            value = silu(value @ weight)
        return value

    value, weight = torch.zeros(8, 8, device=device), torch.zeros(8, 8, device=device)
    return _seconds(lambda _: chain(value, weight), device) / (2 * pairs)


def _matmul(device: torch.device, dtype: torch.dtype, launch: float) -> Curve:
    """Of a batch of tokens with a weight, twice as wide: forward and both gradients, a third of the time each."""
    curve = []
    for rows in (16, 32, 64, 128, 256, 512, 1024) if device.type == "cpu" else (128, 256, 512, 1024, 2048, 4096, 8192):
        shapes = [(rows, 2 * rows), (2 * rows, 2 * rows), (rows, 2 * rows), (2 * rows, 2 * rows)]
        sets = _several(shapes, device, dtype)

        def layer(i: int, sets: list[list[Tensor]] = sets) -> None:
            tokens, weight, out, gradient = sets[i % len(sets)]
            torch.mm(tokens, weight.t(), out=out)
            torch.mm(tokens, weight, out=out)
            torch.mm(out.t(), tokens, out=gradient)

        curve.append(_rate(3 * 8.0 * rows**3, _seconds(layer, device), 3 * launch, 3))
    return tuple(curve)


def _attention(device: torch.device, dtype: torch.dtype, launch: float) -> Curve:
    """Causal, of 8 heads of 64, forward."""
    curve = []
    for seq in (64, 128, 256, 512, 1024, 2048) if device.type == "cpu" else (256, 512, 1024, 2048, 4096, 8192):
        sets = _several([(1, 8, seq, 64)] * 3, device, dtype)

        def attend(i: int, sets: list[list[Tensor]] = sets) -> Tensor:
            query, key, value = sets[i % len(sets)]
            return scaled_dot_product_attention(query, key, value, is_causal=True)

        curve.append(_rate(4.0 * 8 * 64 * seq**2, _seconds(attend, device), launch))
    return tuple(curve)


def _memory(device: torch.device) -> Curve:
    """Of a gated activation, as TorchInductor compiles it; what calling that costs does not count."""

    @torch.compile(dynamic=True)
    def gated(one: Tensor, other: Tensor) -> Tensor:
        return silu(one) * other

    curve: list[tuple[float, float]] = []
    call = 0.0
    for numel in (1 << n for n in (4, *range(14, 25, 2))):
        sets = _several([(numel,)] * 2, device, torch.float32)

        def run(i: int, sets: list[list[Tensor]] = sets) -> Tensor:
            return gated(*sets[i % len(sets)])

        seconds = _seconds(run, device)
        if call:
            curve.append(_rate(12.0 * numel, seconds, call))
        else:
            call = seconds
    return tuple(curve)


def _rate(size: float, seconds: float, launch: float, calls: int = 1) -> tuple[float, float]:
    """A point of a curve: of ``calls`` together of ``size``, whose launches are not counted."""
    return size / calls, size / max(seconds - launch, 0.1 * seconds)


def _collective_launch_s() -> float:
    """Of issuing and awaiting a collective whose communication costs nothing."""
    shard = torch.ones(64)
    with rehearsal.world(2, None):
        group = torch.distributed.distributed_c10d._get_default_group().group_name

        def gather(_: int) -> Tensor:
            return _c10d.wait_tensor(_c10d.all_gather_into_tensor(shard, 2, group))

        return _seconds(gather, shard.device)

"""Measure how much slower matmuls are beside collectives, on a GPU: ``python -m benchmarks.matmul_contention``.

The matmuls are those of a Llama 3 8B block, forward and backward, in bf16 with gradients of weights in fp32. A kernel
holds some multiprocessors in clusters of a given size meanwhile, as a collective of NCCL does. A second axis is the
number of multiprocessors that cuBLAS is told to plan for (``cublasSetSmCountTarget``). Times are sums over the block,
as ratios to all matmuls alone.
"""

import argparse
import ctypes
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from simplefsdp.rehearsal.cuda import HeldMultiprocessors
from simplefsdp.text.tables import markdown_table

HELD = ((16, 1), (16, 4), (8, 4), (24, 4), (32, 4))
"""Multiprocessors that are held, and the blocks of a cluster of them."""
LEFT = (0, 8, 16, 24, 32)
"""Multiprocessors that cuBLAS leaves alone."""
HOLD_S = 0.02
TIMED_S = 0.005
FLOP_PER_S = 6e14
"""About what the GPU reaches, to choose how often a matmul is repeated."""


def matmuls(tokens: int) -> Iterator[tuple[int, tuple[int, int, int], Callable[[], Tensor]]]:
    """Yield how often a matmul is in a block, its dims ``(m, k, n)``, and a call of it."""
    for count, inputs, outputs in ((2, 4096, 4096), (2, 4096, 1024), (2, 4096, 14336), (1, 14336, 4096)):
        x, weight, dy = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        )
        yield count, (tokens, inputs, outputs), functools.partial(torch.mm, x, weight.t())
        yield count, (tokens, outputs, inputs), functools.partial(torch.mm, dy, weight)
        yield count, (outputs, tokens, inputs), functools.partial(torch.mm, dy.t(), x, out_dtype=torch.float32)


def seconds(
    call: Callable[[], Tensor], repeats: int, held: HeldMultiprocessors | None, side: torch.cuda.Stream
) -> float:
    """Return the seconds of one call, while multiprocessors are held on another stream."""
    call()
    torch.cuda.synchronize()
    if held is not None:
        with torch.cuda.stream(side):
            held.hold(HOLD_S)
    torch.cuda._sleep(1_000_000)  # until the other stream's kernel has begun
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3 / repeats


def cublas_set_sm_count_target() -> Any:
    """Return cuBLAS' function of that name, from the library that torch has loaded."""
    torch.cuda.current_blas_handle()
    if function := getattr(ctypes.CDLL(None), "cublasSetSmCountTarget", None):
        return function
    with open("/proc/self/maps") as maps:
        path = next(line.split()[-1] for line in maps if "libcublas.so" in line)
    return ctypes.CDLL(path).cublasSetSmCountTarget


def leave(set_target: Any, multiprocessors: int) -> None:
    """Let cuBLAS plan for a GPU with so many fewer multiprocessors; 0: for the whole."""
    total = torch.cuda.get_device_properties(0).multi_processor_count
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    status = set_target(handle, total - multiprocessors if multiprocessors else 0)
    if status != 0:
        raise RuntimeError(f"cublasSetSmCountTarget: status {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    args = parser.parse_args()
    torch.cuda.init()
    device = torch.device("cuda", torch.cuda.current_device())
    set_target = cublas_set_sm_count_target()
    side = torch.cuda.Stream(priority=-1)
    holders = [None, *(HeldMultiprocessors(device, *held) for held in HELD)]
    names = ["none", *(f"{number} in clusters of {cluster}" for number, cluster in HELD)]
    for tokens in args.tokens:
        sums: dict[tuple[str, int], float] = defaultdict(float)
        for count, dims, call in matmuls(tokens):
            repeats = max(3, min(30, round(TIMED_S * FLOP_PER_S / (2 * dims[0] * dims[1] * dims[2]))))
            for left in LEFT:
                leave(set_target, left)
                for name, held in zip(names, holders, strict=True):
                    sums[name, left] += count * min(seconds(call, repeats, held, side) for _ in range(2))
            leave(set_target, 0)
        alone = sums["none", 0]
        rows = [[name, *(f"{sums[name, left] / alone:.2f}x" for left in LEFT)] for name in names]
        print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; {tokens} tokens: {1e3 * alone:.2f} ms\n")
        print(markdown_table(("multiprocessors held", *(f"cuBLAS leaves {n}" for n in LEFT)), rows))


if __name__ == "__main__":
    main()

"""``hadamard_transform`` against a copy of the same bytes, which no transform can beat.

    python -m benchmarks.hadamard                          # 32 MiB for each size and dtype, on the device that there is

Each time is the best of several runs, on one thread of a CPU. Out of place, both write new memory.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from functools import partial

import torch

from simplefsdp import hadamard_transform

SIZES = (16, 128, 256, 1024, 4096, 32768)
DTYPES = (torch.float32, torch.bfloat16)


def best_s(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the seconds of the fastest of some runs, after one that does not count."""
    found = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return min(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.hadamard", description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=32, help="size of the data")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"{where}, torch {torch.__version__}, {args.mib} MiB\n")
    print("| dtype | block | copy, ms | transform, ms | / copy | in place, ms |\n|---|---|---|---|---|---|")
    for dtype in DTYPES:
        for size in SIZES:
            x = torch.randn((args.mib << 20) // dtype.itemsize // size, size, device=device).to(dtype)
            copy = best_s(x.clone, device, args.repeats)
            out = best_s(partial(hadamard_transform, x), device, args.repeats)
            inside = best_s(partial(hadamard_transform, x, inplace=True), device, args.repeats)
            times = f"{1e3 * copy:.1f} | {1e3 * out:.1f} | {out / copy:.1f} | {1e3 * inside:.1f}"
            print(f"| {dtype} | {size} | {times} |", flush=True)


if __name__ == "__main__":
    main()

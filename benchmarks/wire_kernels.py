"""How fast a device encodes and decodes wire formats, beside a copy of the same values.

python -m benchmarks.wire_kernels
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from inductor_passes.ops.wire_formats import GATHER_FORMATS, REDUCE_FORMATS, decode, decode_sum, encode
from simplefsdp.text.tables import markdown_table

REPEATS = 7


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a call, after two that compile and warm up."""
    times = []
    for _ in range(2 + REPEATS):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.wire_kernels", description=__doc__.splitlines()[0])
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--numel", type=int, default=1 << 28 if on_gpu else 1 << 22, help="values of a bucket")
    parser.add_argument("--ranks", type=int, default=8, help="whose parts of a gradient are added up")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(args.device)
    weights = torch.randn(args.ranks, args.numel // args.ranks, device=device, dtype=torch.bfloat16)
    gradients, copied = weights.float(), torch.empty_like(weights, dtype=torch.float32)

    def rate(call: Callable[[], object]) -> str:
        return f"{args.numel / seconds(call, device) / 1e9:.2f}"

    where = torch.cuda.get_device_name() if args.device == "cuda" else "cpu, 1 thread"
    print(f"{args.numel} values, {args.ranks} ranks, {where}, torch {torch.__version__}; 10^9 values a second\n")
    columns = ["format", "encode bf16 weights", "decode them", "encode fp32 gradients", "decode and add up"]
    print(markdown_table(columns, []), flush=True)
    row = ["copy", *[rate(lambda: copied.bfloat16())] * 2, *[rate(lambda: copied.copy_(gradients))] * 2]
    print(f"| {' | '.join(row)} |", flush=True)
    for name in dict.fromkeys([*GATHER_FORMATS, *REDUCE_FORMATS]):
        row = [name]
        for form, values in ((GATHER_FORMATS.get(name), weights), (REDUCE_FORMATS.get(name), gradients)):
            if form is None:
                row += ["", ""]
                continue
            encoded = torch.empty(args.ranks, form.nbytes(values.shape[1]), dtype=torch.uint8, device=device)

            def encodes(values=values, encoded=encoded, form=form) -> None:
                encode([values], [encoded], [values.shape[1]], form)

            def decodes(encoded=encoded, form=form) -> None:
                decode([encoded], [weights], form)

            def adds_up(encoded=encoded, form=form) -> None:
                decode_sum([encoded], [copied[0]], form, float(args.ranks))

            row += [rate(encodes), rate(decodes if values is weights else adds_up)]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()

"""``simplefsdp calibrate``: measure this device, and under torchrun the network between its ranks.

    simplefsdp calibrate --network h100-8-nodes --out profile.json
    torchrun --nproc-per-node 2 -m simplefsdp calibrate

A profile that was measured with its network is cached, and ``plan="auto"`` uses it where as many ranks train on such a
device. On the CPUs of one node, under torchrun, ``plan="auto"`` runs this command by itself.
"""

import argparse
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from simplefsdp.calibration import calibrate
from simplefsdp.calibration.measure_network import LinkFit, measure_network
from simplefsdp.hardware.cache import cache_path, end_with_owner
from simplefsdp.hardware.profile import HardwareProfile, network, save


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    add("--threads", type=int, default=1, help="of compute on cpu")
    add("--network", help="name or JSON file of the network between such devices (default: measured, under torchrun)")
    add("--out", type=Path, help="JSON file for the profile (default: where this user's profiles are kept)")


def run(args: argparse.Namespace) -> None:
    """Measure this device, print its profile and cache it.

    Under torchrun all ranks measure at once, as they train. The numbers of rank 0 count, and one rank of each node
    writes them to its cache.

    Raises:
        ValueError: an argument is not valid; names it.
    """
    if args.threads < 1:
        raise ValueError(f"--threads: expected a positive number, found {args.threads}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: cuda, but torch sees no GPU here")
    end_with_owner()
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
    path = args.out or cache_path(device, ranks if args.network is None else 1)
    try:
        of_profile = network(args.network or "cpu-bandwidth")
    except ValueError as error:
        raise ValueError(f"--network: {error}") from None
    profile = calibrate.calibrate(device, of_profile)
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
        print("\n".join([*_lines(profile, fits), f"cached in {path}"]))


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
    member_s = profile.network.member_s
    if fits and member_s is None:
        yield "groups of collectives: this backend does not issue them together, so buckets are packed"
    elif fits and member_s is not None:
        yield f"groups of collectives: {1e6 * member_s:.1f} us for each member beyond the first"
    for level, found in fits.items():
        for kind, (alpha, per_byte, error) in found.items():
            yield (
                f"{kind}, {level} nodes: {1e6 * alpha:.0f} us and {1e-9 / per_byte:.2f} GB/s, within {error:.0%} of "
                "what all sizes took"
            )

"""``simplefsdp rehearse --simulate``: a step on a GPU that is not there."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from inductor_passes.torch_compat.distributed import GROUPING_NCCL
from simplefsdp.analysis.simulated import SimulatedResult, simulate_system, simulated_table, write_trace
from simplefsdp.cli.results import print_results
from simplefsdp.hardware.profile import HardwareProfile
from simplefsdp.null_gpu.launch import environment, null_device
from simplefsdp.null_gpu.rank import null_rank
from simplefsdp.rehearsal.systems import System
from simplefsdp.rehearsal.workload import Workload


def start_under_null_gpu(device: str) -> None:
    """Start this command once more under the null GPU of a device, in place of this process; return if that was done.

    Raises:
        ValueError: torch is no CUDA build, or there is no gcc.
    """
    if null_device() == device:
        return
    try:
        variables = environment(device)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"--simulate: {error}") from error
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "simplefsdp", *sys.argv[1:]], variables)


def simulate_systems(
    args: argparse.Namespace,
    systems: Mapping[str, System],
    make_workload: Callable[[], Workload],
    profile: HardwareProfile,
) -> None:
    """Simulate a step of each system and print the results.

    Args:
        args: of ``simplefsdp rehearse``.
        systems: by name.
        make_workload: called once for each system, when there is a process group.
        profile: rates of the device, and the network.
    """
    found: list[SimulatedResult] = []
    failed = {}
    torch._inductor.config.benchmark_combo_kernel = True  # kernels carry the bytes that they move
    for name, system in systems.items():
        try:
            with null_rank(args.ranks, GROUPING_NCCL) as recorder:
                result = simulate_system(name, system, make_workload(), recorder, profile, host_factor=args.host_factor)
        except Exception as error:  # of one of several systems: say so, and go on
            if len(systems) == 1:
                raise
            failed[name] = f"{type(error).__name__}: {error}"
            continue
        found.append(result)
        if args.trace is not None:
            write_trace(result, Path(args.trace) / f"{name}.json.gz")
    text = f"{_heading(args, profile)}\n\n{simulated_table(found) if found else ''}"
    print_results(args, text, [result.figures() for result in found], failed)


def _heading(args: argparse.Namespace, profile: HardwareProfile) -> str:
    parallel = f", tensor parallel over {args.tp}" if args.tp > 1 else ""
    return (
        f"{args.model}, {args.batch} x {args.seq} tokens, as rank 0 of {args.ranks}{parallel}; simulated: structure of "
        f"torch's own CUDA calls on a null GPU ({torch.cuda.get_device_name()}), times of the profile {profile.name}, "
        f"CPU times of this host times {args.host_factor:g}; torch {torch.__version__}\n"
        "exposed: communication that compute waited for; host late: compute had nothing to do because the host had "
        "not asked for it"
    )

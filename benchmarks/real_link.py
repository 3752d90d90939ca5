"""Does a rehearsal agree with a real network? Two gloo ranks over a link of limited rate, against one rank rehearsed.

    python -m benchmarks.real_link                     # 0.25 Gbit/s; needs Linux, root, ip and tc

Alpha and bandwidth are fitted per kind of collective on the link, without compute; gloo has one thread, so that
collectives go one after the other. Then a Llama that the fit has not
seen is trained over the link, and rehearsed on the fitted network, each in two processes, so that both find the machine
equally busy. Prints the fit and, for every system, both steps and their ratio; the exit status is 1 if one is more than
15 % off.
"""

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.rate_limited import link, permitted, run
from simplefsdp.calibration.measure_network import SIZES, LinkFit, measure_network
from simplefsdp.hardware.profile import Network
from simplefsdp.models import llama
from simplefsdp.rehearsal.group import World
from simplefsdp.rehearsal.systems import SYSTEMS, Parallelism
from simplefsdp.rehearsal.timing import TrainingRun
from simplefsdp.rehearsal.workload import Workload

AGREES = 0.15
SEEN = ("fsdp2", "block")


def measured() -> tuple[Network, dict[str, LinkFit]]:
    network, fits = measure_network(torch.device("cpu"), ranks_per_node=1, repeats=9)
    return network, fits["between"]


def small_llama() -> Workload:
    """The Llama that two ranks train over a link, in fp32."""
    return Workload(
        lambda: llama.build("debug", dim=192, layers=3, ffn_dim=576),
        batch=4,
        seq=128,
        vocab_size=256,
        device=torch.device("cpu"),
        parallelism=Parallelism(init_device_mesh("cpu", (2,)), MixedPrecisionPolicy(), True),
    )


def train(system: str, steps: int, network: Network | None) -> list[float]:
    """Seconds of each step of this rank, rehearsed if there is a network."""
    rank = dist.get_rank()
    torch.set_num_threads(1)
    dist.barrier()
    begin_together = time.time() + 1.0
    world = World(network)
    if network is not None:
        dist.destroy_process_group()
        dist.init_process_group("rehearsal", rank=rank, world_size=2, store=dist.HashStore(), pg_options=world)
    training_run = TrainingRun(system, SYSTEMS[system], small_llama(), world)
    time.sleep(max(0.0, begin_together - time.time()))
    for _ in range(3):
        training_run.step(network)
    return [training_run.step(network).seconds for _ in range(steps)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.real_link", description=__doc__.splitlines()[0])
    parser.add_argument("--gbit", type=float, default=0.25, help="per second, each way")
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    if reason := permitted():
        print(f"not measured: {reason}")
        return
    off = []
    with link(args.gbit * 1e9) as namespaces:
        network, fits = run(namespaces, measured, threads=1)[0]
        for kind, found in fits.items():
            print(
                f"{kind}: alpha {1e3 * found.alpha_s:.2f} ms, {8e-9 / found.s_per_byte:.3f} Gbit/s, within "
                f"{found.error:.0%} of {SIZES[0] // 1024} KiB to {SIZES[-1] // 2**20} MiB"
            )
        print("\n| system | real step, ms | rehearsed, ms | rehearsed / real |\n|---|---|---|---|")
        for system in SEEN:
            real, rehearsed = (
                statistics.median(run(namespaces, train, system, args.steps, chosen, timeout_s=300, threads=1)[0])
                for chosen in (None, network)
            )
            print(f"| {system} | {1e3 * real:.1f} | {1e3 * rehearsed:.1f} | {rehearsed / real:.2f} |", flush=True)
            if abs(rehearsed / real - 1) > AGREES:
                off.append(system)
    if off:
        sys.exit(f"more than {AGREES:.0%} off: {', '.join(off)}")


if __name__ == "__main__":
    main()

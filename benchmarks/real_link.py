"""Does a rehearsal agree with a real network? Two gloo ranks over a link of limited rate, against one rank rehearsed.

    python -m benchmarks.real_link                     # 0.25 Gbit/s; needs Linux, root, ip and tc

Alpha and bandwidth are fitted per kind of collective on the link, without compute; gloo has one thread, so that
collectives go one after the other. Then a Llama that the fit has not
seen is trained over the link, and rehearsed on the fitted network, each in two processes, so that both find the machine
equally busy. Prints the fit and, for every system, both steps and their ratio; the exit status is 1 if one is more than
15 % off.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.rate_limited import link, permitted, run
from simplefsdp import llama
from simplefsdp.hardware import KINDS, Link, Network
from simplefsdp.rehearsal.group import World
from simplefsdp.rehearsal.systems import SYSTEMS, Parallelism
from simplefsdp.rehearsal.trial import Trial, Workload

SIZES = [2**n for n in (12, 16, 18, 19, 20, 21, 22, 23)]
"""Bytes of the whole tensors that are fitted."""
LATE_S = 0.002
AGREES = 0.15
SEEN = ("fsdp2", "block")


def all_gather(whole: Tensor) -> None:
    dist.all_gather_into_tensor(whole, whole.chunk(2)[0].clone())


def reduce_scatter(whole: Tensor) -> None:
    dist.reduce_scatter_tensor(torch.empty_like(whole.chunk(2)[0]), whole)


def all_reduce(whole: Tensor) -> None:
    dist.all_reduce(whole)


MEASURED: dict[str, Callable[[Tensor], None]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
}


def sweep(repeats: int) -> dict[str, list[float]]:
    """Seconds of each kind and size on this rank's link, medians.

    One rank comes late, as in training one of them does, and it is its time that counts: gloo's all-gather takes longer
    then than between ranks that come together (0.75 instead of 0.5 of the whole tensor crosses the link).
    """
    found: dict[str, list[float]] = {kind: [] for kind in MEASURED}
    for (kind, collective), size in itertools.product(MEASURED.items(), SIZES):
        whole = torch.zeros(size // 4)
        times = []
        for _ in range(repeats):
            dist.barrier()
            time.sleep(LATE_S * dist.get_rank())
            began = time.perf_counter()
            collective(whole)
            times.append(time.perf_counter() - began)
        found[kind].append(statistics.median(times))
    return found


def fit(found: dict[str, list[float]]) -> tuple[Network, dict[str, float]]:
    """A network of two nodes, and the largest relative error of each kind on the sizes it is fitted to."""
    links, errors = {}, {}
    for kind, seconds in found.items():
        rounds = 2 if kind == "all_reduce" else 1
        bytes_received = rounds * numpy.array(SIZES) / 2
        columns = numpy.stack([numpy.ones_like(bytes_received), bytes_received], axis=1)
        measured = numpy.array(seconds)
        # Relative errors count, so that small messages do, too.
        (alpha, per_byte), *_ = numpy.linalg.lstsq(columns / measured[:, None], numpy.ones_like(measured), rcond=None)
        links[kind] = Link(1 / per_byte, max(alpha, 1e-6))
        errors[kind] = float(abs(columns @ (links[kind].alpha_s, per_byte) / measured - 1).max())
    every = {kind: links.get(kind, links["all_gather"]) for kind in KINDS}
    return Network("fitted", "this link", ranks_per_node=1, nodes=2, inside=every, between=every), errors


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
    workload = Workload(
        lambda: llama.build("debug", dim=192, layers=3, ffn_dim=576),
        batch=4,
        seq=128,
        vocab_size=256,
        device=torch.device("cpu"),
        parallelism=Parallelism(init_device_mesh("cpu", (2,)), MixedPrecisionPolicy(), True),
    )
    trial = Trial(system, SYSTEMS[system], workload, world)
    time.sleep(max(0.0, begin_together - time.time()))
    for _ in range(3):
        trial.step(network)
    return [trial.step(network).seconds for _ in range(steps)]


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
        network, errors = fit(run(namespaces, sweep, 9, threads=1)[1])
        for kind, error in errors.items():
            one = network.between[kind]
            print(
                f"{kind}: alpha {1e3 * one.alpha_s:.2f} ms, {one.bandwidth_bytes_per_s * 8e-9:.3f} Gbit/s, within "
                f"{error:.0%} of {SIZES[0] // 1024} KiB to {SIZES[-1] // 2**20} MiB"
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

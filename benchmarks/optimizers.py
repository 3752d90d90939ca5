"""The step of Muon and of GaLore on a sharded Llama: whole matrices on owners, and what people do without owners.

    python -m benchmarks.optimizers                       # one rank of 8 and of 64, rehearsed

Times are those of one rank's step, with a network that costs nothing and with one that is given by its bandwidth;
collectives and MiB are what that rank issued in one step; memory is the peak of the process in its steps, beyond
parameters and gradients: state, exchanges and what a step computes. A system runs in a process of its own. Steps of the
owners' rank are then timed once more, each after a step of the matrices that it owns as if there was nobody else.
GaLore steps the matrices that it projects from the right (more rows than columns), at a quarter of the width.
"""

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from simplefsdp import galore, muon, rehearsal, simple_fsdp
from simplefsdp.hardware.profile import flat
from simplefsdp.models import llama
from simplefsdp.text.tables import markdown_table
from simplefsdp.training.optimizers.newton_schulz import Muon

SHAPE = {"heads": 8, "kv_heads": 4, "vocab_size": 1024, "max_seq_len": 128}


class Redundant(Muon):
    """Muon for which every rank gathers every gradient, makes every matrix orthogonal, and keeps its rows."""

    def step_matrices(self, params: list[Any], group: dict[str, Any]) -> None:
        for param in params:
            whole = nn.Parameter(param.full_tensor())
            whole.grad = param.grad.full_tensor()
            if state := self.state[param]:
                self.state[whole] = {"momentum_buffer": state["momentum_buffer"]}
            super().step_matrices([whole], group)
            self.state[param] = {"momentum_buffer": self.state.pop(whole)["momentum_buffer"]}
            mine = distribute_tensor(whole.detach(), param.device_mesh, param.placements, src_data_rank=None)
            param._local_tensor.copy_(mine._local_tensor)


def hidden(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that all systems of Muon step: matrices of the blocks."""
    return {name: param for name, param in model.named_parameters() if "layers" in name and param.ndim == 2}


def tall(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that all systems of GaLore step: those of Muon that have more rows than columns."""
    return {name: param for name, param in hidden(model).items() if param.shape[0] > param.shape[1]}


def rank_of(model: nn.Module) -> int:
    """Return the rank at which GaLore keeps moments: a quarter of the width."""
    return min(param.shape[1] for param in tall(model).values()) // 4


def ours(optimizer_of: Callable[..., Any], model: nn.Module, stepped: dict[str, nn.Parameter], **settings: Any) -> Any:
    """Return this library's optimizer of matrices for these parameters, which steps no others."""
    others = [name for name, _ in model.named_parameters() if name not in stepped]
    optimizer = optimizer_of(model, adamw=others, **settings)
    for group in optimizer.param_groups:
        if group["algorithm"] == "adamw":
            for param in group["params"]:
                param.grad = None
    return optimizer


def of_pytorch_optimizer(model: nn.Module) -> Any:
    """Each rank steps every N-th matrix and gathers all others; it needs whole parameters on every rank."""
    from pytorch_optimizer import DistributedMuon

    by_shape = sorted(
        hidden(model).values(), key=lambda param: tuple(param.shape)
    )  # it gathers N neighbours as if they were alike
    return DistributedMuon([{"params": by_shape, "use_muon": True}])


SYSTEMS: dict[str, Callable[[nn.Module], Any]] = {
    "owners": lambda model: ours(muon, model, hidden(model)),
    "every rank all": lambda model: Redundant(hidden(model).values()),
    "torch on DTensor": lambda model: torch.optim.Muon(hidden(model).values()),
    "DistributedMuon, replicated": of_pytorch_optimizer,
    "one process": lambda model: Muon(hidden(model).values()),
    "GaLore, owners": lambda model: ours(galore, model, tall(model), rank=rank_of(model)),
    "GaLore, rows": lambda model: ours(galore, model, tall(model), rank=rank_of(model), on="rows"),
}


def seconds(optimizer: Any) -> float:
    """Return what a step takes."""
    started = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - started


def resident_bytes(most: bool = False) -> int:
    """Return the resident memory of this process, or the most since ``forget_peak``."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:" if most else "VmRSS:")[2].split()[0]) * 1024


def forget_peak() -> None:
    """Give back what is free, and let ``resident_bytes(most=True)`` begin anew."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def share_of(optimizer: Any, rank: int) -> Muon:
    """Return Muon on plain matrices of the shapes that a rank owns."""
    owned = [each.param.shape for each in optimizer.simple_fsdp_distribution.owned if each.owner_rank == rank]
    matrices = [nn.Parameter(0.02 * torch.randn(shape)) for shape in owned]
    for matrix in matrices:
        matrix.grad = 0.01 * torch.randn(matrix.shape)
    return Muon(matrices)


def measure(system: str, ranks: int, rank: int, dim: int, blocks: int, steps: int, gb_per_s: float) -> dict[str, Any]:
    """Return seconds, collectives and bytes of a step of one rank."""
    torch.set_num_threads(1)
    network = flat("given", ranks, alpha_s=20e-6, bandwidth_bytes_per_s=1e9 * gb_per_s)
    sharded = system not in ("one process", "DistributedMuon, replicated")
    with rehearsal.world(ranks, None, rank=rank) as world:
        torch.manual_seed(0)
        model: nn.Module = llama.build("debug", layers=blocks, dim=dim, ffn_dim=3 * dim, **SHAPE)
        if sharded:
            simple_fsdp(model)
        for param in model.parameters():
            local = param._local_tensor if isinstance(param, DTensor) else param
            gradient: Tensor = 0.01 * torch.randn(local.shape)
            param.grad = (
                DTensor.from_local(
                    gradient,
                    param.device_mesh,
                    param.placements,
                    run_check=False,
                    shape=param.shape,
                    stride=param.stride(),
                )
                if isinstance(param, DTensor)
                else gradient
            )
        optimizer = SYSTEMS[system](model)
        forget_peak()
        before = resident_bytes()
        optimizer.step()
        world.forget()
        found: dict[str, Any] = {}
        for name, of in (("free", None), ("network", network)):
            world.network = of
            found[f"{name}_s"] = statistics.median(seconds(optimizer) for _ in range(steps))
        issued = world.collectives()
        found["collectives"] = dict(Counter(each.kind for each in issued))
        found["collectives"] = {kind: count // (2 * steps) for kind, count in found["collectives"].items()}
        found["mib"] = sum(each.nbytes for each in issued) / (2 * steps) / 2**20
        found["memory_mib"] = (resident_bytes(most=True) - before) / 2**20
        if system == "owners":
            found["distribution"] = str(optimizer.simple_fsdp_distribution)
            world.network = None
            share = share_of(optimizer, rank)
            seconds(share)
            pairs = [(seconds(share), seconds(optimizer)) for _ in range(steps)]
            found["share_s"], found["beside_share_s"] = map(statistics.median, zip(*pairs, strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.optimizers", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--dim", type=int, default=512, help="width of the model")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--steps", type=int, default=5, help="of which the median counts")
    parser.add_argument("--bandwidth", type=float, default=10.0, help="GB/s of each rank")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--one", metavar="JSON", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(**json.loads(args.one))))
        return
    rows = []
    for ranks in args.ranks:
        for system in args.systems:
            asked = {"system": system, "ranks": ranks, "rank": 0, "steps": args.steps}
            asked |= {"dim": args.dim, "blocks": args.blocks}
            words = [
                sys.executable,
                "-m",
                "benchmarks.optimizers",
                "--one",
                json.dumps({**asked, "gb_per_s": args.bandwidth}),
            ]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                rows.append([str(ranks), system, done.stderr.strip().splitlines()[-1][:90], "", "", "", "", ""])
                continue
            found = json.loads(done.stdout.strip().splitlines()[-1])
            issued = ", ".join(f"{count} {kind}" for kind, count in found["collectives"].items()) or "none"
            rows.append(
                [
                    str(ranks),
                    system,
                    f"{1e3 * found['free_s']:.0f}",
                    f"{1e3 * found['network_s']:.0f}",
                    issued,
                    f"{found['mib']:.0f}",
                    f"{found['memory_mib']:.0f}",
                    f"{found['beside_share_s'] / found['share_s']:.2f}x" if "share_s" in found else "",
                ]
            )
            print(json.dumps(found), file=sys.stderr, flush=True)
    columns = [
        "ranks",
        "system",
        "step, no network, ms",
        "step, ms",
        "collectives",
        "MiB",
        "memory, MiB",
        "of its share",
    ]
    print(markdown_table(columns, rows))


if __name__ == "__main__":
    main()

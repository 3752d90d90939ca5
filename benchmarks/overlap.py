"""Who hides communication best: one rank of a rehearsed cluster, the same model and network for every system.

    python -m benchmarks.overlap                                # all scenarios and three random ones, half an hour
    python -m benchmarks.overlap --scenarios latency,hybrid --random 0 --rounds 3

Every scenario is a process of its own. Its systems step in turn, forwards in one round and backwards in the next, on
the scenario's network and on one that costs nothing; what is printed are medians, and the median over rounds of a
system's step divided by ours in the same round. All systems drop weights after forward, but ``auto-kept``, where the
planner decides (what saves time: there is no budget), and torchtitan. Loss and optimizer are the same; the loss is
compiled wherever blocks are. First steps compile, from an empty cache. L1 (``simplefsdp.rehearsal.limits``) is one
bound for a scenario, the smallest of the systems on our frontend that gather twice, with what each computes on the free
network; who keeps weights may be below it. Peak memory is that of the allocator's events in a step and what lives
before it. The device is calibrated in the scenario's process before anything is measured; what our plans are then
predicted to take is compared with what they took. Writes Markdown, JSON and a chart to benchmarks/results/.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.baselines import baselines
from benchmarks.off_profile import planned_off_profile
from simplefsdp import rehearsal
from simplefsdp.analysis.prediction import Prediction, collected_predictions
from simplefsdp.calibration.calibrate import calibrate
from simplefsdp.hardware.profile import Network, flat, network
from simplefsdp.models import llama
from simplefsdp.rehearsal.group import World
from simplefsdp.rehearsal.systems import SYSTEMS, Parallelism, System
from simplefsdp.rehearsal.timing import TrainingRun, fresh_compile_cache, measure
from simplefsdp.rehearsal.workload import Workload

RESULTS = Path(__file__).parent / "results"
OURS = "block"
OURS_ALL = (OURS, "auto", "auto-kept", "greedy")
ON_OUR_FRONTEND = (OURS, "auto", "greedy", "none", "inductor-auto", "inductor-manual")


@dataclass(frozen=True)
class Scenario:
    """A Llama in fp32 on CPU, one thread of compute."""

    what: str
    network: Network
    ranks: int
    seq: int
    model: Mapping[str, int] = field(default_factory=dict)
    hybrid: bool = False


SCENARIOS = {
    "latency": Scenario(
        "latency-bound: 0.2 ms a collective",
        network("cpu-latency"),
        64,
        128,
        {"dim": 128, "layers": 6, "ffn_dim": 384},
    ),
    "bandwidth": Scenario(
        "bandwidth-bound: communication takes about as long as compute",
        network("cpu-bandwidth"),
        8,
        256,
        {"dim": 512, "layers": 3, "ffn_dim": 1536},
    ),
    "compute": Scenario("compute-bound", network("cpu-compute"), 8, 256, {"dim": 512, "layers": 3, "ffn_dim": 1536}),
    "hybrid": Scenario(
        "hybrid shard: 4 nodes of 4 ranks",
        network("cpu-hybrid"),
        16,
        256,
        {"dim": 256, "layers": 3, "ffn_dim": 768},
        hybrid=True,
    ),
}


def scenarios(seed: int, count: int) -> Mapping[str, Scenario]:
    """Return the scenarios above, and ``count`` on networks that are drawn at random, evenly on logarithmic scales.

    Alpha is from 10 us to 2 ms, bandwidth from 0.1 to 10 GB/s, and there are 4 to 256 ranks.
    """
    found = dict(SCENARIOS)
    random = Random(seed)
    for i in range(count):
        alpha, bandwidth = math.exp(random.uniform(*_logs(10e-6, 2e-3))), math.exp(random.uniform(*_logs(0.1e9, 10e9)))
        ranks = round(math.exp(random.uniform(*_logs(4, 256))))
        drawn = flat(f"random-{seed}-{i}", ranks, alpha_s=alpha, bandwidth_bytes_per_s=bandwidth, source="drawn")
        what = f"at random: {1e6 * alpha:.0f} us a collective, {bandwidth / 1e9:.2f} GB/s"
        model = {"dim": 256, "layers": 3, "ffn_dim": 768}
        found[f"random{i + 1}"] = Scenario(what, drawn, ranks, 256, model)
    return found


def _logs(low: float, high: float) -> tuple[float, float]:
    return math.log(low), math.log(high)


def systems_for(chosen: Network) -> Mapping[str, System]:
    return {
        OURS: SYSTEMS["block"],
        "auto": SYSTEMS["auto"],
        "auto-kept": SYSTEMS["auto-kept"],
        "greedy": SYSTEMS["greedy"],
        "none": SYSTEMS["inductor"],
        **baselines(chosen),
        "fsdp2": SYSTEMS["fsdp2"],
        "fsdp2-compile": SYSTEMS["fsdp2-compile"],
        "single": SYSTEMS["single"],
    }


ALL = tuple(systems_for(network("cpu-latency")))


@contextmanager
def prepared(scenario: Scenario) -> Iterator[tuple[World, Workload, list[Prediction]]]:
    """The scenario's rehearsal in this process, which is calibrated before, and what is predicted meanwhile."""
    chosen = scenario.network
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # every system compiles the same forward
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    profile = calibrate(torch.device("cpu"), chosen)
    with rehearsal.world(scenario.ranks, chosen) as world, collected_predictions() as predictions:
        nodes = scenario.ranks // chosen.ranks_per_node
        shape = (nodes, chosen.ranks_per_node) if scenario.hybrid else (scenario.ranks,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        workload = Workload(
            lambda: llama.build("debug", **scenario.model),
            batch=1,
            seq=scenario.seq,
            vocab_size=llama.CONFIGS["debug"].vocab_size,
            device=torch.device("cpu"),
            parallelism=Parallelism(mesh, MixedPrecisionPolicy(), True, profile),
        )
        yield world, workload, predictions


def run(name: str, scenario: Scenario, systems: list[str], rounds: int) -> dict[str, Any]:
    """Measure one scenario, in this process."""
    chosen = scenario.network
    with prepared(scenario) as (world, workload, predictions):
        training_runs = []
        predicted: dict[str, dict[str, float]] = {}
        failed = {}
        every = systems_for(chosen)
        with fresh_compile_cache():  # imports and what else only the first compilation in a process pays
            small = replace(workload, build=lambda: llama.build("debug", dim=16, layers=1, ffn_dim=16), seq=8)
            TrainingRun("warm up", every["none"], small, world).step(chosen)
        for system in systems:
            predictions.clear()
            with fresh_compile_cache(), restored_config():
                try:
                    training_run = TrainingRun(system, planned_off_profile(system, every), workload, world)
                    for _ in range(2):
                        training_run.step(chosen)
                except Exception as error:  # of somebody else's passes: say so and go on
                    if system in OURS_ALL:
                        raise
                    failed[system] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                    continue
            training_runs.append(training_run)
            if predictions:
                predicted[system] = predictions[-1].figures()
            print(f"{name}: {system}: first step {training_run.first_step_s:.1f} s", file=sys.stderr)
        results = measure(training_runs, chosen, rounds, lambda: None)
    return {
        "scenario": {**asdict(scenario), "network": chosen.name},
        "rounds": rounds,
        "results": [asdict(result) for result in results],
        "predicted": predicted,
        "failed": failed,
    }


@contextmanager
def restored_config() -> Iterator[None]:
    """Some systems set Inductor's configuration for the whole process."""
    before = inductor_config.save_config()
    try:
        yield
    finally:
        inductor_config.load_config(before)


def table(found: Mapping[str, Any]) -> str:
    """Return the results of one scenario in Markdown."""
    results = {result["system"]: result for result in found["results"]}
    l1, single = bound(found), results.get("single")
    columns = ["system", "step / ours", "T/L1", "T/L2", "compute / single", "step, ms", "exposed, ms"]
    columns += ["of communication", "collectives", "peak, MiB", "first step, s"]
    if predicted := found.get("predicted"):
        columns += ["predicted step", "predicted peak"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for name, result in results.items():
        cells = [
            f"{_ratio(result, results[OURS]):.2f}",
            f"{result['step_s'] / l1:.2f}" if name != "single" else "",
            f"{result['step_s'] / result['l2_s']:.2f}",
            f"{result['compute_s'] / single['compute_s']:.2f}" if single else "",
            f"{1e3 * result['step_s']:.1f}",
            f"{1e3 * result['exposed_s']:.1f}",
            f"{1e3 * result['communication_s']:.1f}",
            str(result["collectives"]),
            f"{result['peak_bytes'] / 2**20:.1f}",
            f"{result['first_step_s']:.1f}",
            *((f"{ratio:.2f}" if ratio else "" for ratio in _predicted(found, result)) if predicted else ()),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        f"| {name} | does not run: {error} |" + " |" * (len(columns) - 2) for name, error in found["failed"].items()
    ]
    return "\n".join(lines)


def _predicted(found: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[float, float]:
    """Predicted step and peak, divided by what was measured; 0 where nothing was predicted."""
    prediction = found.get("predicted", {}).get(result["system"])
    if prediction is None:
        return 0.0, 0.0
    return prediction["step_s"] / result["step_s"], prediction["peak_bytes"] / result["peak_bytes"]


def bound(found: Mapping[str, Any]) -> float:
    """Seconds that no schedule of our frontend's graphs can beat, as far as this run knows."""
    return min(result["l1_s"] for result in found["results"] if result["system"] in ON_OUR_FRONTEND)


def summary(measured: Mapping[str, Any], label: str) -> str:
    """A row for each system, a column for each scenario: its step divided by ours; then how far we are from L1, and
    what was predicted, divided by what was measured."""
    ratios: dict[str, dict[str, str]] = {}
    bounds: dict[str, dict[str, str]] = {}
    for name, found in measured.items():
        results = {result["system"]: result for result in found["results"]}
        for system, result in results.items():
            ratios.setdefault(system, {})[name] = f"{_ratio(result, results[OURS]):.2f}"
        for system in (system for system in (OURS, "auto") if system in results):
            bounds.setdefault(f"T/L1 of {system}", {})[name] = f"{results[system]['step_s'] / bound(found):.2f}"
        for what, ratio in zip(("step", "peak"), _predicted(found, results.get("auto", {"system": ""})), strict=True):
            if ratio:
                bounds.setdefault(f"predicted {what} of auto", {})[name] = f"{ratio:.2f}"
    rows = {**ratios, **bounds}
    lines = [f"| {label.split(',')[0]} | {' | '.join(measured)} |", "|" + "---|" * (len(measured) + 1)]
    lines += [f"| {name} | {' | '.join(row.get(column, '-') for column in measured)} |" for name, row in rows.items()]
    return "\n".join(lines)


def _ratio(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> float:
    return statistics.median(a / b for a, b in zip(theirs["steps_s"], ours["steps_s"], strict=True))


def report(measured: Mapping[str, Any], machine: str) -> str:
    parts = [f"# Overlap\n\n{machine}. `python -m benchmarks.overlap`; what the columns mean is in its docstring."]
    for name, found in measured.items():
        scenario = found["scenario"]
        parts.append(
            f"## {name}\n\n{scenario['what']}; one of {scenario['ranks']} ranks on "
            f"`{scenario['network']}`, Llama "
            f"{scenario['model']}, 1 x {scenario['seq']} tokens, fp32, {found['rounds']} rounds\n\n{table(found)}"
        )
    return "\n\n".join(parts) + "\n"


def chart(measured: Mapping[str, Any], machine: str, path: Path) -> None:
    """Bars of the step, compute and exposed communication, with the bound as a line; a panel for each scenario."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(measured), figsize=(5 * len(measured), 3.6), squeeze=False)
    for panel, (name, found) in zip(panels[0], measured.items(), strict=True):
        results = found["results"][::-1]
        names = [result["system"] for result in results]
        compute = [1e3 * (result["step_s"] - result["exposed_s"]) for result in results]
        exposed = [1e3 * result["exposed_s"] for result in results]
        panel.barh(names, compute, color="#9aa5b1", label="compute")
        panel.barh(names, exposed, left=compute, color="#d9534f", label="exposed communication")
        panel.axvline(1e3 * bound(found), color="black", linestyle="--", linewidth=1, label="L1")
        panel.set_title(name)
        panel.set_xlabel("ms a step")
    panels[0][0].legend(fontsize="small", loc="lower right")
    figure.suptitle(machine, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def machine() -> str:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=RESULTS.parent, check=False
    )
    return (
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, commit "
        f"{commit.stdout.strip() or 'unknown'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.overlap", description=__doc__.splitlines()[0])
    parser.add_argument("--scenarios", help="default: all")
    parser.add_argument("--random", type=int, default=3, help="how many scenarios to draw, random1, random2, ...")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of what is drawn")
    parser.add_argument("--systems", default=",".join(ALL), help="auto@compute=0.85: planned for a wrong profile")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", metavar="FILE", help=argparse.SUPPRESS)  # a scenario, in this process
    args = parser.parse_args()
    every = scenarios(args.seed, args.random)
    chosen, systems = (args.scenarios or ",".join(every)).split(","), args.systems.split(",")
    for names, valid in ((chosen, every), (systems, ALL)):
        if unknown := [name for name in names if name.partition("@")[0] not in valid]:
            parser.error(f"unknown {', '.join(unknown)}; there are {', '.join(valid)}")
    if OURS not in systems:
        parser.error(f"--systems: all ratios are to {OURS}")
    if args.one:
        Path(args.one).write_text(json.dumps(run(chosen[0], every[chosen[0]], systems, args.rounds)))
        return
    measured = {}
    label = machine()  # before the files it writes are part of the tree
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            file = Path(folder) / name
            arguments = [
                "--scenarios",
                name,
                "--random",
                str(args.random),
                "--seed",
                str(args.seed),
                "--systems",
                args.systems,
                "--rounds",
                str(args.rounds),
                "--one",
                str(file),
            ]
            subprocess.run([sys.executable, "-m", "benchmarks.overlap", *arguments], check=True)
            measured[name] = json.loads(file.read_text())
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"overlap-torch{torch.__version__.split('+')[0]}"
    text = report(measured, label)
    stem.with_name(stem.name + ".md").write_text(text)
    stem.with_name(stem.name + ".json").write_text(json.dumps({"machine": label, **measured}, indent=1) + "\n")
    chart(measured, label, stem.with_name(stem.name + ".png"))
    print(text)


if __name__ == "__main__":
    main()

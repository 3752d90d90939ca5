"""One rank of a GPU cluster on one GPU: a scenario under several systems, through ``simplefsdp rehearse``.

    benchmarks/gpu.sh 8b-64            # or python -m benchmarks.gpu 8b-64

bf16 compute, fp32 reductions and master weights, one sequence of 8192 tokens, full activation checkpointing, the loss
compiled alike in all compiled systems. Where a model is larger than the device, it runs with two numbers of layers, and
the cost of a layer is their difference; it is labelled so. ``smoke`` is the same path with a tiny model, on any device.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

SYSTEMS = ("block", "inductor", "fsdp2", "fsdp2-compile")


class Scenario(NamedTuple):
    model: str
    layers: Sequence[int]
    """Whole if there is one number."""
    ranks: int
    network: str
    seq: int = 8192
    tp: int = 1


SCENARIOS = {
    "8b-64": Scenario("llama3-8b", (32,), 64, "h100-8-nodes"),
    "8b-8": Scenario("llama3-8b", (8, 16), 8, "h100-1-node"),
    "8b-128": Scenario("llama3-8b", (8, 16), 128, "h100-16-nodes"),
    "70b-64": Scenario("llama3-70b", (8, 16), 64, "h100-8-nodes"),
    "70b-64-tp8": Scenario("llama3-70b", (8, 16), 64, "h100-8-nodes", tp=8),
    "smoke": Scenario("llama3-debug", (1, 2), 8, "h100-1-node", seq=64),
}


def rehearse(scenario: Scenario, layers: int, steps: int) -> dict[str, Any]:
    arguments = {
        "model": scenario.model,
        "layers": layers,
        "ranks": scenario.ranks,
        "tp": scenario.tp,
        "network": scenario.network,
        "seq": scenario.seq,
        "steps": steps,
        "dtype": "bf16",
        "activation-checkpointing": "block",
        "plan": SYSTEMS[0],
        "against": ",".join(SYSTEMS[1:]),
    }
    if scenario is not SCENARIOS["smoke"]:
        arguments["device"] = "cuda"
    options = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "simplefsdp", "rehearse", *options, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"not measured: {' '.join(command[1:])}")
    return json.loads(done.stdout)


def table(runs: dict[int, dict[str, Any]]) -> str:
    """In Markdown: times in ms, memory in GiB."""
    lines = [
        "| layers | system | step | fsdp2-compile / its step | MFU | communication | exposed | L1 | L2 | peak "
        "| parameters | optimizer | rest | first step, s |",
        "|" + "---|" * 14,
    ]
    for layers, run in runs.items():
        baseline = next((r["step_s"] for r in run["results"] if r["system"] == "fsdp2-compile"), float("nan"))
        for result in run["results"]:
            resident = result["resident_bytes"]
            memory = [result["peak_bytes"], *resident.values(), result["peak_bytes"] - sum(resident.values())]
            times = [result[f"{name}_s"] for name in ("communication", "exposed", "l1", "l2")]
            cells = [
                f"{layers}",
                result["system"],
                f"{1e3 * result['step_s']:.1f}",
                f"{baseline / result['step_s']:.2f}",
                "-" if result["mfu"] is None else f"{result['mfu']:.1%}",
                *("-" if seconds is None else f"{1e3 * seconds:.1f}" for seconds in times),
                *(f"{nbytes / 2**30:.2f}" for nbytes in memory),
                f"{result['first_step_s']:.1f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines += [f"| {layers} | {name} | does not run: {error} |" for name, error in run["failed"].items()]
    if len(runs) == 2:
        (few, first), (many, second) = runs.items()
        lines += ["", f"A layer, by the difference of {many} and {few} layers:", ""]
        lines += ["| system | step, ms | exposed, ms | peak, GiB |", "|---|---|---|---|"]
        others = {result["system"]: result for result in second["results"]}
        pairs = [(one, others[one["system"]]) for one in first["results"] if one["system"] in others]
        for one, other in pairs:
            step, exposed, peak = (
                (other[name] - one[name]) / (many - few) for name in ("step_s", "exposed_s", "peak_bytes")
            )
            lines.append(f"| {one['system']} | {1e3 * step:.2f} | {1e3 * exposed:.2f} | {peak / 2**30:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--steps", type=int, default=8)
    default = os.environ.get("OUT", str(Path(__file__).parent / "results"))
    parser.add_argument("--out", type=Path, default=Path(default))
    args = parser.parse_args()
    scenario = SCENARIOS[args.scenario]
    began = time.perf_counter()
    runs = {layers: rehearse(scenario, layers, args.steps) for layers in scenario.layers}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    heading = (
        f"{args.scenario}: {scenario.model} as rank 0 of {scenario.ranks} on {scenario.network}, 1 x {scenario.seq} "
        f"tokens; {device}, torch {torch.__version__}, {time.perf_counter() - began:.0f} s in all"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    text = f"{heading}\n\n{table(runs)}\n"
    (args.out / f"gpu-{args.scenario}.json").write_text(json.dumps({"heading": heading, "runs": runs}, indent=1) + "\n")
    (args.out / f"gpu-{args.scenario}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

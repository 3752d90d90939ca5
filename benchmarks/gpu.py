"""One rank of a GPU cluster on one GPU: a scenario under several systems, each through ``simplefsdp rehearse``.

    benchmarks/gpu.sh 8b-64            # or python -m benchmarks.gpu 8b-64

bf16 compute, fp32 reductions and master weights, fused AdamW, one sequence a step, the loss compiled alike in all
compiled systems. Each system has a process of its own, and its row is written as soon as it is there. Where a model is
larger than the device, it runs with two numbers of layers, and the cost of a layer is their difference; it is labelled
so. ``smoke`` is the same path with a tiny model, on any device.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from simplefsdp.text.tables import markdown_table

BASELINE = "fsdp2-compile"
SYSTEMS = (BASELINE, "block", "auto", "fsdp2")


class Scenario(NamedTuple):
    model: str
    layers: Sequence[int]
    """Numbers of blocks that are measured; with one number, that is the whole model."""
    ranks: int
    network: str
    seq: int
    tp: int = 1
    checkpointing: str = "none"
    device: str = "cuda"


SCENARIOS = {
    "8b-64": Scenario("llama3-8b", (32,), 64, "h100-8-nodes", seq=8192),
    "8b-64-2048": Scenario("llama3-8b", (32,), 64, "h100-8-nodes", seq=2048),
    "8b-8": Scenario("llama3-8b", (32,), 8, "h100-1-node", seq=4096),
    "8b-128": Scenario("llama3-8b", (32,), 128, "h100-16-nodes", seq=4096),
    "70b-64": Scenario("llama3-70b", (4, 8), 64, "h100-8-nodes", seq=8192, checkpointing="block"),
    "70b-64-tp8": Scenario("llama3-70b", (8, 16), 64, "h100-8-nodes", seq=8192, tp=8, checkpointing="block"),
    "smoke": Scenario("llama3-debug", (1, 2), 8, "h100-1-node", seq=64, device="cpu"),
}


def rehearse(scenario: Scenario, layers: int, system: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the result of one system, with what its report predicted, or ``{"failed": ...}``."""
    ours = system in ("auto", "block")
    arguments = {
        "model": scenario.model,
        "layers": layers,
        "ranks": scenario.ranks,
        "tp": scenario.tp,
        "network": scenario.network,
        "seq": scenario.seq,
        "steps": args.steps,
        "dtype": "bf16",
        "activation-checkpointing": scenario.checkpointing,
        "device": scenario.device,
        "multiprocessors": args.multiprocessors,
        "plan": system,
        "embedding-lookup": args.embedding_lookup if ours else "gather",
    }
    for name in ("profile", "memory-budget", "turn", "trace"):
        value = getattr(args, name.replace("-", "_"))
        if value is not None:
            arguments[name] = value
    options = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    options += ["--anyway"] * (args.turn is not None)  # memory of others is free when it is this one's turn
    command = [sys.executable, "-m", "simplefsdp", "rehearse", *options, "--json"]
    with tempfile.TemporaryDirectory() as report:
        environment = os.environ | ({"SIMPLEFSDP_REPORT_DIR": report} if ours else {})
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
        if done.returncode:
            return {"failed": f"exit code {done.returncode}, see the log"}
        (result,) = json.loads(done.stdout)["results"]
        predictions = [json.loads(path.read_text()) for path in sorted(Path(report).glob("*/prediction.json"))]
    if ours and args.embedding_lookup != "gather":
        result["system"] += f", {args.embedding_lookup}"
    if predictions:
        result["predicted_s"] = sum(prediction["step_s"] for prediction in predictions)
        result["predicted_peak_bytes"] = max(prediction["peak_bytes"] for prediction in predictions)
    return result


def table(runs: Mapping[int, Sequence[dict[str, Any]]]) -> str:
    """Return the results in Markdown, a row for each number of layers and system; times in ms, memory in GiB."""
    times = "step", "to FSDP2 compiled", "predicted", "exposed", "communication", "L1", "MFU"
    columns = "layers", "system", *times, "peak", "to FSDP2 compiled", "predicted", "resident", "first step, s"
    rows, failed = [], []
    for layers, results in runs.items():
        baseline = next((r for r in results if r["system"] == BASELINE and "failed" not in r), None)
        for result in results:
            if "failed" in result:
                failed.append(f"{layers} layers, {result['system']}: {result['failed']}")
                continue
            rows.append([str(layers), result["system"], *_cells(result, baseline)])
    lines = [markdown_table(columns, rows), *failed]
    if len(runs) == 2:
        lines += ["", *_one_layer(*runs.items())]
    return "\n".join(lines)


def _cells(result: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> list[str]:
    def ms(name: str) -> str:
        return "-" if result.get(name) is None else f"{1e3 * result[name]:.1f}"

    def gib(nbytes: float | None) -> str:
        return "-" if nbytes is None else f"{nbytes / 2**30:.2f}"

    def ratio(name: str) -> str:
        return "-" if baseline is None else f"{result[name] / baseline[name]:.3f}x"

    spread = 500 * (max(result["steps_s"]) - min(result["steps_s"]))
    return [
        f"{ms('step_s')} ± {spread:.1f}",
        ratio("step_s"),
        *(ms(name) for name in ("predicted_s", "exposed_s", "communication_s", "l1_s")),
        "-" if result["mfu"] is None else f"{result['mfu']:.1%}",
        gib(result["peak_bytes"]),
        ratio("peak_bytes"),
        gib(result.get("predicted_peak_bytes")),
        gib(sum(result["resident_bytes"].values())),
        f"{result['first_step_s']:.1f}",
    ]


def _one_layer(few: tuple[int, Sequence[dict[str, Any]]], many: tuple[int, Sequence[dict[str, Any]]]) -> list[str]:
    """Return a table of what one layer takes: the difference of two numbers of layers, by their difference."""
    others = {result["system"]: result for result in many[1] if "failed" not in result}
    pairs = [(one, others[one["system"]]) for one in few[1] if "failed" not in one and one["system"] in others]
    rows = []
    for one, other in pairs:
        step, exposed, peak = (
            (other[name] - one[name]) / (many[0] - few[0]) for name in ("step_s", "exposed_s", "peak_bytes")
        )
        rows.append([one["system"], f"{1e3 * step:.2f}", f"{1e3 * exposed:.2f}", f"{peak / 2**30:.3f}"])
    title = f"A layer, by the difference of {many[0]} and {few[0]} layers:"
    return [title, "", markdown_table(["system", "step, ms", "exposed, ms", "peak, GiB"], rows)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"of simplefsdp rehearse (default: {SYSTEMS})")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--profile", help="of the device, as in simplefsdp rehearse (default: measured first)")
    parser.add_argument("--memory-budget", help="of auto, as in simplefsdp rehearse")
    parser.add_argument("--embedding-lookup", default="gather", help="of auto and block, as in simplefsdp rehearse")
    parser.add_argument("--layers", type=int, help="instead of those of the scenario")
    parser.add_argument("--turn", help="a lock, to run several of these commands at once; as in simplefsdp rehearse")
    parser.add_argument("--trace", help="a folder for the profiler's records; as in simplefsdp rehearse")
    parser.add_argument("--multiprocessors", type=int, default=16, help="that a collective keeps busy")
    default = os.environ.get("OUT", str(Path(__file__).parent / "results"))
    parser.add_argument("--out", type=Path, default=Path(default))
    args = parser.parse_args()
    scenario = SCENARIOS[args.scenario]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    heading = (
        f"{args.scenario}: {scenario.model} as rank 0 of {scenario.ranks} on {scenario.network}, 1 x {scenario.seq} "
        f"tokens, checkpointing {scenario.checkpointing}, medians of {args.steps} steps, collectives on "
        f"{args.multiprocessors} multiprocessors; {device}, torch {torch.__version__}"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    depths = scenario.layers if args.layers is None else (args.layers,)
    runs: dict[int, list[dict[str, Any]]] = {layers: [] for layers in depths}
    text = heading
    for layers, system in ((layers, system) for layers in depths for system in args.systems.split(",")):
        began = time.perf_counter()
        runs[layers].append({"system": system} | rehearse(scenario, layers, system, args))
        print(f"{system}: {time.perf_counter() - began:.0f} s in all", file=sys.stderr)
        text = f"{heading}\n\n{table(runs)}\n"
        content = {"heading": heading, "runs": runs}
        (args.out / f"gpu-{args.scenario}.json").write_text(json.dumps(content, indent=1) + "\n")
        (args.out / f"gpu-{args.scenario}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

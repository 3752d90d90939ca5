"""One rank of a GPU cluster on one GPU: a scenario under several systems, each through ``simplefsdp rehearse``.

    benchmarks/gpu.sh 8b-64            # or python -m benchmarks.gpu 8b-64
    benchmarks/gpu.sh 8b-64 --simulate
    benchmarks/gpu.sh 8b-64 --simulate h100 --measured

bf16 compute, fp32 reductions and master weights, fused AdamW, one sequence a step, the loss compiled alike in all
compiled systems. Each system has a process of its own, and its row is written as soon as it is there. Where a model is
larger than the device, it runs with two numbers of layers, and the cost of a layer is their difference; it is labelled
so. ``--simulate`` puts what a GPU that does nothing says of each row beside what was measured; that needs no GPU, so
with ``--measured`` it is added to results of another day. ``smoke`` is the same path with a tiny model, on any device.
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

from simplefsdp.null_gpu.launch import DEVICES
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


def rehearse(scenario: Scenario, layers: int, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the result of one system, with what its report predicted, or ``{"failed": ...}``."""
    options = _options(scenario, layers, name, args)
    options |= {"steps": args.steps, "device": scenario.device, "multiprocessors": args.multiprocessors}
    if args.turn is not None:  # memory of others is free when it is this one's turn
        options |= {"turn": args.turn, "anyway": None}
    with tempfile.TemporaryDirectory() as report:
        result = _run(options, {"SIMPLEFSDP_REPORT_DIR": report} if _is_ours(name) else {})
        predictions = [json.loads(path.read_text()) for path in sorted(Path(report).glob("*/prediction.json"))]
    if predictions and "failed" not in result:
        result["predicted_s"] = sum(prediction["step_s"] for prediction in predictions)
        result["predicted_peak_bytes"] = max(prediction["peak_bytes"] for prediction in predictions)
    return result | {"system": name}


def simulate(scenario: Scenario, layers: int, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return what a system asks of a GPU that does nothing, and takes there, or ``{"failed": ...}``."""
    return _run(_options(scenario, layers, name, args) | {"simulate": None, "device": args.simulate}, {})


def _is_ours(name: str) -> bool:
    return name.partition(", ")[0] in ("auto", "block")


def _named(system: str, lookup: str) -> str:
    """Return the name of a row: a system, and how it looks up embeddings where that is not by a gather."""
    return f"{system}, {lookup}" if _is_ours(system) and lookup != "gather" else system


def _options(scenario: Scenario, layers: int, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return what measured and simulated rehearsals of a row have in common."""
    system, _, lookup = name.partition(", ")
    options = {
        "model": scenario.model,
        "layers": layers,
        "ranks": scenario.ranks,
        "tp": scenario.tp,
        "network": scenario.network,
        "seq": scenario.seq,
        "dtype": "bf16",
        "activation-checkpointing": scenario.checkpointing,
        "plan": system,
        "embedding-lookup": lookup or "gather",
    }
    given = {"profile": args.profile, "memory-budget": args.memory_budget, "trace": args.trace}
    return options | {name: value for name, value in given.items() if value is not None}


def _run(options: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the result of ``simplefsdp rehearse``, for which an option of ``None`` is one without a value."""
    given = [text for name, value in options.items() for text in (f"--{name}", value) if text is not None]
    command = [sys.executable, "-m", "simplefsdp", "rehearse", *map(str, given), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | variables)
    if done.returncode:
        return {"failed": f"exit code {done.returncode}, see the log"}
    (result,) = json.loads(done.stdout)["results"]
    return dict(result)


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


def beside(runs: Mapping[int, Sequence[dict[str, Any]]]) -> str:
    """Return a table of what was simulated beside what was measured, in ms and GiB, and the first by the second."""
    figures = {"step": ("step_s", 1e3, ".1f"), "exposed": ("exposed_s", 1e3, ".1f")}
    figures |= {"communication": ("communication_s", 1e3, ".1f"), "peak": ("peak_bytes", 2**-30, ".2f")}
    rows, failed = [], []
    for layers, results in runs.items():
        for result in results:
            simulated = result.get("simulated")
            if simulated is None or "failed" in result:
                continue
            if "failed" in simulated:
                failed.append(f"{layers} layers, {result['system']}, simulated: {simulated['failed']}")
                continue
            cells = [str(layers), result["system"]]
            for name, scale, digits in figures.values():
                cells += [format(scale * simulated[name], digits), format(scale * result[name], digits)]
                if name in ("step_s", "peak_bytes"):
                    cells.append(f"{simulated[name] / result[name]:.3f}x")
            rows.append(cells)
    columns = ["layers", "system"]
    for title, (name, *_) in figures.items():
        columns += [f"{title}, simulated", "measured", *["of measured"] * (name in ("step_s", "peak_bytes"))]
    return "\n".join([markdown_table(columns, rows), *failed])


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


def page(heading: str, runs: Mapping[int, Sequence[dict[str, Any]]], simulated: str | None) -> str:
    """Return all results in Markdown: what was measured, and then what was simulated beside it."""
    parts = [heading, table(runs)]
    if simulated is not None:
        parts += [simulated, beside(runs)]
    return "\n\n".join(parts) + "\n"


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
    parser.add_argument(
        "--simulate", metavar="DEVICE", nargs="?", const="", help="simulate each row too (default: the device here)"
    )
    parser.add_argument("--measured", action="store_true", help="take measured rows from the results that are there")
    default = os.environ.get("OUT", str(Path(__file__).parent / "results"))
    parser.add_argument("--out", type=Path, default=Path(default))
    args = parser.parse_args()
    if args.measured and args.simulate is None:
        parser.error("--measured: needs --simulate, or there is nothing to add")
    if args.simulate == "":
        here = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        args.simulate = next((name for name, device in DEVICES.items() if device.name == here), here)
    if args.simulate is not None and args.simulate not in DEVICES:
        parser.error(f"--simulate: expected one of {', '.join(DEVICES)}, found {args.simulate!r}")
    scenario = SCENARIOS[args.scenario]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    heading = (
        f"{args.scenario}: {scenario.model} as rank 0 of {scenario.ranks} on {scenario.network}, 1 x {scenario.seq} "
        f"tokens, checkpointing {scenario.checkpointing}, medians of {args.steps} steps, collectives on "
        f"{args.multiprocessors} multiprocessors; {device}, torch {torch.__version__}"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    written = args.out / f"gpu-{args.scenario}.json"
    names = [_named(system, args.embedding_lookup) for system in args.systems.split(",")]
    depths = scenario.layers if args.layers is None else (args.layers,)
    runs: dict[int, list[dict[str, Any]]] = {layers: [{"system": name} for name in names] for layers in depths}
    content: dict[str, Any] = {"heading": heading, "runs": runs}
    if args.measured:
        content = json.loads(written.read_text())
        runs = content["runs"] = {int(layers): results for layers, results in content["runs"].items()}
    if args.simulate is not None:
        content["simulated"] = f"simulated: a null GPU ({DEVICES[args.simulate].name}), torch {torch.__version__}"
    for layers, result in ((layers, result) for layers, results in runs.items() for result in results):
        began = time.perf_counter()
        if not args.measured:
            result |= rehearse(scenario, layers, result["system"], args)
        if args.simulate is not None:
            result["simulated"] = simulate(scenario, layers, result["system"], args)
        print(f"{result['system']}: {time.perf_counter() - began:.0f} s in all", file=sys.stderr)
        done = {layers: [one for one in results if len(one) > 1] for layers, results in runs.items()}
        written.write_text(json.dumps(content | {"runs": done}, indent=1) + "\n")
        written.with_suffix(".md").write_text(page(content["heading"], done, content.get("simulated")))
    print(written.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()

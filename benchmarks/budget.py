"""Costs of a memory budget: ``plan="auto"`` under budgets from the least that a step can do with to all it would use.

    python -m benchmarks.budget                # the bandwidth-bound scenario of benchmarks.overlap, three minutes

Predicted step and peak of each plan, and what was measured in a rehearsal; peaks as in ``benchmarks.overlap``. Writes
Markdown, JSON and a chart to benchmarks/results/.
"""

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.overlap import RESULTS, SCENARIOS, machine, prepared
from simplefsdp.compile.plan_step import PLANNED_PERCENT
from simplefsdp.rehearsal.systems import simplefsdp_system
from simplefsdp.rehearsal.timing import TrainingRun, fresh_compile_cache, measure


def run(name: str, count: int, rounds: int) -> list[dict[str, Any]]:
    scenario = SCENARIOS[name]
    with prepared(scenario) as (world, workload, predictions):

        def training_run(budget: int | None) -> TrainingRun:
            with fresh_compile_cache():
                made = TrainingRun(str(budget), simplefsdp_system("auto", budget=budget), workload, world)
                for _ in range(2):
                    made.step(scenario.network)
            return made

        try:
            training_run(1)
        except Exception as error:  # Dynamo's, around ours
            found = re.search(r"needs at least (\d+) bytes", str(error))
            if found is None:
                raise
            least = int(found[1])
        torch._dynamo.reset()
        training_runs, predicted = [training_run(None)], [predictions[-1]]
        most = -(-100 * predicted[0].peak_bytes // PLANNED_PERCENT)
        for i in reversed(range(count)):
            training_runs.append(training_run(least + (most - least) * i // count))
            predicted.append(predictions[-1])
        results = measure(training_runs, scenario.network, rounds, lambda: None)
    return [
        {
            "budget": None if training_run.name == "None" else int(training_run.name),
            "predicted_s": prediction.step_s,
            "step_s": result.step_s,
            "relative": statistics.median(a / b for a, b in zip(result.steps_s, results[0].steps_s, strict=True)),
            "predicted_peak": prediction.peak_bytes,
            "peak": result.peak_bytes,
            "collectives": result.collectives,
        }
        for training_run, prediction, result in zip(training_runs, predicted, results, strict=True)
    ]


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| budget, MiB | predicted peak | measured peak | predicted step, ms | measured step, ms "
        "| step / without a budget | collectives |",
        "|" + "---|" * 7,
    ]
    for row in found:
        cells = [
            "none" if row["budget"] is None else f"{row['budget'] / 2**20:.1f}",
            f"{row['predicted_peak'] / 2**20:.1f}",
            f"{row['peak'] / 2**20:.1f}",
            f"{1e3 * row['predicted_s']:.1f}",
            f"{1e3 * row['step_s']:.1f}",
            f"{row['relative']:.3f}",
            str(row["collectives"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def chart(found: list[dict[str, Any]], title: str, path: Path) -> None:
    from matplotlib import pyplot

    budgets = [(row["budget"] or row["predicted_peak"]) / 2**20 for row in found]
    figure, (time, memory) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    for panel, unit, predicted, measured in (
        (time, 1e-3, "predicted_s", "step_s"),
        (memory, 2**20, "predicted_peak", "peak"),
    ):
        panel.plot(budgets, [row[predicted] / unit for row in found], "o--", color="#9aa5b1", label="predicted")
        panel.plot(budgets, [row[measured] / unit for row in found], "o-", color="#d9534f", label="measured")
        panel.set_xlabel("budget, MiB")
    memory.plot(budgets, budgets, color="black", linewidth=1, label="budget")
    time.set_ylabel("ms a step")
    memory.set_ylabel("peak, MiB")
    memory.legend(fontsize="small")
    figure.suptitle(title, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.budget", description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", default="bandwidth", choices=SCENARIOS)
    parser.add_argument("--budgets", type=int, default=6, help="how many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    label = machine()
    found = run(args.scenario, args.budgets, args.rounds)
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"budget-torch{torch.__version__.split('+')[0]}"
    text = f"# Budget\n\n{label}. `python -m benchmarks.budget`, scenario {args.scenario}.\n\n{table(found)}\n"
    stem.with_name(stem.name + ".md").write_text(text)
    stem.with_name(stem.name + ".json").write_text(json.dumps({"machine": label, "budgets": found}, indent=1) + "\n")
    chart(found, f"{args.scenario}: {label}", stem.with_name(stem.name + ".png"))
    print(text)


if __name__ == "__main__":
    main()

"""``simplefsdp explain``: a report as a screen of words, as JSON, as pictures, or against another one."""

import argparse
import difflib
import json
from itertools import zip_longest
from pathlib import Path

from simplefsdp.analysis.explanation import ROWS, Explanation, explain
from simplefsdp.analysis.first_step import first_step
from simplefsdp.analysis.html_report import write_html_report
from simplefsdp.analysis.measurement import Measurement
from simplefsdp.analysis.prediction import StepCosts
from simplefsdp.plan.bucket_plan import BucketPlan
from simplefsdp.text.json_fields import MALFORMED, read_file
from simplefsdp.text.units import gib, ms


def read(folder: str | Path) -> dict[Path, Explanation]:
    """Return the explanation of each graph in a report, by its folder.

    Raises:
        ValueError: there is none, it was made without a profile, or one of its files is not what was written.
    """
    root = Path(folder)
    graphs = sorted(path.parent for path in (*root.glob("plan.json"), *root.glob("*/plan.json")))
    if not graphs:
        raise ValueError(f"{root}: no report here (a folder for options={{'report_dir': ...}}, with plan.json in it)")
    found = {}
    for graph in graphs:
        if not (graph / "costs.json").exists():
            raise ValueError(f"{graph}: no costs.json: compiled without a profile, so nothing was predicted")
        costs = read_file(graph / "costs.json", "costs", StepCosts.from_json)
        measured = graph / "measurement.json"
        measurement = read_file(measured, "measurement", Measurement.from_json) if measured.exists() else None
        plan = BucketPlan.load(graph / "plan.json")
        try:
            found[graph] = explain(plan, costs, measurement)
        except MALFORMED as error:
            files = "plan.json, costs.json and measurement.json are not of one compilation"
            raise ValueError(f"{graph}: {files}, or were edited: {type(error).__name__}: {error}") from error
    return found


def compared(one: Explanation, other: Explanation) -> str:
    """Return, for people, how ``one`` differs from ``other``."""
    predicted = one.prediction, other.prediction
    lines = []
    for name, values in (
        ("step", [p.step_s for p in predicted]),
        ("exposed", [p.exposed_s for p in predicted]),
        ("L1", [p.bound_s + p.outside_s for p in predicted]),
    ):
        lines.append(f"  {name:12} {ms(values[0])}, against {ms(values[1])} ({values[0] / values[1] - 1:+.1%})")
    peaks = [p.peak_bytes for p in predicted]
    lines.append(f"  {'peak':12} {gib(peaks[0])}, against {gib(peaks[1])} ({peaks[0] / peaks[1] - 1:+.1%})")
    lines.append(f"  {'collectives':12} {one.collectives}, against {other.collectives}")
    theirs, ours = (explained.plan.explain().splitlines() for explained in (other, one))
    lines += difflib.unified_diff(theirs, ours, "against", "this", n=0, lineterm="")
    return "\n".join(lines) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("report", help="folder that options={'report_dir': ...} named, or that of one graph in it")
    add("--against", metavar="REPORT", help="another one, to be compared with")
    add("--all", action="store_true", help="show every bucket")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Print or draw the report that ``args`` name.

    Raises:
        ValueError: there is no report.
    """
    found = read(args.report)
    others = read(args.against) if args.against else {}
    if others and len(others) != len(found):
        raise ValueError(f"--against: {len(others)} graphs there, {len(found)} in {args.report}")
    if args.json:
        print(json.dumps({folder.name: json.loads(one.to_json()) for folder, one in found.items()}, indent=1))
        return
    for (folder, one), other in zip_longest(found.items(), others.values()):
        print(f"{folder.name}:")
        if other is not None:
            print(compared(one, other))
            continue
        print(one.text(len(one.buckets) if args.all else ROWS))
        print(first_step(folder), end="")
        try:
            print(f"in pictures: {', '.join(map(str, write_html_report(folder, one)))}")
        except ModuleNotFoundError as error:
            print(f"in pictures, with pip install 'simplefsdp[report]': {error}")

"""Run a campaign, or all of them, and print the figures of each as JSON."""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

CAMPAIGNS = {"disagreement": 200, "death": 100, "models": 2000, "files": 10_000, "training": 2000, "cache": 99}
"""How many runs each campaign has."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.soak", description=__doc__)
    parser.add_argument("campaign", choices=CAMPAIGNS, nargs="?", help="default: all of them, one after the other")
    parser.add_argument("--runs", type=int, help=f"default: {CAMPAIGNS}")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="a folder for the figures: reliability-CAMPAIGN.json"
    )
    args = parser.parse_args()
    names = [args.campaign] if args.campaign else CAMPAIGNS
    return max([_run(name, args.runs or CAMPAIGNS[name], args.out) for name in names])


def _run(name: str, runs: int, out: Path | None) -> int:
    """Run one campaign; return 1 if a run was wrong."""
    began = time.monotonic()
    figures = importlib.import_module(f"tests.soak.{name}").campaign(runs)
    figures["seconds"] = round(time.monotonic() - began)
    text = json.dumps(figures, indent=1)
    print(text, flush=True)
    if out:
        (out / f"reliability-{name}.json").write_text(text + "\n")
    return 1 if figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())

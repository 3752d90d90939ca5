"""Run a campaign and print, or write, its figures as JSON."""

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
    parser.add_argument("campaign", choices=CAMPAIGNS)
    parser.add_argument("--runs", type=int, help=f"default: {CAMPAIGNS}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a JSON file for the figures")
    args = parser.parse_args()
    began = time.monotonic()
    figures = importlib.import_module(f"tests.soak.{args.campaign}").campaign(args.runs or CAMPAIGNS[args.campaign])
    figures["seconds"] = round(time.monotonic() - began)
    text = json.dumps(figures, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 1 if figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""The command ``simplefsdp``."""

import argparse
import importlib
import sys
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from typing import Any

COMMANDS = {
    "calibrate": "measure this device, and under torchrun the network between its ranks.",
    "compare": "train a model along a ladder of systems, and say where its numbers first differ.",
    "explain": "a report as a screen of words, as JSON, as pictures, or against another one.",
    "plan": "what a step on a cluster will take, and the plan for it, from a laptop.",
    "rehearse": "time one rank of a cluster on this machine.",
}
"""A summary of each command; the module of the command, ``simplefsdp.cli.<command>``, is imported when it is used."""


def main() -> None:
    """Run the command that ``sys.argv`` names; an argument that is not valid ends the process with a message."""
    args = parser([word for word in sys.argv[1:2] if word in COMMANDS]).parse_args()
    try:
        _module(args.command).run(args)
    except ValueError as error:
        sys.exit(f"simplefsdp {args.command}: {error}")


def parser(commands: Collection[str]) -> argparse.ArgumentParser:
    """Return the parser of ``simplefsdp``, in which these commands have their arguments."""
    result = argparse.ArgumentParser(prog="simplefsdp", description="Sharded training, scheduled by the compiler.")
    try:
        own = version("simplefsdp")
    except PackageNotFoundError:  # run from a source tree
        own = "not installed"
    result.add_argument("--version", action="version", version=f"simplefsdp {own}, torch {version('torch')}")
    subparsers = result.add_subparsers(dest="command", required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary)
        if name in commands:
            subparser.description = _module(name).__doc__
            _module(name).add_arguments(subparser)
    return result


def _module(command: str) -> Any:
    return importlib.import_module(f"simplefsdp.cli.{command}")


if __name__ == "__main__":
    main()

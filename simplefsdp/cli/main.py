"""The command ``simplefsdp``."""

import argparse
import sys
from importlib.metadata import version

import torch

from simplefsdp.cli import calibrate, explain, plan, rehearse

COMMANDS = {"calibrate": calibrate, "explain": explain, "plan": plan, "rehearse": rehearse}


def main() -> None:
    """Run the command that ``sys.argv`` names; an argument that is not valid ends the process with a message."""
    parser = argparse.ArgumentParser(prog="simplefsdp", description="Sharded training, scheduled by the compiler.")
    versions = f"simplefsdp {version('simplefsdp')}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=versions)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").split("\n")[0].partition(": ")[2]
        module.add_arguments(commands.add_parser(name, help=summary, description=module.__doc__))
    args = parser.parse_args()
    try:
        COMMANDS[args.command].run(args)
    except ValueError as error:
        sys.exit(f"simplefsdp {args.command}: {error}")


if __name__ == "__main__":
    main()

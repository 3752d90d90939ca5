"""The command ``simplefsdp``."""

import argparse
import sys

from . import calibrate, explain, planning
from .rehearsal import command as rehearse


def main() -> None:
    parser = argparse.ArgumentParser(prog="simplefsdp", description="Sharded training, scheduled by the compiler.")
    commands = parser.add_subparsers(dest="command", required=True)
    modules = {"calibrate": calibrate, "explain": explain, "plan": planning, "rehearse": rehearse}
    for name, module in modules.items():
        module.add_arguments(commands.add_parser(name, help=module.__doc__))
    args = parser.parse_args()
    try:
        modules[args.command].run(args)
    except ValueError as error:
        sys.exit(f"simplefsdp {args.command}: {error}")


if __name__ == "__main__":
    main()

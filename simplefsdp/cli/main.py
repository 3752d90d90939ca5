"""The command ``simplefsdp``."""

import argparse
import sys

from simplefsdp.calibration import calibrate
from simplefsdp.cli import explain
from simplefsdp.cli import plan as planning
from simplefsdp.cli import rehearse as rehearse


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

"""The command ``simplefsdp``."""

import argparse
import sys

from .rehearsal import command as rehearse


def main() -> None:
    parser = argparse.ArgumentParser(prog="simplefsdp", description="Sharded training, scheduled by the compiler.")
    commands = parser.add_subparsers(dest="command", required=True)
    rehearse.add_arguments(commands.add_parser("rehearse", help=rehearse.__doc__))
    args = parser.parse_args()
    try:
        rehearse.run(args)
    except ValueError as error:
        sys.exit(f"simplefsdp {args.command}: {error}")


if __name__ == "__main__":
    main()

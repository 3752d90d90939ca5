"""``python -m simplefsdp.null_gpu [--device h100] script.py ... | -m module ...``: Python under the null GPU."""

import argparse
import os
import sys

from simplefsdp.null_gpu.launch import DEVICES, environment


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m simplefsdp.null_gpu", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, default="h100", help="the GPU that torch sees")
    parser.usage = "%(prog)s [-h] [--device DEVICE] script.py ... | -m module ..."
    own = 2 if sys.argv[1:2] == ["--device"] else 1 if sys.argv[1:2] in (["-h"], ["--help"]) else 0
    args, command = parser.parse_args(sys.argv[1 : 1 + own]), sys.argv[1 + own :]
    if not command:
        parser.error("expected a script, or -m and a module")
    os.execve(sys.executable, [sys.executable, *command], environment(args.device))


if __name__ == "__main__":
    main()

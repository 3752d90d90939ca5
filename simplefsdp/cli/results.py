"""The output of ``simplefsdp rehearse`` for several systems, with and without ``--simulate``."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any


def print_results(
    args: argparse.Namespace, text: str, results: Sequence[Mapping[str, Any]], failed: Mapping[str, str]
) -> None:
    """Print ``text`` and what failed, or with ``--json`` the arguments, the results and what failed as JSON.

    Args:
        failed: the error of each system that does not run.
    """
    if args.json:
        arguments = {name: value for name, value in vars(args).items() if isinstance(value, str | int | float | None)}
        print(json.dumps({"arguments": arguments, "results": results, "failed": failed}, indent=2))
        return
    print(text)
    for name, words in failed.items():
        print(f"\n{name} does not run: {words}")

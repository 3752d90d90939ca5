"""The options by which a command is told a wire format."""

import argparse

from inductor_passes.ops.wire_formats import GATHER_FORMATS, REDUCE_FORMATS
from simplefsdp.frontend.wire_format import WireFormat


def add_wire_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--wire-gather", choices=GATHER_FORMATS, help="format in which weights travel (default: their dtype)")
    add("--wire-reduce", choices=REDUCE_FORMATS, help="format in which gradients travel (default: their dtype)")
    add("--wire-between-nodes", choices=REDUCE_FORMATS, help="format of their second step (default: as the first)")
    add("--wire-error-feedback", action="store_true", help="replicas add what rounding took to their next gradients")
    add("--wire-auto", action="store_true", help="a format only for what compute cannot hide; needs plan auto")


def chosen_wire(args: argparse.Namespace, *, plans_with_auto: bool) -> WireFormat:
    """Return the format that the options say, which may be that of nothing.

    Args:
        args: has the options of ``add_wire_options``.
        plans_with_auto: whether the command makes a plan by ``"auto"``.

    Raises:
        ValueError: an option needs another.
    """
    if args.wire_auto and not plans_with_auto:
        raise ValueError("--wire-auto: needs --plan auto")
    if args.wire_auto and not (args.wire_gather or args.wire_reduce):
        raise ValueError("--wire-auto: needs --wire-gather or --wire-reduce, the formats that are allowed")
    for option, given in (
        ("--wire-between-nodes", args.wire_between_nodes),
        ("--wire-error-feedback", args.wire_error_feedback),
    ):
        if given and not args.wire_reduce:
            raise ValueError(f"{option}: needs --wire-reduce")
    return WireFormat(args.wire_gather, args.wire_reduce, args.wire_between_nodes, args.wire_error_feedback)

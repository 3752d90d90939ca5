"""Wrap plans: which parameters share a collective. Pure data over FQNs."""

from itertools import groupby

Buckets = tuple[tuple[str, ...], ...]
"""The FQNs of each bucket, in packing order; every parameter of a model is in one."""


def block_of(fqn: str) -> str | None:
    """The outermost numbered module that holds ``fqn``, or ``None``: ``layers.0`` for ``layers.0.wq.weight``."""
    parts = fqn.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return None


def blocks(fqns: tuple[str, ...]) -> list[str]:
    """Names of the repeated blocks that ``fqns`` belong to, in registration order."""
    return list(dict.fromkeys(block for fqn in fqns if (block := block_of(fqn)) is not None))


def block_buckets(fqns: tuple[str, ...]) -> Buckets:
    """One bucket per repeated block and one for each run of parameters before, between and after the blocks.

    ``fqns`` are all parameters of a model in registration order, which is also the packing order (as in FSDP2).
    """
    return tuple(tuple(run) for _, run in groupby(fqns, key=block_of))


def single_buckets(fqns: tuple[str, ...]) -> Buckets:
    """A bucket for each parameter."""
    return tuple((fqn,) for fqn in fqns)

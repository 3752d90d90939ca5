"""Wrap plans: which parameters share a collective. Pure data over FQNs."""

import hashlib
import json
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class BucketPlan:
    """A request resolved against one model: the FQNs of each bucket, in packing order."""

    buckets: tuple[tuple[str, ...], ...]

    @property
    def hash(self) -> str:
        """Hex digest of the contents; equal plans have equal hashes in every process."""
        return hashlib.sha256(json.dumps(self.buckets).encode()).hexdigest()


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


def block_plan(fqns: tuple[str, ...]) -> BucketPlan:
    """One bucket per repeated block and one for each run of parameters before, between and after the blocks.

    ``fqns`` are all parameters of a model in registration order, which is also the packing order (as in FSDP2).
    """
    return BucketPlan(tuple(tuple(run) for _, run in groupby(fqns, key=block_of)))


def no_plan(fqns: tuple[str, ...]) -> BucketPlan:
    """A bucket for each parameter."""
    return BucketPlan(tuple((fqn,) for fqn in fqns))

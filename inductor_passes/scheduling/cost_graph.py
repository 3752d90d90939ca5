"""A forward or backward graph as its schedule sees it: steps of compute, gathers and reductions, with what they cost.

Compute is a chain of steps. A *slot* is the place before a step, numbered like that step; the slot behind the last step
has the number of steps as its number. Collectives are issued and awaited in slots (``issue_points.py``).
"""

from collections.abc import Iterable
from typing import NamedTuple


class CollectiveKind(NamedTuple):
    """What collectives must have in common to be merged, and what they cost."""

    channel: str
    """Their process group."""
    alpha_s: float
    s_per_byte: float
    """Of the whole tensor: a gather's output, a reduction's input."""
    issue_s: float = 0.0
    """Compute time that is lost by issuing and awaiting one."""
    copy_s_per_byte: float = 0.0
    """Compute time of unpacking a bucket's weights, or of packing its gradients or shards."""
    shard: float = 0.0
    """Part of the whole tensor that one rank has: shards of several members are packed before they are gathered."""
    issue_s_per_byte: float = 0.0
    """Compute time that is lost, besides, for each byte: compute is slower meanwhile."""
    all_reduce_after: "CollectiveKind | None" = None
    """Of the all-reduce that follows, per byte of the same tensor."""
    name: str = ""
    """Tells apart what costs the same but cannot be merged."""

    def seconds(self, nbytes: int) -> float:
        return self.alpha_s + nbytes * self.s_per_byte


class Gather(NamedTuple):
    fqn: str
    kind: CollectiveKind
    nbytes: int
    """Of the full weight."""
    first_use_slot: int
    """The first step that reads it; the number of steps if none does."""
    last_use_slot: int
    """The last step that reads it; the number of steps if it outlives the graph."""
    prepared: int = 0
    """Bytes of what is made of the shard to be gathered alone: cast or padded; 0 if it is gathered as it is."""


class Reduction(NamedTuple):
    fqn: str
    kind: CollectiveKind
    nbytes: int
    """Of the full gradient."""
    ready_slot: int
    """The slot in which it is complete: behind the step of one less."""
    result: int = 0
    """Bytes of the reduced shard, which outlives the graph."""


class CostGraph(NamedTuple):
    """A forward or a backward graph, as far as its schedule is concerned."""

    seconds: tuple[float, ...]
    """Of each step of compute."""
    live_bytes_in_step: tuple[int, ...]
    """In use during each, without what gathers and reductions need."""
    live_bytes_at_slot: tuple[int, ...]
    """The same in each slot; one more than there are steps."""
    gathers: tuple[Gather, ...]
    """By first use."""
    reductions: tuple[Reduction, ...]
    """By when they are complete."""

    def has_all_reduce(self, members: Iterable[int]) -> bool:
        """Whether any of these reductions is followed by an all-reduce."""
        return any(self.reductions[i].kind.all_reduce_after for i in members)

"""A forward or backward graph as its schedule sees it: steps of compute, gathers and reductions, with what they cost.

Compute is a chain of steps. A *slot* is the place before a step, numbered like that step; the slot behind the last step
has the number of steps as its number. Collectives are issued and awaited in slots (``issue_points.py``).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from inductor_passes.ops.wire_formats import BLOCK, FORMATS


class CollectiveKind(NamedTuple):
    """Costs of a collective; collectives of one kind can be merged."""

    channel: str
    """Name of the process group, which carries out one collective after the other."""
    alpha_s: float
    s_per_byte: float
    """Seconds for each byte of the whole tensor: a gather's output, a reduction's input."""
    issue_s: float = 0.0
    """Compute time that is lost by issuing and awaiting one collective."""
    copy_s_per_byte: float = 0.0
    """Compute time of unpacking a bucket's weights, or of packing its gradients or shards."""
    shard: float = 0.0
    """The part of the whole tensor that one rank has."""
    issue_s_per_byte: float = 0.0
    """Compute time that is lost, besides, for each byte of the whole tensor, whatever runs meanwhile."""
    all_reduce_after: "CollectiveKind | None" = None
    """The kind of the all-reduce that follows a reduce-scatter, or of the second step of a reduction in a wire format,
    per byte of the same tensor."""
    member_s: float | None = None
    """Seconds that each member of a group takes on the channel beyond the first; ``None``: nothing is grouped."""
    name: str = ""
    """A name that tells apart kinds that cost the same but cannot be merged."""
    wire_format: str | None = None
    """The wire format: members are encoded and decoded, one by one too; ``None``: they travel as they are."""
    wire: float = 1.0
    """Bytes on the wire for each byte of the whole tensor."""
    received: int = 1
    """Bytes that the second step of a reduction brings for each byte that a rank sends: one from each replica."""
    plain: "CollectiveKind | None" = None
    """The kind of the same collective without its wire format."""
    contention: float = 0.0
    """The part of its speed that a copy of a bucket loses while a collective is under way."""

    @property
    def wire_formats(self) -> tuple[str, ...]:
        """The wire format, if there is one, and that of the second step where a reduction has two."""
        if self.wire_format is None:
            return ()
        return self.wire_format, *(self.all_reduce_after.wire_formats if self.all_reduce_after else ())

    def seconds(self, nbytes: int) -> float:
        return self.alpha_s + nbytes * self.s_per_byte

    def in_format(self, wire_format: str, dtype: torch.dtype, plain: "CollectiveKind") -> "CollectiveKind":
        """Return the kind of a collective of this kind that carries values of ``dtype`` in a wire format.

        Args:
            plain: the kind of the collective that carries the values as they are.
        """
        return self._carrying(wire_format, dtype.itemsize, plain)

    def with_formats(self, *names: str) -> "CollectiveKind":
        """Return the kind of the same collective in other formats: one for each step, or none for the plain one."""
        if self.plain is None or names == self.wire_formats:
            return self
        if not names:
            return self.plain
        assert self.wire_format is not None
        itemsize = FORMATS[self.wire_format].nbytes(BLOCK) / BLOCK / self.wire
        second = self.all_reduce_after
        carrier = self._replace(
            s_per_byte=self.s_per_byte / self.wire,
            issue_s_per_byte=self.issue_s_per_byte / self.wire,
            copy_s_per_byte=2 * self.copy_s_per_byte / (1 + self.wire),
            all_reduce_after=second.with_formats(*names[1:]) if second and names[1:] else second,
        )
        return carrier._carrying(names[0], itemsize, self.plain)

    def _carrying(self, wire_format: str, itemsize: float, plain: "CollectiveKind") -> "CollectiveKind":
        wire = FORMATS[wire_format].nbytes(BLOCK) / BLOCK / itemsize
        return self._replace(
            s_per_byte=self.s_per_byte * wire,
            issue_s_per_byte=self.issue_s_per_byte * wire,
            copy_s_per_byte=self.copy_s_per_byte * (1 + wire) / 2,
            member_s=None,
            wire_format=wire_format,
            wire=wire,
            plain=plain,
        )

    def sent(self, nbytes: int) -> int:
        """Return the bytes on the wire, and so of the collective's buffer, of a whole tensor of ``nbytes``."""
        return nbytes if self.wire_format is None else round(nbytes * self.wire)


class Gather(NamedTuple):
    fqn: str
    kind: CollectiveKind
    nbytes: int
    """Bytes of the full weight."""
    first_use_slot: int
    """The first step that reads the weight; the number of steps if none does."""
    last_use_slot: int
    """The last step that reads the weight; the number of steps if the weight outlives the graph."""
    prepared: int = 0
    """Bytes of the shard that are cast or padded before they are sent; 0 if the shard is sent as it is."""
    dtype: str = ""
    """Dtype in which the weight is gathered."""
    mixes_dtypes: bool = False
    """Whether it can be in a group with gathers of other dtypes."""
    held: int = 0
    """Bytes of a copy of the shard, such as one on the device, that is in use until the gather is awaited."""


class Reduction(NamedTuple):
    fqn: str
    kind: CollectiveKind
    nbytes: int
    """Bytes of the collective's input: the full gradient in the dtype of its reduction, padded."""
    ready_slot: int
    """The slot in which the gradient is complete: directly behind the step that makes it."""
    result: int = 0
    """Bytes of the reduced shard, which outlives the graph."""
    copied_from: int | None = None
    """Bytes of the gradient that is cast or padded into the collective's input when the collective is issued. Until
    ``ready_slot`` they are part of the graph's live bytes; all the time, and 0 here, if something else needs the
    gradient too. ``None``: the gradient itself is the input."""

    in_memory_before: bool = False
    """Whether the gradient is made in memory that is part of the graph's live bytes until ``ready_slot``."""
    in_place: bool = False
    """Whether a group of reductions can read the gradient where it lies, so that nothing is packed."""
    waiting_steps: int = 0
    """Number of steps before the one that ends at ``ready_slot`` in which the gradient exists, but is not cast yet."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes in use from ``ready_slot`` until the collective is issued."""
        return self.nbytes if self.copied_from is None else self.copied_from

    @property
    def is_made_in_step(self) -> bool:
        """Whether the step before ``ready_slot`` makes the collective's input in memory of its own."""
        return self.copied_from is None and not self.in_memory_before and self.ready_slot > 0


class CostGraph(NamedTuple):
    """A forward or a backward graph, as its schedule sees it."""

    seconds: tuple[float, ...]
    """One entry per step of compute."""
    live_bytes_in_step: tuple[int, ...]
    """Bytes in use during each step, without the memory of gathers and reductions; one entry per step. Schedules count
    a gradient from the beginning of the step that makes it, so its bytes are taken away until it is made."""
    live_bytes_at_slot: tuple[int, ...]
    """Bytes in use in each slot, without the memory of gathers and reductions; one entry more than there are steps."""
    gathers: tuple[Gather, ...]
    """Gathers by first use."""
    reductions: tuple[Reduction, ...]
    """Reductions by the slot in which their gradients are complete."""
    contention: tuple[float, ...] = ()
    """The part of its speed that each step loses while a collective is under way; empty: no step loses any."""
    exchanges: tuple[int, ...] = ()
    """Numbers of the steps that begin with an exchange of tokens or embeddings in the process group of the parameters:
    such a step begins when the collectives under way have ended."""

    def has_all_reduce(self, members: Iterable[int]) -> bool:
        """Whether any of these reductions is followed by an all-reduce."""
        return any(self.reductions[i].kind.all_reduce_after for i in members)


def joint_contention(seconds: Sequence[float], contention: Sequence[float]) -> float:
    """Return the contention of a step that runs these one after the other."""
    slowed = sum(s / (1 - part) for s, part in zip(seconds, contention, strict=True))
    return 1 - sum(seconds) / slowed if slowed else 0.0


def beside_collectives(at: float, seconds: float, until: float, contention: float) -> tuple[float, float]:
    """Run compute of ``seconds`` from the time ``at`` on, beside collectives that are under way ``until`` then.

    Return when it ends, or ``until`` if that is earlier, and the seconds of compute that are left.
    """
    done = (until - at) * (1 - contention)
    if seconds <= done:
        return at + seconds / (1 - contention), 0.0
    return until, seconds - done

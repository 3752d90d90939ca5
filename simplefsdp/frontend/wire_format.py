"""``WireFormat``: the formats in which a parameter's weight and gradient travel between ranks."""

from dataclasses import dataclass

import torch

from inductor_passes.ops.wire_formats import BLOCK, GATHER_FORMATS, REDUCE_FORMATS
from simplefsdp.text.messages import unknown


@dataclass(frozen=True)
class WireFormat:
    """How the weight of a parameter is gathered and how its gradient is reduced, for ``simple_fsdp(wire=...)``.

    Quantised formats cut each rank's part into blocks of 128 values with one float32 scale each. Weights, gradients
    and the optimizer's state keep their dtype; only what is sent is narrower.

    Args:
        gather: ``None``: in the dtype of the weight. ``"bf16"``; ``"fp8"``: float8 e4m3; ``"int8"``.
        reduce: ``None``: a reduce-scatter in the dtype of the reduction, which rounds at every rank on the way. Others
            are an all-to-all and a sum in float32 on the rank that owns the gradient, so that a gradient is rounded
            once: ``"bf16-fp32sum"``, ``"fp8"``, ``"int8"``, ``"int4"``, and the last three with ``"-hadamard"``: blocks
            are multiplied by a Hadamard matrix first, so that outliers spread. Those of integers may also end with
            ``"-stochastic"``, as ``"int4-hadamard-stochastic"``: values are rounded up or down at random, so that they
            are right on average.
        between_nodes: one of the formats of ``reduce``, in which sums over the ranks of a node travel to other nodes;
            ``None``: as ``reduce``. Counts where parameters are fully sharded over several nodes of several ranks, and
            in a hybrid mode, where each replica sends its sums to all others: with ``None`` the all-reduce stays as it
            is where ``reduce`` would send no less.
        error_feedback: whether each replica, in a hybrid mode, adds what rounding took from its sums to its sums of the
            next step, so that what is lost does not add up over the steps. It costs four bytes for each value of a
            rank's shard. ``ErrorFeedback`` puts these errors into checkpoints.

    Raises:
        TypeError: ``error_feedback`` is not ``True`` or ``False``.
        ValueError: an unknown format; one between nodes, or ``error_feedback``, without one of ``reduce``; in
            ``simple_fsdp`` one that sends no less among so many replicas than their all-reduce, and ``error_feedback``
            where replicas send no sums.

    Source: ZeRO++ (arXiv 2306.10013), sections 3.1 and 3.3; SDP4Bit (arXiv 2410.15526), section 3.2; error feedback:
    Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et al. (arXiv 1901.09847).
    """

    gather: str | None = None
    reduce: str | None = None
    between_nodes: str | None = None
    error_feedback: bool = False

    def __post_init__(self) -> None:
        for option, value, known in (
            ("gather", self.gather, GATHER_FORMATS),
            ("reduce", self.reduce, REDUCE_FORMATS),
            ("between_nodes", self.between_nodes, REDUCE_FORMATS),
        ):
            if value is not None and value not in known:
                raise ValueError(f"WireFormat: {option}: " + unknown("format", str(value), list(known)))
        if self.between_nodes is not None and self.reduce is None:
            raise ValueError(f"WireFormat: between_nodes: {self.between_nodes!r} needs a format of reduce, found None")
        if not isinstance(self.error_feedback, bool):
            raise TypeError(f"WireFormat: error_feedback: expected True or False, found {self.error_feedback!r}")
        if self.error_feedback and self.reduce is None:
            raise ValueError("WireFormat: error_feedback: needs a format of reduce, found None")


def sends_less_to_replicas(wire_format: str, replicas: int, dtype: torch.dtype | None) -> bool:
    """Return whether sums that each replica sends to all others are fewer bytes than in an all-reduce.

    A ring brings each rank ``2 * (replicas - 1) / replicas`` times the bytes of the tensor, all others' sums are
    ``replicas - 1`` encoded ones.

    Args:
        wire_format: one of the formats of ``WireFormat.reduce``.
        dtype: of the all-reduce; ``None``: float32.
    """
    nbytes = REDUCE_FORMATS[wire_format].nbytes(BLOCK) / BLOCK
    return replicas * nbytes < 2 * (dtype or torch.float32).itemsize

"""``WireFormat``: the formats in which a parameter's weight and gradient travel between ranks."""

from dataclasses import dataclass

from inductor_passes.ops.wire_formats import GATHER_FORMATS, REDUCE_FORMATS
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
            are multiplied by a Hadamard matrix first, so that outliers spread.
        between_nodes: one of the formats of ``reduce``, in which sums over the ranks of a node travel to other nodes;
            ``None``: as ``reduce``. Counts where parameters are fully sharded over several nodes of several ranks.

    Raises:
        ValueError: an unknown format, or one between nodes without one inside of them.

    Source: ZeRO++ (arXiv 2306.10013), sections 3.1 and 3.3; SDP4Bit (arXiv 2410.15526), section 3.2.
    """

    gather: str | None = None
    reduce: str | None = None
    between_nodes: str | None = None

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

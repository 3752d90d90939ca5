"""Notes of a compilation, made while its passes run."""

from dataclasses import dataclass, field

from simplefsdp.compile.progress import Progress


@dataclass
class CompilationLog:
    """Notes of one compilation, which become part of the forward graph's record and are logged by its first run."""

    summaries: list[str] = field(default_factory=list)
    """One line for each graph that was planned."""
    warnings: list[str] = field(default_factory=list)
    """Reasons why the compiled graphs are worse than planned, one sentence each."""
    is_inference: bool = False
    """Whether the one graph has no backward."""
    held_bytes: int = 0
    """Bytes that the forward graph leaves in memory for its backward, as predicted."""
    progress: Progress = field(default_factory=Progress)
    """The stages of the compilation, and how long each took."""

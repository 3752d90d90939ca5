"""Progress of a compilation: its stage, on a terminal while it lasts, and the time of each stage, in the log."""

import logging
import sys
import time
from typing import TextIO

import torch.distributed as dist

log = logging.getLogger("simplefsdp")


class Progress:
    """The stages of one compilation and how long each took.

    On a terminal rank 0 shows the current stage in a line that the next one overwrites::

        simplefsdp compiles a step: lowering forward (12 s)
    """

    def __init__(self, stream: TextIO | None = None):
        """Start no stage yet. ``stream``: where progress is shown if it is a terminal; ``None``: standard error."""
        self._stream = stream or sys.stderr
        self._shown = self._stream.isatty() and (not dist.is_initialized() or dist.get_rank() == 0)
        self._stage = ""
        self._began = 0.0
        self.seconds: dict[str, float] = {}
        """Seconds of each stage that is over, in the order in which they began."""

    def begin(self, stage: str) -> None:
        """End the current stage and begin ``stage``."""
        self._end_stage()
        self._stage, self._began = stage, time.perf_counter()
        if self._shown:
            self._stream.write(f"\r\x1b[Ksimplefsdp compiles a step: {stage} ({sum(self.seconds.values()):.0f} s)")
            self._stream.flush()

    def end(self) -> None:
        """End the current stage, if any, remove the line from the terminal, and log how long each stage took."""
        if not self._stage:
            return
        self._end_stage()
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        log.info("compiled: %s", self)

    def __str__(self) -> str:
        return ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self.seconds.items())

    def _end_stage(self) -> None:
        if self._stage:
            took = time.perf_counter() - self._began
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + took
            self._stage = ""

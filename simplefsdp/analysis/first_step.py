"""Where the time of a first step went, as the files of a report say it."""

from pathlib import Path

FIRST_STEP = "first_step.txt"
"""File of a report: seconds of each stage of the compilation. With a warm compile cache there is one stage, this
process's, and the rest of the report is of the process that compiled."""
TRACED_ONCE = "traced_once.txt"
"""File of a report: the blocks that were traced once, and why others were not."""
BODIES = "{}_bodies.txt"
"""File of a report, by graph: the compute that was compiled once, and why other compute was not; then each body."""


def first_step(folder: Path) -> str:
    """Return lines for people about how a graph was compiled; empty where the report says nothing about it.

    Args:
        folder: of one graph in a report.
    """
    named = {
        "first step": FIRST_STEP,
        "blocks": TRACED_ONCE,
        "forward": BODIES.format("forward"),
        "backward": BODIES.format("backward"),
    }
    found = [(name, _first_line(folder / file)) for name, file in named.items()]
    return "".join(f"  {name:12} {line}\n" for name, line in found if line)


def _first_line(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline().strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        return f"{path.name} cannot be read: {type(error).__name__}"

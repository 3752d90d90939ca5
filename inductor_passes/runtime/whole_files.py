"""Files that are there as a whole or not at all, whenever the process that writes them is killed."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file; who reads ``path`` meanwhile, or after a crash, finds the old file or all of the new one.

    The content is written to ``<path>.<process>`` first, which a crash leaves behind.

    Raises:
        OSError: the file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # a pipe or a terminal
        path.write_bytes(data)
        return
    path = path.resolve()  # a link goes on to be one
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)

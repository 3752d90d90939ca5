"""Files are whole, also where the process that writes them is killed."""

import os
from pathlib import Path
from unittest import mock

import pytest

from inductor_passes.runtime.whole_files import write_whole


def test_a_writer_that_is_killed_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_whole(path, "old")
    with mock.patch.object(Path, "replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old"
    write_whole(path, "newer")
    assert path.read_text() == "newer"
    assert os.listdir(tmp_path) == ["plan.json"], "the same process writes its unfinished file anew"


def test_a_link_goes_on_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_whole(tmp_path / "link", b"bytes")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"bytes"


def test_a_pipe_is_written_to_and_not_replaced() -> None:
    reads, writes = os.pipe()
    write_whole(Path(f"/dev/fd/{writes}"), "text")
    assert os.read(reads, 9) == b"text"
    os.close(reads)
    os.close(writes)

"""Reports of a compilation as files."""

import logging

import pytest

from inductor_passes.runtime.graph_dump import Report


@pytest.mark.parametrize("name", ["a file/graph_0", "a file", "folder"])
def test_a_report_that_cannot_be_written_is_a_warning_and_goes_on_in_memory(tmp_path, caplog, name):
    (tmp_path / "a file").write_text("of somebody else")
    (tmp_path / "folder" / "plan.json").mkdir(parents=True)
    report = Report("key", tmp_path / name)
    with caplog.at_level(logging.WARNING, "simplefsdp"):
        report.write_text("plan.json", "one")
        report.write_text("costs.json", "two")
    (message,) = caplog.messages
    assert message.startswith(f"option 'report_dir': no report is written to {tmp_path / name}: ")
    assert (report.text("plan.json"), report.text("costs.json")) == ("one", "two")
    assert (tmp_path / "a file").read_text() == "of somebody else"

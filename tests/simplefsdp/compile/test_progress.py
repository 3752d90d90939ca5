"""Progress of a compilation: a line on a terminal, one line in the log."""

import io
import logging

import pytest
import torch
from torch import nn

from simplefsdp import simple_fsdp
from simplefsdp.compile.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_stage_and_is_clean_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    shown = Terminal()
    progress = Progress(shown)
    with caplog.at_level(logging.INFO, "simplefsdp"):
        for stage in ("tracing", "lowering forward", "tracing"):
            progress.begin(stage)
        progress.end()
        progress.end()
    assert list(progress.seconds) == ["tracing", "lowering forward"]
    lines = shown.getvalue().split("\r\x1b[K")
    assert lines == [
        "",
        "simplefsdp compiles a step: tracing (0 s)",
        "simplefsdp compiles a step: lowering forward (0 s)",
        "simplefsdp compiles a step: tracing (0 s)",
        "",
    ]
    assert [record.message for record in caplog.records] == ["compiled: tracing 0.0 s, lowering forward 0.0 s"]


def test_nothing_is_shown_where_no_terminal_is() -> None:
    shown = io.StringIO()
    progress = Progress(shown)
    progress.begin("tracing")
    progress.end()
    assert shown.getvalue() == ""


@pytest.mark.subprocess
@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_a_first_step_names_its_stages(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.compile(simple_fsdp(nn.Linear(8, 8)), backend="simplefsdp", options={"plan": "block"})
    with caplog.at_level(logging.INFO, "simplefsdp"), torch._inductor.config.patch(force_disable_caches=True):
        torch._dynamo.reset()
        model(torch.ones(2, 8)).sum().backward()
    *_, last = (record.message for record in caplog.records if record.message.startswith("compiled: "))
    stages = [part.rsplit(" ", 2)[0] for part in last.removeprefix("compiled: ").split(", ")]
    assert stages == [
        "tracing",
        "partitioning and planning",
        "lowering forward",
        "generating code and kernels",
        "lowering backward",
    ]

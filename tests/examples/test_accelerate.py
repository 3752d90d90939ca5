"""A loop of Accelerate, as a user starts it: on two ranks through torchrun."""

import re
from pathlib import Path

import pytest
import torch

from simplefsdp.models import llama
from tests.examples.plain import FLAGS, train
from tests.ranks import torchrun

pytest.importorskip("accelerate")


@pytest.mark.slow
def test_accelerate_trains_and_resumes_as_a_single_process_trains(tmp_path: Path) -> None:
    found = []
    for steps in (3, 6):  # the second goes on from what the first has saved
        flags = [*FLAGS, "--steps", str(steps), "--out", str(tmp_path / "out")]
        printed = torchrun("-m", "examples.accelerate_loop", *flags)
        found += re.findall(r"^step (\d+) loss (\S+) norm", printed, re.MULTILINE)
    assert [int(step) for step, _ in found] == [1, 2, 3, 4, 5, 6]
    torch.manual_seed(0)
    expected = train(llama.build("debug"), torch.arange(48))
    assert [float(loss) for _, loss in found] == pytest.approx(expected, abs=1e-3)

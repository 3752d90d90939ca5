"""A trainer of Lightning, as a user starts it: on two ranks through torchrun."""

import csv
from pathlib import Path

import pytest
import torch

from simplefsdp.models import llama
from tests.examples.plain import FLAGS, train
from tests.ranks import torchrun

pytest.importorskip("lightning")


@pytest.mark.slow
def test_lightning_trains_and_resumes_as_a_single_process_trains(tmp_path: Path) -> None:
    """A checkpoint of one file a rank is read, one of a single file written."""
    flags = [*FLAGS, "--sequences", "24", "--out", str(tmp_path)]
    launch = ["-m", "examples.lightning_module", *flags, "--epochs"]
    torchrun(*launch, "1")
    assert (tmp_path / "epoch=0.ckpt" / ".metadata").is_file()
    torchrun(*launch, "2", "--resume", str(tmp_path / "epoch=0.ckpt"), "--one-file")
    rows = [row for log in sorted(tmp_path.glob("*/version_*/metrics.csv")) for row in csv.DictReader(log.open())]
    model = llama.build("debug")
    torch.manual_seed(0)
    model.reset_parameters()
    losses = train(model, torch.cat([epoch_of_lightning(0), epoch_of_lightning(1)]))
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [float(row["loss"]) for row in rows] == pytest.approx(losses, abs=1e-3)
    saved = torch.load(tmp_path / "epoch=1.ckpt")["state_dict"]
    for name, param in model.named_parameters():
        torch.testing.assert_close(saved[f"model.{name}"], param.detach(), rtol=0, atol=1e-3)


def epoch_of_lightning(epoch: int) -> torch.Tensor:
    """The order of Lightning's samples in an epoch: always shuffled, as by ``DistributedSampler``."""
    return torch.randperm(24, generator=torch.Generator().manual_seed(epoch))

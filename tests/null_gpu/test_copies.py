"""The null GPU keeps small values, and touches no memory for large ones."""

import pytest
import torch


@pytest.mark.parametrize(("numel", "arrives"), [(2**17, True), (2**20, False)])
def test_large_copies_move_nothing(numel: int, arrives: bool) -> None:
    sent = torch.ones(numel).cuda()
    received = torch.zeros(numel)
    received.copy_(sent)
    assert bool(received.any()) is arrives
    assert sent[:8].cpu().tolist() == [float(arrives)] * 8

"""Ranks that wait for each other are told where each of them is."""

import logging
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from simplefsdp import simple_fsdp
from simplefsdp.frontend import stall_watch
from tests.ranks import Ranks


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def _one_is_late(compiled: bool) -> list[str]:
    stall_watch._STALL_S, stall_watch._INTERVAL_S = 0.5, 0.05
    torch.manual_seed(0)
    model: Any = simple_fsdp(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))))
    if compiled:
        options: Any = {"lower_with": "aot_eager", "plan": "block"}
        model = torch.compile(model, backend="simplefsdp", options=options)
    model(torch.ones(2, 8)).sum().backward()
    messages = _Messages()
    logging.getLogger("simplefsdp").addHandler(messages)
    if dist.get_rank():
        time.sleep(3)
    model(torch.ones(2, 8)).sum().backward()
    logging.getLogger("simplefsdp").removeHandler(messages)
    return messages.found


@pytest.mark.parametrize("compiled", [False, True])
def test_ranks_that_wait_for_each_other_are_told_where_they_are(two_ranks: Ranks, compiled: bool) -> None:
    ((on_0,), (on_1,)) = two_ranks.run(_one_is_late, compiled)
    forward = "the compiled forward graph whose first collective is of 0.weight"
    backward = "the compiled backward graph whose first collective is of 2.weight"
    if not compiled:
        forward, backward = "all-gather of 0.weight", "reduction of the gradient of 0.weight"
    assert "rank 0 has issued nothing for" in on_0
    assert forward in on_0.partition("rank 1 last issued")[0]
    assert backward in on_0.partition("rank 1 last issued")[2]
    assert "rank 1 has issued nothing for" in on_1
    assert forward in on_1.partition("rank 0 last issued")[2]

"""Ranks that wait for each other are told how they differ, or where each of them is."""

import logging
import math
import re
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.runtime import stall_watch
from simplefsdp import simple_fsdp
from tests.ranks import Ranks


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def _one_is_late(compiled: bool) -> list[str]:
    stall_watch._CONFLICT_S, stall_watch._STALL_S, stall_watch._INTERVAL_S = 0.2, 0.5, 0.05
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


def _issues_otherwise(compiled: bool, freezes: bool, shape: tuple[int, ...]) -> tuple[list[str], str]:
    """Train two steps; before the second, one rank freezes a layer or evaluates. Return errors, logged and raised."""
    stall_watch._CONFLICT_S, stall_watch._INTERVAL_S = 0.5, 0.05
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=6), group)
    torch.manual_seed(0)
    model: Any = simple_fsdp(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {"lower_with": "aot_eager", "plan": "block"}
    forward = torch.compile(model, backend="simplefsdp", options=options) if compiled else model
    messages, raised = _Messages(), ""
    logging.getLogger("simplefsdp").addHandler(messages)
    try:
        for step in range(2):
            is_odd = step > 0 and dist.get_rank() == mesh.size() - 1
            model[1].weight.requires_grad_(not (is_odd and freezes))
            if is_odd and not freezes:
                with torch.no_grad():
                    forward(torch.ones(2, 8))
            forward(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        raised = str(error)
    logging.getLogger("simplefsdp").removeHandler(messages)
    return messages.found, raised


@pytest.mark.parametrize(
    ("compiled", "freezes", "shape"),
    [(False, True, (2,)), (True, True, (2,)), (True, False, (2,)), (False, True, (2, 2))],
)
def test_ranks_that_issue_different_things_are_told_which(
    compiled: bool, freezes: bool, shape: tuple[int, ...]
) -> None:
    ranks = Ranks(math.prod(shape))  # what these wait for in gloo ends with their connections
    try:
        told = ranks.run(_issues_otherwise, compiled, freezes, shape)
    finally:
        ranks.close()
    assert all(raised for _, raised in told)
    texts = ["; ".join(logged) for logged, _ in told]
    assert all(re.search(r"ranks \d and \d have issued different things, and wait for each other", t) for t in texts)
    if compiled:
        difference = "1.weight: torch.float32 frozen" if freezes else "'graph: inference'"
        assert all("the compiled forward graph" in text and difference in text for text in texts)
    else:
        assert all("'reduction of the gradient of 1.weight'" in text for text in texts)
    assert any("have issued different things" in raised for _, raised in told), "a rank that waits at the store raises"


ENDS_IN_THE_STORE = """
import time
import torch.distributed as dist
from inductor_passes.runtime import stall_watch

store = dist.TCPStore("localhost", 0, 1, is_master=True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
stall_watch._INTERVAL_S = 0.0
stall_watch.histories = lambda: [store.check(["nothing"]) for _ in range(200)] and {}
stall_watch.start()
time.sleep(0.3)
"""
"""A script whose watch is in a request to the store when the process ends, or just about to begin one."""


@pytest.mark.subprocess
def test_a_process_whose_watch_reads_the_store_ends_well() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS_IN_THE_STORE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

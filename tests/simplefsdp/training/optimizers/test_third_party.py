"""Every optimizer of the package pytorch-optimizer: where it is stepped, to the values that one process has."""

import functools
import itertools
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from torch import nn, optim

from simplefsdp import distribute_optimizer
from tests.ranks import Ranks
from tests.simplefsdp.training.optimizers.test_distribute import MODES, Model, assert_same_values, set_gradients

PAGE = Path(__file__).parents[4] / "docs/optimizers.md"
REASONS = (
    ("depends on other parameters", "refused: depends on other parameters, `whole_model=True` steps it on one rank"),
    ("draws random numbers", "refused: draws random numbers, or its step is not repeatable"),
    ("it leaves a parameter as it is", "refused: leaves parameters as they are in the first steps"),
    ("its step needs a closure", "refused: its step needs a closure"),
    ("its step fails", "refused: its step fails with its default settings on a matrix and a vector"),
)
"""Words of errors, and their rows of the table."""


def vectors_and_matrices(model: nn.Module) -> list[Any]:
    return [param for param in model.parameters() if param.ndim in (1, 2) and param.dtype == torch.float32]


def compare(part: int, parts: int, *modes: str) -> dict[str, list[str]]:
    """Return names by row, having compared those that are accepted with one process for 20 steps.

    Args:
        part: the number of the part of all optimizers.
        parts: how many parts there are; each must be over within the ranks' deadline.
        modes: how the models are sharded: that of each optimizer in turn.
    """
    warnings.simplefilter("ignore")
    rows: dict[str, list[str]] = {}
    kinds = [
        (name, kind)
        for name, kind in sorted(vars(pytorch_optimizer).items())
        if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind not in vars(optim).values()
    ]
    with_modes = list(zip(kinds, itertools.cycle(modes), strict=False))
    for (name, kind), mode in with_modes[part::parts]:
        shard = MODES[mode]
        plain, model = Model(0), shard(Model(0))
        try:
            make: Any = functools.partial(kind)
            reference, optimizer = make(vectors_and_matrices(plain)), make(vectors_and_matrices(model))
        except Exception:
            rows.setdefault("not tried: needs more than parameters, or another package", []).append(name)
            continue
        try:
            distribute_optimizer(optimizer)
        except TypeError as error:
            row = next((row for words, row in REASONS if words in str(error)), str(error))
            rows.setdefault(row, []).append(name)
            continue
        rows.setdefault(f"on {optimizer.simple_fsdp_distribution.ways[0]}", []).append(name)
        for step in range(20):
            set_gradients(plain, model, step)
            for each in (reference, optimizer):
                each.step()
        try:
            assert_same_values(shard, plain, model)
        except AssertionError as error:
            raise AssertionError(f"{name}, {mode}, on rank {dist.get_rank()}: {error}") from None
    return rows


def assert_as_on_the_page(found: dict[str, list[str]]) -> None:
    table = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE))
    expected = {row: ", ".join(names) for row, names in sorted(found.items())}
    assert {row: table.get(row) for row in expected} == expected


@pytest.mark.slow
def test_third_party_optimizers_have_the_values_of_one_process_and_are_where_the_page_says(two_ranks: Ranks) -> None:
    found, other = two_ranks.run(compare, 0, 1, "fully")
    assert found == other
    assert_as_on_the_page(found)


@pytest.mark.slow
def test_third_party_optimizers_have_the_values_of_one_process_however_four_ranks_shard(four_ranks: Ranks) -> None:
    names: dict[str, list[str]] = {}
    parts = 3
    for part in range(parts):
        found, *others = four_ranks.run(
            compare, part, parts, "tensor parallel", "hybrid", "replicate", "columns", "offload"
        )
        assert others == [found] * 3
        for row, more in found.items():
            names.setdefault(row, []).extend(more)
    assert_as_on_the_page({row: sorted(found) for row, found in names.items()})

"""The command ``simplefsdp compare``: what it prints, and which arguments it refuses."""

import json
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simplefsdp.analysis.ladder import Comparison, Difference
from simplefsdp.cli import compare as command
from simplefsdp.cli import main as cli
from tests.ranks import run

NAMED = "--model tests.simplefsdp.rehearsal.models:Named"


class Pair(nn.Module):
    """A model of two arguments whose output is its loss, with a layer that few would shard."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layer(x).square().mean() * self.scale.sum() - y.mean()).square()


def pairs(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, generator=generator), torch.randn(2, generator=generator)


def compare(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["simplefsdp", "compare", *arguments.split()])
    cli.main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model llama3-debgu", "--model: "),
        ("--model tests.simplefsdp.rehearsal.models:Tagger", "no vocab_size; --inputs"),
        (f"{NAMED} --ranks 0", "--ranks: expected a positive number, found 0"),
        (f"{NAMED} --rungs eager,indcutor", "--rungs: "),
        (f"{NAMED} --rungs eager", "--rungs: expected two or more"),
        (f"{NAMED} --layers 2", "--layers: "),
        (f"{NAMED} --inputs tests.nowhere:f", "--inputs tests.nowhere:f: "),
        (f"{NAMED} --inputs os:sep", "--inputs os:sep: expected package.module:function"),
        (f"{NAMED} --inputs pairs", "--inputs pairs: "),
    ],
)
def test_an_argument_that_is_not_valid_is_named_before_a_process_starts(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.mp, "start_processes", None)
    with pytest.raises(SystemExit, match=f"^simplefsdp compare: .*{message}"):
        compare(arguments, monkeypatch)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs to have too few GPUs")
def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="--ranks: 2, but torch sees 0 GPUs here"):
        compare(f"{NAMED} --device cuda", monkeypatch)


def test_a_row_says_what_was_promised_and_where_numbers_first_differ() -> None:
    small, large = Difference(1, "a.weight", 3, 1e-7), Difference(2, "the loss", 900, 0.5)
    lacking = Difference(0, "the gradient of b", -1, math.inf)
    rows = command.table(
        [
            Comparison("b", "a", True, None, None),
            Comparison("c", "b", True, small, small),
            Comparison("d", "c", False, small, small),
            Comparison("e", "d", False, small, large),
            Comparison("f", "e", False, lacking, lacking),
        ],
        1e-4,
    ).splitlines()[2:]
    assert [[cell.strip() for cell in row.strip("|").split("|")][2:5] for row in rows] == [
        ["bits", "the same bits", "-"],
        ["bits", "DIFFERENT", "step 1, a.weight: 1.0e-07, 3 ulps at most"],
        ["within 0.0001", "to rounding", "step 1, a.weight: 1.0e-07, 3 ulps at most"],
        ["within 0.0001", "DIFFERENT", "step 1, a.weight: 1.0e-07, 3 ulps at most"],
        ["within 0.0001", "DIFFERENT", "step 0, the gradient of b: only one of both has it"],
    ]


def compared(arguments: str) -> dict[str, Any]:
    printed = run([sys.executable, "-m", "simplefsdp", "compare", "--json", *arguments.split()])
    result: dict[str, Any] = json.loads(printed)
    return result


@pytest.mark.slow
@pytest.mark.subprocess
def test_a_model_with_inputs_of_its_own_climbs_from_a_single_process() -> None:
    here = "tests.simplefsdp.cli.test_compare"
    result = compared(f"--model {here}:Pair --inputs {here}:pairs --rungs single,fsdp2,eager --steps 2")
    assert result["passed"]
    assert not result["failed"]
    assert [(one["against"], one["rung"], one["keeps_bits"]) for one in result["compared"]] == [
        ("single", "fsdp2", False),
        ("fsdp2", "eager", True),
    ]


@pytest.mark.slow
@pytest.mark.subprocess
def test_all_rungs_of_a_model_are_as_close_as_promised() -> None:
    result = compared(f"{NAMED} --seq 8 --steps 2")
    assert result["passed"]
    assert [one["rung"] for one in result["compared"]] == list(command.RUNGS[1:])

"""The README says nothing that is not so."""

import inspect
import json
import re
from pathlib import Path

from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.first_light import SYSTEMS
from benchmarks.overlap import report, summary
from tests.ranks import TORCHRUN, run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_two_lines_train_on_two_ranks(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert "print" not in script
    path = tmp_path / "script.py"
    path.write_text(script.replace("dist.destroy", "print(f'loss {loss:.3f}', flush=True)\ndist.destroy"))
    printed = run([*TORCHRUN, str(path)])
    # Both may be on one line.
    found = [float(loss) for loss in re.findall(r"loss (\d+\.\d{3})", printed)]
    assert len(found) == 2
    assert all(0 < loss < 1.2 for loss in found)


def test_every_command_is_a_target():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = set(re.findall(r"make (\w+)", README))
    assert {"train", "test", "lint", "bench"} <= commands <= targets


def test_every_row_of_the_table_names_tests_that_exist():
    tests = set(re.findall(r"def (test_\w+)", "".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py"))))
    table = README.split("## What works today")[1].split("## Coming from FSDP2")[0]
    rows = [line for line in table.splitlines() if line.startswith("|") and not line.startswith(("| |", "|---"))]
    assert len(rows) > 10
    for row in rows:
        state, shown_by = row.strip("|").split("|")[-2:]
        named = re.findall(r"`(test_\w+)`", shown_by)
        assert named or "not" in state or "tested" in state, row
        assert set(named) <= tests, row


def test_the_migration_table_names_every_method_of_fsdp2_and_every_argument():
    table = README.split("## Coming from FSDP2")[1].split("## Rehearse")[0]
    methods = {name for name in vars(FSDPModule) if not name.startswith("_")}
    arguments = set(inspect.signature(fully_shard).parameters) - {"module"}
    assert {name for name in methods | arguments if f"`{name}" not in table and f".{name}(" not in table} == set()
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")][2:]
    assert all(answer.strip() for _, answer in rows)


def test_every_file_named_exists():
    named = set(re.findall(r"[`(]((?:simplefsdp|inductor_passes|examples|benchmarks)/[\w/]+\.py)", README))
    assert len(named) >= 10
    assert all((ROOT / name).exists() for name in named)


def test_every_source_file_is_named():
    files = {f"{d}/{p.name}" for d in ("simplefsdp", "inductor_passes") for p in (ROOT / d).glob("[a-z]*.py")}
    assert {name for name in files if name not in README} == set()


def test_the_tables_of_overlap_are_those_of_the_committed_results():
    files = sorted((ROOT / "benchmarks" / "results").glob("overlap-*.json"))
    assert [file.stem for file in files] == ["overlap-torch2.13.0", "overlap-torch2.15.0"]
    for file in files:
        measured = json.loads(file.read_text())
        label = measured.pop("machine")
        assert summary(measured, label) in README
        assert file.with_suffix(".md").read_text() == report(measured, label)


def test_the_measurement_has_a_row_for_every_system():
    measured = README.split("## Measured")[1].split("## How it works")[0]
    for system in SYSTEMS:
        assert re.search(rf"^\| {re.escape(system)} \| \d", measured, re.MULTILINE), system

"""Files that a command reads, broken in any way: an error that names the file, or an object."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from simplefsdp import BucketPlan
from simplefsdp.analysis.measurement import GraphRun, MeasuredCollective, Measurement
from simplefsdp.analysis.prediction import StepCosts
from simplefsdp.cli.explain import read
from simplefsdp.hardware.profile import load_profile, save
from simplefsdp.plan.bucket_plan import GraphUses
from simplefsdp.plan.grouping import block_buckets, resolve_plan
from tests.models import PROFILE

FQNS = ("tok.weight", "layers.0.w.weight", "layers.1.w.weight", "out.weight")


def write_report(folder: Path) -> None:
    """Write a report of a step with four weights, a compute slot for each."""
    kind = CollectiveKind("0", 1.0, 0.1, 0.0, 0.0, 0.5, 0.0)
    gathers = tuple(Gather(fqn, kind, 4, i, i, 0) for i, fqn in enumerate(FQNS))
    again = tuple(Gather(fqn, kind, 4, i, i, 0) for i, fqn in enumerate(FQNS[::-1]))
    reductions = tuple(Reduction(fqn, kind, 4, i, 0) for i, fqn in enumerate(FQNS[::-1], 1))
    forward = CostGraph((2.0,) * 4, (1,) * 4, (0,) * 5, gathers, ())
    backward = CostGraph((4.0,) * 4, (1,) * 4, (0,) * 5, again, reductions)
    (folder / "costs.json").write_text(StepCosts("test", forward, backward, 16, 1.0, math.inf).to_json())
    uses = GraphUses(FQNS, FQNS[::-1], FQNS[::-1], frozenset())
    resolve_plan(1, block_buckets(FQNS), uses, [(fqn, (4, 2)) for fqn in FQNS], ()).save(folder / "plan.json")
    one = MeasuredCollective("all_gather_into_tensor", FQNS[:1], "0", 64, 0.1, 0.2, 0.3, 0.4)
    measured = Measurement((1.0, 2.0), (GraphRun("forward", 0.0, (one,)),))
    (folder / "measurement.json").write_text(measured.to_json())


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of each value in a tree of dicts and lists, that of the whole included."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path] + [place for name, child in children for place in places(child, (*path, name))]


def put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    tree = copy.deepcopy(tree)
    parent = tree
    for name in path[:-1]:
        parent = parent[name]
    if value is None:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return tree


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.sampled_from([1e308, -1.0, 0.5, "", "tok.weight", "layers.9", [], {}, [[]], ["tok.weight"], {"name": 1}]),
)


@st.composite
def broken(draw: st.DrawFn, text: str) -> bytes:
    """Return the bytes of a JSON file with other values, or of a part of one, or with other bytes."""
    how = draw(st.sampled_from(["values", "values", "values", "cut", "bytes", "deep"]))
    if how == "values":
        tree = json.loads(text)
        for _ in range(draw(st.integers(1, 3))):
            tree = put(tree, draw(st.sampled_from(places(tree))), draw(VALUES))
        return json.dumps(tree).encode()
    data = text.encode()
    at = draw(st.integers(0, len(data) - 1))
    if how == "cut":
        return data[:at]
    return data[:at] + (b"[" * 20_000 if how == "deep" else draw(st.binary(min_size=1, max_size=4))) + data[at + 1 :]


def _whole_report(path: Path) -> Any:
    return read(path.parent)


READERS: list[tuple[str, Callable[[Path], Any]]] = [
    ("plan.json", BucketPlan.load),
    ("profile.json", load_profile),
    ("costs.json", _whole_report),
    ("plan.json", _whole_report),
    ("measurement.json", _whole_report),
]
"""The name of a file, and the function that is tried on it."""


def check_reader(folder: Path, name: str, load: Callable[[Path], Any], examples: int) -> int:
    """Break a file in so many ways; return how often an error that names it was raised.

    Raises:
        AssertionError: an error did not name the file.
        Exception: anything but a ``ValueError`` that ``load`` raised.
    """
    write_report(folder)
    save(PROFILE, folder / "profile.json")
    path = folder / name
    text = path.read_text()
    load(path)
    refused = 0

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
    @given(broken(text))
    def check(content: bytes) -> None:
        nonlocal refused
        path.write_bytes(content)
        told = ""
        try:
            load(path)
        except ValueError as error:
            told = str(error)
            refused += 1
        assert not told or str(folder) in told

    check()
    return refused


@pytest.mark.parametrize(("name", "load"), READERS)
def test_an_error_names_the_file(tmp_path: Path, name: str, load: Callable[[Path], Any]) -> None:
    assert check_reader(tmp_path, name, load, 300) > 30
    path = tmp_path / name
    path.unlink()
    if name != "measurement.json":
        with pytest.raises(ValueError, match=str(tmp_path)):
            load(path)


def test_an_edited_plan_says_so_and_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_report(tmp_path)
    path = tmp_path / "plan.json"
    saved = BucketPlan.load(path)
    assert not caplog.messages
    tree = json.loads(path.read_text())
    tree["keep_unsharded"] = ["out.weight"]
    path.write_text(json.dumps(tree))
    edited = BucketPlan.load(path)
    assert edited.keep_unsharded == ("out.weight",)
    assert caplog.messages == [f"{path}: edited since it was saved: hash {saved.hash}, now {edited.hash}"]

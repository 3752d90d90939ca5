"""Bucket plans: which parameters share a collective, and when it is issued and awaited. Pure data over FQNs.

A ``BucketPlan`` is exact, hashed, and saved as JSON; ``grouping.py`` makes one of what a user asks for.
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

from inductor_passes.ops.wire_formats import GATHER_FORMATS, LEVELS, REDUCE_FORMATS, Encoding, milder
from inductor_passes.runtime.whole_files import write_whole
from inductor_passes.scheduling.issue_points import Bucket, Form, check_points
from inductor_passes.scheduling.narrow import Narrowed
from simplefsdp.text.json_fields import read_file
from simplefsdp.text.messages import fqn_range, unknown

log = logging.getLogger("simplefsdp")

_VERSION = 2
_DIRECTIONS = ("forward", "backward", "reductions")
_POINTS = ("issue", "all_reduce_after", "wait")


class GraphUses(NamedTuple):
    """FQNs of the parameters that the graphs of a step gather and reduce, each in the order in which it happens."""

    forward: Sequence[str]
    """Parameters that forward gathers, by first use."""
    backward: Sequence[str]
    reductions: Sequence[str]
    """Parameters whose gradients are reduced, by when their full gradients are complete."""
    has_all_reduce: frozenset[str]
    """Parameters whose reduce-scatter an all-reduce follows, or that are reduced in two steps."""


class WireFormats(NamedTuple):
    """The wire formats of a parameter; ``None``: its weight, or its gradient, travels as it is."""

    fqn: str
    gather: str | None
    reduce: str | None = None
    between_nodes: str | None = None
    """The format of the second step, where the gradient is reduced in two; ``None``: in one."""

    @property
    def formats(self) -> tuple[str | None, ...]:
        """The formats, without that of a second step where there is none."""
        return self[1:] if self.between_nodes else self[1:3]

    @property
    def of_gather(self) -> tuple[str, ...]:
        """The format of the weight; none if it travels as it is."""
        return (self.gather,) if self.gather else ()

    @property
    def of_reduction(self) -> tuple[str, ...]:
        """The formats of the gradient, one for each step; none if it travels as it is."""
        return tuple(name for name in (self.reduce, self.between_nodes) if name)


@dataclass(frozen=True)
class BucketPlan:
    """The exact schedule of a step: each collective of its forward and backward graph, when it is issued and awaited.

    Buckets are in the order in which they are issued; ``Bucket`` explains issue and wait points.
    """

    forward: tuple[Bucket, ...]
    """Gathers of the forward graph."""
    backward: tuple[Bucket, ...]
    """Gathers of the backward graph."""
    reductions: tuple[Bucket, ...]
    """Reductions of the backward graph: reduce-scatters, all-reduces, or both."""
    keep_unsharded: tuple[str, ...]
    """Parameters that stay unsharded from forward to backward."""
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """FQN and shape of every parameter of the model, in registration order."""
    wire: tuple[WireFormats, ...] = ()
    """The wire formats of the parameters that have one, in registration order."""

    @property
    def narrowed(self) -> Narrowed:
        """The wire formats of weights, and those of gradients."""
        return Narrowed(
            {each.fqn: each.of_gather for each in self.wire if each.gather},
            {each.fqn: each.of_reduction for each in self.wire if each.reduce},
        )

    @property
    def hash(self) -> str:
        """Hash of the plan's content, except the order of ``parameters``; equal on every rank."""
        return hashlib.sha256(self._json().encode()).hexdigest()[:16]

    def collectives(self, uses: GraphUses) -> int:
        """Return how many gathers and reductions the plan makes in graphs with these uses."""
        return sum(
            not used.isdisjoint(bucket.fqns)
            for direction in _DIRECTIONS
            for used in [set(getattr(uses, direction))]
            for bucket in getattr(self, direction)
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, a line for each name, so that a ``diff`` shows what changed."""
        write_whole(Path(path), self.to_json())

    def to_json(self) -> str:
        text = json.dumps({"version": _VERSION, "hash": self.hash, **self._fields()}, indent=1)
        return re.sub(r"\[[\s\d,]*\]", lambda sizes: "".join(sizes[0].split()).replace(",", ", "), text) + "\n"

    @classmethod
    def load(cls, path: str | Path) -> "BucketPlan":
        """Return the plan in a file that ``save`` wrote, edited or not; a warning says that it was edited.

        Raises:
            ValueError: the file cannot be read, is no JSON, of another version, or a field is missing or wrong; names
                the file and the field.
        """
        data = _decoded(read_file(path, "plan", str), str(path))
        plan = _parsed(data, str(path))
        if (written := data.get("hash", plan.hash)) != plan.hash:
            log.warning("%s: edited since it was saved: hash %s, now %s", path, written, plan.hash)
        return plan

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> "BucketPlan":
        return _parsed(_decoded(text, where), where)

    def _json(self) -> str:
        return json.dumps(self._fields(), sort_keys=True)

    def _fields(self) -> dict[str, Any]:
        def described(bucket: Bucket) -> dict[str, Any]:
            points = {point: getattr(bucket, point) for point in _POINTS}
            if bucket.all_reduce_after is None:
                del points["all_reduce_after"]
            form = {} if bucket.form == "packed" else {"form": bucket.form}
            return {"parameters": list(bucket.fqns), **points, **form}

        return {
            "parameters": {fqn: list(shape) for fqn, shape in self.parameters},
            "keep_unsharded": list(self.keep_unsharded),
            **{direction: [described(bucket) for bucket in getattr(self, direction)] for direction in _DIRECTIONS},
            **({"wire": {each.fqn: list(each.formats) for each in self.wire}} if self.wire else {}),
        }

    def explain(self) -> str:
        """Return the plan for people: a line for each bucket."""
        numel = {fqn: math.prod(shape) for fqn, shape in self.parameters}
        total = sum(numel.values())
        lines = [
            f"plan {self.hash}: {len(self.parameters)} parameters, {total:,} elements; {len(self.forward)} gathers in "
            f"forward, {len(self.backward)} in backward, {len(self.reductions)} reductions; "
            f"{len(self.keep_unsharded)} kept unsharded"
        ]
        for direction in _DIRECTIONS:
            if getattr(self, direction):
                lines.append(f"{direction}:")
            for bucket in getattr(self, direction):
                share = sum(numel[fqn] for fqn in bucket.fqns) / max(1, total)
                two_steps = any(each.between_nodes for each in self.wire if each.fqn in bucket.fqns)
                points = _reduction_points(bucket, two_steps) if direction == "reductions" else _gather_points(bucket)
                form = ", grouped" if bucket.form == "grouped" else ""
                place = WireFormats._fields.index("reduce" if direction == "reductions" else "gather")
                sent = sorted({str(each[place]) for each in self.wire if each.fqn in bucket.fqns} - {"None"})
                form += f", sent as {' and '.join(sent)}" if sent else ""
                lines.append(f"  {share:6.1%}  {fqn_range(bucket.fqns)}: {points}{form}")
        return "\n".join(lines)

    def check_fits(
        self,
        parameters: Mapping[str, tuple[int, ...]],
        keep_unsharded: Iterable[str],
        used: Collection[str],
        wire: Iterable[WireFormats] = (),
        *,
        may_drop: bool = False,
    ) -> None:
        """Raise ``ValueError`` that lists every parameter whose shape, resharding or wire format differs between plan
        and model.

        Args:
            parameters: FQN and shape of all parameters of the model.
            keep_unsharded: FQNs of the parameters that stay unsharded from forward to backward.
            used: FQNs of the parameters that the graph at hand uses.
            wire: wire formats of the parameters.
            may_drop: whether a parameter may travel as it is, or in a milder format, although the model gives it one.
        """
        planned = dict(self.parameters)
        problems = [f"{fqn}: not in the plan" for fqn in parameters if fqn not in planned]
        problems += [f"{fqn}: not in the model" for fqn in planned if fqn not in parameters]
        problems += [
            f"{fqn}: shape {planned[fqn]} in the plan, {shape} in the model"
            for fqn, shape in parameters.items()
            if fqn in planned and planned[fqn] != shape
        ]
        unsharded = set(keep_unsharded)
        for fqn in parameters:
            if fqn in planned and fqn in used and (fqn in unsharded) != (fqn in self.keep_unsharded):
                planned_as = "kept unsharded" if fqn in self.keep_unsharded else "resharded"
                problems.append(
                    f"{fqn}: {planned_as} after forward in the plan, not in the model (reshard_after_forward)"
                )
        given = {each.fqn: each for each in wire}
        chosen = {each.fqn: each for each in self.wire}
        for fqn in (fqn for fqn in parameters if fqn in used):
            mine, theirs = (found.get(fqn, WireFormats(fqn, None, None)) for found in (chosen, given))
            if not (
                _fits(mine.of_gather, theirs.of_gather, GATHER_FORMATS, may_drop)
                and _fits(mine.of_reduction, theirs.of_reduction, REDUCE_FORMATS, may_drop)
            ):
                formats = [found[fqn].formats if fqn in found else None for found in (chosen, given)]
                problems.append(f"{fqn}: travels as {formats[0]} in the plan, as {formats[1]} in the model (wire)")
        if problems:
            raise ValueError("plan: does not fit this model:\n  " + "\n  ".join(problems))

    def check_order(self, uses: "GraphUses") -> None:
        """Raise ``ValueError`` if a bucket is issued after it is needed or awaited before it is issued, in graphs with
        these uses; it names the bucket."""
        gathers = {"forward": self.forward, "backward": self.backward}
        check_points(gathers, {"forward": uses.forward, "backward": uses.backward}, self.reductions)


def _fits(own: tuple[str, ...], given: tuple[str, ...], among: Mapping[str, Encoding], may_drop: bool) -> bool:
    """Return whether a plan may have its own formats where those of the model are given.

    They are the same ones; with ``may_drop`` also none, or the same with more bits.
    """
    milder_ones = [tuple(milder(name, bits, among) for name in given) for bits in LEVELS]
    return own == given or (may_drop and (not own or own in milder_ones))


def _gather_points(bucket: Bucket) -> str:
    if bucket.issue and bucket.issue == bucket.wait:
        return f"issued and awaited before {bucket.wait} is used"
    issue = f"before {bucket.issue} is used" if bucket.issue else "at the start"
    return f"issued {issue}, awaited before {bucket.wait} is" if bucket.wait else f"issued {issue}, awaited at the end"


def _reduction_points(bucket: Bucket, two_steps: bool) -> str:
    def before(point: str | None) -> str:
        if point in bucket.fqns:
            return "at once"
        return f"before that of {point}" if point else "at the end"

    own = bucket.issue is None or bucket.issue in bucket.fqns
    issue = "issued when complete" if own else f"issued when that of {bucket.issue} is there"
    second_step = "sent between nodes" if two_steps else "all-reduced"
    all_reduce = f", {second_step} {before(bucket.all_reduce_after)}" if bucket.all_reduce_after or two_steps else ""
    return f"{issue}{all_reduce}, awaited {before(bucket.wait)}"


def _decoded(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from None


def _parsed(data: Any, where: str) -> BucketPlan:
    def need(condition: bool, field: str, expected: str, found: Any) -> None:
        if not condition:
            raise ValueError(f"{where}: {field}: expected {expected}, found {found!r}")

    need(isinstance(data, dict), "plan", "an object", data)
    need(data.get("version") == _VERSION, "version", str(_VERSION), data.get("version"))
    known = {"version", "hash", "parameters", "keep_unsharded", *_DIRECTIONS, "wire"}
    for field in data:
        if field not in known:
            raise ValueError(f"{where}: " + unknown("field", field, sorted(known)))
    parameters = data.get("parameters")
    need(isinstance(parameters, dict), "parameters", "an object of shapes", parameters)
    for fqn, shape in parameters.items():
        right = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        need(right, f"parameters.{fqn}", "a list of sizes", shape)

    def fqns(found: Any, field: str) -> tuple[str, ...]:
        need(isinstance(found, list), field, "a list of FQNs", found)
        for fqn in found:
            need(isinstance(fqn, str) and fqn in parameters, field, "FQNs of parameters", fqn)
        need(len(set(found)) == len(found), field, "each FQN once", found)
        return tuple(found)

    def buckets(direction: str) -> tuple[Bucket, ...]:
        found = data.get(direction)
        need(isinstance(found, list), direction, "a list of buckets", found)
        result = []
        for i, bucket in enumerate(found):
            field = f"{direction}[{i}]"
            need(isinstance(bucket, dict), field, "an object", bucket)
            for name in bucket:
                if name not in ("parameters", *_POINTS, "form"):
                    raise ValueError(f"{where}: {field}: " + unknown("field", name, ["parameters", *_POINTS, "form"]))
            members = fqns(bucket.get("parameters"), f"{field}.parameters")
            need(bool(members), f"{field}.parameters", "at least one FQN", [])
            for point in _POINTS:
                value = bucket.get(point)
                known_point = value is None or (isinstance(value, str) and value in parameters)
                need(known_point, f"{field}.{point}", "an FQN of a parameter, or null", value)
            issue, wait, all_reduce = (bucket.get(point) for point in ("issue", "wait", "all_reduce_after"))
            form = bucket.get("form", "packed")
            need(form in get_args(Form), f"{field}.form", " or ".join(map(repr, get_args(Form))), form)
            result.append(Bucket(members, issue, wait, all_reduce, i, form))
        fqns([fqn for bucket in result for fqn in bucket.fqns], direction)
        return tuple(result)

    def wire_formats() -> tuple[WireFormats, ...]:
        found = data.get("wire", {})
        need(isinstance(found, dict), "wire", "an object of formats", found)
        for fqn, formats in found.items():
            need(fqn in parameters, "wire", "FQNs of parameters", fqn)
            right = isinstance(formats, list) and len(formats) in (2, 3)
            expected = "a format, or null, for the gather, one for the reduction, and one for it between nodes, if any"
            need(right, f"wire.{fqn}", expected, formats)
            for name, valid in zip(formats, (GATHER_FORMATS, REDUCE_FORMATS, REDUCE_FORMATS), strict=False):
                need(name is None or name in valid, f"wire.{fqn}", f"one of {', '.join(valid)}, or null", name)
        return tuple(WireFormats(fqn, *found[fqn]) for fqn in parameters if fqn in found)

    return BucketPlan(
        forward=buckets("forward"),
        backward=buckets("backward"),
        reductions=buckets("reductions"),
        keep_unsharded=fqns(data.get("keep_unsharded"), "keep_unsharded"),
        parameters=tuple((fqn, tuple(shape)) for fqn, shape in parameters.items()),
        wire=wire_formats(),
    )

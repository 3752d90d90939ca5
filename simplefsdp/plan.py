"""Bucket plans: which parameters share a collective, and when it is issued and awaited. Pure data over FQNs.

A *request* (``"block"``, ``manual_plan([...])``) says which parameters belong together; resolved against a graph, whose
order of use it follows, it becomes a ``BucketPlan``: exact, hashed, saved as JSON.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from inductor_passes.order import Bucket

from ._messages import unknown

log = logging.getLogger("simplefsdp")

Buckets = tuple[tuple[str, ...], ...]
"""The FQNs of each bucket, in packing order; every parameter of a model is in one."""

_VERSION = 1
_DIRECTIONS = ("forward", "backward", "reductions")
_POINTS = ("issue", "then", "wait")


def block_of(fqn: str) -> str | None:
    """The outermost numbered module that holds ``fqn``, or ``None``: ``layers.0`` for ``layers.0.wq.weight``."""
    parts = fqn.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return None


def blocks(fqns: tuple[str, ...]) -> list[str]:
    """Names of the repeated blocks that ``fqns`` belong to, in registration order."""
    return list(dict.fromkeys(block for fqn in fqns if (block := block_of(fqn)) is not None))


def block_buckets(fqns: tuple[str, ...]) -> Buckets:
    """One bucket per repeated block and one for each run of parameters before, between and after the blocks.

    ``fqns`` are all parameters of a model in registration order, which is also the packing order (as in FSDP2).
    """
    return tuple(tuple(run) for _, run in groupby(fqns, key=block_of))


@dataclass(frozen=True)
class Request:
    """What is asked of a plan: which parameters belong together, and how far ahead they are gathered."""

    name: str
    buckets: Callable[[tuple[str, ...]], Buckets]
    """From all FQNs of a model, in registration order."""
    prefetch: int = 1
    """Buckets. A gather is issued before the wait for the one that is used this many before it; a reduction is awaited
    before the one that is issued this many behind it."""


BLOCK = Request("block", block_buckets)


def manual_plan(wrap: Sequence[str | Sequence[str]], *, prefetch: int = 1) -> Request:
    """Buckets by the names of modules or parameters: the manual wrapping of the SimpleFSDP paper.

    ``manual_plan(["tok_embeddings", "layers.*", ["norm", "output"]])``: each module (or parameter) that a pattern names
    is a bucket, whatever a nested list names is one together. ``*``, ``?`` and ``[...]`` match within one component of
    the name, as in ``layers.*.attention``. A parameter that nothing names gets a bucket of its own, and a warning.

    Args:
        wrap: patterns, and lists of patterns.
        prefetch: how many buckets ahead gathers are issued, and how many later reductions are awaited; 0: everything
            is awaited where it is issued.

    Raises:
        TypeError: ``wrap`` or ``prefetch`` is of another type.
        ValueError: ``prefetch`` is negative or a list is empty. When a model is compiled: a pattern names nothing, or
            two name the same parameter.
    """
    if isinstance(wrap, str) or not isinstance(wrap, Sequence):
        raise TypeError(f"manual_plan: expected a list of patterns and lists of patterns, found {wrap!r}")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int):
        raise TypeError(f"manual_plan: prefetch: expected a number of buckets, found {prefetch!r}")
    if prefetch < 0:
        raise ValueError(f"manual_plan: prefetch={prefetch}: expected 0 or more buckets")
    for entry in wrap:
        patterns = entry if isinstance(entry, Sequence) and not isinstance(entry, str) else [entry]
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"manual_plan: expected a pattern or a list of patterns, found {entry!r}")
        if not patterns or "" in patterns:
            raise ValueError(f"manual_plan: expected a pattern or a list of patterns, found {entry!r}")
    entries = tuple((entry,) if isinstance(entry, str) else tuple(entry) for entry in wrap)
    together = tuple(not isinstance(entry, str) for entry in wrap)
    return Request(f"manual_plan({list(wrap)!r}, {prefetch=})", _Manual(entries, together), prefetch)


@dataclass(frozen=True)
class _Manual:
    entries: tuple[tuple[str, ...], ...]
    together: tuple[bool, ...]
    """Whether all that an entry names is one bucket."""

    def __call__(self, fqns: tuple[str, ...]) -> Buckets:
        named: dict[str, tuple[str, str]] = {}  # the pattern that names a parameter, and its bucket
        for entry, together in zip(self.entries, self.together, strict=True):
            for pattern in entry:
                matches = {fqn: module for fqn in fqns if (module := _matched(pattern, fqn)) is not None}
                if not matches:
                    raise ValueError("manual_plan: " + unknown("pattern", pattern, _names(fqns)))
                for fqn, module in matches.items():
                    if fqn in named and named[fqn][0] != pattern:
                        raise ValueError(f"manual_plan: {fqn} is named by both {named[fqn][0]!r} and {pattern!r}")
                    named[fqn] = pattern, str(entry) if together else module
        if rest := [fqn for fqn in fqns if fqn not in named]:
            log.warning("manual_plan: no pattern names %s: a bucket for each", ", ".join(rest))
        buckets: dict[str, list[str]] = {}
        for fqn in fqns:
            buckets.setdefault(named[fqn][1] if fqn in named else fqn, []).append(fqn)
        return tuple(map(tuple, buckets.values()))


def _matched(pattern: str, fqn: str) -> str | None:
    """The module that holds ``fqn``, or ``fqn`` itself, if ``pattern`` names it."""
    wanted, parts = pattern.split("."), fqn.split(".")
    if len(wanted) <= len(parts) and all(map(fnmatchcase, parts, wanted)):
        return ".".join(parts[: len(wanted)])
    return None


def _names(fqns: Iterable[str]) -> list[str]:
    """What a pattern may name, modules first."""
    modules = {".".join(parts[:i]): None for fqn in fqns for parts in [fqn.split(".")] for i in range(1, len(parts))}
    return [*modules, *fqns]


class Uses(NamedTuple):
    """What the graphs of a step do with the parameters, each in the order in which it happens: FQNs."""

    forward: Sequence[str]
    """Gathered parameters by their first use."""
    backward: Sequence[str]
    reductions: Sequence[str]
    """Reduced parameters by when their full gradients are there."""
    followed: frozenset[str]
    """Those whose reduce-scatter an all-reduce follows."""


@dataclass(frozen=True)
class BucketPlan:
    """What the passes carry out: every collective of a forward and a backward graph, and when. Buckets are in the
    order in which they are issued; see ``Bucket`` for what issue and wait points mean."""

    forward: tuple[Bucket, ...]
    """Gathers of the forward graph."""
    backward: tuple[Bucket, ...]
    """Gathers of the backward graph."""
    reductions: tuple[Bucket, ...]
    """Of the backward graph: reduce-scatters, all-reduces, or both."""
    kept: tuple[str, ...]
    """Parameters that stay whole from forward to backward."""
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """FQN and shape of every parameter of the model, in registration order."""

    @property
    def hash(self) -> str:
        """Of all that it says; equal on every rank."""
        return hashlib.sha256(self._json().encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write it as JSON, a line for each name, so that a ``diff`` shows what changed."""
        Path(path).write_text(self.to_json())

    def to_json(self) -> str:
        text = json.dumps({"version": _VERSION, "hash": self.hash, **self._fields()}, indent=1)
        return re.sub(r"\[[\s\d,]*\]", lambda sizes: "".join(sizes[0].split()).replace(",", ", "), text) + "\n"

    @classmethod
    def load(cls, path: str | Path) -> "BucketPlan":
        """Read what ``save`` wrote, edited or not.

        Raises:
            ValueError: it is no JSON, of another version, or a field is missing or wrong; names the field.
        """
        return cls.from_json(Path(path).read_text(), str(path))

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> "BucketPlan":
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON: {error}") from None
        return _parsed(data, where)

    def _json(self) -> str:
        return json.dumps(self._fields(), sort_keys=True)

    def _fields(self) -> dict[str, Any]:
        def described(bucket: Bucket) -> dict[str, Any]:
            points = {point: getattr(bucket, point) for point in _POINTS}
            if bucket.then is None:
                del points["then"]
            return {"parameters": list(bucket.fqns), **points}

        return {
            "parameters": {fqn: list(shape) for fqn, shape in self.parameters},
            "kept": list(self.kept),
            **{direction: [described(bucket) for bucket in getattr(self, direction)] for direction in _DIRECTIONS},
        }

    def explain(self) -> str:
        """The plan for people: a line for each bucket."""
        numel = {fqn: _product(shape) for fqn, shape in self.parameters}
        total = sum(numel.values())
        lines = [
            f"plan {self.hash}: {len(self.parameters)} parameters, {total:,} elements; {len(self.forward)} gathers in "
            f"forward, {len(self.backward)} in backward, {len(self.reductions)} reductions; {len(self.kept)} kept whole"
        ]
        for direction in _DIRECTIONS:
            if getattr(self, direction):
                lines.append(f"{direction}:")
            for bucket in getattr(self, direction):
                share = sum(numel[fqn] for fqn in bucket.fqns) / max(1, total)
                points = _reduction_points(bucket) if direction == "reductions" else _gather_points(bucket)
                lines.append(f"  {share:6.1%}  {_span(bucket.fqns)}: {points}")
        return "\n".join(lines)

    def check_fits(self, parameters: Mapping[str, tuple[int, ...]], kept: Iterable[str], used: Collection[str]) -> None:
        """Raise ``ValueError`` that lists every parameter of a model that is not as the plan has it.

        Args:
            parameters: FQN and shape of all parameters of the model.
            kept: those that stay whole from forward to backward, of
            used: those that the graph at hand uses.
        """
        planned = dict(self.parameters)
        problems = [f"{fqn}: not in the plan" for fqn in parameters if fqn not in planned]
        problems += [f"{fqn}: not in the model" for fqn in planned if fqn not in parameters]
        problems += [
            f"{fqn}: shape {planned[fqn]} in the plan, {shape} in the model"
            for fqn, shape in parameters.items()
            if fqn in planned and planned[fqn] != shape
        ]
        here = set(kept)
        for fqn in parameters:
            if fqn in planned and fqn in used and (fqn in here) != (fqn in self.kept):
                there = "kept whole" if fqn in self.kept else "resharded"
                problems.append(f"{fqn}: {there} after forward in the plan, not in the model (reshard_after_forward)")
        if problems:
            raise ValueError("plan: does not fit this model:\n  " + "\n  ".join(problems))

    def check_order(self, uses: "Uses") -> None:
        """Raise ``ValueError`` if a bucket is issued after it is needed or awaited before it is issued, in graphs with
        these uses; it names the bucket."""
        for direction in ("forward", "backward"):
            place = {fqn: i for i, fqn in enumerate(getattr(uses, direction))}
            for i, bucket in enumerate(getattr(self, direction)):
                due = min((place[fqn] for fqn in bucket.fqns if fqn in place), default=len(place))
                for point in ("issue", "wait"):
                    fqn = getattr(bucket, point)
                    if place.get(fqn, -1) > due:
                        first = next(f for f in bucket.fqns if place.get(f) == due)
                        raise ValueError(f"plan: {direction}[{i}].{point}: {fqn} is used after {first}, of this bucket")
        issued = {}
        for i, bucket in enumerate(self.reductions):
            issued.update(dict.fromkeys(bucket.fqns, i))
        for i, bucket in enumerate(self.reductions):
            points = [issued.get(fqn, len(issued)) for fqn in (bucket.then, bucket.wait) if fqn]
            if points != sorted(points) or points and points[0] < i:
                raise ValueError(f"plan: reductions[{i}]: its points come before what they wait for")


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _span(fqns: tuple[str, ...]) -> str:
    return fqns[0] if len(fqns) == 1 else f"{fqns[0]} .. {fqns[-1]} ({len(fqns)})"


def _gather_points(bucket: Bucket) -> str:
    if bucket.issue and bucket.issue == bucket.wait:
        return f"issued and awaited before {bucket.wait} is used"
    issue = f"before {bucket.issue} is used" if bucket.issue else "at the start"
    return f"issued {issue}, awaited before {bucket.wait} is" if bucket.wait else f"issued {issue}, awaited at the end"


def _reduction_points(bucket: Bucket) -> str:
    def before(point: str | None) -> str:
        if point in bucket.fqns:
            return "at once"
        return f"before that of {point}" if point else "at the end"

    issue = f"issued when the gradient of {bucket.issue} is there" if bucket.issue else "issued when it is there"
    then = f", all-reduced {before(bucket.then)}" if bucket.then else ""
    return f"{issue}{then}, awaited {before(bucket.wait)}"


def resolve(
    prefetch: int,
    buckets: Buckets,
    uses: Uses,
    parameters: Iterable[tuple[str, tuple[int, ...]]],
    kept: Iterable[str],
) -> BucketPlan:
    """The plan that carries out a request for these buckets, in graphs that use the parameters so."""
    return BucketPlan(
        forward=_gathers(buckets, uses.forward, prefetch),
        backward=_gathers(buckets, uses.backward, prefetch),
        reductions=_reductions(buckets, uses, prefetch),
        kept=tuple(kept),
        parameters=tuple(parameters),
    )


def _gathers(buckets: Buckets, uses: Sequence[str], prefetch: int) -> tuple[Bucket, ...]:
    members = _members(buckets, uses)
    first = [min(fqns, key=list(uses).index) for fqns in members]
    return tuple(
        Bucket(fqns, first[i - prefetch] if i >= prefetch else None, first[i], place=i)
        for i, fqns in enumerate(members)
    )


def _reductions(buckets: Buckets, uses: Uses, prefetch: int) -> tuple[Bucket, ...]:
    members = _members(buckets, uses.reductions[::-1])[::-1]
    last = [max(fqns, key=list(uses.reductions).index) for fqns in members]
    later: list[str | None] = [*last, *[None] * (2 * prefetch)]
    return tuple(
        Bucket(fqns, last[i], later[i + 2 * prefetch], later[i + prefetch], i)
        if uses.followed.intersection(fqns)
        else Bucket(fqns, last[i], later[i + prefetch], place=i)
        for i, fqns in enumerate(members)
    )


def _members(buckets: Buckets, uses: Sequence[str]) -> list[tuple[str, ...]]:
    """The used members of each bucket, in packing order; buckets by their first use."""
    bucket_of = {fqn: bucket for bucket in buckets for fqn in bucket}
    used = set(uses)
    ordered = dict.fromkeys(bucket_of[fqn] for fqn in uses)
    return [tuple(fqn for fqn in bucket if fqn in used) for bucket in ordered]


def _parsed(data: Any, where: str) -> BucketPlan:
    def need(condition: bool, field: str, expected: str, found: Any) -> None:
        if not condition:
            raise ValueError(f"{where}: {field}: expected {expected}, found {found!r}")

    need(isinstance(data, dict), "plan", "an object", data)
    need(data.get("version") == _VERSION, "version", str(_VERSION), data.get("version"))
    known = {"version", "hash", "parameters", "kept", *_DIRECTIONS}
    for field in data:
        if field not in known:
            raise ValueError(f"{where}: " + unknown("field", field, sorted(known)))
    parameters = data.get("parameters")
    need(isinstance(parameters, dict), "parameters", "an object of shapes", parameters)
    for fqn, shape in parameters.items():
        right = isinstance(shape, list) and all(isinstance(n, int) and n >= 0 for n in shape)
        need(right, f"parameters.{fqn}", "a list of sizes", shape)

    def fqns(found: Any, field: str) -> tuple[str, ...]:
        need(isinstance(found, list), field, "a list of FQNs", found)
        for fqn in found:
            need(fqn in parameters, field, "FQNs of parameters", fqn)
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
                if name not in ("parameters", *_POINTS):
                    raise ValueError(f"{where}: {field}: " + unknown("field", name, ["parameters", *_POINTS]))
            members = fqns(bucket.get("parameters"), f"{field}.parameters")
            need(bool(members), f"{field}.parameters", "at least one FQN", [])
            for point in _POINTS:
                value = bucket.get(point)
                need(value is None or value in parameters, f"{field}.{point}", "an FQN of a parameter, or null", value)
            result.append(Bucket(members, *(bucket.get(point) for point in ("issue", "wait", "then")), place=i))
        fqns([fqn for bucket in result for fqn in bucket.fqns], direction)
        return tuple(result)

    return BucketPlan(
        *(buckets(direction) for direction in _DIRECTIONS),
        kept=fqns(data.get("kept"), "kept"),
        parameters=tuple((fqn, tuple(shape)) for fqn, shape in parameters.items()),
    )

"""Records of compiled graphs: text that is part of a graph, and so of the graph's entry in the compile cache.

Ranks compare records to see whether they have compiled the same graph (``agreement.py``). A process with a warm cache
reads from the record what was planned and reported, and ``measure`` reads which collective took how long.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from inductor_passes.collectives import EXCHANGED, FQNS, WAIT
from inductor_passes.ops.gather_shards import GATHERS_OF_SHARDS
from inductor_passes.scheduling.issue_points import PlanError
from inductor_passes.torch_compat.fx import size_hint


class RecordedCollective(NamedTuple):
    """A collective of a graph, as a record has it."""

    name: str
    """Name of the functional operator, without the mark of in-place operators: ``"all_gather_into_tensor"``."""
    group: str
    about: str
    """Dtype and elements of each tensor that a rank sends, options."""
    nbytes: int
    """Bytes of the whole tensors: a gather's output, other collectives' input."""
    fqns: tuple[str, ...]
    """FQNs of its parameters; none for a collective of the user's own."""

    def __str__(self) -> str:
        return f"{self.name} of {self.about}: {', '.join(self.fqns)}"


@dataclass(frozen=True)
class Record:
    """The record of one graph."""

    direction: str
    """``"forward"`` or ``"backward"``."""
    about: tuple[str, ...]
    """Facts about the compilation that are the same on every rank, one line each."""
    groups: tuple[str, ...]
    """Names of process groups whose ranks compare records, whether the graph has collectives of theirs or not."""
    issued: tuple[RecordedCollective, ...]
    """All collectives, in the order of their issue."""
    order: tuple[int, ...]
    """``i`` where collective ``i`` is issued, ``-1 - i`` where it is awaited."""
    summary: str = ""
    """The plan and its prediction, one line."""
    warnings: tuple[str, ...] = ()
    """Reasons why the graph is worse than planned."""
    report: Mapping[str, str] | None = None
    """``Report.packed()``."""
    held_bytes: int = 0
    """Bytes that the forward graph leaves in memory for its backward, as predicted; both graphs have them."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Record":
        fields: dict[str, Any] = json.loads(text)
        lists = {name: tuple(fields[name]) for name in ("about", "groups", "order", "warnings")}
        issued = tuple(RecordedCollective._make(one)._replace(fqns=tuple(one[-1])) for one in fields["issued"])
        return cls(**{**fields, **lists, "issued": issued})

    @property
    def title(self) -> str:
        """A noun phrase for the graph; graphs of a model in one direction may share it."""
        fqns = next((one.fqns for one in self.issued if one.fqns), ("no parameter",))
        return f"the compiled {self.direction} graph whose first collective is of {fqns[0]}"

    @cached_property
    def noted(self) -> dict[str, str]:
        """For each process group, the text that its ranks note when the graph begins; the same if they agree."""
        digests = {
            group: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8] for group, lines in self.compared().items()
        }
        return {group: f"{self.title} ({digest})" for group, digest in digests.items()}

    def compared(self) -> dict[str, list[str]]:
        """Return, for each process group, the lines that its ranks must have in common."""
        lines = {group: list(self.about) for group in self.groups}
        for one in self.issued:
            if one.fqns:
                lines.setdefault(one.group, list(self.about)).append(str(one))
        return lines


def record_graph(direction: str, about: Sequence[str], groups: Iterable[str], steps: Iterable[Node]) -> Record:
    """Return the record of a graph whose collectives and waits are ``steps``, in this order."""
    issued, order = _sequence(steps)
    return Record(direction, (f"torch {torch.__version__}", *about), tuple(groups), issued, order)


def recorded_sequence(old: Record, steps: Iterable[Node]) -> dict[str, Any]:
    """Return the fields ``issued`` and ``order`` of the record of the same graph in another order.

    Args:
        steps: the graph's collectives and waits, in the new order.

    Raises:
        PlanError: they are not the same collectives.
    """
    issued, order = _sequence(steps)
    before, after = (Counter(str(one) for one in ones if one.fqns) for ones in (old.issued, issued))
    if before != after:
        raise PlanError(f"the plan is not carried out: lost {[*(before - after)]}, unasked for {[*(after - before)]}")
    return {"issued": issued, "order": order}


def _sequence(steps: Iterable[Node]) -> tuple[tuple[RecordedCollective, ...], tuple[int, ...]]:
    number: dict[Node, int] = defaultdict(lambda: len(number))
    issued, order = [], []
    for node in steps:
        if node.target is not WAIT:
            order.append(number[node])
            issued.append(_issued(node))
        elif (source := awaited_collective(node)) in number:
            order.append(-1 - number[source])
    return tuple(issued), tuple(order)


def is_collective(node: Node) -> bool:
    """Return whether ``node`` issues a functional collective, of this library or of the user."""
    target = node.target
    if target in GATHERS_OF_SHARDS:
        return True
    return isinstance(target, OpOverload) and target.namespace == "_c10d_functional" and target is not WAIT


def collective_name(node: Node) -> str:
    """Return the name of a collective, without the mark of in-place operators."""
    return str(node.target).split(".")[-2].removesuffix("_")


def is_step(node: Node) -> bool:
    """Return whether ``node`` issues or awaits a functional collective."""
    return node.target is WAIT or is_collective(node)


def awaited_collective(wait: Node) -> Node:
    """Return the collective that ``wait`` awaits."""
    node = wait.all_input_nodes[0]
    while not is_collective(node) and node.all_input_nodes:  # one of several results
        node = node.all_input_nodes[0]
    return node


def _issued(node: Node) -> RecordedCollective:
    name = collective_name(node)
    inputs = [source.meta["val"] for source in tree_leaves(node.args) if isinstance(source, Node)]
    whole = tree_leaves(node.meta["val"]) if name.startswith("all_gather") else inputs
    sent = [(value.dtype, value.numel()) for value in inputs]
    options: Sequence[Any] = node.args[1:-1]
    if node.target in GATHERS_OF_SHARDS:  # ranks may have to pad shards to what all ranks send
        numels, dtypes, *options = options
        sent = [*zip(dtypes, numels, strict=True)]
    tensors = (f"{dtype}[{numel}]".removeprefix("torch.") for dtype, numel in sent)
    about = " ".join([*tensors, *map(str, options)])
    nbytes = sum(size_hint(value.numel()) * value.itemsize for value in whole)
    exchanged = (node.meta[EXCHANGED],) if EXCHANGED in node.meta else ()
    return RecordedCollective(name, str(node.args[-1]), about, nbytes, (*node.meta.get(FQNS, ()), *exchanged))

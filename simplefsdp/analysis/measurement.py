"""Measurements of a training step: its collectives, by the graphs that issued them."""

import json
import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from simplefsdp.text.messages import fqn_range


class MeasuredCollective(NamedTuple):
    """A measured collective; times in seconds since its graph began to run."""

    name: str
    """Name of the functional operator: ``"all_gather_into_tensor"``."""
    parameters: tuple[str, ...]
    """FQNs; none for a collective of your own."""
    group: str
    nbytes: int
    """Bytes of the whole tensors."""
    issued_s: float
    started_s: float
    """When the process group was done with the collectives issued before; ``issued_s``, where that is not known."""
    finished_s: float
    awaited_s: float
    """When a wait for the collective began; infinite: nobody waited."""

    @property
    def exposed_s(self) -> float:
        """Seconds that the waiting thread or stream was held up."""
        return max(0.0, self.finished_s - self.awaited_s)


@dataclass(frozen=True)
class GraphRun:
    """One run of a compiled graph and its collectives."""

    direction: str
    """``"forward"`` or ``"backward"``."""
    began_s: float
    """Seconds from the beginning of the step."""
    collectives: tuple[MeasuredCollective, ...]
    report: str | None = None
    """Key of the graph's report."""


@dataclass(frozen=True)
class Measurement:
    """Times of some training steps, and the collectives of the step that took the median time."""

    steps_s: tuple[float, ...]
    """Seconds of each step, in the order in which the steps were made."""
    runs: tuple[GraphRun, ...]

    @property
    def step_s(self) -> float:
        return statistics.median_low(self.steps_s)

    @property
    def collectives(self) -> tuple[MeasuredCollective, ...]:
        return tuple(one for run in self.runs for one in run.collectives)

    @property
    def communication_s(self) -> float:
        return sum(one.finished_s - one.started_s for one in self.collectives)

    @property
    def exposed_s(self) -> float:
        return sum(one.exposed_s for one in self.collectives)

    def to_json(self) -> str:
        """Return the measurement as ``from_json`` reads it; infinity is ``null``."""
        runs = [
            {**asdict(run), "collectives": [one._asdict() | {"exposed_s": one.exposed_s} for one in run.collectives]}
            for run in self.runs
        ]
        for one in (one for run in runs for one in run["collectives"]):
            one["awaited_s"] = one["awaited_s"] if one["awaited_s"] < math.inf else None
        sums = {name: getattr(self, name) for name in ("step_s", "exposed_s", "communication_s")}
        return json.dumps({**sums, "steps_s": self.steps_s, "runs": runs}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Measurement":
        fields = json.loads(text)

        def measured(of: dict[str, Any]) -> MeasuredCollective:
            awaited = math.inf if of["awaited_s"] is None else of["awaited_s"]
            others = {"parameters": tuple(of["parameters"]), "awaited_s": awaited}
            return MeasuredCollective(**{name: of[name] for name in MeasuredCollective._fields} | others)

        runs = (GraphRun(**run | {"collectives": tuple(map(measured, run["collectives"]))}) for run in fields["runs"])
        return cls(tuple(fields["steps_s"]), tuple(runs))

    def __str__(self) -> str:
        lines = [
            f"{1e3 * self.step_s:.1f} ms a step, of which {1e3 * self.exposed_s:.1f} exposed of "
            f"{1e3 * self.communication_s:.1f} communication"
        ]
        for run in self.runs:
            lines.append(f"{run.direction}, {1e3 * run.began_s:.2f} ms into the step: issued, done, needed at; exposed")
            for one in run.collectives:
                at = "  ".join(f"{1e3 * when:8.2f}" for when in (one.issued_s, one.finished_s, one.awaited_s))
                what = fqn_range(one.parameters) if one.parameters else "(your own)"
                lines.append(f"  {at}  {1e3 * one.exposed_s:7.2f} ms  {one.name} of {what}")
        return "\n".join(lines) + "\n"

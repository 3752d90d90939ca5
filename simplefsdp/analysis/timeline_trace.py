"""The schedule of a step, for Perfetto (ui.perfetto.dev): compute, process groups and memory over time, as predicted,
and process groups as measured."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from inductor_passes.scheduling.replay import CollectiveSpan, Timeline
from simplefsdp.analysis.measurement import GraphRun
from simplefsdp.analysis.prediction import Prediction, StepCosts
from simplefsdp.text.trace_events import complete, counter, microseconds, named

_COMPUTE = 0
"""Number of the first track; process groups have the following ones."""


def prediction_files(prediction: Prediction, costs: StepCosts, replayed: Sequence[Timeline]) -> dict[str, str]:
    """Return the prediction for a plan as the files of a report, by name."""
    return {
        "costs.json": costs.to_json(),
        "prediction.json": prediction.to_json(),
        "timeline.json": timeline_trace(replayed, costs.resident_bytes),
    }


def timeline_trace(timelines: Sequence[Timeline], resident: int = 0) -> str:
    """Return the JSON of the replays of a forward and a backward graph, one after the other.

    The track ``compute`` has compute and, as ``exposed``, the time that compute waits for each collective. Collectives
    are in the tracks of their process groups, with FQNs, bytes, and when they were issued and awaited. ``memory``
    counts ``resident`` bytes and what the graphs need.
    """
    channels = list(dict.fromkeys(span.kind.channel for timeline in timelines for span in timeline.spans))
    tracks = ["compute", *(f"group {channel}" for channel in channels)]
    events: list[dict[str, Any]] = [named("process_name", 0, "predicted")]
    events += [named("thread_name", track, name) for track, name in enumerate(tracks)]
    begin = 0.0
    for direction, timeline in zip(("forward", "backward"), timelines, strict=True):
        for step, (start, end) in enumerate(zip(timeline.starts, timeline.ends, strict=False)):
            events.append(complete(_COMPUTE, f"{direction} {step}", "compute", begin + start, end - start))
        for span in timeline.spans:
            track = 1 + channels.index(span.kind.channel)
            events += _of_span(track, span, begin)
        for start, nbytes in zip(timeline.starts, timeline.memory, strict=True):
            events.append(counter("memory", begin + start, resident + nbytes))
        begin += timeline.seconds
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1) + "\n"


def add_measured_tracks(predicted: str, runs: Sequence[GraphRun]) -> str:
    """Return the JSON of ``timeline_trace`` with a measurement beside it, from when the first graph began.

    Collectives are in tracks of their process groups; the track ``waits`` has, as ``exposed``, the time that compute
    waited for each collective.
    """
    content = json.loads(predicted)
    events = [event for event in content["traceEvents"] if event["pid"] == 0]
    groups = list(dict.fromkeys(one.group for run in runs for one in run.collectives))
    tracks = ["waits", *(f"group {group}" for group in groups)]
    events.append(named("process_name", 0, "measured") | _MEASURED)
    events += [named("thread_name", track, name) | _MEASURED for track, name in enumerate(tracks)]
    for run in runs:
        begin = run.began_s - runs[0].began_s
        for one in run.collectives:
            name = _name(one.name, one.parameters)
            track, start = 1 + groups.index(one.group), begin + one.started_s
            about = {
                "parameters": list(one.parameters),
                "bytes": one.nbytes,
                "issued_us": microseconds(begin + one.issued_s),
            }
            of_parameters = _KINDS | ({"all_to_all_single": "reduce"} if one.parameters else {})
            what = of_parameters.get(one.name.removesuffix("_coalesced"), "other")
            took = complete(track, name, what, start, one.finished_s - one.started_s)
            events.append(took | _MEASURED | {"args": about})
            if one.exposed_s:
                wait = complete(0, f"wait for {name}", "exposed", begin + one.awaited_s, one.exposed_s)
                events.append(wait | _MEASURED)
    return json.dumps(content | {"traceEvents": events}, indent=1) + "\n"


_KINDS = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "reduce", "all_reduce": "all-reduce"}
"""The names that predictions have for these functional operators."""
_MEASURED = {"pid": 1}
"""Fields that put events into a process of their own, beside the predicted one."""


def _of_span(track: int, span: CollectiveSpan, begin: float) -> Iterator[dict[str, Any]]:
    name = _name(span.what, span.fqns)
    about = {
        "parameters": list(span.fqns),
        "bytes": span.nbytes,
        "sent": span.kind.sent(span.nbytes),
        "collectives": span.parts,
        "issued_us": microseconds(begin + span.issued),
        "awaited_us": microseconds(begin + span.awaited),
    }
    yield complete(track, name, span.what, begin + span.started, span.finished - span.started) | {"args": about}
    if span.exposed:
        yield complete(_COMPUTE, f"wait for {name}", "exposed", begin + span.awaited, span.exposed)


def _name(what: str, fqns: Sequence[str]) -> str:
    first, more = " ".join((what, *fqns[:1])), len(fqns) - 1
    return f"{first} and {more} more" if more > 0 else first

"""Events of Chrome's trace event format, which Perfetto (ui.perfetto.dev) shows: complete events (``"X"``), counters
(``"C"``) and names (``"M"``), as dicts. Times are given in seconds, and are microseconds in the events."""

from typing import Any


def complete(track: int, name: str, category: str, start_s: float, seconds: float) -> dict[str, Any]:
    """Return something that takes its time, in a track of process 0."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": 0,
        "tid": track,
        "ts": microseconds(start_s),
        "dur": microseconds(seconds),
    }


def counter(name: str, at_s: float, nbytes: int) -> dict[str, Any]:
    """Return a value in bytes that process 0 has from a time on."""
    return {"ph": "C", "name": name, "pid": 0, "ts": microseconds(at_s), "args": {"bytes": nbytes}}


def named(what: str, track: int, name: str) -> dict[str, Any]:
    """Return the name of a track (``"thread_name"``) or of process 0 (``"process_name"``)."""
    return {"ph": "M", "name": what, "pid": 0, "tid": track, "args": {"name": name}}


def microseconds(seconds: float) -> float:
    """Return the unit of the format."""
    return 1e6 * seconds

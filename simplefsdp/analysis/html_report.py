"""A report as pictures: ``report.html``, one file that needs nothing else, and ``timeline.png``.

Both show one drawing of ``timeline.json``; in the page it can be zoomed and pointed into. They need
``pip install 'simplefsdp[report]'``: matplotlib and Jinja2.
"""

import html
import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inductor_passes.runtime.whole_files import write_whole
from simplefsdp.analysis.explanation import Explanation
from simplefsdp.text.messages import fqn_range

_COLORS = {
    "compute": "#c7ccd1",
    "gather": "#4c78a8",
    "reduce": "#54a24b",
    "all-reduce": "#72b7b2",
    "between nodes": "#72b7b2",
    "other": "#b279a2",
    "exposed": "#e45756",
}
"""Colors of bars, by what happens."""
_NAMED = 12
"""Number of parameters that a bar names when the pointer is on it."""


class _Bar(NamedTuple):
    track: str
    what: str
    start_ms: float
    took_ms: float
    text: str


class _Picture(NamedTuple):
    tracks: tuple[str, ...]
    bars: tuple[_Bar, ...]
    memory: tuple[tuple[float, int], ...]
    """Bytes in use over time: pairs of milliseconds and bytes."""

    @property
    def unit(self) -> tuple[str, int]:
        """The unit in which memory is drawn, and its bytes."""
        return ("GiB", 2**30) if max(nbytes for _, nbytes in self.memory) >= 2**30 else ("MiB", 2**20)


def write_html_report(folder: Path, explanation: Explanation) -> list[Path]:
    """Write ``report.html`` and ``timeline.png`` of the graph whose report is in ``folder``; return their paths.

    Raises:
        ModuleNotFoundError: matplotlib or Jinja2 is not installed.
    """
    picture = _picture(json.loads((folder / "timeline.json").read_text())["traceEvents"])
    figure = _drawn(picture, explanation.memory_limit_bytes)
    page, image = folder / "report.html", folder / "timeline.png"
    write_whole(page, _html(folder.name, _svg(figure, picture), explanation))
    drawing = io.BytesIO()
    figure.savefig(drawing, dpi=150)
    write_whole(image, drawing.getvalue())
    return [page, image]


def _picture(events: Sequence[dict[str, Any]]) -> _Picture:
    """Return the bars and the memory curve of the events of ``timeline.json`` (``timeline_trace.py``)."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    tracks = {
        (e["pid"], e["tid"]): f"{processes[e['pid']]}: {e['args']['name']}"
        for e in events
        if e["name"] == "thread_name"
    }
    bars = [
        _Bar(tracks[e["pid"], e["tid"]], e["cat"], e["ts"] / 1e3, e["dur"] / 1e3, _text(e))
        for e in events
        if e["ph"] == "X"
    ]
    memory = [(e["ts"] / 1e3, e["args"]["bytes"]) for e in events if e["ph"] == "C"]
    return _Picture(tuple(tracks.values()), tuple(bars), tuple(memory))


def _text(event: dict[str, Any]) -> str:
    lines = [event["name"], f"{event['dur'] / 1e3:.3f} ms from {event['ts'] / 1e3:.3f}"]
    if about := event.get("args"):
        names = about["parameters"]
        lines.append(f"{about['bytes'] / 2**20:.2f} MiB, issued at {about['issued_us'] / 1e3:.3f}")
        lines += names[:_NAMED] + [f"and {len(names) - _NAMED} more"] * (len(names) > _NAMED)
    return "\n".join(lines)


def _html(name: str, svg: str, explanation: Explanation) -> str:
    from jinja2 import Environment

    environment = Environment(autoescape=True)
    environment.globals["span"] = fqn_range
    return environment.from_string(Path(__file__).with_suffix(".html").read_text()).render(
        title=f"simplefsdp: {name}",
        summary=explanation.text(rows=0),
        svg=svg,
        buckets=explanation.buckets,
        measured=explanation.measurement is not None,
        exposed_color=_COLORS["exposed"],
    )


def _drawn(picture: _Picture, memory_limit: float) -> Any:
    """Return a ``matplotlib.figure.Figure`` of the tracks above the memory; ``memory_limit`` in bytes."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    height = 1.6 + 0.45 * len(picture.tracks)
    figure = Figure(figsize=(11, height), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[height - 1.4, 1.4])
    for number, bar in enumerate(picture.bars):
        corner = bar.start_ms, picture.tracks.index(bar.track) - 0.4
        above.add_patch(Rectangle(corner, bar.took_ms, 0.8, color=_COLORS[bar.what], linewidth=0, gid=f"bar{number}"))
    above.autoscale_view()
    above.set_yticks(range(len(picture.tracks)), picture.tracks)
    above.invert_yaxis()
    found = {bar.what for bar in picture.bars}
    handles = [Patch(color=color, label=what) for what, color in _COLORS.items() if what in found]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    unit, size = picture.unit
    at, used = zip(*((ms, nbytes / size) for ms, nbytes in picture.memory), strict=True)
    below.fill_between(at, used, step="post", color=_COLORS["compute"])
    if memory_limit < math.inf:
        below.axhline(memory_limit / size, linestyle="--", color="black", linewidth=1)
    below.set_ylabel(unit)
    below.set_xlabel("ms")
    return figure


def _svg(figure: Any, picture: _Picture) -> str:
    """Return the drawing as an element of a page; each bar has its text as a tooltip."""
    import matplotlib

    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "simplefsdp"}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    text = written.getvalue()

    def with_tooltip(group: re.Match[str]) -> str:
        bar = picture.bars[int(group[1])]
        return f'<g class="bar"><title>{html.escape(bar.text)}</title>'

    return re.sub(r'<g id="bar(\d+)">', with_tooltip, text[text.index("<svg") :])

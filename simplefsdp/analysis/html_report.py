"""A report as pictures: ``report.html``, one file that needs nothing else, and ``timeline.png``.

Both draw ``timeline.json``. They need ``pip install 'simplefsdp[report]'``: plotly, Jinja2, matplotlib.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from simplefsdp.analysis.explanation import Explanation
from simplefsdp.text.messages import fqn_range

_COLORS = {
    "compute": "#c7ccd1",
    "gather": "#4c78a8",
    "reduce": "#54a24b",
    "all-reduce": "#72b7b2",
    "other": "#b279a2",
    "exposed": "#e45756",
}
"""By what happens; one of them all that is exposed."""
_NAMED = 12
"""Parameters that a bar shows when one points at it."""


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
    """Milliseconds and bytes."""

    @property
    def unit(self) -> tuple[str, int]:
        """The unit in which memory is drawn, and its bytes."""
        return ("GiB", 2**30) if max(nbytes for _, nbytes in self.memory) >= 2**30 else ("MiB", 2**20)


def write_html_report(folder: Path, explanation: Explanation) -> list[Path]:
    """``report.html`` and ``timeline.png`` of the graph whose report is in ``folder``.

    Raises:
        ModuleNotFoundError: plotly or matplotlib is not installed.
    """
    picture = _picture(json.loads((folder / "timeline.json").read_text())["traceEvents"])
    page, image = folder / "report.html", folder / "timeline.png"
    page.write_text(_html(folder.name, picture, explanation))
    _draw(picture, explanation, image)
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
    lines = [f"<b>{event['name']}</b>", f"{event['dur'] / 1e3:.3f} ms from {event['ts'] / 1e3:.3f}"]
    if about := event.get("args"):
        names = about["parameters"]
        lines.append(f"{about['bytes'] / 2**20:.2f} MiB, issued at {about['issued_us'] / 1e3:.3f}")
        lines += names[:_NAMED] + [f"and {len(names) - _NAMED} more"] * (len(names) > _NAMED)
    return "<br>".join(lines)


def _html(name: str, picture: _Picture, explanation: Explanation) -> str:
    from jinja2 import Environment

    environment = Environment(autoescape=True)
    environment.globals["span"] = fqn_range
    return environment.from_string(Path(__file__).with_suffix(".html").read_text()).render(
        title=f"simplefsdp: {name}",
        summary=explanation.text(rows=0),
        figure=_figure(picture, explanation.memory_limit_bytes),
        buckets=explanation.buckets,
        measured=explanation.measurement is not None,
        exposed_color=_COLORS["exposed"],
    )


def _figure(picture: _Picture, limit: float) -> str:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.65, 0.35], vertical_spacing=0.04)
    for what, color in _COLORS.items():
        if bars := [bar for bar in picture.bars if bar.what == what]:
            drawn = go.Bar(
                name=what,
                orientation="h",
                y=[bar.track for bar in bars],
                base=[bar.start_ms for bar in bars],
                x=[bar.took_ms for bar in bars],
                hovertext=[bar.text for bar in bars],
                hoverinfo="text",
                marker={"color": color, "line": {"width": 0.3, "color": "white"}},
            )
            figure.add_trace(drawn, row=1, col=1)
    unit, size = picture.unit
    at, used = zip(*((ms, nbytes / size) for ms, nbytes in picture.memory), strict=True)
    figure.add_trace(
        go.Scatter(name="memory", x=at, y=used, line={"shape": "hv", "color": "#555"}, fill="tozeroy"), row=2, col=1
    )
    if limit < math.inf:
        figure.add_hline(limit / size, line={"dash": "dash"}, annotation_text="budget", row=2, col=1)
    figure.update_yaxes(categoryorder="array", categoryarray=picture.tracks[::-1], row=1, col=1)
    figure.update_yaxes(title=unit, row=2, col=1)
    figure.update_xaxes(title="ms", row=2, col=1)
    figure.update_layout(barmode="overlay", template="plotly_white", height=260 + 60 * len(picture.tracks))
    return str(figure.to_html(full_html=False, include_plotlyjs=True))


def _draw(picture: _Picture, explanation: Explanation, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    height = 1.6 + 0.45 * len(picture.tracks)
    figure = Figure(figsize=(11, height), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[height - 1.4, 1.4])
    for row, track in enumerate(picture.tracks):
        bars = [bar for bar in picture.bars if bar.track == track]
        where = [(bar.start_ms, bar.took_ms) for bar in bars]
        above.broken_barh(where, (row - 0.4, 0.8), facecolors=[_COLORS[bar.what] for bar in bars])
    above.set_yticks(range(len(picture.tracks)), picture.tracks)
    above.invert_yaxis()
    found = {bar.what for bar in picture.bars}
    handles = [Patch(color=color, label=what) for what, color in _COLORS.items() if what in found]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    unit, size = picture.unit
    at, used = zip(*((ms, nbytes / size) for ms, nbytes in picture.memory), strict=True)
    below.fill_between(at, used, step="post", color=_COLORS["compute"])
    if explanation.memory_limit_bytes < math.inf:
        below.axhline(explanation.memory_limit_bytes / size, linestyle="--", color="black", linewidth=1)
    below.set_ylabel(unit)
    below.set_xlabel("ms")
    figure.savefig(path, dpi=150)

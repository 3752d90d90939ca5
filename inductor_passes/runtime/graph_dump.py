"""Graphs as text, one line a node, so that a ``diff`` of two files shows what a pass did.

What was written while a graph was compiled is part of the graph's record (``record.py``), and so of the compile cache's
entry: where that is found no pass runs, and the first run of the graph writes the same files. The code that
TorchInductor generated is written by the first run in any case.
"""

import base64
import json
import logging
import zlib
from pathlib import Path

import torch
from torch.fx import Graph, Node

from inductor_passes.collectives import FQNS
from inductor_passes.runtime.whole_files import write_whole
from inductor_passes.torch_compat.inductor import running_code

log = logging.getLogger("simplefsdp")

DUMP_NAMES = {
    "joint": ("01_joint_before_identify", "02_joint_after_identify"),
    "inference": ("01_forward_before_identify", "02_forward_after_identify"),
    "forward": (
        "03_forward_before_bucket",
        "04_forward_after_bucket",
        "05_forward_before_order",
        "06_forward_after_order",
        "07_forward_code",
    ),
    "backward": (
        "08_backward_before_bucket",
        "09_backward_after_bucket",
        "10_backward_before_order",
        "11_backward_after_order",
        "12_backward_code",
    ),
}
"""Names of the files of each graph, in the order of the pipeline."""


class Report:
    """Dumps of a compilation's graphs, before and after each pass, in the order of the passes."""

    def __init__(self, key: str, folder: Path | None):
        """Register the report of a compilation.

        Args:
            key: the key of the compilation, the same in each process.
            folder: where files are written; ``None`` on ranks that write nothing.
        """
        self.key = key
        self.folder = folder
        self._texts: dict[str, str] = {}
        self._restored: set[str] = set()
        _reports[key] = self

    def write(self, step: str, graph: Graph) -> None:
        """Write ``graph`` to ``<folder>/<step>.txt``."""
        self.write_text(f"{step}.txt", render_graph(graph))

    def write_text(self, name: str, text: str) -> None:
        """Write ``text`` to ``<folder>/<name>``; where that fails, warn and write no more files.

        An error on the one rank that writes would leave the others waiting for it.
        """
        self._texts[name] = text
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_whole(self.folder / name, text)
            except OSError as error:
                log.warning("option 'report_dir': no report is written to %s: %s", self.folder, error)
                self.folder = None

    def text(self, name: str) -> str | None:
        """Return the text that was written as ``name``, or ``None``."""
        return self._texts.get(name)

    def packed(self) -> dict[str, str]:
        """Return all texts that were written until now, for ``restore``."""
        files = zlib.compress(json.dumps(self._texts).encode())
        return {"key": self.key, "files": base64.b64encode(files).decode()}

    def restore(self, files: str, direction: str) -> None:
        """Write the packed texts that no pass of this process has written, and the code that runs."""
        if files in self._restored:
            return
        self._restored.add(files)
        for name, text in json.loads(zlib.decompress(base64.b64decode(files))).items():
            if name not in self._texts:
                self.write_text(name, text)
        if code := running_code():
            self.write_text(f"{DUMP_NAMES[direction][-1]}.py", code)


_reports: dict[str, Report] = {}
"""The latest report of each compilation in this process, by key."""


def restore_report(key: str, files: str, direction: str) -> None:
    """Write a packed report of a graph that runs, if this process wants a report of that compilation."""
    if (report := active_report(key)) is not None:
        report.restore(files, direction)


def active_report(key: str) -> Report | None:
    """Return the report that this process wants of a compilation, or ``None``."""
    return _reports.get(key)


def render_graph(graph: Graph) -> str:
    """Return one line a node: ``name: dtype[shape] = target(arguments)``, collectives with the FQNs that they carry."""
    return "".join(_line(node) + "\n" for node in graph.nodes)


def _line(node: Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    value = "input"
    if node.op == "call_function":
        arguments = [*map(str, node.args), *(f"{name}={arg}" for name, arg in node.kwargs.items())]
        value = f"{node._pretty_print_target(node.target)}({', '.join(arguments)})"
    line = f"{node.name}{_type(node.meta.get('val'))} = {value}"
    fqns = node.meta.get(FQNS)
    return f"{line}  # {', '.join(fqns)}" if fqns else line


def _type(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    return f": {str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"

"""Graphs as text, one line a node, so that a ``diff`` of two files shows what a pass did."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx import Graph, Node

from .collectives import MARK


@dataclass(frozen=True)
class Report:
    """A folder that a compilation's graphs are written to, in pipeline order."""

    folder: Path

    def write(self, step: str, graph: Graph) -> None:
        """Write ``graph`` to ``<folder>/<step>.txt``."""
        self.write_text(f"{step}.txt", render(graph))

    def write_text(self, name: str, text: str) -> None:
        """Write ``text`` to ``<folder>/<name>``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)


def render(graph: Graph) -> str:
    """One line a node: ``name: dtype[shape] = target(arguments)``, collectives with the FQNs they carry."""
    return "".join(_line(node) + "\n" for node in graph.nodes)


def _line(node: Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    value = "input"
    if node.op == "call_function":
        arguments = [*map(str, node.args), *(f"{name}={arg}" for name, arg in node.kwargs.items())]
        value = f"{node._pretty_print_target(node.target)}({', '.join(arguments)})"
    line = f"{node.name}{_type(node.meta.get('val'))} = {value}"
    fqns = node.meta.get(MARK)
    return f"{line}  # {', '.join(fqns)}" if fqns else line


def _type(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    return f": {str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"

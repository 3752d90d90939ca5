"""Hooks of ``mkdocs build``: they add the table of public names and pictures from other folders to the pages.

Links out of ``docs/`` work where the repository is read as files; in the site they become the file's name, and
pictures become copies.
"""

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PICTURES = (
    "examples/timeline.png",
    "benchmarks/results/overlap-torch2.13.0.png",
    "benchmarks/results/overlap-torch2.15.0.png",
    "benchmarks/results/budget-torch2.13.0.png",
)
TABLE = "<!-- table of public names -->"
LAYERS = "<!-- layers of tests/test_structure.py -->"
_PICTURE = re.compile(r"(!\[[^\]]*\]\()\.\./([^)]+)\)")
_LINK = re.compile(r"(?<!!)\[(`?[^\]`]+`?)\]\(\.\./([^)]+)\)")


def on_files(files: Files, config: Any) -> Files:
    for name in PICTURES:
        files.append(File.generated(config, f"images/{Path(name).name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    markdown = _PICTURE.sub(lambda m: f"{m[1]}images/{Path(m[2]).name})", markdown)
    markdown = _LINK.sub(r"\1", markdown)
    return markdown.replace(TABLE, public_names_table()).replace(LAYERS, layers_table())


def public_names_table() -> str:
    """A row for each name of ``simplefsdp.__all__``, with the first sentence of its docstring."""
    rows = [f"| [`{name}`](#{module}.{name}) | {first} |" for name, module, first in public_names()]
    return "\n".join(["| Name | Summary |", "|---|---|", *rows])


def public_names() -> list[tuple[str, str, str]]:
    """Name, module and the first sentence of the docstring of all that ``simplefsdp.__all__`` lists."""
    tree = ast.parse((ROOT / "simplefsdp/__init__.py").read_text())
    (found,) = (ast.literal_eval(node.value) for node in tree.body if _assigns(node, "_MODULES"))
    modules = {name: f"simplefsdp.{module}" for name, module in found.items()}
    (names,) = (ast.literal_eval(node.value) for node in tree.body if _assigns(node, "__all__"))
    return [(name, modules[name], _first_sentence(modules[name], name)) for name in names]


def layers_table() -> str:
    """A row for each layer of ``tests/test_structure.py``, the lowest first."""
    tree = ast.parse((ROOT / "tests/test_structure.py").read_text())
    (layers,) = (ast.literal_eval(node.value) for node in tree.body if _assigns(node, "LAYERS"))
    rows = [f"| {i} | {', '.join(f'`{name}`' for name in layer)} |" for i, layer in enumerate(layers, 1)]
    return "\n".join(["| layer | packages |", "|---|---|", *rows])


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)


def _first_sentence(module: str, name: str) -> str:
    path = ROOT / (module.replace(".", "/") + ".py")
    path = path if path.exists() else ROOT / module.replace(".", "/") / "__init__.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if text:
                found = re.match(r".*?[.:](?=\s[A-Z`]|$)", text)
                return (found[0] if found else text).replace("``", "`").replace("|", "\\|")
    raise ValueError(f"{module}.{name} has no docstring")

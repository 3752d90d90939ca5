"""Imports point one way: a module imports from layers below its own, or from its own folder, and never in a circle."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("inductor_passes", "simplefsdp")

LAYERS = (
    ("inductor_passes.torch_compat",),
    ("inductor_passes.ops",),
    ("inductor_passes.collectives",),
    ("inductor_passes.fusion",),
    ("inductor_passes.scheduling",),
    ("inductor_passes.runtime",),
    ("inductor_passes",),  # the passes themselves
    ("simplefsdp.text",),
    ("simplefsdp.hardware", "simplefsdp.models", "simplefsdp.frontend"),
    ("simplefsdp.plan", "simplefsdp.training", "simplefsdp.null_gpu"),
    ("simplefsdp.api",),
    ("simplefsdp.rehearsal",),
    ("simplefsdp.analysis",),
    ("simplefsdp.compile",),
    ("simplefsdp.calibration",),
    ("simplefsdp.cli",),
    ("simplefsdp",),  # __init__ and __main__
)
"""Prefixes of module names, the lowest layer first; the longest prefix of a module's name counts. Two entries of one
layer do not import each other."""


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of both packages that a module imports, also inside of functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import of {node.module}"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from [full] if full in known else [node.module] if node.module in known else []
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def layer_of(name: str) -> tuple[int, str]:
    """The layer of a module and the entry of ``LAYERS`` that it belongs to."""
    entries = [(i, entry) for i, layer in enumerate(LAYERS) for entry in layer]
    return max(
        ((i, entry) for i, entry in entries if name == entry or name.startswith(entry + ".")),
        key=lambda found: len(found[1]),
    )


def test_no_module_imports_from_a_layer_above_its_own_or_from_a_neighbour_in_it():
    known = modules()
    against = []
    for name, path in known.items():
        layer, entry = layer_of(name)
        for imported in imports(name, path, known):
            other, its_entry = layer_of(imported)
            if other > layer or (other == layer and entry != its_entry):
                against.append(f"{name} imports {imported}")
    assert not against


def test_inductor_passes_know_nothing_of_simplefsdp():
    known = modules()
    passes = {name: path for name, path in known.items() if name.startswith("inductor_passes")}
    assert not [
        (name, imported)
        for name, path in passes.items()
        for imported in imports(name, path, known)
        if imported.startswith("simplefsdp")
    ]


def test_no_modules_import_each_other_in_a_circle():
    known = modules()
    graph = {name: set(imports(name, path, known)) - {name} for name, path in known.items()}
    while leaves := {name for name, imported in graph.items() if not imported}:
        graph = {name: imported - leaves for name, imported in graph.items() if name not in leaves}
    assert not graph, f"a circle among {sorted(graph)}"


def test_no_command_imports_another():
    known = modules()
    commands = {f"simplefsdp.cli.{name}" for name in ("plan", "explain", "rehearse", "calibrate", "compare")}
    for name in commands & set(known):
        assert not commands & set(imports(name, known[name], known)) - {name}


def test_every_layer_is_there():
    known = modules()
    for layer in LAYERS:
        for entry in layer:
            assert entry in known, entry


def module_state(tree: ast.Module) -> Iterator[str]:
    """Names of what a module keeps between calls: containers, own objects, optional values and caches."""
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            if any("cache" in ast.unparse(decorator) for decorator in node.decorator_list):
                yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            value = node.value
            empty = isinstance(value, ast.Dict | ast.List | ast.Set) and not any(ast.iter_child_nodes(value))
            empty = empty or ast.unparse(value) in ("[]", "{}", "None", "set()")
            called = ast.unparse(value.func).split(".")[-1] if isinstance(value, ast.Call) else ""
            private = called.startswith("_") and called in classes
            if (
                empty
                or private
                or called in ("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "deque", "defaultdict")
            ):
                yield ast.unparse(target)


def test_module_state_is_listed_with_its_reason() -> None:
    found = {
        f"{name}.{state}" for name, path in modules().items() for state in module_state(ast.parse(path.read_text()))
    }
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.partition("## State of modules")[2].partition("\n## ")[0]
    assert found == set(re.findall(r"^\| `([\w.]+)` \| \S", section, re.MULTILINE))


def everywhere(found_in: Callable[[Path], Iterator[tuple[int, str]]]) -> Iterator[tuple[str, str]]:
    """Yield ``file:line`` and what ``found_in`` finds there, for all code of this repository."""
    for folder in (*PACKAGES, "examples", "benchmarks", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, text in found_in(path):
                yield f"{path.relative_to(ROOT)}:{line}", text


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each string that stands by itself, below a definition or below an attribute."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_no_docstring_opens_with_a_word_that_points_elsewhere() -> None:
    texts = [*everywhere(docstrings)]
    assert len(texts) > 1000
    assert not [(where, text) for where, text in texts if re.match(r"(Of|What|That|Those|As|It|They)\b", text)]


def variables(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of each variable, parameter, function and class."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name


def test_no_variable_has_a_name_that_says_nothing_by_itself() -> None:
    words = {"alike", "cuts", "followed", "half", "kept", "room", "then", "there", "why"}
    names = [*everywhere(variables)]
    assert len(names) > 1000
    assert not [(where, name) for where, name in names if name.lstrip("_") in words]

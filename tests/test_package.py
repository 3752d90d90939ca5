"""The package as it is installed: every module is in the wheel, with the files that it reads and its entry points."""

import ast
import re
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
import torch

import simplefsdp
from simplefsdp.cli import main as cli

ROOT = Path(__file__).parents[1]

ON_A_GPU = (
    "simplefsdp.rehearsal.cuda",
    "inductor_passes.ops.hadamard_triton",
    "inductor_passes.ops.wire_formats_triton",
)
"""Modules that need Triton, which torch's CPU builds lack, and that are imported on a GPU only."""

_IMPORT_ALL = f"""
ON_A_GPU = {ON_A_GPU}
import importlib, pkgutil, sys
sys.path[:0] = sys.argv[1:]
import inductor_passes, simplefsdp
assert simplefsdp.__file__.startswith(sys.argv[1]) and inductor_passes.__file__.startswith(sys.argv[1])
for package in (inductor_passes, simplefsdp):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name != "triton" or module.name not in ON_A_GPU:
                raise
        print(module.name)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of this repository's tracked and new files, so that no build folder is left behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith("benchmarks/results"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(out), str(source)], check=True, capture_output=True)
    (built,) = out.glob("simplefsdp-*.whl")
    return built


@pytest.mark.subprocess
def test_every_module_of_the_installed_wheel_imports_without_the_source_tree(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    # -I and -S keep the source tree and the editable installation of this environment out of the path.
    command = [sys.executable, "-I", "-S", "-c", _IMPORT_ALL, str(tmp_path), sysconfig.get_path("purelib")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    installed = set(done.stdout.split()) | {"simplefsdp", "inductor_passes"}
    here = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in ("simplefsdp", "inductor_passes")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__main__.py"  # importing it runs the command
    }
    assert installed == here


@pytest.mark.slow
@pytest.mark.skipif("+cpu" not in torch.__version__, reason="a CUDA build of torch would be installed once more")
def test_the_wheel_and_its_requirements_are_all_that_a_clean_environment_needs(wheel, tmp_path):
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    torch_release = torch.__version__.partition("+")[0]
    install = [python, "-m", "pip", "install", "--quiet", f"torch=={torch_release}", wheel]
    subprocess.run(install, check=True, capture_output=True)
    command = [python, "-c", _IMPORT_ALL, str(environment)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    done = subprocess.run([environment / "bin" / "simplefsdp", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("simplefsdp ")


def test_the_wheel_holds_the_data_files_and_the_entry_points(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        text = archive.read(entry_points).decode()
    data = {
        path.relative_to(ROOT).as_posix()
        for package in ("simplefsdp", "inductor_passes")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert {"simplefsdp/py.typed", "inductor_passes/py.typed", "simplefsdp/rehearsal/channel.cpp"} <= data
    assert data <= set(names)
    assert not any(name.startswith(("tests", "benchmarks", "examples")) for name in names)
    assert "simplefsdp = simplefsdp.cli.main:main" in text
    assert "simplefsdp = simplefsdp.compile.backend:simplefsdp" in text


def _imported_when_loaded(path: Path) -> set[str]:
    """Top-level packages that a module imports outside of its functions."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
        todo += [child for child in ast.iter_child_nodes(node) if not isinstance(child, functions)]
    return found


def test_modules_import_nothing_but_the_packages_of_install_requires():
    lines = [line for line in requires("simplefsdp") or () if "extra ==" not in line]
    allowed = {re.match(r"[\w.-]+", line)[0].lower() for line in lines}
    assert {"torch", "filelock", "platformdirs"} <= allowed
    allowed |= {"simplefsdp", "inductor_passes", "functorch", *sys.stdlib_module_names}  # functorch is torch's
    for package in ("simplefsdp", "inductor_passes"):
        for path in (ROOT / package).rglob("*.py"):
            needed = _imported_when_loaded(path) - allowed
            if ".".join(path.relative_to(ROOT).with_suffix("").parts) in ON_A_GPU:
                needed -= {"triton"}
            assert not needed, f"{path.relative_to(ROOT)} imports {needed}, which install_requires does not have"


@pytest.mark.subprocess
def test_importing_the_package_and_asking_for_help_imports_no_torch():
    code = "import sys, simplefsdp, simplefsdp.cli.main as cli; cli.parser(()); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_every_public_name_is_found_and_registers_the_backend():
    assert set(simplefsdp.__all__) == set(simplefsdp._MODULES)
    assert set(simplefsdp.__all__) <= set(dir(simplefsdp))
    assert all(getattr(simplefsdp, name).__module__.startswith("simplefsdp.") for name in simplefsdp.__all__)
    assert "simplefsdp" in torch._dynamo.list_backends()
    with pytest.raises(AttributeError, match="module 'simplefsdp' has no attribute 'simple_fdsp'"):
        simplefsdp.simple_fdsp  # noqa: B018


def test_the_help_of_the_command_says_what_the_modules_of_its_commands_say():
    for name, summary in cli.COMMANDS.items():
        assert cli._module(name).__doc__.split("\n")[0] == f"``simplefsdp {name}``: {summary}"


@pytest.mark.subprocess
def test_the_command_names_the_versions():
    command = [sys.executable, "-m", "simplefsdp", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"simplefsdp {version('simplefsdp')}, torch {version('torch')}"


def test_the_command_runs_from_a_source_tree_that_is_not_installed(monkeypatch):
    def version_of_others(name):
        if name == "simplefsdp":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(cli, "version", version_of_others)
    arguments = cli.parser(["plan"]).parse_args(["plan", "--model", "llama3-8b", "--ranks", "8", "--profile", "h100"])
    assert arguments.ranks == 8


def test_every_pin_but_torch_has_the_hashes_of_its_files() -> None:
    lines = [line.split() for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 90
    for pin, *hashes in lines:
        assert re.fullmatch(r"[\w.-]+==[\w.]+", pin), pin
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), pin
        assert bool(hashes) == (not pin.startswith("torch==")), pin

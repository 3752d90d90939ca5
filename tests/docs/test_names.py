"""Names on the pages exist, and statements about the code are true of the code."""

import ast
import inspect
import json
import re
import subprocess
import sys
from dataclasses import MISSING, fields

import pytest
from torch.distributed.fsdp import FSDPModule, fully_shard

import simplefsdp
from benchmarks.first_light import SYSTEMS
from benchmarks.overlap import report, summary
from simplefsdp.compile.options import Options
from simplefsdp.frontend.fsdp_methods import FSDPMethods
from tests.docs.pages import ROOT, pages, rows, section
from tests.docs.test_blocks import command_parsers
from tests.soak.__main__ import CAMPAIGNS

PAGES = pages()
STATES = {"tested on CPU", "structure checked", "refused", "run on a GPU", "run by hand", "not run"}
"""Every state that the support matrix may give."""
OPTION_TABLES = {
    "plan": "docs/cluster.md",
    "explain": "docs/debugging.md",
    "rehearse": "docs/rehearsal.md",
    "calibrate": "docs/profiles.md",
    "compare": "docs/comparing.md",
}


def _names_of_tests() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found |= {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    return {name for name in found if name.startswith("test_")}


def test_readme_is_at_most_200_lines():
    assert len(PAGES["README.md"].splitlines()) <= 200


def test_every_row_of_the_support_matrix_has_a_known_state_and_names_tests_that_exist():
    tests = _names_of_tests()
    text = PAGES["docs/support.md"]
    assert {row[0] for row in rows(text.split("## Features")[0])} == STATES
    assert len(rows(section(text, "## Features"))) > 40
    assert len(rows(section(text, "## Works with"))) >= 15
    for row in rows(section(text, "## Features")) + rows(section(text, "## Works with")):
        feature, state, remark, shown_by = row
        assert feature
        assert state in STATES, row
        named = re.findall(r"`(test_\w+)`", shown_by)
        assert re.sub(r"`test_\w+`(, )?", "", shown_by) == "", row
        assert set(named) <= tests, f"{feature}: {set(named) - tests}"
        assert named or state == "not run" or (state == "run by hand" and "make " in feature), row
        assert not re.match(r"(yes|no|not tested)\b", remark), row


def test_every_state_of_the_support_matrix_is_used():
    found = rows(section(PAGES["docs/support.md"], "## Features")) + rows(
        section(PAGES["docs/support.md"], "## Works with")
    )
    assert {row[1] for row in found} == STATES


def test_the_migration_table_names_every_method_of_fsdp2_and_every_argument():
    table = PAGES["docs/migrating.md"]
    methods = {name for name in vars(FSDPModule) if not name.startswith("_")}
    arguments = set(inspect.signature(fully_shard).parameters) - {"module"}
    assert {name for name in methods | arguments if f"`{name}" not in table and f".{name}(" not in table} == set()
    found = rows(table)
    assert len(found) > 25
    assert all(answer for _, answer in found)


def test_every_file_and_folder_named_exists():
    named = set()
    folders = "simplefsdp|inductor_passes|examples|benchmarks|tests|docs"
    for page, text in PAGES.items():
        found = set(re.findall(rf"[`( ]((?:\.\./)?(?:{folders})/[\w./-]*[\w/])", text))
        for name in found:
            path = name.removeprefix("../")
            assert (ROOT / path).exists(), f"{page}: {name}"
        named |= found
    assert len([name for name in named if name.endswith(".py")]) >= 10


def test_every_relative_link_leads_to_a_file():
    for page, text in PAGES.items():
        folder = (ROOT / page).parent
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if not target.startswith("https://"):
                assert (folder / target).exists(), f"{page}: {target}"


def test_every_module_and_name_of_this_library_in_backticks_exists():
    for page, text in PAGES.items():
        for name in re.findall(r"`(?:python -m )?((?:simplefsdp|benchmarks|examples)(?:\.\w+)+)", text):
            path, _, attribute = name.rpartition(".")
            module = ROOT / (name.replace(".", "/") + ".py")
            folder = ROOT / name.replace(".", "/")
            if module.exists() or folder.is_dir() or name in ("simplefsdp.clip_grad_norm_",):
                continue
            holder = ROOT / (path.replace(".", "/") + ".py")
            holder = holder if holder.exists() else ROOT / path.replace(".", "/") / "__init__.py"
            assert holder.exists(), f"{page}: {name}"
            assert re.search(rf"\b{attribute}\b", holder.read_text()), f"{page}: {name}"


def test_every_package_is_in_the_architecture_page():
    table = {row[0].strip("`") for row in rows(section(PAGES["docs/architecture.md"], "## Packages"))}
    folders = {
        path.parent.relative_to(ROOT).as_posix() + "/"
        for package in ("simplefsdp", "inductor_passes")
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert table == folders - {"simplefsdp/"}


def test_the_api_page_documents_every_public_name():
    """The table of names is made from ``simplefsdp.__all__`` when the site is built; each links to its entry."""
    hooks = _hooks()
    found = hooks.public_names()
    assert [name for name, _, _ in found] == list(simplefsdp.__all__)
    for name, module, summary_line in found:
        assert f"::: {module}.{name}\n" in PAGES["docs/api.md"]
        assert getattr(simplefsdp, name).__module__ == module
        assert len(summary_line) > 20
        assert f"[`{name}`](#{module}.{name})" in hooks.public_names_table()
    for entry in re.findall(r"^::: (\S+)$", PAGES["docs/api.md"], re.M):
        module, _, name = entry.rpartition(".")
        assert hasattr(sys.modules[module] if module in sys.modules else __import__(module, fromlist=[name]), name)


def _hooks():
    pytest.importorskip("mkdocs")  # the extra "docs" of setup.py
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("docs_hooks", ROOT / "docs/hooks.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_options_is_that_of_the_code():
    found = rows(section(PAGES["docs/plans.md"], "## Options of the backend"))
    in_code = {f.name: f.default_factory() if f.default is MISSING else f.default for f in fields(Options)}
    assert {name.strip("`"): ast.literal_eval(default.strip("`")) for name, default, _ in found} == in_code
    assert [name.strip("`") for name, _, _ in found] == [f.name for f in fields(Options)]


def test_the_arguments_of_simple_fsdp_are_named():
    text = PAGES["docs/quickstart.md"] + PAGES["docs/migrating.md"]
    arguments = set(inspect.signature(simplefsdp.simple_fsdp).parameters) - {"model"}
    assert {name for name in arguments if not re.search(rf"\b{name}\b", text)} == set()


def test_the_methods_of_a_sharded_module_are_in_the_migration_table():
    methods = {name for name in vars(FSDPMethods) if not name.startswith("_")}
    assert {name for name in methods if not re.search(rf"\b{name}\b", PAGES["docs/migrating.md"])} == set()


@pytest.mark.parametrize("command", sorted(OPTION_TABLES))
def test_the_table_of_a_commands_options_is_that_of_its_help(command: str):
    assert set(command_parsers()) == set(OPTION_TABLES)
    parser = command_parsers()[command]
    shown = parser.format_help()
    in_code = {
        action.option_strings[-1] if action.option_strings else action.dest
        for action in parser._actions
        if action.dest != "help"
    }
    in_docs = {
        name
        for cells in rows(PAGES[OPTION_TABLES[command]])
        for name in re.findall(r"`(--[\w-]+|report)`", cells[0])
        if len(cells) == 2
    }
    assert in_docs == in_code
    assert all(name in shown for name in in_docs)


def test_options_in_backticks_are_options_of_a_command():
    known = {option for parser in command_parsers().values() for option in parser._option_string_actions}
    for page, text in PAGES.items():
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        for span in re.findall(r"`([^`\n]+)`", prose):
            if "torch" not in span and "make" not in span:
                assert set(re.findall(r"(?<!\S)--[a-z][\w-]*", span)) <= known, f"{page}: {span}"


def test_the_tables_of_overlap_are_those_of_the_committed_results():
    files = sorted((ROOT / "benchmarks" / "results").glob("overlap-*.json"))
    assert [file.stem for file in files] == ["overlap-torch2.13.0", "overlap-torch2.15.0"]
    for file in files:
        measured = json.loads(file.read_text())
        label = measured.pop("machine")
        assert summary(measured, label) in PAGES["docs/benchmarks.md"]
        assert file.with_suffix(".md").read_text() == report(measured, label)


def test_the_table_of_the_readme_is_part_of_that_of_overlap():
    table = {row[0]: row[1:] for row in rows(PAGES["docs/benchmarks.md"].split("torch 2.15, commit")[0])}
    names = {
        '`plan="block"`': "block",
        '`plan="auto"`': "auto",
        '`plan="auto"`, `reshard_after_forward="auto"`': "auto-kept",
        '`plan="none"` (TorchInductor alone)': "none",
        "FSDP2": "fsdp2",
        "FSDP2, blocks compiled": "fsdp2-compile",
    }
    found = rows(section(PAGES["README.md"], "## Measured"))
    assert [row[0] for row in found] == list(names)
    for name, *figures in found:
        assert figures == table[names[name]][:4], name


def test_the_table_of_gpus_in_the_readme_rounds_those_of_the_benchmarks():
    def ratios(title: str, step: int, peak: int) -> dict[tuple[str, str], tuple[float, ...]]:
        found: dict[tuple[str, str], tuple[float, ...]] = {}
        label = ""
        for row in rows(section(PAGES["docs/benchmarks.md"], title)):
            label = row[0] or label
            if len(row) > peak and re.fullmatch(r"[\d.]+x", row[step]):
                found.setdefault((label, row[1]), tuple(float(row[i][:-1]) for i in (step, peak)))
        return found

    rehearsed, simulated = ratios("## One GPU", 3, 9), ratios("## A GPU that does nothing", 3, 8)
    labels = {
        "8B, 64 ranks, 2048 tokens": ("`8b-64-2048`: 64 ranks, 2048 tokens", "2048", "auto"),
        "8B, 64 ranks, 8192 tokens": ("`8b-64`: 64 ranks, 8192 tokens", "8192", "auto"),
        "8B, 8 ranks, 4096 tokens": ("`8b-8`: 8 ranks, 4096 tokens", "4096, 8 ranks", "auto"),
        "8B, 128 ranks, 4096 tokens": ("`8b-128`: 128 ranks, 4096 tokens", "", ""),
        "8B, 512 ranks, 4096 tokens, budget 21.3 GiB": ("", "4096, 512 ranks", "auto, budget 21.3 GiB"),
        "70B, 4 layers, 64 ranks, 8192 tokens": (None, "8192, 64 ranks, 4 layers", "auto"),  # measured by layers
        "70B, 8 layers, 256 ranks, 4096 tokens": ("", "4096, 256 ranks, 8 layers", "auto"),
    }
    shown = {row[0]: row[1:] for row in rows(section(PAGES["README.md"], "## On GPUs"))}
    assert shown.keys() == labels.keys()
    for name, (scenario, tokens, auto) in labels.items():
        figures = [simulated.get((tokens, system)) for system in ("block", auto)]
        cells = iter(shown[name][4:])
        if scenario is not None:
            figures = [*(rehearsed.get((scenario, f"{system}, exchange")) for system in ("block", "auto")), *figures]
            cells = iter(shown[name])
        for both in figures:
            for figure in both or (None, None):
                cell = next(cells)
                assert cell == "-" if figure is None else abs(float(cell) - figure) < 0.0051, (name, cell, figure)


def test_two_real_ranks_have_a_row_for_every_system():
    measured = section(PAGES["docs/benchmarks.md"], "## Two real gloo ranks")
    for system in SYSTEMS:
        assert re.search(rf"^\| {re.escape(system)} \| \d", measured, re.MULTILINE), system


def test_every_benchmark_that_make_bench_runs_has_a_section():
    of_make = set(re.findall(r"-m (benchmarks\.\w+)", (ROOT / "Makefile").read_text()))
    table = PAGES["docs/benchmarks.md"].split("\n## ")[0]
    for name in of_make:
        assert f"| `python -m {name}` |" in table
        assert re.search(rf"^`python -m {name}`", PAGES["docs/benchmarks.md"], re.M), name


@pytest.mark.subprocess
def test_every_section_of_figures_names_a_commit_of_this_repository():
    sections = re.split(r"^## ", PAGES["docs/benchmarks.md"], flags=re.M)[1:]
    git = ["git", "-C", str(ROOT), "rev-parse", "--quiet", "--verify"]
    if subprocess.run([*git, "HEAD"], capture_output=True, check=False).returncode:
        pytest.skip("not a git repository")
    if (ROOT / ".git/shallow").exists():
        pytest.skip("a shallow clone has no older commits")
    for text in sections:
        commits = re.findall(r"commit ([0-9a-f]{7})\b", text)
        assert commits or "not run" in text, text.splitlines()[0]
        for commit in commits:
            done = subprocess.run([*git, f"{commit}^{{commit}}"], capture_output=True, check=False)
            assert done.returncode == 0, commit


def test_pages_name_no_path_of_a_machine_and_no_host_but_sources():
    for page, text in PAGES.items():
        assert not re.findall(r"(?<![\w.])/(?:home|work|root|tmp|opt|usr|Users)/\S+", text), page
        hosts = set(re.findall(r"https?://([^/)\s]+)", text))
        assert hosts <= {"arxiv.org", "ui.perfetto.dev"}, page


@pytest.mark.subprocess
def test_the_site_builds_strictly(tmp_path):
    """Every page is in the navigation, every link and anchor leads somewhere, and nothing is fetched."""
    pytest.importorskip("mkdocstrings")  # the extra "docs" of setup.py
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = "\n".join(path.read_text() for path in (tmp_path / "site").glob("*.html"))
    loaded = re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"?(https?://[^\"\s>]+)", built)
    assert not loaded
    for name in simplefsdp.__all__:
        assert name in built
    assert "<!-- table of public names -->" not in built
    assert "<!-- layers of tests/test_structure.py -->" not in built


def test_the_figures_of_reliability_are_those_of_the_committed_results():
    page = PAGES["RELIABILITY.md"]
    table = {re.sub(r"\W", " ", row[0]).split()[0]: row for row in rows(page.split("\n## ")[0])}
    assert {re.findall(r"soak (\w+)", row[3])[0] for row in table.values() if "soak" in row[3]} == {*CAMPAIGNS}
    for row in table.values():
        if "soak" in row[3]:
            (campaign,) = re.findall(r"soak (\w+)", row[3])
            found = json.loads((ROOT / f"benchmarks/results/reliability-{campaign}.json").read_text())
            assert [row[1], row[2]] == [f"{found['runs']:,}", str(len(found["failures"]))], campaign
    misuses = (ROOT / "tests/simplefsdp/misuses.txt").read_text().splitlines()
    assert table["misuses"][1] == str(sum(not line.startswith(" ") for line in misuses))

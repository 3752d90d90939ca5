"""Every code block of README.md and docs/ runs, or says why it does not."""

import argparse
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.pages import LANGUAGES, ROOT, Block, blocks, commands, pages
from tests.ranks import TORCHRUN, Ranks, run

SCRIPTS = [block for block in blocks("python") if "init_process_group" in block.text]
SNIPPETS = [block for block in blocks("python") if not block.not_run and block not in SCRIPTS]
REHEARSED = [block for block in SNIPPETS if "rehearsal.world" in block.text]
SHELL = blocks("sh")
RUN_SHELL = [block for block in SHELL if not block.not_run]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def names(found: list[Block]) -> list[str]:
    return [block.name for block in found]


def test_every_fence_is_a_block_of_a_known_language_and_a_reason_stands_above_a_block():
    for page, text in pages().items():
        of_page = [block for block in blocks() if block.page == page]
        assert len(re.findall(r"^ *```", text, re.M)) == 2 * len(of_page), page
        assert len(re.findall("^<!-- not run:", text, re.M)) == sum(block.not_run is not None for block in of_page), (
            page
        )
        assert {block.language for block in of_page} <= set(LANGUAGES), page


def test_text_blocks_hold_output_and_diagrams_and_no_code():
    for block in blocks("text"):
        first = block.text.split()[0]
        assert block.not_run is None, block.name
        assert first not in ("import", "from", "with", "make", "pip", "simplefsdp", "python", "torchrun"), block.name


def test_a_reason_says_what_is_missing_or_names_the_test_that_runs_the_block():
    for block in blocks():
        if block.not_run is not None:
            named = re.findall(r"tests/[\w/]+(?:\.py)?", block.not_run)
            assert all((ROOT / name).exists() for name in named), block.name
            known = re.search(r"needs|takes|minute|checks|above|script", block.not_run)
            assert named or known, f"{block.name}: {block.not_run}"


def test_readme_and_quickstart_show_the_same_script():
    assert [block.page for block in SCRIPTS] == ["README.md", "docs/quickstart.md"]
    assert SCRIPTS[0].text == SCRIPTS[1].text
    assert "print" not in SCRIPTS[0].text
    assert len(blocks("python")) > 10


@pytest.mark.subprocess
def test_the_two_lines_train_on_two_ranks(tmp_path):
    path = tmp_path / "script.py"
    printed_loss = "print(f'loss {loss:.3f}', flush=True)\ndist.destroy"
    path.write_text(SCRIPTS[0].text.replace("dist.destroy", printed_loss))
    printed = run([*TORCHRUN, str(path)])
    found = [float(loss) for loss in re.findall(r"loss (\d+\.\d{3})", printed)]  # both may be on one line
    assert len(found) == 2
    assert all(0 < loss < 1.2 for loss in found)


def _run_snippet(text: str, name: str, folder: str) -> dict[str, str]:
    """Run a block in an empty folder, beside a fresh model.

    Blocks are lowered with ``aot_eager``, to be quick. The script of the quickstart is lowered with TorchInductor.
    """
    from simplefsdp.models.llama import LlamaConfig
    from tests.models import tiny_llama

    model = tiny_llama(layers=2)
    shape = model.tok_embeddings.weight.shape
    config = LlamaConfig(dim=36, layers=1, heads=6, kv_heads=2, ffn_dim=50, vocab_size=30, max_seq_len=32)
    scope: dict[str, Any] = {"torch": torch, "model": model, "config": config}
    scope["tokens"] = torch.arange(16).reshape(2, 8) % shape[0]
    compile_as_it_is, before = torch.compile, Path.cwd()

    def compile_quickly(model: Any, *, backend: str, options: dict[str, Any] | None = None) -> Any:
        options = {"plan": "block", "lower_with": "aot_eager"} | (options or {})
        return compile_as_it_is(model, backend=backend, options=options)

    Path(folder).mkdir(exist_ok=True)
    os.chdir(folder)
    torch.compile = compile_quickly  # type: ignore[assignment]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(text, name, "exec"), scope)
    finally:
        torch.compile = compile_as_it_is
        os.chdir(before)
    gradients = [p.grad for p in scope["model"].parameters()]
    trained = any(grad is not None for grad in gradients)
    return {"printed": printed.getvalue(), "trained": "yes" if trained else "no"}


@pytest.mark.parametrize("block", [b for b in SNIPPETS if b not in REHEARSED], ids=lambda block: block.name)
def test_a_block_of_python_runs_on_two_ranks(block: Block, two_ranks: Ranks, tmp_path):
    for result in two_ranks.run(_run_snippet, block.text, block.name, str(tmp_path / "work")):
        assert ("backward()" not in block.text) or result["trained"] == "yes" or "zero_grad" in block.text
        assert ("print(" not in block.text) or result["printed"].strip()


@pytest.mark.parametrize("block", REHEARSED, ids=lambda block: block.name)
def test_a_block_with_a_rehearsal_runs_without_other_ranks(block: Block, tmp_path):
    printed = _run_snippet(block.text, block.name, str(tmp_path / "work"))["printed"]
    assert "all_gather" in printed
    assert "reduce_scatter" in printed


@cache
def _parser() -> argparse.ArgumentParser:
    """The parser of the command ``simplefsdp`` with the arguments of all its commands."""
    from simplefsdp.cli import main

    return main.parser(main.COMMANDS)


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command of ``simplefsdp``."""
    (subparsers,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(subparsers.choices)


def check_command(line: str) -> None:
    """Fail unless a shell line names a make target, a module, a command of this library with its options, or a tool."""
    words = shlex.split(line)
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        assert targets, line
        assert set(targets) <= TARGETS, line
    elif words[0] in ("torchrun", "python"):
        if "-m" in words:
            module = words[words.index("-m") + 1]
            rest = words[words.index("-m") + 2 :]
            if module == "simplefsdp":
                _parser().parse_args(rest)
            elif module != "torchtitan.train":
                assert (ROOT / (module.replace(".", "/") + ".py")).exists(), line
                _check_options((ROOT / (module.replace(".", "/") + ".py")).read_text(), rest, line)
        else:
            assert words[-1] == "script.py", line
    elif words[0] == "simplefsdp":
        _parser().parse_args(words[1:])
    else:
        assert words[0] in ("pip", "export", "diff"), line


def _check_options(source: str, words: list[str], line: str) -> None:
    for word in words:
        assert not word.startswith("--") or f'"{word}"' in source, f"{line}: no option {word}"


@pytest.mark.parametrize("block", SHELL, ids=names(SHELL))
def test_every_command_of_a_shell_block_exists_with_its_options(block: Block):
    found = commands(block)
    assert found, block.name
    for line in found:
        check_command(line)


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize("block", RUN_SHELL, ids=names(RUN_SHELL))
def test_a_shell_block_without_a_reason_runs(block: Block, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for line in commands(block):
        words = shlex.split(line)
        assert words[0] == "simplefsdp", f"{block.name}: the test knows how to run simplefsdp only"
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.strip()


def test_every_make_target_that_a_page_names_is_there():
    named = set()
    for text in pages().values():
        named |= set(re.findall(r"\bmake ([a-z][\w-]*)", "\n".join(re.findall(r"`[^`\n]*`|^make .*", text, re.M))))
    assert {"train", "test", "lint", "bench", "docs"} <= named <= TARGETS
    assert {"train", "test"} <= set(re.findall(r"make (\w+)", pages()["README.md"]))

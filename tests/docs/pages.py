"""The pages of the documentation, and the code blocks in them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LANGUAGES = ("python", "sh", "text")
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str
    not_run: str | None
    """The reason why no test runs this block, if the page gives one."""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> dict[str, str]:
    """The text of every page, by its path in the repository."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "RELIABILITY.md")]
    paths = [*top, *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def blocks(language: str | None = None) -> list[Block]:
    """Code blocks of all pages, of one language or of all."""
    found = [
        Block(page, text.count("\n", 0, match.start("text")), match["language"], match["text"], match["reason"])
        for page, text in pages().items()
        for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def commands(block: Block) -> list[str]:
    """The commands of a shell block, without comments."""
    lines = [re.sub(r"\s+# .*", "", line).strip() for line in block.text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def section(text: str, heading: str) -> str:
    """Return the text below a heading, up to the next heading of its level."""
    level = heading.split()[0]
    return re.split(rf"^{level} ", text.split(f"\n{heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]


def rows(text: str) -> list[list[str]]:
    """The rows of all tables of a text, without heads and lines, a list of cells each."""
    found: list[list[str]] = []
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if line.startswith("|") and i and lines[i - 1].startswith("|") and not re.fullmatch(r"[|\s:-]+", line):
            found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))])
    return found

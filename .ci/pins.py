"""Write the hashes of the files of each pinned version into constraints.txt, and print vulnerabilities that are known.

    python .ci/pins.py                              # after a version was changed

Both are what PyPI says, which tells vulnerabilities of the latest version of a project only. Torch has no hash: which
file it is depends on the index that it comes from.
"""

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

PINS = Path(__file__).parents[1] / "constraints.txt"
WITHOUT_HASH = "torch"
_TAG = r"(py2\.)?py3\d*-none|cp31[1-4]-cp31\d|cp3\d+-abi3"
_PLATFORM = r"any|(many)?linux.*_(x86_64|aarch64)|macosx.*_(arm64|x86_64|universal2)"
USED = re.compile(rf"\.tar\.gz$|-({_TAG})-({_PLATFORM})\.whl$")
"""Files that Python 3.11 to 3.14 may take on Linux and macOS."""


class Pinned(NamedTuple):
    """What the index says of a pinned version."""

    version: str
    hashes: list[str]
    latest: str
    vulnerabilities: list[str]
    """Those of the latest version."""


def main() -> None:
    lines = PINS.read_text().splitlines()
    names = {line: line.split()[0] for line in lines if line and not line.startswith("#")}
    with ThreadPoolExecutor(8) as threads:
        found = dict(zip(names, threads.map(look_up, names.values()), strict=True))
    PINS.write_text("".join(" ".join([names.get(line, line), *hashes_of(found.get(line))]) + "\n" for line in lines))
    asked = [each for each in found.values() if each.version == each.latest]
    vulnerable = [f"{each.version}: {', '.join(each.vulnerabilities)}" for each in asked if each.vulnerabilities]
    print(
        f"{len(asked)} of {len(found)} versions are the latest of their projects; of these are known to be vulnerable:"
    )
    print("\n".join(vulnerable or ["none"]))


def look_up(pin: str) -> Pinned:
    """Return what the index says of ``name==version``."""
    name, _, version = pin.partition("==")
    name = re.sub(r"[-_.]+", "-", name).lower()
    project = ask(f"https://pypi.org/pypi/{name}/json")
    start = re.compile(rf"{name.replace('-', '[-_.]')}-{re.escape(version)}(-|\.tar)", re.IGNORECASE)
    files = ask(f"https://pypi.org/simple/{name}/")["files"]
    used = [file for file in files if start.match(file["filename"]) and USED.search(file["filename"])]
    return Pinned(
        pin,
        sorted(file["hashes"]["sha256"] for file in used) if name != WITHOUT_HASH else [],
        f"{pin.partition('==')[0]}=={project['info']['version']}",
        [each["id"] for each in project["vulnerabilities"]],
    )


def hashes_of(pinned: Pinned | None) -> list[str]:
    """Return the options of pip for the files of a version."""
    return [f"--hash=sha256:{each}" for each in (pinned.hashes if pinned else ())]


def ask(address: str) -> Any:
    """Return the JSON at an address."""
    accepted = "application/vnd.pypi.simple.v1+json, application/json"
    request = urllib.request.Request(address, headers={"Accept": accepted})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()

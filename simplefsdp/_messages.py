"""Wording shared by the errors of the public API."""

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: object, valid: Iterable[str]) -> str:
    """'unknown <kind> <name>', the nearest valid name if there is one, and all of them."""
    names = list(valid)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}{hint} (valid: {', '.join(map(repr, names))})"

"""Wording that several packages share."""

import difflib
from collections.abc import Iterable, Sequence


def unknown(kind: str, name: object, valid: Iterable[str]) -> str:
    """'unknown <kind> <name>', the nearest valid name if there is one, and those that are valid."""
    names = list(valid)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    shown = ", ".join(map(repr, names[:20])) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return f"unknown {kind} {name!r}{hint} (valid: {shown})"


def fqn_range(fqns: Sequence[str]) -> str:
    """Return the first and the last of some FQNs and their number, for people."""
    return fqns[0] if len(fqns) == 1 else f"{fqns[0]} .. {fqns[-1]} ({len(fqns)})"

"""Wording that several packages share."""

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

_SHOWN = 20
"""Number of valid names in a message; where there are more, the nearest."""


def unknown(kind: str, name: object, valid: Iterable[str]) -> str:
    """'unknown <kind> <name>', the nearest valid name if there is one, and those that are valid."""
    names = list(valid)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    nearest = names if len(names) <= _SHOWN else difflib.get_close_matches(str(name), sorted(names), _SHOWN, cutoff=0)
    shown = ", ".join(map(repr, nearest)) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return f"unknown {kind} {name!r}{hint} (valid: {shown})"


def matching(option: str, kind: str, pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that match a glob.

    Raises:
        ValueError: there is none; the message has the option and the nearest name.
    """
    every = list(names)
    found = [name for name in every if fnmatchcase(name, pattern)]
    if not found:
        raise ValueError(f"{option}: {unknown(kind, pattern, every)}")
    return found


def fqn_range(fqns: Sequence[str]) -> str:
    """Return the first and the last of some FQNs and their number, for people."""
    return fqns[0] if len(fqns) == 1 else f"{fqns[0]} .. {fqns[-1]} ({len(fqns)})"

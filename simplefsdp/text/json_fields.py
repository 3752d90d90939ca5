"""Objects from JSON files, with errors that name the file and, in files that people write, the field."""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from simplefsdp.text.messages import unknown

T = TypeVar("T")

MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Errors of code that reads a file which this library did not write, or did not write like this."""


def read_json(path: str | Path, what: str, make: Callable[[Any], T]) -> T:
    """Return the object that ``make`` makes of the JSON in a file; errors as of ``read_file``."""
    return read_file(path, what, lambda text: make(json.loads(text)))


def read_file(path: str | Path, what: str, parse: Callable[[str], T]) -> T:
    """Return the object that ``parse`` makes of the text of a file.

    Args:
        what: the kind of file, for errors: ``"profile"``.
        parse: may raise whatever comes of a text that this library did not write, nested however deep.

    Raises:
        ValueError: the file cannot be read or parsed; names the kind of file and the path.
    """
    try:
        return parse(Path(path).read_text())
    except (OSError, *MALFORMED) as error:
        raise ValueError(f"{what} file {path}: {type(error).__name__}: {error}") from error


def parse_fields(made: type[T], found: Any, where: str, parsers: Mapping[str, Callable[[Any, str], Any]]) -> T:
    """Return an instance of a dataclass, from an object of JSON.

    Args:
        found: the object; a field with a default may be missing.
        where: the path of the object in the file, for errors.
        parsers: what parses a field; fields without one are text or numbers.

    Raises:
        ValueError: a field is missing, unknown or of another type; names it.
    """
    if not isinstance(found, Mapping):
        raise ValueError(f"{where}: expected an object, found {found!r}")
    known: Any = fields(made)  # type: ignore[arg-type]
    names = [field.name for field in known]
    for name in found:
        if name not in names:
            raise ValueError(f"{where}: " + unknown("field", name, names))
    values = {}
    for field in known:
        if field.name in found:
            values[field.name] = parsers.get(field.name, parse_plain)(found[field.name], f"{where}.{field.name}")
        elif field.default is MISSING:
            raise ValueError(f"{where}.{field.name}: missing")
    return made(**values)


def parse_plain(found: Any, where: str) -> Any:
    """Return ``found`` if it is text, where the path ends in ``name`` or ``source``, or else a number."""
    is_text = where.endswith((".name", ".source"))
    right = isinstance(found, str) if is_text else isinstance(found, int | float) and not isinstance(found, bool)
    if not right:
        raise ValueError(f"{where}: expected {'text' if is_text else 'a number'}, found {found!r}")
    return found


def parse_optional(found: Any, where: str) -> Any:
    """Return ``None`` for ``null``, and else what ``parse_plain`` returns."""
    return None if found is None else parse_plain(found, where)


def parse_values(parse: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Return a parser of an object whose values are all parsed by ``parse``."""

    def parsed(found: Any, where: str) -> Any:
        if not isinstance(found, Mapping):
            raise ValueError(f"{where}: expected an object, found {found!r}")
        return {name: parse(value, f"{where}.{name}") for name, value in found.items()}

    return parsed

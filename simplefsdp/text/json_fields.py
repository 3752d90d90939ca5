"""Dataclasses from JSON files, with errors that name the file and the field."""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from simplefsdp.text.messages import unknown

T = TypeVar("T")


def read_json(path: str | Path, what: str, make: Callable[[Any], T]) -> T:
    """Return what ``make`` makes of the JSON in a file.

    Args:
        what: the kind of file, for errors: ``"profile"``.
        make: raises ``ValueError`` that names the field that is not valid.

    Raises:
        ValueError: the file cannot be read, is no JSON, or ``make`` refuses it; names the kind of file and the path.
    """
    try:
        return make(json.loads(Path(path).read_text()))
    except (OSError, ValueError) as error:
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


def parse_values(parse: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Return a parser of an object whose values are all parsed by ``parse``."""

    def parsed(found: Any, where: str) -> Any:
        if not isinstance(found, Mapping):
            raise ValueError(f"{where}: expected an object, found {found!r}")
        return {name: parse(value, f"{where}.{name}") for name, value in found.items()}

    return parsed

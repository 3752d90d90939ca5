"""Which versions of torch this library was tested with."""

import warnings

import torch

OLDEST = (2, 11)
"""Major and minor version of the oldest torch that is supported, as ``setup.py`` says."""
NEWEST = (2, 15)
"""Major and minor version of the newest torch that the tests were run with."""


def parse(version: str) -> tuple[int, int]:
    """Return the major and minor number of a version such as ``"2.13.0+cpu"``."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


VERSION = parse(torch.__version__)
"""Major and minor version of the torch that is installed."""


def check_version(version: str) -> None:
    """Refuse a torch that is older than ``OLDEST``, and warn once of one that is newer than ``NEWEST``.

    Raises:
        ImportError: the version is older than ``OLDEST``.
    """
    found = parse(version)
    oldest, newest = (".".join(map(str, known)) for known in (OLDEST, NEWEST))
    if found < OLDEST:
        raise ImportError(f"simplefsdp needs torch {oldest} or newer; torch {version} is installed")
    if found > NEWEST:
        warnings.warn(f"simplefsdp was tested with torch {oldest} to {newest}; torch {version} is newer", stacklevel=2)

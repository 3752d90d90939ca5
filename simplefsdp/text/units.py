"""Bytes and seconds, as people write and read them."""

import math


def ms(seconds: float) -> str:
    """Return a time in milliseconds, for people."""
    return f"{1e3 * seconds:.1f} ms"


def gib(nbytes: float) -> str:
    """Return a size in GiB, or in MiB if it is less than one GiB, for people."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def parse_bytes(value: object) -> int:
    """Return the number of bytes that ``60_000_000``, ``"60GiB"`` or ``"500 MB"`` means.

    Raises:
        ValueError: ``value`` is neither a number nor a number with a unit, or is not positive.
    """
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    number: float | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str):
        digits = value.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
        unit = value.strip()[len(digits) :].strip().upper()
        try:
            number = float(digits) * units[unit]
        except (ValueError, KeyError):
            number = None
    if number is None or not 1 <= number < math.inf:
        raise ValueError(f"option 'memory_budget': expected bytes, as 60_000_000 or '60GiB', found {value!r}")
    return int(number)

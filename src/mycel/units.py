"""Bytes, seconds and rates: parsing what people write, formatting what they read.

Sizes follow nccl-tests: ``KB``, ``MB`` and ``GB`` are powers of 1024. Rates follow networking and
datasheets: ``Mbit/s``, ``Gb/s`` and ``GB/s`` are powers of 1000.
"""

from __future__ import annotations

import re
from fractions import Fraction

from mycel.errors import UsageError

__all__ = [
    "RATE_UNITS",
    "bus_bandwidth_factor",
    "format_seconds",
    "format_size",
    "parse_rate",
    "parse_seconds",
    "parse_size",
]

_SIZE_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_RATE_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SECONDS = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6), "ns": Fraction(1, 10**9)}

#: Bytes a second that one unit of capacity stands for; ``link`` is a unit-less relative capacity.
RATE_UNITS: dict[str, Fraction] = {
    "bit/s": Fraction(1, 8),
    "kbit/s": Fraction(10**3, 8),
    "Mbit/s": Fraction(10**6, 8),
    "Gbit/s": Fraction(10**9, 8),
    "Gb/s": Fraction(10**9, 8),
    "Tbit/s": Fraction(10**12, 8),
    "B/s": Fraction(1),
    "kB/s": Fraction(10**3),
    "MB/s": Fraction(10**6),
    "GB/s": Fraction(10**9),
    "TB/s": Fraction(10**12),
}

#: A port as people write it: 100G, 400GbE, 25 GE. Bits, whatever the letters.
_PORT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([MGT])(?:b?E)?\s*$")
_RATE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(bit|b|B)(?:ps|/s)\s*$")
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*$", re.IGNORECASE)
_TIME = re.compile(r"^\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(ns|us|ms|s)\s*$")


def parse_rate(text: str) -> Fraction:
    """Bytes a second, exactly, from text such as ``400 Mbit/s``, ``25 GB/s`` or ``10 Gb/s``.

    Raises:
        UsageError: the text has no number, no rate unit, or is not positive.

    Examples:
        >>> parse_rate("400 Mbit/s")
        Fraction(50000000, 1)
        >>> parse_rate("25GB/s") == 25 * 10**9
        True
        >>> parse_rate("100GbE") == parse_rate("100G") == parse_rate("100 Gbit/s")
        True
    """
    port = _PORT.match(text)
    match = _RATE.match(f"{port[1]} {port[2]}bit/s" if port else text)
    if not match:
        raise UsageError(f"cannot read {text!r} as a bandwidth; write for example '400 Mbit/s' or '25 GB/s'")
    number, prefix, base = match.groups()
    rate = Fraction(number) * _RATE_PREFIXES[prefix]
    if base in ("bit", "b"):
        rate /= 8
    if rate <= 0:
        raise UsageError(f"bandwidth {text!r} must be positive")
    return rate


def parse_seconds(text: str) -> float:
    """Seconds from text such as ``50us`` or ``1.5 ms``.

    Raises:
        UsageError: the text has no number or no time unit.

    Examples:
        >>> parse_seconds("50us")
        5e-05
    """
    match = _TIME.match(text)
    if not match:
        raise UsageError(f"cannot read {text!r} as a time; write for example '50us' or '1.5ms'")
    number, unit = match.groups()
    return float(Fraction(number) * _SECONDS[unit])


def parse_size(text: str) -> int:
    """Bytes from text such as ``64KB``, ``16M`` or ``4096``; powers of 1024, as nccl-tests has them.

    Raises:
        UsageError: the text is no size, or not a whole number of bytes.

    Examples:
        >>> parse_size("64KB"), parse_size("16M"), parse_size("100")
        (65536, 16777216, 100)
    """
    match = _SIZE.match(text)
    if not match:
        raise UsageError(f"cannot read {text!r} as a size; write for example '64KB' or '16MB'")
    number, prefix = match.groups()
    size = Fraction(number) * 1024 ** _SIZE_POWERS[prefix.upper()]
    if size.denominator != 1 or size <= 0:
        raise UsageError(f"size {text!r} must be a positive whole number of bytes")
    return int(size)


def format_size(num_bytes: int) -> str:
    """Shortest exact text for a number of bytes.

    Examples:
        >>> format_size(65536), format_size(16 << 20), format_size(1000)
        ('64KB', '16MB', '1000B')
    """
    for suffix, power in (("GB", 30), ("MB", 20), ("KB", 10)):
        if num_bytes >= 1 << power and num_bytes % (1 << power) == 0:
            return f"{num_bytes >> power}{suffix}"
    return f"{num_bytes}B"


def format_seconds(seconds: float) -> str:
    """Three significant digits with the fitting unit.

    Examples:
        >>> format_seconds(0.0123), format_seconds(2.5e-5), format_seconds(75.0)
        ('12.3 ms', '25 us', '75 s')
    """
    for suffix, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {suffix}"
    return f"{seconds / 1e-9:.3g} ns"


def bus_bandwidth_factor(collective: str, num_ranks: int) -> Fraction:
    """busbw / algbw as nccl-tests defines it (PERFORMANCE.md of nccl-tests).

    Args:
        collective: canonical name, for example ``all_reduce``.
        num_ranks: world size.

    Examples:
        >>> bus_bandwidth_factor("all_reduce", 4)
        Fraction(3, 2)
    """
    if collective == "all_reduce":
        return Fraction(2 * (num_ranks - 1), num_ranks)
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return Fraction(num_ranks - 1, num_ranks)
    return Fraction(1)

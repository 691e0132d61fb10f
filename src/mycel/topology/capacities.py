"""From bandwidths as people write them to integer capacities in one unit, exactly."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fractions import Fraction

from mycel.errors import UsageError
from mycel.units import RATE_UNITS, parse_rate, parse_seconds

__all__ = ["fitting_unit", "read_rate", "read_seconds", "unit_of"]

_BIT_UNITS = ("Tbit/s", "Gbit/s", "Mbit/s", "kbit/s", "bit/s")
_BYTE_UNITS = ("TB/s", "GB/s", "MB/s", "kB/s", "B/s")

#: Digits that no bandwidth or time needs; beyond them, exact arithmetic could be made to run for hours.
_LONGEST = 40
_LONG_EXPONENT = re.compile(r"e[+-]?\d{4}", re.IGNORECASE)


def read_rate(text: str) -> Fraction:
    """``mycel.units.parse_rate`` for text from files that anybody may have written.

    Raises:
        UsageError: as there, or the text is absurdly long.
    """
    if len(text) > _LONGEST:
        raise UsageError(f"cannot read {text[:_LONGEST]!r}... as a bandwidth; write for example '400 Mbit/s'")
    return parse_rate(text)


def read_seconds(text: str) -> float:
    """``mycel.units.parse_seconds`` for text from files that anybody may have written.

    Raises:
        UsageError: as there, or the number is absurdly long or large.
    """
    if len(text) > _LONGEST or _LONG_EXPONENT.search(text):
        raise UsageError(f"time {text[:_LONGEST]!r} is out of range")
    try:
        return parse_seconds(text)
    except OverflowError:
        raise UsageError(f"time {text!r} is out of range") from None


def unit_of(text: str) -> str:
    """The unit that a bandwidth is written in, in the spelling of ``mycel.units.RATE_UNITS``.

    Args:
        text: something that ``mycel.units.parse_rate`` reads.

    Examples:
        >>> unit_of("400 Mbps"), unit_of("25GB/s")
        ('Mbit/s', 'GB/s')
    """
    letters = re.sub(r"[\d.\s]", "", text).removesuffix("/s").removesuffix("ps").removesuffix("E").replace("K", "k")
    base = "B/s" if letters.endswith("B") else "bit/s"
    return letters.removesuffix("bit").removesuffix("b").removesuffix("B") + base


def fitting_unit(rates: Collection[Fraction], written: Iterable[str]) -> str:
    """The largest unit in which every rate is whole: one of those written if one of them will do.

    Where no unit will do, the smallest is returned; the caller finds a rate that is not whole in it.

    Args:
        rates: in bytes a second.
        written: units that people used for them; they also decide between bits and bytes.

    Examples:
        >>> fitting_unit([Fraction(50_000_000), Fraction(6_250_000)], ["Mbit/s"])
        'Mbit/s'
        >>> fitting_unit([Fraction(12_500_000_000), Fraction(25_000_000_000)], ["GB/s"])
        'MB/s'
    """
    preferred = sorted(set(written), key=lambda unit: (-RATE_UNITS[unit], unit))
    family = _BYTE_UNITS if preferred and preferred[0] in _BYTE_UNITS else _BIT_UNITS
    for unit in (*preferred, *family):
        if all((rate / RATE_UNITS[unit]).denominator == 1 for rate in rates):
            return unit
    return family[-1]

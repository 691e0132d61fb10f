"""What callers pass, looked at where they pass it: what is wrong ends there in one line, not in a backward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import isfinite
from numbers import Integral, Real
from typing import Any, TypeVar

from mycel.errors import UsageError
from mycel.names import nearest

__all__ = ["check_options", "real_number", "the", "whole_number"]

_Kind = TypeVar("_Kind")


def whole_number(value: object, name: str, *, least: int | None = None, most: int | None = None) -> int:
    """The value as an ``int``: numbers that are whole (NumPy's too), no fractions, no texts, no truth values.

    Args:
        value: that was passed.
        name: of what it is, for the message.
        least, most: bounds, both allowed.

    Raises:
        UsageError: it is another thing, or out of bounds.

    Examples:
        >>> whole_number(4, "bits", least=2)
        4
        >>> whole_number(3.5, "bits")
        Traceback (most recent call last):
        ...
        mycel.errors.UsageError: bits: 3.5 is not a whole number
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"{name}: {_shown(value)} is not a whole number")
    number = int(value)
    if (least is not None and number < least) or (most is not None and number > most):
        raise UsageError(f"{name}: {number} is not {_between(least, most)}")
    return number


def real_number(
    value: object, name: str, *, above: float | None = None, least: float | None = None, most: float | None = None
) -> float:
    """The value as a finite ``float``.

    Args:
        value: that was passed.
        name: of what it is, for the message.
        above: a bound that it may not reach.
        least, most: bounds, both allowed.

    Raises:
        UsageError: it is another thing, or out of bounds.

    Examples:
        >>> real_number(1, "density", above=0, most=1)
        1.0
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not isfinite(value):
        raise UsageError(f"{name}: {_shown(value)} is not a number")
    number = float(value)
    if above is not None and not number > above:
        raise UsageError(f"{name}: {_shown(value)} is not above {above:g}")
    if (least is not None and number < least) or (most is not None and number > most):
        raise UsageError(f"{name}: {_shown(value)} is not {_between(least, most)}")
    return number


def the(kind: type[_Kind], value: object, what: str, *, hint: str = "") -> _Kind:
    """The value, which is of a kind; who passed the class in place of an object is told so.

    Args:
        kind: what it must be.
        value: that was passed.
        what: it is for, with its article: ``"a topology"``.
        hint: the way out.

    Raises:
        UsageError: it is another thing.

    Examples:
        >>> the(str, "ring", "a method")
        'ring'
        >>> the(str, 3, "a method", hint="name it")
        Traceback (most recent call last):
        ...
        mycel.errors.UsageError: expected a method, got int (3): name it
    """
    if isinstance(value, kind):
        return value
    end = f": {hint}" if hint else ""
    if isinstance(value, type) and issubclass(value, kind):
        raise UsageError(f"{value.__name__} is a class, and {what} is wanted: make one, {value.__name__}(...)")
    raise UsageError(f"expected {what}, got {type(value).__name__} ({_shown(value)}){end}")


def check_options(function: Callable[..., Any], options: dict[str, Any], what: str) -> None:
    """Refuse options that a function does not have.

    Args:
        function: that will be called with them.
        options: by name.
        what: has them, for the message.

    Raises:
        UsageError: it has no such option; the message proposes the nearest and names all.
    """
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            raise UsageError(f"{what} has no option {name!r}{nearest(name, known)}; known: {', '.join(known)}")


def _between(least: float | None, most: float | None) -> str:
    if most is None:
        return f"at least {least:g}"
    return f"at most {most:g}" if least is None else f"in {least:g} to {most:g}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}..."

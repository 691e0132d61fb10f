"""Options of methods as text: ``NAME=VALUE``, turned into what the method's signature says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

from mycel.collectives.schedule import Schedule
from mycel.errors import UsageError

__all__ = ["option_kinds", "parse_options"]

#: Kinds of value that text can give, and what to call them in a message.
_KINDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
    str: "a word",
}
_CLAIMS = {"true": True, "yes": True, "false": False, "no": False}


def option_kinds(method: Callable[..., Schedule]) -> dict[str, type]:
    """Options of a method that text can give, and their types; an option of another type is not among them.

    Examples:
        >>> from mycel.collectives.synth.forest import synthesize
        >>> option_kinds(synthesize)
        {'k': <class 'int'>, 'within': <class 'float'>, 'num_bytes': <class 'int'>, 'links': <class 'str'>}
    """
    hints = get_type_hints(method)
    kinds: dict[str, type] = {}
    for name, parameter in signature(method).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        hint = hints[name]
        kind = next((kind for kind in _KINDS if kind in (hint, *get_args(hint))), None)
        if kind is not None:
            kinds[name] = kind
    return kinds


def parse_options(method_name: str, method: Callable[..., Schedule], texts: Iterable[str]) -> dict[str, Any]:
    """Arguments for a method from ``NAME=VALUE`` texts; ``-`` in a name is as good as ``_``.

    Args:
        method_name: for messages.
        method: whose signature says which options there are.
        texts: one an option.

    Raises:
        UsageError: no ``=``, an option the method does not have or that is given twice, or a value of another kind.

    Examples:
        >>> from mycel.collectives.synth.forest import synthesize
        >>> parse_options("forest", synthesize, ["k=2"])
        {'k': 2}
    """
    kinds = option_kinds(method)
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise UsageError(f"option {text!r}: expected NAME=VALUE")
        if name not in kinds:
            has = f"its options: {', '.join(sorted(kinds))}" if kinds else "it has none"
            raise UsageError(f"method {method_name!r} has no option {name!r}; {has}")
        if name in options:
            raise UsageError(f"option {name!r} is given twice")
        options[name] = _value(name, value.strip(), kinds[name])
    return options


def _value(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() in _CLAIMS:
            return _CLAIMS[text.lower()]
    elif text:
        try:
            return kind(text)
        except ValueError:
            pass
    raise UsageError(f"option {name!r}: expected {_KINDS[kind]}, got {text!r}")

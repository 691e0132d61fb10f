"""What a function that is translated calls: written in its place, or called by its symbol; and what it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

__all__ = ["function_of", "ingredients", "linked", "linked_symbol"]


def linked_symbol(callee: Any) -> str | None:
    """By which symbol something is called that has code of its own; ``None`` where it has none."""
    return cast(str, callee.symbol) if getattr(type(callee), "is_linked", False) is True else None


def function_of(callee: Any) -> FunctionType | None:
    """The Python function behind what is written in place where it is called; ``None``: it is none."""
    if linked_symbol(callee) is not None:
        return None
    found = getattr(callee, "function", None)
    return found if isinstance(found, FunctionType) else None


def _named(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function's names stand for: globals, variables of functions around it, and what modules have."""
    names = function.__code__.co_names
    known = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        known[name] = cell.cell_contents
    for name, value in known.items():
        yield name, value
        if isinstance(value, ModuleType):
            for inner in names:
                if hasattr(value, inner):
                    yield f"{name}.{inner}", getattr(value, inner)


def _written_together(function: FunctionType) -> list[FunctionType]:
    """The function, and those that are written in place in it."""
    found: dict[int, FunctionType] = {}
    left = [function]
    while left:
        one = left.pop()
        if id(one) not in found:
            found[id(one)] = one
            left.extend(inner for _, value in _named(one) if (inner := function_of(value)) is not None)
    return list(found.values())


def linked(function: FunctionType) -> dict[str, Any]:
    """Functions with code of their own that a function calls, or what is written into it, by symbol."""
    found = {}
    for each in _written_together(function):
        for _, value in _named(each):
            if (symbol := linked_symbol(value)) is not None:
                found[symbol] = value
    return found


@cache
def _content(file: str) -> bytes:
    return Path(file).read_bytes()


def ingredients(function: FunctionType) -> Iterator[bytes]:
    """All that a function's code depends on: source files, those of the translation too, and values of constants."""
    together = _written_together(function)
    files = {each.__code__.co_filename for each in together}
    files |= {str(file) for file in Path(__file__).parent.glob("*.py")}
    for file in sorted(files):
        yield _content(file)
    constants = {
        f"{each.__module__}.{name}={value!r}"
        for each in together
        for name, value in _named(each)
        if isinstance(value, int | float | tuple)
    }
    yield "\n".join(sorted(constants)).encode()

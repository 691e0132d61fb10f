"""Short text for values of any size: what a notebook, a debugger or a log shows of them.

A schedule of 16 GPUs is 115,000 characters when it is written out. Its ``repr`` says what it is; the whole of it is
to be had by ``to_json``, ``to_text`` or ``explain``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

__all__ = ["MOST", "brief"]

#: No text is longer.
MOST = 400
#: Nor is that of one field, beyond which elements are counted instead; a data class in a field may take more.
_MOST_OF_ONE = 60
_MOST_OF_INNER = 100


def brief(value: Any) -> str:
    """The ``repr`` of a data class or named tuple: small fields as they are, of others their kind and how many.

    To be set in the class, where ``dataclass`` leaves it alone: ``__repr__ = brief``.

    Examples:
        >>> from mycel.topology.builders import star
        >>> star(num_ranks=64)
        Topology(name='star_64', unit='Mbit/s', vertices=<65 of Vertex>, links=<128 of Link>, link_classes=())
    """
    names = [f.name for f in fields(value) if f.repr] if is_dataclass(value) else value._fields
    shown = []
    length = len(type(value).__name__)
    for name in names:
        shown.append(f"{name}={_field(getattr(value, name))}")
        length += len(shown[-1]) + 2
        if length > MOST:
            shown[-1] = "..."
            break
    return f"{type(value).__name__}({', '.join(shown)})"


def _field(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):  # of numpy or torch, whichever is there
        kind = "records" if getattr(value.dtype, "names", None) else value.dtype
        return f"<{kind} of shape {tuple(value.shape)}>"
    if isinstance(value, str):
        return repr(value) if len(value) <= _MOST_OF_ONE else f"{value[: _MOST_OF_ONE - 4]!r}..."
    if isinstance(value, Collection) and not isinstance(value, (bytes, bytearray)):
        return _collection(value)
    text = repr(value)
    most = _MOST_OF_INNER if is_dataclass(value) else _MOST_OF_ONE
    return text if len(text) <= most else f"<{type(value).__name__}>"


def _collection(value: Collection[Any]) -> str:
    if len(value) <= _MOST_OF_ONE // 3:
        if isinstance(value, Mapping):
            text = "{" + ", ".join(f"{_field(key)}: {_field(item)}" for key, item in value.items()) + "}"
        elif hasattr(value, "_fields"):
            text = repr(value)
        else:
            left, right = "()" if isinstance(value, tuple) else "[]" if isinstance(value, list) else "{}"
            comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
            text = left + ", ".join(map(_field, value)) + comma + right
        if len(text) <= _MOST_OF_ONE:
            return text
    kinds = {type(item).__name__ for item in value}
    return f"<{len(value)} of {kinds.pop()}>" if len(kinds) == 1 else f"<{len(value)} items>"

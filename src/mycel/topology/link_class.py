"""Classes of links: what a link is, as far as a topology says, and what it says that messages cost there.

A topology may name a class for a link, and numbers for a class. What is not said has defaults (``mycel.cost.links``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mycel.errors import TopologyError

__all__ = ["LINK_CLASS_NAMES", "StatedClass", "stated_from_json", "stated_to_json"]

#: Classes that there are.
LINK_CLASS_NAMES = ("nvlink", "xgmi", "pcie", "rdma", "tcp", "shared_memory")
_TIMES = {"latency": "latency_s", "wake": "wake_s", "work": "work_s"}
#: Shortest and longest message that can be stated, in bytes.
_PIECES = (1 << 8, 1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedClass:
    """What a topology says about a class of links; ``None``, or nothing, where it does not say.

    Attributes:
        name: one of ``LINK_CLASS_NAMES``.
        latency_s: of a path over such links that state none of their own, in seconds.
        wake_s: from a message's arrival until its receiver goes on, in seconds.
        work_s: of either end for a message, one after the other for all of a rank's messages, in seconds.
        piece_bytes: lengths of messages worth trying, the shortest first.

    Raises:
        TopologyError: an unknown class, a negative or endless time, or lengths that do not grow or make no sense.

    Examples:
        >>> StatedClass(name="rdma", latency_s=3e-6, piece_bytes=(1 << 16, 1 << 19)).wake_s is None
        True
    """

    name: str
    latency_s: float | None = None
    wake_s: float | None = None
    work_s: float | None = None
    piece_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "piece_bytes", tuple(self.piece_bytes))
        if self.name not in LINK_CLASS_NAMES:
            raise TopologyError(f"unknown class of links {self.name!r}; known: {', '.join(LINK_CLASS_NAMES)}")
        for key, field in _TIMES.items():
            value = getattr(self, field)
            if value is not None and not 0 <= value < float("inf"):
                raise TopologyError(f"class {self.name}: {key} {value!r} s must be zero or more")
        pieces = self.piece_bytes
        if any(p % 4 or not _PIECES[0] <= p <= _PIECES[1] for p in pieces) or list(pieces) != sorted(set(pieces)):
            raise TopologyError(
                f"class {self.name}: pieces {list(pieces)} must grow, from {_PIECES[0]} to {_PIECES[1]} bytes, "
                "each a multiple of 4"
            )


def stated_to_json(stated: tuple[StatedClass, ...]) -> dict[str, dict[str, Any]]:
    """What ``stated_from_json`` reads: an object a class, with times in seconds and pieces in bytes."""
    found: dict[str, dict[str, Any]] = {}
    for one in stated:
        values = {key: getattr(one, field) for key, field in _TIMES.items()}
        found[one.name] = {key: value for key, value in values.items() if value is not None}
        found[one.name] |= {"pieces": list(one.piece_bytes)} if one.piece_bytes else {}
    return found


def stated_from_json(data: object, where: str) -> tuple[StatedClass, ...]:
    """Stated classes of a decoded JSON object.

    Args:
        data: as ``stated_to_json`` makes it.
        where: what to begin messages with.

    Raises:
        TopologyError: it is something else.
    """
    if not isinstance(data, Mapping):
        raise TopologyError(f"{where}: link_classes must be an object with a class a key")
    found = []
    for name, said in data.items():
        if not isinstance(said, Mapping):
            raise TopologyError(f"{where}: class {name}: must be an object with {', '.join(_TIMES)} or pieces")
        if unknown := [key for key in said if key not in (*_TIMES, "pieces")]:
            raise TopologyError(
                f"{where}: class {name}: unknown key {unknown[0]!r}; known keys: {', '.join(_TIMES)}, pieces"
            )
        times: dict[str, float] = {}
        for key, value in said.items():
            if key != "pieces":
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise TopologyError(f"{where}: class {name}: {key} must be a number of seconds")
                times[_TIMES[key]] = float(value)
        pieces = said.get("pieces", [])
        if not isinstance(pieces, list) or any(isinstance(p, bool) or not isinstance(p, int) for p in pieces):
            raise TopologyError(f"{where}: class {name}: pieces must be a list of whole numbers of bytes")
        try:
            found.append(StatedClass(name=str(name), piece_bytes=tuple(pieces), **times))
        except TopologyError as error:
            raise TopologyError(f"{where}: {error}") from None
    return tuple(found)

"""What goes between the controller and its ranks: an item to carry out, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ARGUMENT", "IN_VAIN", "OWN", "SMALL_BYTES", "Failure", "Held", "Item", "Large", "answer", "replace"]

#: Values of at most so many bytes come with the reply; larger ones stay on the ranks until they are asked for.
SMALL_BYTES = 64 << 10
#: What a failure is, the likeliest cause of those of other ranks first: an argument's call had failed, the program's
#: own, another rank did not come.
ARGUMENT, OWN, IN_VAIN = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Held:
    """In the place of an argument: what an earlier call left on the rank."""

    number: int


@dataclass(frozen=True, slots=True)
class Large:
    """In the place of a value that did not come with the reply."""

    what: str


@dataclass(frozen=True, slots=True)
class Failure:
    """In the place of the value of a call that failed.

    Attributes:
        rank: in the cluster, on which.
        said: what the exception says, its class first.
        trace: the traceback, from the program on.
        kind: ``ARGUMENT``, ``OWN`` or ``IN_VAIN``.
    """

    rank: int
    said: str
    trace: str
    kind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Something for ranks to do, in its place in the one order of all.

    Attributes:
        number: that place, and the name of what comes out.
        ranks: of the mesh.
        places: of the item among all that each of them gets, by rank; messages may overtake each other.
        call: the program and its arguments, pickled; ``Held`` stands for what is on the rank. It is for the rank to
            unpickle, so that what cannot be found there is a failure like any other.
        frees: numbers of values that nobody can ask for any more.
    """

    number: int
    ranks: tuple[int, ...]
    places: tuple[int, ...]
    call: bytes
    frees: tuple[int, ...] = ()


def replace(value: Any, wanted: type, by: Callable[[Any], Any]) -> Any:
    """A value in which everything of a class is replaced; looks into lists, tuples and dicts."""
    if isinstance(value, wanted):
        return by(value)
    if isinstance(value, dict):
        return {key: replace(one, wanted, by) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replace(one, wanted, by) for one in value))
    if isinstance(value, (list, tuple)):
        return type(value)(replace(one, wanted, by) for one in value)
    return value


def answer(value: Any) -> Any:
    """What of a value comes with the reply: the value, if it is small and plain, or ``Large``."""
    size = _plain_bytes(value)
    if size is None or size > SMALL_BYTES:
        return Large(type(value).__name__)
    return replace(value, torch.Tensor, lambda tensor: tensor.detach().cpu())


def _plain_bytes(value: Any) -> int | None:
    if value is None or isinstance(value, (bool, int, float, complex)):
        return 8
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return _sum([*value.keys(), *value.values()])
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return _sum(value)
    return None


def _sum(values: Any) -> int | None:
    total = 0
    for one in values:
        size = _plain_bytes(one)
        if size is None or total > SMALL_BYTES:
            return None
        total += size
    return total

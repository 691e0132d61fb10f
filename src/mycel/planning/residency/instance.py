"""Blocks of a model, what they save between forward and backward, and how much fits: what is planned."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.names import nearest

__all__ = ["Block", "MemoryInstance"]

_MOST_BLOCKS, _MOST = 1 << 12, 1 << 50
_KEYS = {"blocks", "capacity", "out_bytes_per_us", "in_bytes_per_us", "latency_us"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Layers that are kept, moved or computed again together.

    Attributes:
        forward_us: of its forward, in whole microseconds.
        backward_us: of its backward.
        saved: bytes, or any unit, that forward leaves for backward.
        input: part of them that is the block's input, of which forward can be computed again.
    """

    forward_us: int
    backward_us: int
    saved: int
    input: int

    def __post_init__(self) -> None:
        _whole(self.forward_us, "forward_us", least=1)
        _whole(self.backward_us, "backward_us", least=1)
        _whole(self.saved, "saved", least=1)
        _whole(self.input, "input", least=0)
        if self.input > self.saved:
            raise UsageError(f"input is {self.input}, and saved, which contains it, {self.saved}")


@dataclass(frozen=True, kw_only=True)
class MemoryInstance:
    """One iteration of a model behind a budget.

    Attributes:
        blocks: in order of forward.
        capacity: that near memory has for what blocks save, in their unit.
        out_bytes_per_us: rate of the way to far memory.
        in_bytes_per_us: rate of the way back; both go at a time.
        latency_us: that every transfer takes besides, whole microseconds.

    Raises:
        UsageError: something is zero, negative or no number, or a block alone is larger than the capacity; the
        message
            says which, and by how much.

    References:
        M. Wahib et al., "Scaling Distributed Deep Learning Workloads beyond the Memory Capacity with KARMA", SC 2020
        (capacity-based interleaving of swap and recompute); recomputing from an input that is swapped itself is
        added.

    Examples:
        >>> two = MemoryInstance(
        ...     blocks=(Block(forward_us=10, backward_us=20, saved=100, input=10),) * 2, capacity=150,
        ...     out_bytes_per_us=3.0, in_bytes_per_us=3.0,
        ... )
        >>> two.out_us(100), two.ideal_us
        (34, 60)
    """

    blocks: tuple[Block, ...]
    capacity: int
    out_bytes_per_us: float
    in_bytes_per_us: float
    latency_us: int = 0

    __repr__ = brief

    def __post_init__(self) -> None:
        if not self.blocks:
            raise UsageError("blocks: there are none")
        if len(self.blocks) > _MOST_BLOCKS:
            raise UsageError(f"blocks: {len(self.blocks)}; at most {_MOST_BLOCKS} are planned: merge some")
        _whole(self.capacity, "capacity", least=1)
        _whole(self.latency_us, "latency_us", least=0)
        for name in ("out_bytes_per_us", "in_bytes_per_us"):
            rate = getattr(self, name)
            if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not math.isfinite(rate):
                raise UsageError(f"{name} is {rate!r}; it must be a number")
            if not 1e-9 <= rate <= 1e15:
                raise UsageError(f"{name} is {rate}; it must be above 0")
        largest = max(range(len(self.blocks)), key=lambda k: self.blocks[k].saved)
        over = self.blocks[largest].saved - self.capacity
        if over > 0:
            raise UsageError(
                f"blocks[{largest}] saves {self.blocks[largest].saved}, and the capacity is {self.capacity}: {over} "
                f"too little for any plan; cut the block in two or raise the capacity"
            )

    @property
    def ideal_us(self) -> int:
        """Microseconds of all forwards and backwards, with nothing computed again and nothing waited for."""
        return sum(block.forward_us + block.backward_us for block in self.blocks)

    def out_us(self, num_bytes: int) -> int:
        """Microseconds of a transfer to far memory.

        Args:
            num_bytes: that move.
        """
        return math.ceil(num_bytes / self.out_bytes_per_us) + self.latency_us

    def in_us(self, num_bytes: int) -> int:
        """Microseconds of a transfer back.

        Args:
            num_bytes: that move.
        """
        return math.ceil(num_bytes / self.in_bytes_per_us) + self.latency_us

    @classmethod
    def from_json(cls, data: Any, *, source: str = "instance") -> MemoryInstance:
        """The instance that a JSON object says.

        Args:
            data: the object: ``blocks [{forward_us, backward_us, saved, input}], capacity, out_bytes_per_us,
                in_bytes_per_us, latency_us``.
            source: the file, for messages.

        Raises:
            UsageError: it says none; the message names the key.
        """
        try:
            return cls._read(data)
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None

    @classmethod
    def parse(cls, text: str, *, source: str = "instance") -> MemoryInstance:
        """The instance in a text.

        Args:
            text: JSON.
            source: the file, for messages.

        Raises:
            UsageError: it is no JSON, or no instance.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{source}: no instance: not JSON ({error})") from None
        return cls.from_json(data, source=source)

    @classmethod
    def _read(cls, data: Any) -> MemoryInstance:
        if not isinstance(data, Mapping):
            raise UsageError(f"no instance: expected a JSON object, got {type(data).__name__}")
        if data.get("version", 1) != 1:
            raise UsageError(f"version {data['version']!r}: this mycel reads version 1")
        missing = [key for key in sorted(_KEYS) if key not in data]
        for key in data:  # others tell people something; one that is nearly a key that is missing was meant to be it
            if key not in _KEYS and (meant := nearest(str(key), missing)):
                raise UsageError(f"unknown key {key!r}{meant}")
        for name in ("blocks", "capacity", "out_bytes_per_us", "in_bytes_per_us"):
            if name not in data:
                raise UsageError(f"there is no {name}")
        if not isinstance(data["blocks"], list):
            raise UsageError("blocks: expected a list of objects")
        return cls(
            blocks=tuple(_block(index, block) for index, block in enumerate(data["blocks"])),
            capacity=data["capacity"],
            out_bytes_per_us=data["out_bytes_per_us"],
            in_bytes_per_us=data["in_bytes_per_us"],
            latency_us=data.get("latency_us", 0),
        )

    def to_json(self) -> dict[str, Any]:
        """The same as an object that ``from_json`` reads."""
        return {
            "version": 1,
            "blocks": [
                {"forward_us": b.forward_us, "backward_us": b.backward_us, "saved": b.saved, "input": b.input}
                for b in self.blocks
            ],
            "capacity": self.capacity,
            "out_bytes_per_us": self.out_bytes_per_us,
            "in_bytes_per_us": self.in_bytes_per_us,
            "latency_us": self.latency_us,
        }


def _block(index: int, data: Any) -> Block:
    if not isinstance(data, Mapping):
        raise UsageError(f"blocks[{index}]: expected an object with forward_us, backward_us, saved and input")
    for name in ("forward_us", "backward_us", "saved", "input"):
        if name not in data:
            raise UsageError(f"blocks[{index}]: there is no {name}")
    try:
        return Block(
            forward_us=data["forward_us"], backward_us=data["backward_us"], saved=data["saved"], input=data["input"]
        )
    except UsageError as error:
        raise UsageError(f"blocks[{index}]: {error}") from None


def _whole(value: object, name: str, *, least: int) -> None:
    if isinstance(value, float) and value.is_integer():
        raise UsageError(f"{name} is {value!r}; write it as a whole number")
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} is {value!r}; it must be a whole number")
    if not least <= value <= _MOST:
        raise UsageError(f"{name} is {value}; it must be from {least} to {_MOST}")

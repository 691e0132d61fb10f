"""What a schedule search begins with: the blocks of one micro-batch, where each runs, and what it waits for.

A block runs once a micro-batch, on all of its devices at once, for a whole number of time units. Memory is counted in
any whole unit: a block takes it on its devices when it starts, if positive, or gives it back when it ends, if
negative. A dependency may have a delay, such as the time that a message takes.

::

    {"version": 1, "name": "two stages", "devices": 2,
     "blocks": [{"name": "F0", "devices": [0], "time": 1, "memory": 1},
                {"name": "F1", "devices": [1], "time": 1, "memory": 1},
                {"name": "B1", "devices": [1], "time": 2, "memory": -1},
                {"name": "B0", "devices": [0], "time": 2, "memory": -1}],
     "deps": [[0, 1, 0], [1, 2, 0], [2, 3, 0]], "cap": [2, 2]}

``deps`` are ``[before, after, delay]``, by position or name of the blocks. ``cap`` is memory a device, ``null`` where
there is no limit; ``memory`` of a block on several devices may be a list, one number a device. Other keys are for
people and ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mycel.arguments import whole_number
from mycel.brief import brief
from mycel.errors import UsageError
from mycel.names import nearest

__all__ = ["Block", "Dependency", "Placement"]

_VERSION = 1
#: Sum of all times and delays, and any memory: what solvers still multiply without overflow.
_MOST = 1 << 31
#: Blocks of a placement: ways between all pairs are looked at, and no search does anything with so many.
_MOST_BLOCKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A piece of a micro-batch's work.

    Attributes:
        name: such as ``F0``; ``F``, ``B``, ``I`` or ``W`` and a number mean what they do in orders of stages.
        devices: that work on it together, each once, in ascending order.
        time: units that it takes on each of them, above 0.
        memory: taken on each device when it starts, or given back when it ends if negative; a tuple says it device by
            device.

    Raises:
        UsageError: a name that is empty, devices that repeat or are none, a time below 1, memory of another length.

    Examples:
        >>> Block(name="S", devices=(0, 1), time=2, memory=(3, 1)).memory_on(1)
        1
    """

    name: str
    devices: tuple[int, ...]
    time: int
    memory: int | tuple[int, ...] = 0

    __repr__ = brief

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not self.name.isprintable():
            raise UsageError(f"a block is named {self.name!r}; expected a printable text that is not empty")
        where = f"block {self.name}"
        devices = tuple(sorted(whole_number(d, f"{where}: device", least=0) for d in _listed(self.devices, where)))
        if not devices:
            raise UsageError(f"{where} is on no device; name at least one")
        if len(set(devices)) < len(devices):
            raise UsageError(f"{where}: devices {', '.join(map(str, devices))}; each can be named once")
        object.__setattr__(self, "time", whole_number(self.time, f"{where}: time", least=1, most=_MOST))
        memory: int | tuple[int, ...]
        if isinstance(self.memory, Sequence):
            given = dict(zip(self.devices, self.memory, strict=False))
            if len(self.memory) != len(devices):
                raise UsageError(
                    f"{where}: memory for {len(self.memory)} devices, and the block is on {len(devices)}; give one "
                    f"number, or one a device"
                )
            memory = tuple(_memory(given[device], where) for device in devices)
            memory = memory[0] if len(set(memory)) == 1 else memory
        else:
            memory = _memory(self.memory, where)
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "memory", memory)

    def memory_on(self, device: int) -> int:
        """What the block takes (or gives back, negative) on a device; 0 where it does not run."""
        if device not in self.devices:
            return 0
        return self.memory if isinstance(self.memory, int) else self.memory[self.devices.index(device)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency:
    """A block waits for another of the same micro-batch.

    Attributes:
        before: position of the block that ends first.
        after: position of the block that waits.
        delay: units from the end of the one to the start of the other, at least 0.

    Examples:
        A message of 4 units from the first block to the second:

        >>> Dependency(before=0, after=1, delay=4).delay
        4
    """

    before: int
    after: int
    delay: int = 0


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The blocks of one micro-batch on their devices; all micro-batches are alike.

    Attributes:
        name: for people.
        num_devices: how many there are, each with at least one block.
        blocks: names are unique.
        dependencies: acyclic.
        cap: memory of each device, ``None`` for no limit; empty for no limit anywhere.

    Raises:
        UsageError: a device that is not there or has nothing to do, names that repeat, a dependency on itself or in a
            circle (which is named), parts that neither wait for each other nor share a device, memory that is not
            given back or is given back before it is taken, or a cap under what one micro-batch needs alone.

    References:
        Lin et al., "Tessel: Boosting Distributed Execution of Large DNN Models via Flexible Schedule Search", HPCA
        2024, section III (blocks, devices, memory of a micro-batch).

    Examples:
        >>> forward = Block(name="F0", devices=(0,), time=1, memory=1)
        >>> backward = Block(name="B0", devices=(0,), time=2, memory=-1)
        >>> one = Placement(name="one", num_devices=1, blocks=(forward, backward), cap=(2,),
        ...                 dependencies=(Dependency(before=0, after=1),))
        >>> one.work, Placement.from_json(one.to_json()) == one
        ((3,), True)
    """

    name: str
    num_devices: int
    blocks: tuple[Block, ...]
    dependencies: tuple[Dependency, ...] = ()
    cap: tuple[int | None, ...] = ()

    __repr__ = brief

    def __post_init__(self) -> None:
        whole_number(self.num_devices, f"{self._where}: devices", least=1)
        if not self.blocks:
            raise UsageError(f"{self._where} has no blocks; a micro-batch needs at least one")
        if len(self.blocks) > _MOST_BLOCKS:
            raise UsageError(
                f"{self._where} has {len(self.blocks)} blocks; at most {_MOST_BLOCKS} can be searched: join some"
            )
        if self.num_devices > (busy := len({device for block in self.blocks for device in block.devices})):
            # A file may name any number: nothing is made as large as that.
            idle = next(d for d in range(busy + 1) if not any(d in block.devices for block in self.blocks))
            raise UsageError(f"{self._where}: device {idle} has no block; give it one, or leave it out")
        if not self.cap:
            object.__setattr__(self, "cap", (None,) * self.num_devices)
        self._check_blocks()
        self._check_dependencies()
        self._check_connected()
        self._check_memory()

    # -- what follows from it ---------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return f"placement {self.name}" if self.name else "placement"

    @cached_property
    def sequence(self) -> tuple[int, ...]:
        """Positions of the blocks so that each comes after all that it waits for; of several ways the given order."""
        return tuple(_sorted(len(self.blocks), self.dependencies)[0])

    @cached_property
    def on(self) -> tuple[tuple[int, ...], ...]:
        """Of each device the positions of its blocks."""
        return tuple(
            tuple(i for i, block in enumerate(self.blocks) if device in block.devices)
            for device in range(self.num_devices)
        )

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Time a micro-batch that each device works."""
        return tuple(sum(self.blocks[i].time for i in mine) for mine in self.on)

    @cached_property
    def longest(self) -> tuple[tuple[int | None, ...], ...]:
        """Of each pair the longest way from the start of one block to the end of another; ``None`` without a way.

        No schedule has them closer. Of a block and itself it is the block's time.
        """
        none = -1
        far = np.full((len(self.blocks), len(self.blocks)), none, dtype=np.int64)
        for i in self.sequence:
            for before, delay in self.waits[i]:
                ways = np.where(far[:, before] >= 0, far[:, before] + delay, none)
                np.maximum(far[:, i], ways, out=far[:, i])
            far[:, i] += np.where(far[:, i] >= 0, self.blocks[i].time, 0)
            far[i, i] = self.blocks[i].time
        return tuple(tuple(None if way < 0 else way for way in row) for row in far.tolist())

    @cached_property
    def waits(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Of each block, ``(block, delay)`` of all that it waits for."""
        rows: list[list[tuple[int, int]]] = [[] for _ in self.blocks]
        for dependency in self.dependencies:
            rows[dependency.after].append((dependency.before, dependency.delay))
        return tuple(tuple(row) for row in rows)

    @cached_property
    def need(self) -> tuple[int, ...]:
        """Memory of each device below which not even one micro-batch fits, in any order of its blocks."""
        return tuple(
            max(self._need(device, i) for i in range(len(self.blocks))) for device in range(self.num_devices)
        )

    def _need(self, device: int, block: int) -> int:
        """Memory held when a block of any device has started, if all that may be was given back.

        What may run earlier is a closed set: with a block all that it waits for. The set that holds least leaves out
        what gives back nothing; what others give back is paid for, as far as possible, by what they wait for and the
        block does not: a maximum flow from the one to the other, and the rest of what is given back is gained.
        """
        sizes = {i: self.blocks[i].memory_on(device) for i in self.on[device]}
        earlier = {i for i in sizes if self.longest[i][block] is not None}
        others = {i for i in sizes if i not in earlier and self.longest[block][i] is None}
        given = {i: -sizes[i] for i in others if sizes[i] < 0}
        paid = {i: [j for j in others if sizes[j] > 0 and self.longest[j][i] is not None] for i in given}
        gained = sum(given.values()) - _most_paid(given, paid, {j: sizes[j] for j in others if sizes[j] > 0})
        return sum(size for i, size in sizes.items() if i in earlier and (i != block or size > 0)) - gained

    # -- its JSON form ----------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """A JSON object that ``from_json`` reads back to an equal placement."""
        return {
            "version": _VERSION,
            "name": self.name,
            "devices": self.num_devices,
            "blocks": [
                {
                    "name": block.name,
                    "devices": list(block.devices),
                    "time": block.time,
                    "memory": block.memory if isinstance(block.memory, int) else list(block.memory),
                }
                for block in self.blocks
            ],
            "deps": [[d.before, d.after, d.delay] for d in self.dependencies],
            "cap": list(self.cap),
        }

    @classmethod
    def from_json(cls, data: object, *, source: str = "placement") -> Placement:
        """The placement that a decoded JSON object describes.

        Args:
            data: an object as ``to_json`` gives it; keys that mean nothing here are ignored.
            source: where it is from, for messages.

        Raises:
            UsageError: a key is missing or of the wrong type, the version is newer, or the placement makes no sense.
        """
        if not isinstance(data, Mapping):
            raise UsageError(
                f"{source}: expected a JSON object with 'devices' and 'blocks', got {type(data).__name__}"
            )
        version = data.get("version", _VERSION)
        if version != _VERSION:
            raise UsageError(
                f"{source}: version {version!r} of placements; this release reads {_VERSION}: update mycel"
            )
        for key in ("devices", "blocks"):
            if key not in data:
                hint = nearest(key, data, "is it what you wrote as")
                raise UsageError(f"{source}: the key {key!r} is missing{hint}")
        try:
            blocks = tuple(_block(i, item) for i, item in enumerate(_listed(data["blocks"], "blocks")))
            number = {block.name: i for i, block in enumerate(blocks)}
            return cls(
                name=str(data.get("name", "")),
                num_devices=whole_number(data["devices"], "devices", least=1),
                blocks=blocks,
                dependencies=tuple(
                    _dependency(i, item, number) for i, item in enumerate(_listed(data.get("deps", []), "deps"))
                ),
                cap=_caps(data.get("cap"), blocks),
            )
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None

    @classmethod
    def parse(cls, text: str, *, source: str = "placement") -> Placement:
        """The placement that a JSON text describes; raises as ``from_json`` does, also for what is no JSON."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"{source}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{source}: not JSON: {error}") from None
        return cls.from_json(data, source=source)

    # -- checks -----------------------------------------------------------------------------------------------------

    def _check_blocks(self) -> None:
        seen: set[str] = set()
        for block in self.blocks:
            if block.name in seen:
                raise UsageError(f"{self._where}: two blocks are named {block.name}; each needs a name of its own")
            seen.add(block.name)
            if block.devices[-1] >= self.num_devices:
                raise UsageError(
                    f"{self._where}: block {block.name} is on device {block.devices[-1]}; devices are "
                    f"0..{self.num_devices - 1}"
                )
        if len(self.cap) != self.num_devices:
            raise UsageError(f"{self._where}: caps for {len(self.cap)} devices, and there are {self.num_devices}")
        for device, cap in enumerate(self.cap):
            if cap is not None:
                whole_number(cap, f"{self._where}: cap of device {device}", least=0, most=_MOST)

    def _check_dependencies(self) -> None:
        for position, d in enumerate(self.dependencies):
            where = f"{self._where}: dependency {position}"
            for end in (d.before, d.after):
                whole_number(end, f"{where}: block", least=0, most=len(self.blocks) - 1)
            whole_number(d.delay, f"{where}: delay", least=0, most=_MOST)
            if d.before == d.after:
                raise UsageError(f"{where}: block {self.blocks[d.before].name} waits for itself; leave it out")
        _, left = _sorted(len(self.blocks), self.dependencies)
        if left:
            circle = _circle(left, self.dependencies)
            names = " -> ".join(self.blocks[i].name for i in (*circle, circle[0]))
            raise UsageError(f"{self._where}: blocks wait for each other in a circle: {names}; drop one dependency")
        total = sum(block.time for block in self.blocks) + sum(d.delay for d in self.dependencies)
        if total > _MOST:
            raise UsageError(
                f"{self._where}: times and delays add up to {total}, above {_MOST}; choose a larger unit"
            )

    def _check_connected(self) -> None:
        """Parts that neither wait for each other nor share a device are two placements, each with its own period."""
        joined = list(range(len(self.blocks)))

        def root(i: int) -> int:
            while joined[i] != i:
                joined[i] = i = joined[joined[i]]
            return i

        for d in self.dependencies:
            joined[root(d.before)] = root(d.after)
        for mine in self.on:
            for i in mine:
                joined[root(i)] = root(mine[0])
        apart = next((i for i in range(len(self.blocks)) if root(i) != root(0)), None)
        if apart is not None:
            raise UsageError(
                f"{self._where} is not connected: block {self.blocks[apart].name} neither waits for "
                f"{self.blocks[0].name} or what belongs to it nor shares a device with that; search each part alone"
            )

    def _check_memory(self) -> None:
        for device, (mine, cap) in enumerate(zip(self.on, self.cap, strict=True)):
            taken = [(self.blocks[i].memory_on(device), i) for i in mine]
            if balance := sum(memory for memory, _ in taken):
                gave = sum(-memory for memory, _ in taken if memory < 0)
                raise UsageError(
                    f"{self._where}: on device {device} a micro-batch takes {balance + gave} of memory and gives "
                    f"back {gave}; both must be equal"
                )
            for memory, i in taken:
                held = sum(size for size, j in taken if self.longest[j][i] is not None)
                if memory < 0 and held < 0:
                    raise UsageError(
                        f"{self._where}: block {self.blocks[i].name} gives back {-memory} on device {device}, of "
                        f"which {held - memory} are taken before it; let it wait for the block that takes the rest"
                    )
            if cap is not None and cap < self.need[device]:
                raise UsageError(
                    f"{self._where}: cap {cap} of device {device} is under the {self.need[device]} that one "
                    f"micro-batch needs there; raise it to at least that"
                )


def _listed(value: object, where: str) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UsageError(f"{where}: expected a list, got {value!r}")
    return value


def _memory(value: object, where: str) -> int:
    return whole_number(value, f"{where}: memory", least=-_MOST, most=_MOST)


def _block(position: int, item: object) -> Block:
    where = f"block {position}"
    if not isinstance(item, Mapping):
        raise UsageError(f"{where}: expected an object with 'name', 'devices' and 'time', got {item!r}")
    for key in ("name", "devices", "time"):
        if key not in item:
            raise UsageError(f"{where}: the key {key!r} is missing{nearest(key, item, 'is it what you wrote as')}")
    memory = item.get("memory", 0)
    return Block(
        name=item["name"],
        devices=tuple(_listed(item["devices"], f"{where}: devices")),
        time=item["time"],
        memory=tuple(memory) if isinstance(memory, list) else memory,
    )


def _dependency(position: int, item: object, number: Mapping[str, int]) -> Dependency:
    where = f"dependency {position}"
    parts = list(_listed(item, where))
    if len(parts) not in (2, 3):
        raise UsageError(f"{where}: expected [before, after] or [before, after, delay], got {item!r}")
    for end, value in enumerate(parts[:2]):
        if isinstance(value, str):
            if value not in number:
                raise UsageError(f"{where}: no block is named {value!r}{nearest(value, number)}")
            parts[end] = number[value]
    return Dependency(before=parts[0], after=parts[1], delay=parts[2] if len(parts) == 3 else 0)


def _caps(value: object, blocks: Sequence[Block]) -> tuple[int | None, ...]:
    if value is None or isinstance(value, int):
        return (value,) * len({device for block in blocks for device in block.devices})
    return tuple(_listed(value, "cap"))


def _sorted(count: int, dependencies: Sequence[Dependency]) -> tuple[list[int], list[int]]:
    """Positions after all that they wait for, and those that are left because they wait in or behind a circle."""
    open_waits = [0] * count
    after: list[list[int]] = [[] for _ in range(count)]
    for d in dependencies:
        open_waits[d.after] += 1
        after[d.before].append(d.after)
    ready = [i for i in range(count) if not open_waits[i]]
    order: list[int] = []
    while ready:
        i = min(ready)
        ready.remove(i)
        order.append(i)
        for j in after[i]:
            open_waits[j] -= 1
            if not open_waits[j]:
                ready.append(j)
    return order, [i for i in range(count) if open_waits[i]]


def _circle(left: list[int], dependencies: Sequence[Dependency]) -> list[int]:
    """A circle among blocks of which each waits for another one of them."""
    before = {d.after: d.before for d in dependencies if d.before in left and d.after in left}
    way = [left[0]]
    while before[way[-1]] not in way:
        way.append(before[way[-1]])
    return way[way.index(before[way[-1]]) :][::-1]


def _most_paid(given: Mapping[int, int], paid: Mapping[int, list[int]], sizes: Mapping[int, int]) -> int:
    """The maximum flow from what is given back to what was taken before it, by augmenting paths."""
    left, room = dict(given), dict(sizes)
    flow: dict[tuple[int, int], int] = {}

    def push(i: int, amount: int, seen: set[int]) -> int:
        for j in paid[i]:
            if j in seen:
                continue
            seen.add(j)
            sent = min(amount, room[j])
            if sent:
                room[j] -= sent
            else:  # another moves over
                for (other, place), moved in list(flow.items()):
                    if place == j and moved and (sent := push(other, min(amount, moved), seen)):
                        flow[other, j] -= sent
                        break
            if sent:
                flow[i, j] = flow.get((i, j), 0) + sent
                return sent
        return 0

    for i in left:
        while left[i] and (sent := push(i, left[i], set())):
            left[i] -= sent
    return sum(given.values()) - sum(left.values())

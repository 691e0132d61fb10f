"""Communication sketches: a person's outline of which links, gateways and symmetries a schedule may use.

Reads the JSON form that TACCL made public::

    {"nnodes": 2,
     "intranode_sketch": {"strategy": "switch", "switches": [[0, 1, 2, 3]], "switch_hyperedge_strategy": ["uc-min"]},
     "internode_sketch": {"strategy": "relay", "internode_conn": {"1": [0]},
                          "gpus_to_sender_rev_map": {"1": [0, 1, 2, 3]}, "enforce_ordering": true},
     "symmetry_offsets": [[4, 8]],
     "hyperparameters": {"input_chunkup": 1}}

GPU numbers are those within a node, except that an offset ``[o, n]`` turns every run of ``n`` ranks by ``o``.

References:
    A. Shah et al., "TACCL: Guiding Collective Algorithm Synthesis using Communication Sketches", NSDI 2023,
    section 3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.names import nearest

__all__ = ["Sketch", "parse_sketch", "read_sketch"]

Inside = Literal["none", "switch", "minmax", "maxmin"]
Policy = Literal["free", "uc-min", "uc-max"]

_INSIDE = ("none", "switch", "minmax", "maxmin")
_POLICIES = ("free", "uc-min", "uc-max")
_EVERY_PAIR, _SAME_NUMBER = "fully-connected", "direct-map"
_MOST_BOXES, _MOST_GPUS, _MOST_PIECES = 64, 512, 64
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """What a sketch file says.

    Attributes:
        source: name of the file, for messages.
        num_nodes: machines.
        inside: what to prefer among equally fast routings: nothing, few or many connections in a switch
            (see ``policy``), an even use of links (``minmax``: the busiest has least to do; ``maxmin``: the idlest
            has most).
        groups: GPUs of a node that share one port into a switch and one out of it.
        policy: ``uc-min`` uses few connections of the switch, ``uc-max`` many.
        connections: receiving GPUs of each sending GPU, between any two nodes; ``None`` with one node.
        senders: through which GPUs the data of a GPU leave its node; GPUs not named may use every connection.
        own_first: a sender sends its own data before those of others.
        symmetry: offsets and the lengths of the runs they turn.
        pieces: chunks that each block of the collective is cut into.
    """

    source: str
    num_nodes: int
    inside: Inside
    groups: tuple[tuple[int, ...], ...]
    policy: Policy
    connections: tuple[tuple[int, tuple[int, ...]], ...] | Literal["fully-connected", "direct-map"] | None
    senders: tuple[tuple[int, tuple[int, ...]], ...]
    own_first: bool
    symmetry: tuple[tuple[int, int], ...]
    pieces: int

    __repr__ = brief


def read_sketch(file: str | Path) -> Sketch:
    """The sketch in a file.

    Raises:
        UsageError: no such file, or not a sketch; one line with the file, the key, and what to do.
    """
    path = Path(file)
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; give a sketch, such as examples/sketches/ndv2_x1.json") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > _MOST_BYTES:
        raise UsageError(f"{path}: larger than {_MOST_BYTES >> 20} MB; a sketch is a page of JSON")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a text file: byte {error.start} is not UTF-8") from None
    return parse_sketch(text, source=str(path))


def parse_sketch(text: str, *, source: str) -> Sketch:
    """The sketch that a text describes.

    Args:
        text: JSON.
        source: name of the file, for messages.

    Raises:
        UsageError: not a sketch; one line with the file, the key, and what to do.

    Examples:
        >>> sketch = parse_sketch('{"nnodes": 1, "intranode_sketch": {"strategy": "none"}}', source="x.json")
        >>> sketch.num_nodes, sketch.pieces, sketch.connections
        (1, 1, None)
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{source}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source}: not JSON: {type(error).__name__}") from None
    whole = _Section(data, source, "")
    whole.keys(
        "nnodes", "intranode_sketch", "internode_sketch", "symmetry_offsets", "hyperparameters", "nics_per_node"
    )
    num_nodes = whole.number("nnodes", 1, _MOST_BOXES)
    inside = whole.section("intranode_sketch")
    inside.keys("strategy", "switches", "switch_hyperedge_strategy")
    strategy = inside.word("strategy", _INSIDE)
    groups, policy = _switches(inside) if strategy == "switch" else ((), "free")
    tuning = whole.section("hyperparameters", needed=False)
    tuning.keys("input_chunkup", "heuristic")
    connections, senders, own_first = _between(whole, num_nodes)
    return Sketch(
        source=source,
        num_nodes=num_nodes,
        inside=strategy,  # type: ignore[arg-type]  # one of _INSIDE
        groups=groups,
        policy=policy,  # type: ignore[arg-type]  # one of _POLICIES
        connections=connections,  # type: ignore[arg-type]  # a word of two
        senders=senders,
        own_first=own_first,
        symmetry=_symmetry(whole),
        pieces=tuning.number("input_chunkup", 1, _MOST_PIECES, default=1),
    )


class _Section:
    """One object of the file, with its name for messages."""

    def __init__(self, value: object, source: str, name: str) -> None:
        self.where = f"{source}: {name}" if name else source
        if not isinstance(value, Mapping):
            raise UsageError(f"{self.where}: expected a JSON object; got {_short(value)}")
        self._value: Mapping[str, Any] = value
        self._source, self._name = source, name

    def __contains__(self, key: str) -> bool:
        return key in self._value

    def keys(self, *known: str) -> None:
        for key in self._value:
            if key not in known:
                raise UsageError(
                    f"{self.where}: unknown key {key[:40]!r}{nearest(key, known)}; known: {', '.join(known)}"
                )

    def get(self, key: str) -> Any:
        if key not in self._value:
            raise UsageError(f"{self.where}: lacks the key {key!r}; add it")
        return self._value[key]

    def place(self, key: str) -> str:
        return f"{self._source}: {self._name}.{key}" if self._name else f"{self._source}: {key}"

    def section(self, key: str, *, needed: bool = True) -> _Section:
        value = self.get(key) if needed else self._value.get(key, {})
        return _Section(value, self._source, key)

    def number(self, key: str, least: int, most: int, *, default: int | None = None) -> int:
        if default is not None and key not in self._value:
            return default
        return _whole(self.get(key), self.place(key), least, most)

    def word(self, key: str, known: tuple[str, ...]) -> str:
        value = self.get(key)
        if value not in known or not isinstance(value, str):
            hint = nearest(value, known) if isinstance(value, str) else ""
            raise UsageError(f"{self.place(key)} is {_short(value)}{hint}; write one of {', '.join(known)}")
        return value


def _switches(inside: _Section) -> tuple[tuple[tuple[int, ...], ...], str]:
    where = inside.place("switches")
    groups: list[tuple[int, ...]] = []
    for number, group in enumerate(_list(inside.get("switches"), where)):
        members = tuple(sorted(_gpus(group, f"{where}[{number}]")))
        if len(members) < 2:
            raise UsageError(f"{where}[{number}]: a switch joins at least two GPUs")
        for other in groups:
            if other != members and set(other) & set(members):
                raise UsageError(f"{where}[{number}]: shares some GPUs with another switch; make them equal or apart")
        if members not in groups:  # the same GPUs on several switches have one port in the model
            groups.append(members)
    if not groups:
        raise UsageError(f'{where}: no switch; name the GPUs of one, or write "strategy": "none"')
    if "switch_hyperedge_strategy" not in inside:
        return tuple(groups), "free"
    place = inside.place("switch_hyperedge_strategy")
    policies = _list(inside.get("switch_hyperedge_strategy"), place)
    for policy in policies:
        if not isinstance(policy, str) or policy not in _POLICIES:
            raise UsageError(f"{place}: {_short(policy)}; write one of {', '.join(_POLICIES)}")
    return tuple(groups), policies[0] if policies else "free"


def _between(
    whole: _Section, num_nodes: int
) -> tuple[tuple[tuple[int, tuple[int, ...]], ...] | str | None, tuple[tuple[int, tuple[int, ...]], ...], bool]:
    if num_nodes == 1:
        return None, (), False
    section = whole.section("internode_sketch")
    section.keys("strategy", "internode_conn", "gpus_to_sender_rev_map", "enforce_ordering")
    section.word("strategy", ("relay",))
    conn = section.get("internode_conn")
    connections: tuple[tuple[int, tuple[int, ...]], ...] | str
    if isinstance(conn, str):
        connections = section.word("internode_conn", (_EVERY_PAIR, _SAME_NUMBER))
    else:
        connections = _table(conn, section.place("internode_conn"))
        if not connections:
            raise UsageError(f"{section.place('internode_conn')}: no connection; the nodes would be apart")
    senders: tuple[tuple[int, tuple[int, ...]], ...] = ()
    if "gpus_to_sender_rev_map" in section:
        senders = _table(section.get("gpus_to_sender_rev_map"), section.place("gpus_to_sender_rev_map"))
    own_first = section.get("enforce_ordering") if "enforce_ordering" in section else False
    if not isinstance(own_first, bool):
        raise UsageError(f"{section.place('enforce_ordering')} is {_short(own_first)}; write true or false")
    return connections, senders, own_first


def _symmetry(whole: _Section) -> tuple[tuple[int, int], ...]:
    if "symmetry_offsets" not in whole:
        return ()
    where = whole.place("symmetry_offsets")
    offsets = []
    for number, pair in enumerate(_list(whole.get("symmetry_offsets"), where)):
        if not isinstance(pair, list) or len(pair) != 2:
            raise UsageError(f"{where}[{number}]: {_short(pair)}; write [offset, length of the run it turns]")
        size = _whole(pair[1], f"{where}[{number}][1]", 1, _MOST_BOXES * _MOST_GPUS)
        offsets.append((_whole(pair[0], f"{where}[{number}][0]", 0, size), size))
    return tuple(offsets)


def _table(value: object, where: str) -> tuple[tuple[int, tuple[int, ...]], ...]:
    if not isinstance(value, Mapping):
        raise UsageError(f'{where}: {_short(value)}; write an object such as {{"1": [0]}}')
    table: dict[int, tuple[int, ...]] = {}
    for key, gpus in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 5 and int(key) < _MOST_GPUS):
            raise UsageError(f"{where}: key {key[:40]!r} is no GPU number; write one in 0..{_MOST_GPUS - 1}")
        if int(key) in table:
            raise UsageError(f"{where}: GPU {int(key)} is named twice; merge the two lists")
        table[int(key)] = _gpus(gpus, f"{where}.{key}")
    return tuple(sorted(table.items()))


def _gpus(value: object, where: str) -> tuple[int, ...]:
    gpus = tuple(_whole(gpu, where, 0, _MOST_GPUS - 1) for gpu in _list(value, where))
    if len(set(gpus)) != len(gpus):
        raise UsageError(f"{where}: a GPU is named twice; name each once")
    return gpus


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{where}: expected a list; got {_short(value)}")
    return value


def _whole(value: object, where: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{where} must be a whole number in {least}..{most}; got {_short(value)}")
    return value


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        text = "a very large number"
    return text if len(text) <= 40 else text[:37] + "..."

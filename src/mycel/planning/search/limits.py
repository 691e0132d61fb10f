"""Limits that a user writes: what a plan must keep, such as ``tp<=8``, ``tp in node`` or ``stage 0 on left``.

::

    limits:                       # a file: this list, or the list alone
      - tp<=8                     # a degree: pp, dp, tp, cp, ep; micro_batch, chunks, zero, num_micro_batches
      - tp in node                # every group of that direction within one node
      - recompute=full|none       # one of several
      - offload=no                # the optimizer's state stays on the device
      - coshard<=8                # layers in pieces, one after the other on a rank; only where a limit names it
      - shares=equal              # all replicas have as many micro-batches; unequal: some have more
      - memory<=70GiB             # of every rank
      - stage 0 on left           # a node's or a rank's name; stage -1 is the last

References:
    Lin et al., "nnScaler: Constraint-Guided Parallelization Plan Generation for Deep Learning Training", OSDI 2024,
    section 4 (constraints that users state shrink the space that is searched).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import yaml

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.names import nearest
from mycel.planning.cluster import Cluster
from mycel.planning.job import RECOMPUTE, Job
from mycel.units import parse_size

__all__ = ["DEGREES", "Limit", "Limits"]

#: Directions of the mesh.
DEGREES = ("pp", "dp", "tp", "cp", "ep")
_NUMBERS = (*DEGREES, "micro_batch", "chunks", "zero", "coshard", "num_micro_batches")
_WORDS: dict[str, tuple[str, ...]] = {
    "recompute": RECOMPUTE,
    "offload": ("yes", "no"),
    "shares": ("equal", "unequal"),
}
_KEYS = (*_NUMBERS, *_WORDS, "memory")
_COMPARED = re.compile(r"(\w+)\s*(<=|>=|==|=|!=|<|>)\s*(.+)")
_INSIDE = re.compile(r"(\w+)\s+in\s+(?:a\s+)?(?:node|box)", re.IGNORECASE)
_PLACED = re.compile(r"stage\s+(-?\d{1,6})\s+on\s+(.+)", re.IGNORECASE)
_LONGEST = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit.

    Attributes:
        text: as it was written.
        key: what it is about: a name, ``in node`` or ``stage``.
        sign: how it compares.
        values: with what.
    """

    text: str
    key: str
    sign: str
    values: tuple[str | int, ...]

    @staticmethod
    def read(text: str) -> Limit:
        """A limit from its text.

        Args:
            text: one of the forms above.

        Raises:
            UsageError: it is of none of them.

        Examples:
            >>> Limit.read("tp <= 8").values, Limit.read("stage 0 on left").values
            ((8,), (0, 'left'))
        """
        text = text.strip()
        if len(text) > _LONGEST:
            raise UsageError(f"limit {text[:40]!r}...: {len(text)} characters are too many for a limit")
        if match := _PLACED.fullmatch(text):
            return Limit(text=text, key="stage", sign="on", values=(int(match[1]), match[2].strip()))
        if match := _INSIDE.fullmatch(text):
            _known(match[1], DEGREES, text)
            return Limit(text=text, key="in node", sign="in", values=(match[1],))
        match = _COMPARED.fullmatch(text)
        if match is None:
            raise UsageError(
                f"cannot read the limit {text!r}; write for example 'tp<=8', 'tp in node', 'stage 0 on left', "
                "'recompute=full' or 'memory<=70GiB'"
            )
        key, sign, said = match[1], "=" if match[2] == "==" else match[2], match[3].strip()
        _known(key, _KEYS, text)
        if key == "memory":
            if sign not in ("<=", "<"):
                raise UsageError(f"limit {text!r}: memory can only be bounded from above: 'memory<=70GiB'")
            return Limit(text=text, key=key, sign=sign, values=(parse_size(said),))
        words = [word.strip() for word in said.split("|")]
        if key in _NUMBERS:
            if not all(re.fullmatch(r"\d{1,15}", word) for word in words):
                raise UsageError(f"limit {text!r}: {said!r} must be a whole number, or several with | between them")
            numbers = tuple(map(int, words))
            if len(numbers) > 1 and sign not in ("=", "!="):
                raise UsageError(f"limit {text!r}: several numbers go with = only")
            return Limit(text=text, key=key, sign=sign, values=numbers)
        allowed = _WORDS[key]
        for word in words:
            if word not in allowed:
                raise UsageError(
                    f"limit {text!r}: {key} is {word!r}{nearest(word, allowed)}; it is one of {', '.join(allowed)}"
                )
        if sign not in ("=", "!="):
            raise UsageError(f"limit {text!r}: {key} is compared by = or !=")
        return Limit(text=text, key=key, sign=sign, values=tuple(words))

    def allows(self, value: str | float) -> bool:
        """Whether a value of its key keeps it.

        Args:
            value: a number, or a word of ``recompute``, ``offload`` or ``shares``.
        """
        if self.sign in ("=", "!="):
            return (value in self.values) == (self.sign == "=")
        bound = self.values[0]
        assert isinstance(value, (int, float)) and isinstance(bound, int)
        return {"<=": value <= bound, "<": value < bound, ">=": value >= bound, ">": value > bound}[self.sign]


def _known(name: str, names: Sequence[str], text: str) -> None:
    if name not in names:
        raise UsageError(
            f"limit {text!r}: {name!r} is nothing that can be limited{nearest(name, names)}; there are "
            f"{', '.join(names)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All limits of a search.

    Attributes:
        limits: of which each must be kept.

    Examples:
        >>> limits = Limits.from_text("tp<=8", "tp in node")
        >>> limits.texts
        ('tp<=8', 'tp in node')
    """

    limits: tuple[Limit, ...] = ()

    __repr__ = brief

    @staticmethod
    def from_text(*texts: str) -> Limits:
        """Limits from their texts.

        Raises:
            UsageError: one of them cannot be read.
        """
        return Limits(limits=tuple(Limit.read(text) for text in texts))

    @staticmethod
    def from_file(path: str | Path) -> Limits:
        """Limits from a file of YAML: a list of texts, alone or under ``limits``.

        Raises:
            UsageError: no such file, or one that cannot be read as limits.
        """
        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValueError, RecursionError, yaml.YAMLError) as error:
            line = str(error).replace("\n", " ")
            raise UsageError(f"{path}: cannot be read as limits: {line}") from None
        if isinstance(data, dict):
            unknown = [key for key in data if key != "limits"]
            if unknown or "limits" not in data:
                raise UsageError(f"{path}: unknown key {str(unknown[:1])[1:-1]}; limits are a list under 'limits'")
            data = data["limits"]
        if data is None:
            data = []
        if not isinstance(data, list) or not all(isinstance(item, str) for item in data):
            raise UsageError(f"{path}: limits are a list of texts such as 'tp<=8'")
        try:
            return Limits.from_text(*data)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    @property
    def texts(self) -> tuple[str, ...]:
        """As they were written."""
        return tuple(limit.text for limit in self.limits)

    def with_more(self, other: Limits | Iterable[Limit]) -> Limits:
        """These and others."""
        more = other.limits if isinstance(other, Limits) else tuple(other)
        return Limits(limits=self.limits + more)

    def without(self, text: str) -> Limits:
        """All but one, by its text."""
        return Limits(limits=tuple(limit for limit in self.limits if limit.text != text))

    def of(self, key: str) -> tuple[Limit, ...]:
        """Those about one thing."""
        return tuple(limit for limit in self.limits if limit.key == key)

    def memory(self, cluster: Cluster) -> tuple[int, ...]:
        """Bytes that a job may use on each rank."""
        bounds = [int(limit.values[0]) - (limit.sign == "<") for limit in self.of("memory")]
        return tuple(min([size, *bounds]) for size in cluster.memory_bytes)

    def check(self, cluster: Cluster) -> None:
        """That names of nodes and ranks are the cluster's, and no stage is on two that have no rank in common.

        Raises:
            UsageError: one is not, or two limits contradict each other.
        """
        names = [*cluster.ranks_by_node, *cluster.rank_names]
        for limit in self.of("stage"):
            name = str(limit.values[1])
            if name not in names:
                raise UsageError(
                    f"limit {limit.text!r}: {cluster.name} has no node or rank {name!r}{nearest(name, names)}"
                )
        for one, other in combinations(self.of("stage"), 2):
            places = [
                {r for r, names in enumerate(zip(cluster.nodes, cluster.rank_names, strict=True)) if each in names}
                for each in (one.values[1], other.values[1])
            ]
            if one.values[0] == other.values[0] and not places[0] & places[1]:
                raise UsageError(
                    f"the limits {one.text!r} and {other.text!r} contradict each other: {one.values[1]} and "
                    f"{other.values[1]} have no rank in common; leave one of them out"
                )

    def broken_by(self, job: Job) -> str | None:
        """The text of the first limit that a job's numbers break; ``None`` where they keep all."""
        mesh = job.mesh
        values: dict[str, str | int] = {
            **{name: getattr(mesh, name) for name in DEGREES},
            **{
                name: getattr(job, name) for name in ("micro_batch", "chunks", "zero", "coshard", "num_micro_batches")
            },
            "recompute": job.recompute,
            "offload": "yes" if job.is_offloaded else "no",
            "shares": "unequal" if job.shares else "equal",
        }
        for limit in self.limits:
            if limit.key in values and not limit.allows(values[limit.key]):
                return limit.text
        return None

    def broken_by_ranks(self, cluster: Cluster, job: Job, ranks: Sequence[int]) -> str | None:
        """The text of the first limit that the places of ranks break; ``None`` where they keep all.

        Args:
            cluster: whose ranks they are.
            job: with the mesh.
            ranks: at every place of it, tensor parallelism innermost and the pipeline outermost.
        """
        mesh = job.mesh
        for limit in self.limits:
            if limit.key == "in node" and any(
                len({cluster.nodes[rank] for rank in group}) > 1
                for group in _groups(job, ranks, str(limit.values[0]))
            ):
                return limit.text
            if limit.key == "stage":
                number, name = int(limit.values[0]), str(limit.values[1])
                stages = mesh.pp * job.chunks
                if not -stages <= number < stages:
                    return limit.text
                size = len(ranks) // mesh.pp
                place = number % stages % mesh.pp
                names = cluster.rank_names
                if any(name not in (cluster.nodes[rank], names[rank]) for rank in ranks[place * size :][:size]):
                    return limit.text
        return None


def _groups(job: Job, ranks: Sequence[int], degree: str) -> list[tuple[int, ...]]:
    """Groups of one direction of the mesh."""
    mesh = job.mesh
    sizes = {"tp": mesh.tp, "cp": mesh.cp, "ep": mesh.ep, "dp": mesh.dp, "pp": mesh.pp}
    strides = {
        "tp": 1,
        "cp": mesh.tp,
        "ep": mesh.tp,
        "dp": mesh.tp * mesh.cp,
        "pp": mesh.tp * mesh.cp * mesh.dp,
    }
    size, stride = sizes[degree], strides[degree]
    return [
        tuple(ranks[first + offset + k * stride] for k in range(size))
        for first in range(0, len(ranks), size * stride)
        for offset in range(stride)
    ]

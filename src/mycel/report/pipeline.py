"""Flight records of pipelines: of every action, when it was planned and when it was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from mycel.errors import UsageError

__all__ = ["PipelineFlight", "Row", "compare", "read_pipelines", "sentences"]

_FORMAT = "mycel.pipeline.flight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An action, planned and measured, in seconds since the step's begin.

    Attributes:
        rank: that carried it out.
        action: its text, as ``2F3``.
        planned: begin and end, or ``None`` where there was no plan.
        measured: begin and end.
        waited_s: of that, for messages.
    """

    rank: int
    action: str
    planned: tuple[float, float] | None
    measured: tuple[float, float]
    waited_s: float

    @property
    def late_s(self) -> float | None:
        """How much later it ended than planned."""
        return None if self.planned is None else self.measured[1] - self.planned[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFlight:
    """A rank's record of its last step.

    Attributes:
        rank: whose.
        order: the order's name.
        began_at: wall clock, seconds.
        rows: its actions.
        current: that was under way when the record was written, if one was.
    """

    rank: int
    order: str
    began_at: float
    rows: tuple[Row, ...]
    current: str


def read_pipelines(places: Iterable[Path]) -> list[PipelineFlight]:
    """The records of pipelines in folders and files, by rank; none where there are none.

    Args:
        places: folders are searched for ``pipeline-rank*.json``.

    Raises:
        UsageError: such a file cannot be read.
    """
    files: list[Path] = []
    for place in places:
        if place.is_dir():
            files += sorted(place.glob("pipeline-rank*.json"))
        elif place.name.startswith("pipeline-rank"):
            files.append(place)
    return sorted((_read(file) for file in files), key=lambda flight: flight.rank)


def _read(file: Path) -> PipelineFlight:
    try:
        record: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{file}: not JSON: {error}") from None
    if not isinstance(record, dict) or record.get("format") != _FORMAT or record.get("version") != 1:
        raise UsageError(
            f"{file}: no flight record of a pipeline of version 1; mycel.parallel's write_flight makes one"
        )
    try:
        planned = {text: (float(times[0]), float(times[1])) for text, times in record["planned"].items()}
        rank = int(record["rank"])
        rows = tuple(
            Row(
                rank=rank,
                action=str(text),
                planned=planned.get(text),
                measured=(float(begin), float(end)),
                waited_s=float(waited),
            )
            for text, begin, end, waited in record["actions"]
        )
        current = "" if record["current"] is None else str(record["current"][0])
        return PipelineFlight(
            rank=rank, order=str(record["order"]), began_at=float(record["began_at"]), rows=rows, current=current
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UsageError(f"{file}: its parts are not those of a flight record: {error!r}") from None


def compare(flights: Sequence[PipelineFlight]) -> list[Row]:
    """Every computation of all ranks by when it ended, on one clock: that of the rank that began first.

    Args:
        flights: of all ranks.
    """
    first = min((flight.began_at for flight in flights), default=0.0)
    rows = []
    for flight in flights:
        shift = flight.began_at - first
        for row in flight.rows:
            if "SEND" in row.action or "RECV" in row.action or "SHARD" in row.action:
                continue
            measured = (row.measured[0] + shift, row.measured[1] + shift)
            rows.append(
                Row(rank=row.rank, action=row.action, planned=row.planned, measured=measured, waited_s=row.waited_s)
            )
    return sorted(rows, key=lambda row: (row.measured[1], row.rank))


def sentences(flights: Sequence[PipelineFlight]) -> list[str]:
    """What the records say together, the most important first.

    Args:
        flights: of all ranks; at least one.
    """
    rows = compare(flights)
    name = next((flight.order for flight in flights if flight.order), "an order")
    unfinished = [f"rank {flight.rank} at {flight.current}" for flight in flights if flight.current]
    if unfinished:
        return [f"{name}: the step was not finished: {', '.join(unfinished)}"]
    if not rows:
        return [f"{name}: no actions were recorded"]
    total = max(row.measured[1] for row in rows) - min(row.measured[0] for row in rows)
    said = [f"{name}: {len(flights)} ranks, {len(rows)} computations, {1e3 * total:.1f} ms"]
    ends = [row.planned[1] for row in rows if row.planned is not None]
    if ends:
        begins = [row.planned[0] for row in rows if row.planned is not None]
        planned = max(ends) - min(begins)
        said[0] += f"; planned were {1e3 * planned:.1f} ms ({total / planned - 1:+.1%})"
        stretched = [
            (row.measured[1] - row.measured[0] - row.waited_s) / (row.planned[1] - row.planned[0])
            for row in rows
            if row.planned is not None and row.planned[1] > row.planned[0]
        ]
        if stretched:
            said.append(f"a computation took {median(stretched):.2f} times its planned length (median)")
    for flight in flights:
        waited = sum(row.waited_s for row in flight.rows)
        worst = max(flight.rows, key=lambda row: row.waited_s, default=None)
        if worst is not None and waited > 0:
            said.append(
                f"rank {flight.rank} waited {1e3 * waited:.1f} ms for messages, longest at {worst.action} "
                f"({1e3 * worst.waited_s:.1f} ms)"
            )
    return said

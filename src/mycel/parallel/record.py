"""When a rank began and ended each action of an order, and how long it waited in it for messages."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.pipeline.order import Action
from mycel.pipeline.stages import Stages
from mycel.pipeline.timed import Timed

__all__ = ["ActionTime", "Flight", "planned_times"]

#: Of the files that ``mycel report`` reads.
FORMAT, VERSION = "mycel.pipeline.flight", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTime:
    """One action, as it went.

    Attributes:
        action: which.
        begin_s: since the step's begin on this rank.
        end_s: since the step's begin on this rank.
        waited_s: of that, for messages.

    Examples:
        >>> from mycel.pipeline.order import Action
        >>> went = ActionTime(action=Action.parse("1F0"), begin_s=0.5, end_s=0.75, waited_s=0.25)
        >>> went.end_s - went.begin_s - went.waited_s
        0.0
    """

    action: Action
    begin_s: float
    end_s: float
    waited_s: float

    __repr__ = brief


class Flight:
    """The flight record of a rank's last step.

    Args:
        rank: whose.
        name: of the order.
        planned: when actions ought to begin and end, in seconds since the step's begin, by their text.

    Attributes:
        began_at: wall clock, seconds, of the step's begin.
        actions: of the step, in the order in which they went.
        current: that is under way, and since when.

    Examples:
        >>> from mycel.pipeline.order import Action
        >>> flight = Flight(0, "mine")
        >>> flight.restart()
        >>> with flight.during(Action.parse("0F0")):
        ...     pass
        >>> [str(went.action) for went in flight.actions], flight.current
        (['0F0'], None)
    """

    def __init__(self, rank: int, name: str, planned: Mapping[str, tuple[float, float]] | None = None) -> None:
        self.rank, self.name, self.planned = rank, name, dict(planned or {})
        self.began_at = 0.0
        self.actions: list[ActionTime] = []
        self.current: tuple[Action, float] | None = None
        self._begin = 0.0
        self._waited = 0.0

    def restart(self) -> None:
        """A step begins."""
        self.actions.clear()
        self.current = None
        self.began_at, self._begin = time.time(), time.perf_counter()

    @contextmanager
    def during(self, action: Action) -> Iterator[None]:
        """Take an action's time; of one that fails it stays in ``current``.

        Args:
            action: that is carried out meanwhile.
        """
        begin = time.perf_counter() - self._begin
        self.current, self._waited = (action, begin), 0.0
        yield
        end = time.perf_counter() - self._begin
        self.actions.append(ActionTime(action=action, begin_s=begin, end_s=end, waited_s=self._waited))
        self.current = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Take the time of a wait inside an action."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - begin

    def to_json(self) -> dict[str, Any]:
        """A JSON object, which ``mycel report`` reads."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "rank": self.rank,
            "order": self.name,
            "began_at": self.began_at,
            "planned": {text: list(times) for text, times in self.planned.items()},
            "actions": [[str(a.action), a.begin_s, a.end_s, a.waited_s] for a in self.actions],
            "current": None if self.current is None else [str(self.current[0]), self.current[1]],
        }

    def write(self, folder: Path) -> Path:
        """Write the record into a folder, as ``pipeline-rank3.json``; an older one is replaced whole.

        Args:
            folder: made where it is not there.

        Returns:
            The file.

        Raises:
            UsageError: it cannot be written.
        """
        file = folder / f"pipeline-rank{self.rank}.json"
        half = file.with_suffix(f".{os.getpid()}.part")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            half.write_text(json.dumps(self.to_json()), encoding="utf-8")
            half.replace(file)
        except OSError as error:
            raise UsageError(f"{file}: cannot be written: {error.strerror}") from None
        return file


def planned_times(timed: Timed, unit_s: float) -> dict[str, tuple[float, float]]:
    """When a schedule that was found by search has each action begin and end, for ``Pipeline(..., planned=)``.

    Args:
        timed: the schedule.
        unit_s: seconds of its unit of time.

    Raises:
        UsageError: the unit is not above 0.

    Examples:
        >>> from mycel.pipeline.placement import Block, Dependency, Placement
        >>> halves = (Block(name="F0", devices=(0,), time=1), Block(name="F1", devices=(1,), time=2))
        >>> two = Placement(name="", num_devices=2, blocks=halves, dependencies=(Dependency(before=0, after=1),))
        >>> planned_times(Timed(placement=two, starts=((0, 1),)), 0.5)
        {'0F0': (0.0, 0.5), '1F0': (0.5, 1.5)}
    """
    if not unit_s > 0:
        raise UsageError(f"unit_s is {unit_s!r}; expected seconds above 0")
    stages = Stages(timed.placement)
    found = {}
    for micro_batch, starts in enumerate(timed.starts):
        for place, (start, block) in enumerate(zip(starts, timed.placement.blocks, strict=True)):
            text = str(stages.action(place, micro_batch))
            found[text] = (start * unit_s, (start + block.time) * unit_s)
    return found

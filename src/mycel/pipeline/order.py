"""Order: what every rank of a pipeline does, one action after the other.

A row holds a rank's actions in the order in which it carries them out; idle time is no part of an order, it follows
from what waits for what. An order is either *compute only*, as people and searches write it, or has the messages
between ranks in it (``has_communication``), as runtimes carry it out.

What needs the result of what follows from the *routes*, the stages that every micro-batch visits: forwards go along
a route, backwards come back along it. Where that is not the whole story, in branches and with blocks that several
ranks carry out together, ``feeds`` says all of it: pairs such as ``("0F", "1F")``, ``("3F", "head")``,
``("head", "3B")``, which hold for each micro-batch that has both.

Construction checks the form. Whether an order is *right* is for ``mycel.pipeline.check`` to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mycel.brief import brief
from mycel.errors import ScheduleError
from mycel.pipeline.action import BLOCK_NAME, NO_STAGE, Action, Kind
from mycel.pipeline.text import (
    FORMAT,
    ORDER_VERSION,
    counts_of,
    fields_of_csv,
    fields_of_json,
    head_of,
    rows_to_csv,
)

__all__ = ["NO_STAGE", "ORDER_VERSION", "Action", "Kind", "Order"]

_END = re.compile(r"(\d{1,9})(F|B|I|W)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The action lists of all ranks. Frozen and hashable.

    Attributes:
        rows: one a rank, in order of execution, no idle time kept.
        num_stages: pieces that the model is cut into; a rank may hold several.
        num_micro_batches: pieces that the batch is cut into.
        name: what people call it; orders that differ in nothing else are equal.
        routes: stages that each micro-batch visits, in order; ``None``: all of them.
        feeds: what needs the result of what, for each micro-batch: pairs of a stage's forward or backward, written
            ``3F`` or ``3B``, or a shared block's name; ``None``: what the routes say. Where it is given, a stage
            of which no backward is named or stands anywhere has none. That a backward needs its own forward is not
            said here.
        version: of this form.
        stage_ranks: on which rank each stage is; of a stage on several, the first.

    Raises:
        ScheduleError: malformed; the message names rank and action.

    Examples:
        >>> order = Order.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n")
        >>> order.num_stages, order.num_micro_batches, order.rank_of(1)
        (2, 2, 1)
        >>> Order.from_json(order.to_json()) == order
        True
        >>> print(order.to_csv(), end="")
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1
    """

    rows: tuple[tuple[Action, ...], ...]
    num_stages: int
    num_micro_batches: int
    name: str = field(default="", compare=False)
    routes: tuple[tuple[int, ...], ...] | None = None
    feeds: tuple[tuple[str, str], ...] | None = None
    version: int = ORDER_VERSION
    stage_ranks: tuple[int, ...] = field(init=False, compare=False, repr=False)

    __repr__ = brief

    def __post_init__(self) -> None:
        if self.version != ORDER_VERSION:
            raise ScheduleError(f"order version {self.version!r}; this mycel has version {ORDER_VERSION}")
        if not isinstance(self.name, str) or not self.name.isprintable():
            raise ScheduleError(f"the order's name is {self.name!r}, not text that can be shown")
        for what, count in (("stages", self.num_stages), ("micro-batches", self.num_micro_batches)):
            if type(count) is not int or count < 1:
                raise ScheduleError(f"an order over {count!r} {what}; expected a whole number from 1 on")
        self._check_rows()
        object.__setattr__(self, "stage_ranks", self._found_ranks())
        if self.routes is not None:
            self._check_routes(self.routes)
        if self.feeds is not None:
            self._check_feeds(self.feeds)

    # -- form -----------------------------------------------------------------------------------------------

    def _check_rows(self) -> None:
        if not isinstance(self.rows, tuple) or not self.rows:
            raise ScheduleError("an order has one row of actions a rank, in a tuple; got none")
        for rank, row in enumerate(self.rows):
            if not isinstance(row, tuple) or not row:
                raise ScheduleError(f"rank {rank} has no actions; every rank holds at least one stage")
            for step, action in enumerate(row):
                if not isinstance(action, Action):
                    raise ScheduleError(f"rank {rank}, action {step}: {action!r} is no Action")
                for leaf in action.leaves:
                    self._check_range(leaf, f"rank {rank}, action {step} ({action})")

    def _check_range(self, leaf: Action, where: str) -> None:
        if leaf.stage >= self.num_stages:
            raise ScheduleError(
                f"{where}: stage {leaf.stage} of {self.num_stages}; the last is {self.num_stages - 1}"
            )
        if leaf.micro_batch is not None and leaf.micro_batch >= self.num_micro_batches:
            raise ScheduleError(
                f"{where}: micro-batch {leaf.micro_batch} of {self.num_micro_batches}; "
                f"the last is {self.num_micro_batches - 1}"
            )

    def _found_ranks(self) -> tuple[int, ...]:
        found: dict[int, int] = {}
        micro_batches = set()
        for rank, row in enumerate(self.rows):
            for action in row:
                for leaf in action.leaves:
                    micro_batches.add(leaf.micro_batch)
                    if leaf.kind.is_computation:
                        found.setdefault(leaf.stage, rank)
        # Files name any number: nothing is made as large as one before it is known that there are so many.
        if len(found) < self.num_stages:
            missing = next(stage for stage in range(self.num_stages) if stage not in found)
            raise ScheduleError(
                f"stage {missing} of {self.num_stages} is on no rank: a row is missing, "
                f"or a slip names stage {self.num_stages - 1}"
            )
        if len(micro_batches - {None}) < self.num_micro_batches:
            missing = next(m for m in range(self.num_micro_batches) if m not in micro_batches)
            raise ScheduleError(
                f"micro-batch {missing} of {self.num_micro_batches} occurs nowhere: its actions are missing, "
                f"or a slip names micro-batch {self.num_micro_batches - 1}"
            )
        return tuple(found[stage] for stage in range(self.num_stages))

    def _check_routes(self, routes: tuple[tuple[int, ...], ...]) -> None:
        if len(routes) != self.num_micro_batches:
            raise ScheduleError(f"{len(routes)} routes for {self.num_micro_batches} micro-batches; each has one")
        for micro_batch, route in enumerate(routes):
            if not route or len(set(route)) < len(route):
                raise ScheduleError(f"route {route} of micro-batch {micro_batch}: stages, each at most once")
            for stage in route:
                if type(stage) is not int or not 0 <= stage < self.num_stages:
                    raise ScheduleError(
                        f"route {route} of micro-batch {micro_batch}: no stage {stage!r}; "
                        f"stages are 0..{self.num_stages - 1}"
                    )

    def _check_feeds(self, feeds: tuple[tuple[str, str], ...]) -> None:
        if self.routes is not None:
            raise ScheduleError("an order has routes or feeds, not both: feeds say all of what needs what")
        blocks = self.blocks
        for pair in feeds:
            if len(pair) != 2:
                raise ScheduleError(f"{pair} among feeds is no pair")
            for end in pair:
                found = _END.fullmatch(end)
                if found is not None and int(found[1]) >= self.num_stages:
                    raise ScheduleError(f"{pair} among feeds: stage {found[1]} of {self.num_stages}")
                if found is None and (BLOCK_NAME.fullmatch(end) is None or end not in blocks):
                    known = ", ".join(sorted(blocks)) or "there is none"
                    raise ScheduleError(
                        f"{pair} among feeds: {end!r} is no end such as 3F or 3B, "
                        f"nor a shared block of the order ({known})"
                    )

    # -- what it says ---------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.rows)

    @property
    def has_communication(self) -> bool:
        """Whether messages, gathers of parameters or reductions of gradients stand among the actions."""
        return any(action.kind.is_message or action.kind.is_of_parameters for row in self.rows for action in row)

    @property
    def blocks(self) -> frozenset[str]:
        """Names of the blocks that several ranks carry out together."""
        return frozenset(action.block for row in self.rows for action in row if action.kind is Kind.SHARED)

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage.

        Args:
            stage: from 0 on.
        """
        return self.stage_ranks[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in ascending order.

        Args:
            rank: from 0 on.
        """
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def route_of(self, micro_batch: int) -> tuple[int, ...]:
        """The stages that a micro-batch visits, in order.

        Args:
            micro_batch: from 0 on.
        """
        return tuple(range(self.num_stages)) if self.routes is None else self.routes[micro_batch]

    def of_first(self, count: int) -> Order:
        """The same for fewer micro-batches: those from ``count`` on are left out.

        What is left keeps its sequence, so it waits for nothing that is not there: of a right order it is one.

        Args:
            count: from 1 to ``num_micro_batches``.

        Raises:
            ScheduleError: there are not so many.

        Examples:
            >>> Order.from_csv("0F0,0F1,0B0,0B1\\n").of_first(1).to_csv()
            '0F0,0B0\\n'
        """
        if not 1 <= count <= self.num_micro_batches:
            raise ScheduleError(f"the first {count} of {self.num_micro_batches} micro-batches; there must be one")
        if count == self.num_micro_batches:
            return self
        rows = tuple(tuple(kept for action in row for kept in _kept(action, count)) for row in self.rows)
        routes = None if self.routes is None else self.routes[:count]
        return replace(self, rows=rows, num_micro_batches=count, routes=routes)

    # -- files ----------------------------------------------------------------------------------------------

    def to_csv(self) -> str:
        """Torch's text, one row a rank; what torch has no words for stands in lines with ``#`` above it.

        An order without routes, feeds and shared blocks is a file that torch reads.
        """
        counts = self.num_stages, self.num_micro_batches
        plain = self.routes is None and self.feeds is None and counts_of(self.rows) == counts
        head = (
            ""
            if plain
            else head_of(
                stages=self.num_stages,
                micro_batches=self.num_micro_batches,
                routes=self.routes,
                feeds=self.feeds,
                name=self.name,
            )
        )
        return head + rows_to_csv(self.rows)

    def torch_csv(self) -> str:
        """Only what torch has words for: shared blocks and lines with ``#`` left out."""
        return rows_to_csv([action for action in row if action.kind is not Kind.SHARED] for row in self.rows)

    @classmethod
    def from_csv(cls, text: str) -> Order:
        """The order in a CSV file, of torch or of ours; every cell is read whole.

        Args:
            text: the file's content.

        Raises:
            ScheduleError: a cell that is no action, with its place; rows or lines that do not fit together.
        """
        return cls(**fields_of_csv(text))

    def to_json(self) -> dict[str, Any]:
        """A JSON object that ``from_json`` reads back to an equal order."""
        record: dict[str, Any] = {
            "format": FORMAT,
            "version": self.version,
            "name": self.name,
            "num_stages": self.num_stages,
            "num_micro_batches": self.num_micro_batches,
            "rows": [[str(action) for action in row] for row in self.rows],
        }
        if self.routes is not None:
            record["routes"] = [list(route) for route in self.routes]
        if self.feeds is not None:
            record["feeds"] = [list(pair) for pair in self.feeds]
        return record

    @classmethod
    def from_json(cls, source: str | Mapping[str, Any]) -> Order:
        """The order that a JSON object describes.

        Args:
            source: the object, or its text.

        Raises:
            ScheduleError: no such object, malformed, or of a newer version.
        """
        return cls(**fields_of_json(source))

    @classmethod
    def from_text(cls, text: str) -> Order:
        """The order in a file of either form; the first character says which.

        Args:
            text: the file's content.

        Raises:
            ScheduleError: as of ``from_csv`` and ``from_json``.
        """
        is_json = text.removeprefix("\ufeff").lstrip()[:1] in ("{", "[")
        return cls.from_json(text) if is_json else cls.from_csv(text)


def _kept(action: Action, count: int) -> tuple[Action, ...]:
    """What is left of an action without the micro-batches from a number on; of two parts, that of the other."""
    left = tuple(leaf for leaf in action.leaves if leaf.micro_batch is None or leaf.micro_batch < count)
    return (action,) if len(left) == len(action.leaves) else left

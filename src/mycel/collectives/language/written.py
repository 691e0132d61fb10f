"""Written collectives: a function that says how an array moves, and the schedule that it makes on a fabric.

The function is run twice, the second time as another rank would run it: a schedule is made by every rank for itself
and must be the same everywhere. Then it is verified as any schedule is, by what it would do, and each rank's program
is made once. Errors of either name the author's line.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mycel.brief import brief
from mycel.collectives.language.array import Array
from mycel.collectives.language.statement import Statement, Where
from mycel.collectives.language.transfers import schedule_of
from mycel.collectives.lower import RankTemplate
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import COLLECTIVES, ROOTED, Collective, CollectiveName, check_ranks
from mycel.collectives.verify import verify_schedule
from mycel.errors import MycelError, ScheduleError, UsageError, VerificationError
from mycel.names import spelled
from mycel.settings import as_another_rank
from mycel.topology.model import Topology

__all__ = ["Built", "Written", "collective", "schedule_from", "traced"]

#: Instances beyond which a number is a slip of the pen.
_MOST_INSTANCES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A verified schedule, and where its author wrote each of its transfers.

    Attributes:
        schedule: it.
        statements: of each transfer.
    """

    schedule: Schedule
    statements: tuple[Statement, ...]

    __repr__ = brief


class Written:
    """A collective that a function says; made by the decorator ``collective``.

    Called with an array, it says its statements about that one: written collectives are parts of others.

    Args:
        function: takes an ``Array`` and says how it moves.
        serves: names of the collectives that it carries out, the usual one first.
        instances: equal parts of every block, each of which the function is run for.
        ranks: the number of ranks that it is for; ``None``: any.

    Attributes:
        name: of the function, and the method of its schedules.
        serves, instances, ranks: as given.
        where: its first line.
    """

    def __init__(
        self, function: Callable[..., None], serves: tuple[CollectiveName, ...], instances: int, ranks: int | None
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self.serves, self.instances, self.ranks = serves, instances, ranks
        code = getattr(function, "__code__", None)
        self.where = Where(
            file=getattr(code, "co_filename", "<unknown>"), line=int(getattr(code, "co_firstlineno", 0))
        )

    def __repr__(self) -> str:
        return f"<{self.name}: {', '.join(self.serves)}, written at {self.where}>"

    def __call__(self, array: Array, *arguments: Any, **named: Any) -> None:
        self._function(array, *arguments, **named)

    def on(
        self,
        topology: Topology,
        name: CollectiveName | None = None,
        *,
        root: int | None = None,
        weights: Sequence[int] | None = None,
    ) -> Schedule:
        """The schedule on a fabric, verified.

        Args:
            topology: the fabric.
            name: which of the collectives that it serves; the first if not given.
            root: of broadcast, reduce, gather and scatter; 0 if not given.
            weights: relative sizes of the blocks, where they are not equal.

        Raises:
            UsageError: another collective or number of ranks, two runs that differ, or an error of the function's.
            ScheduleError: a statement is malformed; the message names its line.
            VerificationError: the schedule is wrong, or two statements race; the message names their lines.
            SynthesisError: a statement asks for a way that there is not.
        """
        return self.built(topology, name, root=root, weights=weights).schedule

    def built(
        self,
        topology: Topology,
        name: CollectiveName | None = None,
        *,
        root: int | None = None,
        weights: Sequence[int] | None = None,
    ) -> Built:
        """``on``, with the author's line of each transfer; arguments and errors as there."""
        wanted = self._wanted(topology, name, root, weights)
        statements = traced(self, topology, wanted)
        with as_another_rank():
            again = traced(self, topology, wanted)
        self._compare(statements, again)
        return schedule_from(statements, topology, wanted, self.name, self.where)

    def _wanted(
        self, topology: Topology, name: str | None, root: int | None, weights: Sequence[int] | None
    ) -> Collective:
        chosen: CollectiveName = self.serves[0]
        if name is not None:
            chosen = spelled(name, COLLECTIVES, "collective")  # type: ignore[assignment]
        if chosen not in self.serves:
            raise UsageError(f"{self.where}: {self.name} is written for {', '.join(self.serves)}, not for {chosen}")
        if self.ranks is not None and topology.num_ranks != self.ranks:
            raise UsageError(
                f"{self.where}: {self.name} is written for {self.ranks} ranks, and {topology.name} has "
                f"{topology.num_ranks}; write it for array.num_ranks, or choose {self.ranks} of them "
                "(Topology.subset)"
            )
        if root is None and chosen in ROOTED:
            root = 0
        wanted = Collective(
            chosen, topology.num_ranks, root=root, weights=None if weights is None else tuple(weights)
        )
        check_ranks(topology, wanted)
        return wanted

    def _compare(self, first: Sequence[Statement], second: Sequence[Statement]) -> None:
        if first == second:
            return
        pairs = zip(first, second, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
        said = [run[at].quoted if at < len(run) else "nothing more" for run in (first, second)]
        raise UsageError(
            f"{self.where}: {self.name} does not say the same in every run, and ranks would disagree: statement {at} "
            f"is {said[0]}, and in a second run, as another rank, {said[1]}; let it depend on the array alone, not "
            "on chance, time or the rank that runs it"
        )


def collective(
    *serves: CollectiveName, instances: int = 1, ranks: int | None = None
) -> Callable[[Callable[..., None]], Written]:
    """Decorate a function that says how the array of a collective moves.

    Args:
        serves: names of collectives that it carries out, such as ``"all_reduce"``; the usual one first.
        instances: every block in so many equal parts, for each of which the function is run: ``array.instance`` says
            for which.
        ranks: the number of ranks that it is for; ``None``: any.

    Raises:
        UsageError: no such collective, or no such number.

    Examples:
        >>> from mycel.topology import load_topology
        >>> @collective("all_gather")
        ... def to_all(array):
        ...     for owner, span in enumerate(array.cut(array.num_ranks)):
        ...         for rank in array.ranks:
        ...             if rank != owner:
        ...                 span.copy(owner, rank)
        >>> schedule = to_all.on(load_topology("star:ranks=4,bandwidth=1 GB/s"))
        >>> schedule.method, schedule.algbw, schedule.depth
        ('to_all', Fraction(4, 3), 1)
    """
    if not serves or not all(isinstance(name, str) for name in serves):
        raise UsageError(f'say what it carries out, as @collective("all_reduce"); one of {", ".join(COLLECTIVES)}')
    names: tuple[CollectiveName, ...] = tuple(
        spelled(name, COLLECTIVES, "collective")  # type: ignore[misc]
        for name in serves
    )
    if isinstance(instances, bool) or not isinstance(instances, int) or not 1 <= instances <= _MOST_INSTANCES:
        raise UsageError(f"instances={instances!r}: a whole number from 1 to {_MOST_INSTANCES} is needed")
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 2):
        raise UsageError(f"ranks={ranks!r}: a whole number from 2, or None for any")
    return lambda function: Written(function, names, instances, ranks)


def traced(written: Written, topology: Topology, wanted: Collective) -> tuple[Statement, ...]:
    """What a function says about a collective on a fabric, in order.

    Args:
        written: the function.
        topology: the fabric.
        wanted: the collective.

    Raises:
        UsageError: the function fails; the message names the line.
        ScheduleError: a statement is malformed.
        SynthesisError: a statement asks for a way that there is not.
    """
    found: list[Statement] = []
    for instance in range(written.instances):
        array = Array(topology, wanted, instance, written.instances)
        try:
            written(array)
        except MycelError:
            raise
        except RecursionError as error:
            where = _innermost(error, written.where)
            raise UsageError(
                f"{where.quoted}: {written.name} calls itself without end; say when it is to stop"
            ) from None
        except Exception as error:
            where = _innermost(error, written.where)
            raise UsageError(f"{where.quoted}: {type(error).__name__}: {error}") from error
        last = found[-1].step + 1 if found else 0
        found += [_moved(statement, last) for statement in array.statements] if last else array.statements
    return tuple(found)


def schedule_from(
    statements: Sequence[Statement], topology: Topology, wanted: Collective, method: str, where: Where
) -> Built:
    """The verified schedule of statements, with the author's line of each transfer.

    Args:
        statements: in order.
        topology: the fabric.
        wanted: what they are to carry out.
        method: name to put on it.
        where: the function's first line, which stands for what nobody has said.

    Raises:
        VerificationError: it is wrong.
        ScheduleError: no programs can be made of it.
    """
    try:
        schedule, lines = schedule_of(statements, topology, wanted, method)
    except VerificationError:
        raise
    except ScheduleError as error:
        raise ScheduleError(f"{where.quoted}: {error}") from None
    check(schedule, lines, where)
    return Built(schedule=schedule, statements=lines)


def check(schedule: Schedule, lines: Sequence[Statement], where: Where) -> None:
    """Return if a schedule is right and has programs; raise otherwise.

    Args:
        schedule: of statements.
        lines: the statement of each of its transfers.
        where: the function's first line.

    Raises:
        VerificationError: it is wrong; the message names the author's lines.
        ScheduleError: no programs can be made of it; the same.
    """
    chunks = [transfer.chunk for transfer in schedule.transfers]
    try:
        verify_schedule(schedule)
    except VerificationError as error:
        raise VerificationError(_located(str(error), chunks, lines, where), grid=error.grid) from None
    try:
        for vertex in range(schedule.num_compute_vertices):
            RankTemplate(schedule, vertex)
    except ScheduleError as error:
        raise ScheduleError(_located(str(error), chunks, lines, where)) from None


def _located(message: str, chunks: Sequence[int], lines: Sequence[Statement], where: Where) -> str:
    """A message in which each transfer is followed by what the author wrote for it.

    Args:
        message: about a schedule.
        chunks: that each of its transfers moves.
        lines: the statement of each.
        where: the function's first line.
    """
    named: list[int] = []

    def line_of(found: re.Match[str]) -> str:
        number = int(found[1])
        if number >= len(lines) or number in named:
            return found[0]
        named.append(number)
        return f"{found[0]}, written at {lines[number].where.quoted},"

    text = re.sub(r"transfer (\d+)(?: \([^()]*\)|, step \d+, \d+ -> \d+)?", line_of, message)
    if named:
        return text
    of = re.search(r"\bchunk (\d+)", message)
    last = next((number for number in reversed(range(len(lines))) if of and chunks[number] == int(of[1])), None)
    if last is None:
        return f"{where.quoted}: {text}; no statement moves it"
    return f"{text}; it is moved last by transfer {last}, written at {lines[last].where.quoted}"


def _innermost(error: BaseException, known: Where) -> Where:
    """The last line of the author's own that an error came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == known.file]
    return Where(file=frames[-1].filename, line=frames[-1].lineno or 0) if frames else known


def _moved(statement: Statement, steps: int) -> Statement:
    return replace(statement, step=statement.step + steps)

"""One thing that a rank does at its turn: a computation of a stage, a message, a block that several ranks do at once.

The text of an action is what ``torch.distributed.pipelining`` writes into a cell of its CSV files. One form is ours:
``SHARED3[head]`` is micro-batch 3 of the block *head*, which several ranks carry out together. Torch's reader stops
at such a cell with an error instead of passing over it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from mycel.errors import ScheduleError

__all__ = ["BLOCK_NAME", "NO_STAGE", "Action", "Kind"]

#: Stage of actions that belong to no single stage: those of two parts, and blocks on several ranks.
NO_STAGE = -1
#: Characters of an action's text that a ``repr`` shows of a long one.
_MOST_SHOWN = 80
#: What a shared block may be called: nothing that has a meaning in the files.
BLOCK_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


class Kind(Enum):
    """What an action does.

    Attributes:
        value: its text in torch's files.

    Examples:
        >>> Kind("I").is_backward, Kind.RECV_F.is_message, Kind.UNSHARD.is_of_parameters
        (True, True, True)
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP = "OVERLAP_F_B"
    SHARED = "SHARED"

    @property
    def is_computation(self) -> bool:
        """Whether it is work of one stage on one micro-batch."""
        return self in _COMPUTATIONS

    @property
    def is_message(self) -> bool:
        """Whether it sends or receives."""
        return self in _MESSAGES

    @property
    def is_of_parameters(self) -> bool:
        """Whether it is about a stage's parameters, for all micro-batches at once."""
        return self in _OF_PARAMETERS

    @property
    def is_backward(self) -> bool:
        """Whether it computes the gradient of a stage's input: a whole backward or its first half."""
        return self in (Kind.BACKWARD, Kind.INPUT)


_COMPUTATIONS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT})
_MESSAGES = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
_OF_PARAMETERS = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})

# Nine digits are more stages than anybody has, and keep what a file names within a machine word.
_NUMBER = r"\d{1,9}"
_PLAIN = re.compile(
    rf"({_NUMBER})(?:(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)({_NUMBER})|(UNSHARD|RESHARD|REDUCE_GRAD))", re.ASCII
)
_SHARED = re.compile(rf"SHARED({_NUMBER})\[({BLOCK_NAME.pattern})\]", re.ASCII)
_OVERLAP = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One entry of a rank's list.

    Attributes:
        stage: whose; ``NO_STAGE`` of two overlapped parts and of a shared block.
        kind: what is done.
        micro_batch: with which; ``None`` of what is about parameters, and of two parts.
        parts: a forward and a whole backward, of two that overlap.
        block: name of a shared block.

    Raises:
        ScheduleError: fields that do not go together.

    Examples:
        >>> str(Action(stage=1, kind=Kind.RECV_F, micro_batch=0))
        '1RECV_F0'
        >>> Action.parse("(0F7;7B3)OVERLAP_F_B").parts[1]
        Action.parse('7B3')
    """

    stage: int
    kind: Kind
    micro_batch: int | None = None
    parts: tuple[Action, ...] = ()
    block: str = ""

    def __post_init__(self) -> None:
        kind = self.kind
        if not isinstance(kind, Kind):
            raise ScheduleError(f"{kind!r} is no kind of action; kinds are {', '.join(k.value for k in Kind)}")
        if kind is Kind.OVERLAP:
            self._check_parts()
        elif self.parts:
            raise ScheduleError(f"{kind.value} has no parts; {Kind.OVERLAP.value} has two")
        if (kind is Kind.SHARED) != bool(self.block) or (self.block and BLOCK_NAME.fullmatch(self.block) is None):
            raise ScheduleError(
                f"{kind.value} of block {self.block!r}: SHARED, and nothing else, names a block, as e1"
            )
        has_stage = kind not in (Kind.OVERLAP, Kind.SHARED)
        if type(self.stage) is not int or (self.stage < 0 if has_stage else self.stage != NO_STAGE):
            expected = "a stage from 0 on" if has_stage else f"{NO_STAGE}, as it is of no single stage"
            raise ScheduleError(f"{kind.value} of stage {self.stage!r}: expected {expected}")
        has_micro_batch = kind is not Kind.OVERLAP and not kind.is_of_parameters
        if has_micro_batch and (type(self.micro_batch) is not int or self.micro_batch < 0):
            raise ScheduleError(f"{kind.value} of micro-batch {self.micro_batch!r}: expected one from 0 on")
        if not has_micro_batch and self.micro_batch is not None:
            raise ScheduleError(f"{kind.value} takes no micro-batch, and got {self.micro_batch!r}")

    def _check_parts(self) -> None:
        kinds = [part.kind if isinstance(part, Action) else None for part in self.parts]
        if kinds != [Kind.FORWARD, Kind.BACKWARD]:
            got = ", ".join(str(part) for part in self.parts) or "none"
            raise ScheduleError(f"{Kind.OVERLAP.value} of {got}: its parts are one F and one B, in this order")

    @property
    def leaves(self) -> tuple[Action, ...]:
        """Its parts, where it has some; itself otherwise."""
        return self.parts or (self,)

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        number = "" if self.micro_batch is None else self.micro_batch
        if self.block:
            return f"{self.kind.value}{number}[{self.block}]"
        return f"{self.stage}{self.kind.value}{number}"

    def __repr__(self) -> str:
        text = str(self)
        shown = text if len(text) <= 2 * _MOST_SHOWN else text[:_MOST_SHOWN] + "..."
        return f"Action.parse({shown!r})"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that a cell's text means; every character counts.

        Args:
            text: such as ``2F3``, ``1RECV_F0``, ``0UNSHARD``; spaces around it are passed over.

        Raises:
            ScheduleError: anything else, also where torch would read a beginning and drop the rest.

        Examples:
            >>> Action.parse("2F3").micro_batch
            3
            >>> Action.parse("0F0xyz")
            Traceback (most recent call last):
            mycel.errors.ScheduleError: '0F0xyz' is no action: after 0F0 stands 'xyz'
        """
        cell = text.strip()
        if found := _PLAIN.fullmatch(cell):
            stage, kind, number, of_parameters = found.groups()
            if of_parameters:
                return cls(stage=int(stage), kind=Kind(of_parameters))
            return cls(stage=int(stage), kind=Kind(kind), micro_batch=int(number))
        if found := _SHARED.fullmatch(cell):
            return cls(stage=NO_STAGE, kind=Kind.SHARED, micro_batch=int(found[1]), block=found[2])
        if found := _OVERLAP.fullmatch(cell):
            return cls(stage=NO_STAGE, kind=Kind.OVERLAP, parts=(cls.parse(found[1]), cls.parse(found[2])))
        raise ScheduleError(f"{cell!r} is no action: {_what_is_wrong(cell)}")


def _what_is_wrong(cell: str) -> str:
    if found := _PLAIN.match(cell):
        return f"after {found[0]} stands {cell[found.end() :]!r}"
    if re.fullmatch(r"\d+(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)", cell, re.ASCII):
        return f"its micro-batch is missing; write {cell[:40]}0"
    if cell.startswith("("):
        return "two parts are written (0F7;7B3)OVERLAP_F_B"
    return "expected stage, kind and micro-batch, such as 2F3, 1RECV_F0, 0UNSHARD or SHARED3[head]"

"""What the ranks of a group have said where somebody asked: one book, opened anew for every inquiry.

An inquiry has two numbers: how often the group has gone on with another fabric (its *epoch*), and how often, on that
fabric, all have found that there is nothing to do but to go on waiting. Each rank says one thing an inquiry, so that
all who have heard everybody know the same. Who hears of a rank further behind than the calls it has told of says it
again with those: that takes the place of what it said before. What is said about inquiries to come is kept; what is
said about those that are over is not.
"""

from __future__ import annotations

from mycel.runtime.evidence import Evidence
from mycel.runtime.messages import Finding, Position
from mycel.runtime.verdict import State

__all__ = ["Inquiry"]

#: Ranks are in the same inquiry or in neighbouring ones: whoever is through has heard all.
_AHEAD = 2


class Inquiry:
    """The book of one rank; not for several threads at once.

    Args:
        rank: whose book it is: others may pass on what it has said, and that is known.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        #: Number of the present inquiry.
        self.number = (0, 0)
        self._states: dict[tuple[tuple[int, int], int], State] = {}
        self._pieces: dict[tuple[tuple[int, int], int], dict[int, Finding]] = {}
        self._planning: dict[tuple[tuple[int, int], int], str] = {}

    @property
    def is_open(self) -> bool:
        """Whether anybody has said where it stands."""
        return any(number == self.number for number, _ in self._states)

    @property
    def states(self) -> dict[int, State]:
        """Where ranks stand, as far as is known."""
        return {rank: state for (number, rank), state in self._states.items() if number == self.number}

    @property
    def planning(self) -> dict[int, str]:
        """What ranks are planning that have said so in place of where they stand."""
        return {rank: what for (number, rank), what in self._planning.items() if number == self.number}

    @property
    def evidence(self) -> dict[int, Evidence]:
        """What ranks have found, those that have been heard to the end."""
        return {
            rank: Evidence.join([pieces[piece].evidence for piece in sorted(pieces)])
            for (number, rank), pieces in self._pieces.items()
            if number == self.number and len(pieces) == next(iter(pieces.values())).pieces
        }

    def file(self, message: Position | Finding) -> bool:
        """Take down what a rank has said; whether that is news."""
        key = (message.inquiry, message.by)
        epoch, number = message.inquiry
        known = self.number[1] if epoch == self.number[0] else 0
        is_over = message.inquiry < self.number
        is_far = epoch > self.number[0] + _AHEAD or number > known + _AHEAD
        if message.by == self._rank or is_over or is_far:
            return False
        if isinstance(message, Position):
            if key in self._states and self._states[key].since <= message.state.since:
                return False
            self._states[key] = message.state
            return True
        pieces = self._pieces.setdefault(key, {})
        if message.piece in pieces or (pieces and next(iter(pieces.values())).pieces != message.pieces):
            return False
        pieces[message.piece] = message
        return True

    def note_planning(self, rank: int, number: tuple[int, int], what: str) -> None:
        """Take down that a rank is planning."""
        if self.number <= number <= (self.number[0] + _AHEAD, number[1]):
            self._planning[number, rank] = what

    def note(self, own: Position) -> None:
        """Take down where this rank stands."""
        self._states[own.inquiry, own.by] = own.state

    def note_found(self, own: tuple[Finding, ...]) -> None:
        """Take down what this rank has found."""
        for each in own:
            self._pieces.setdefault((each.inquiry, each.by), {})[each.piece] = each

    def again(self) -> None:
        """Open the next one on the same fabric."""
        self._open((self.number[0], self.number[1] + 1))

    def next_epoch(self) -> None:
        """Open the first one on another fabric."""
        self._open((self.number[0] + 1, 0))

    def _open(self, number: tuple[int, int]) -> None:
        self.number = number
        self._states = {key: said for key, said in self._states.items() if key[0] >= number}
        self._pieces = {key: said for key, said in self._pieces.items() if key[0] >= number}
        self._planning = {key: said for key, said in self._planning.items() if key[0] >= number}

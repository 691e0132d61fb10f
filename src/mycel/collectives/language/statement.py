"""Statements of a written collective, and where in its author's files each stands."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from mycel.brief import brief

__all__ = ["Statement", "Where", "where_called"]

#: What stands between an author's line and ours: this package, and Python's ``with``.
_BETWEEN = (str(Path(__file__).parent) + os.sep, contextlib.__file__)
#: Characters of a line that a message quotes.
_QUOTED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A line of a file.

    Attributes:
        file: its path, as Python has it.
        line: number of the line, from 1.

    Examples:
        >>> print(Where(file="ring.py", line=12))
        ring.py:12
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def quoted(self) -> str:
        """The place and what is written there."""
        text = linecache.getline(self.file, self.line).strip()[:_QUOTED]
        return f"{self}: {text}" if text else str(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A run of a block that goes from one vertex to another.

    Attributes:
        adds: to what the destination holds, instead of overwriting it.
        block: block of the collective's array.
        start, stop: which part of the block, as shares of it.
        src, dst: compute vertices: ranks, and after them switches that copy and add.
        path: topology vertices from one to the other.
        step: statements of one step read what was there before any of them wrote.
        where: the author's line.
    """

    adds: bool
    block: int
    start: Fraction
    stop: Fraction
    src: int
    dst: int
    path: tuple[int, ...]
    step: int
    where: Where

    __repr__ = brief

    @property
    def quoted(self) -> str:
        """The author's line, and which of the transfers that it stands for this is."""
        return f"{self.where.quoted} ({'add' if self.adds else 'copy'} {self.src} -> {self.dst})"


def where_called() -> Where:
    """The line outside of this package from which it was called."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return Where(file=frame.f_code.co_filename, line=frame.f_lineno)

"""Consoles for tables, progress and sentences: text is shown as it is, markup is read nowhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

__all__ = ["doing", "notes", "output"]


def output(*, wide: bool = False) -> Console:
    """Standard output.

    Args:
        wide: where it is no terminal, be wide enough for a large table instead of 80 columns.
    """
    console = Console(markup=False, highlight=False)
    return Console(markup=False, highlight=False, width=132) if wide and not console.is_terminal else console


def notes() -> Console:
    """Standard error."""
    return Console(markup=False, highlight=False, file=sys.stderr)


@contextmanager
def doing(what: str, *, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """A line with a clock on standard error while something lasts, where that is a terminal; nothing elsewhere.

    Args:
        what: is being done.
        shown: false on ranks that leave the word to another.

    Yields:
        What takes the place of ``what`` as the work goes on; any thread may call it.
    """
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = notes()
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as line:
        task = line.add_task(what, total=None)
        yield lambda text: line.update(task, description=text)

"""Consoles for tables, progress and sentences: text is shown as it is, markup is read nowhere."""

from __future__ import annotations

import sys

from rich.console import Console

__all__ = ["notes", "output"]


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

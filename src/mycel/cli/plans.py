"""``mycel plan``: which parallelism, orders of stages, groups of ranks, what memory keeps. One module a command."""

from __future__ import annotations

import typer

from mycel.cli import (
    COMMANDS,
    plan_check,
    plan_explain,
    plan_export,
    plan_known,
    plan_measure,
    plan_memory,
    plan_order,
    plan_search,
    plan_sequences,
)

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the group."""

    @app.callback(help=COMMANDS["plan"], no_args_is_help=True)
    def plan() -> None:
        pass

    plan_search.register(app)
    plan_explain.register(app)
    plan_export.register(app)
    plan_check.register(app)
    plan_measure.register(app)
    plan_known.register(app)
    plan_order.register(app)
    plan_sequences.register(app)
    plan_memory.register(app)

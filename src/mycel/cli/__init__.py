"""The command line: one module a subcommand, each with a function ``register(app)``, imported when it is named.

``--json`` prints one object on standard output; everything else goes to standard error. An error that mycel
raises on purpose becomes one line and exit code 2, never a traceback; so does a package of an extra that is missing.

All text is shown as it is: rich, which takes ``[run]`` for a style, draws tables and progress and nothing else, and
reads markup nowhere (``mycel.cli.consoles``).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mycel import __version__
from mycel.errors import MycelError
from mycel.extras import without

__all__ = ["COMMANDS", "build_app", "main"]

#: Subcommands, in the order of ``mycel --help``, and what they do.
COMMANDS = {
    "doctor": "What is installed, what is missing and what for, and whether two ranks come together here.",
    "warm": "Compile what ranks need, before any starts.",
    "show": "What a topology file is read as: ranks, switches, links and every assumption.",
    "bound": "The least time a collective can take on a fabric, exactly, and which links bind.",
    "whatif": "The bound before and after a change to the fabric.",
    "draw": "Draw a fabric; with a collective, also the links that bind and one tree of a schedule.",
    "synth": "Find a schedule for a collective on a fabric, verify it, and compare it with the bound.",
    "build": "Build the schedule that a Python file writes, verify it, and compare it with the bound.",
    "select": "Simulate all methods at several sizes and say which to use where.",
    "steps": "Schedules from the fewest steps to the most bandwidth, proven one by one (small fabrics).",
    "plan": "Plans with proofs: which parallelism, orders of stages, groups for sequences, what memory keeps.",
    "memory": "What a model's training step holds, moment by moment, and whether it fits.",
    "verify": "Check a schedule file: exit 0 if it is right, 1 if it is not.",
    "export": "Verify a schedule file and write it in a form that another tool reads.",
    "bench": "Time collectives: baseline and mycel in the same run, beside the bound, in the columns of nccl-tests.",
    "report": "Say what the flight records of a job's ranks tell together.",
    "emulate": "Run a program once a rank on an emulated cluster, as torchrun would on a real one.",
    "probe": "Measure the cluster this runs on and write its topology: start it once a rank, as a training program.",
    "discover": "Ask the machines of a running job what they have and write its topology: start it once a rank.",
    "advise": "Say what would pay here, compression under DDP or FSDP2, or local updates: start it once a rank.",
    "demo": "Train a small language model over an emulated cluster: the same training over Gloo and over mycel.",
}

#: Modules that are not called as their subcommand: a group of several.
_MODULES = {"plan": "plans"}

#: Those that write a file at their end, if at all, or raise ``KeyboardInterrupt`` with what they have written before.
_WRITING = frozenset(COMMANDS) - {"doctor", "warm", "verify", "emulate", "advise"}


def new_app(**options: Any) -> typer.Typer:
    """A typer application that prints plain text."""
    usual: dict[str, Any] = {"add_completion": False, "context_settings": {"help_option_names": ["-h", "--help"]}}
    return typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, **(usual | options))


class _Commands(Mapping[str, Any]):
    """The subcommands; a module is imported when its command is looked up."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        if name not in self._made:
            app = new_app()
            import_module(f"mycel.cli.{_MODULES.get(name, name)}").register(app)
            self._made[name] = typer.main.get_command(app)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Group(TyperGroup):
    """Says what the subcommands do without importing them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = _Commands()

    def invoke(self, ctx: Any) -> Any:
        """Runs the subcommand; Ctrl-C ends it with one line that says what is kept."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            _say_what_is_kept(str(error), ctx.invoked_subcommand)
            raise typer.Exit(128 + signal.SIGINT) from None

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mycel {__version__}")
        raise typer.Exit


def build_app() -> typer.Typer:
    """The typer application with every subcommand."""
    app = new_app(cls=_Group, no_args_is_help=True, add_completion=True)

    @app.callback(help="Provably optimal collective communication on the cluster you really have.")
    def root(
        version: Annotated[
            bool, typer.Option("--version", "-V", help="Print the version.", is_eager=True, callback=_print_version)
        ] = False,
    ) -> None:
        pass

    return app


def main() -> None:
    """Entry point of the ``mycel`` command."""
    _say_what_is_compiled()
    try:
        build_app()()
    except MycelError as error:
        _end(error)
    except ModuleNotFoundError as error:
        known = without(error, "this command")
        if known is None:
            raise
        _end(known)


def _say_what_is_compiled() -> None:
    """Compiling takes seconds, once for a machine: a line on standard error, whether or not that is a terminal."""
    logger, handler = logging.getLogger("mycel.compiled"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("mycel: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _say_what_is_kept(kept: str, command: str | None) -> None:
    """One line; of several ranks the first speaks for all."""
    if os.environ.get("RANK", "0") != "0":
        return
    sys.stdout.flush()
    if not kept and command in _WRITING:
        kept = "nothing was written"
    print("mycel: interrupted" + (f"; {kept}" if kept else ""), file=sys.stderr, flush=True)


def _end(error: MycelError) -> None:
    print(f"mycel: {error}", file=sys.stderr)
    sys.exit(2)

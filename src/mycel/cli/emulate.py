"""``mycel emulate``: a program, once a rank, on a cluster made of network namespaces with shaped links."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from mycel.errors import UsageError

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command("emulate", context_settings={"allow_interspersed_args": False})(emulate)


def emulate(
    cluster: Annotated[str, typer.Argument(help="Topology file of the cluster.", show_default=False)],
    command: Annotated[
        list[str] | None,
        typer.Argument(help="Program and arguments, after '--'.", metavar="-- COMMAND...", show_default=False),
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds the run may take; then exit code 124.")] = None,
    no_prefix: Annotated[bool, typer.Option("--no-prefix", help="Do not begin lines with the rank.")] = False,
    grace: Annotated[
        float, typer.Option(help="Seconds that ranks may go on after the first failure or a signal.", min=0.0)
    ] = 30.0,
) -> None:
    """Run a program once a rank on an emulated cluster, as torchrun would on a real one.

    The exit code is that of the rank that failed first (128 + number for a signal).
    """
    from mycel.cli.fabric import load_fabric
    from mycel.emulate import acquire_privileges, launch

    if command and command[0] == "--":
        command = command[1:]
    if not command:
        raise UsageError("no command to run; write: mycel emulate CLUSTER -- python train.py")
    if timeout is not None and not timeout > 0:
        raise UsageError(f"--timeout {timeout:g} must be positive")
    topology = load_fabric(cluster)
    acquire_privileges()
    logging.basicConfig(stream=sys.stderr, format="mycel: %(message)s", level=logging.WARNING)
    raise typer.Exit(launch(topology, command, timeout_s=timeout, grace_s=grace, prefix=not no_prefix))

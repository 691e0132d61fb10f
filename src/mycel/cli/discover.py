"""``mycel discover``: started once a rank, asks the machines' own tools and writes the cluster's topology file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mycel.cli.bound import JsonOption
from mycel.cli.show import check_name, reading_lines, reading_record, write_reading
from mycel.errors import UsageError

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command("discover")(discover)


def discover(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Topology file that rank 0 writes: .yaml, .yml or .json.")
    ],
    alone: Annotated[
        bool, typer.Option("--alone", help="This machine only, with a rank a GPU; so it is, too, without a launcher.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for all ranks to come, and again for their answers.")
    ] = 60.0,
    json_output: JsonOption = False,
) -> None:
    """Ask the machines of a running job what they have and write its topology: start it once a rank.

    Reads nvidia-smi, rocm-smi, the kernel's files and ibstat, and measures nothing; what they do not say is assumed
    and said. Works under torchrun (-m mycel discover), mpirun and srun, and alone for one machine.
    """
    from mycel.discover import discover as take_part
    from mycel.settings import is_launched, read_launched, read_settings

    check_name(output)
    if not timeout > 0:
        raise UsageError(f"--timeout {timeout:g} must be positive")
    launched = read_launched() if is_launched() and not alone else None
    found = take_part(launched, read_settings(), timeout_s=timeout, name=output.stem)
    if found is None:
        return
    origin = "this machine's tools" if launched is None else f"the tools of a job of {launched.world_size} ranks"
    write_reading(found, output, origin)
    if json_output:
        print(json.dumps(reading_record(found)))
        return
    print("\n".join(reading_lines(found)))
    print(f"\nwritten to {output}")

"""Schedules of one's own on a command line: a file that holds one, or a Python file that writes one."""

from __future__ import annotations

from pathlib import Path

from mycel.cli.verify import read_schedule
from mycel.collectives.language import load_written
from mycel.collectives.schedule import Schedule
from mycel.collectives.verify import verify_schedule
from mycel.errors import UsageError
from mycel.topology.model import Topology

__all__ = ["load_own"]


def load_own(text: str, fabric: Topology, name: str | None = None, root: int | None = None) -> Schedule:
    """The verified schedule that a command line names.

    Args:
        text: ``FILE.py`` or ``FILE.py:name``, which is built on the fabric; else a file with a schedule for it.
        fabric: the fabric.
        name: the collective; the file's own if not given.
        root: of one that has a root; the file's own, or 0, if not given.

    Raises:
        UsageError: it is of another collective or fabric, or the file cannot be read.
        ScheduleError: it is no schedule, or a wrong one.
        SynthesisError: the fabric does not have a way that it asks for.
    """
    if text.endswith(".py") or ".py:" in text:
        return load_written(text).on(fabric, name, root=root)  # type: ignore[arg-type]
    schedule = read_schedule(Path(text))
    if schedule.topology.fingerprint != fabric.fingerprint:
        raise UsageError(
            f"{text}: is for {schedule.topology.name} ({schedule.topology.fingerprint}), not for {fabric.name} "
            f"({fabric.fingerprint})"
        )
    wanted = schedule.collective
    if (name is not None and wanted.name != name) or (root is not None and wanted.root != root):
        raise UsageError(f"{text}: carries out {wanted.to_text()}")
    verify_schedule(schedule)
    return schedule

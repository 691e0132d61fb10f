"""Writes a schedule in the form that the end of a file's name says, for ``mycel synth`` and ``mycel export``."""

from __future__ import annotations

import json
from pathlib import Path

from mycel.collectives.export import FORMATS, SUFFIXES, export, files_of, format_of
from mycel.collectives.export.chakra import system_file
from mycel.collectives.imports import READERS, Content
from mycel.collectives.schedule import Schedule
from mycel.errors import UsageError

__all__ = ["FORMS", "NAMES", "SIZE", "form_of", "write_schedule"]

#: Size of the array in bytes, for forms that need one, if nobody says.
SIZE = 1 << 24

#: mycel's own forms, and the ends of names that mean them.
_OWN = {".json": "json", ".txt": "text"}
#: Forms that a schedule can be written in.
FORMS: tuple[str, ...] = (*_OWN.values(), *FORMATS)
#: Ends of names that mean a form.
NAMES: tuple[str, ...] = (*_OWN, *SUFFIXES)


def form_of(output: Path) -> str:
    """Form that a file's name means.

    Raises:
        UsageError: none.

    Examples:
        >>> form_of(Path("ring.plan.json")), form_of(Path("ring.json")), form_of(Path("ring.xml"))
        ('mscclpp_json', 'json', 'msccl_xml')
    """
    form = format_of(output.name) or _OWN.get(output.suffix)
    if form is None:
        raise UsageError(f"{output}: its name says no form; let it end in {', '.join(NAMES)}")
    return form


def write_schedule(
    schedule: Schedule, output: Path, form: str, *, num_bytes: int, piece_bytes: int | None = None
) -> list[str]:
    """Write a verified schedule; lines for people say what was written.

    Where mycel reads the form too, what was written is read and verified again, and the line says what the reader
    found: in which runtimes a file loads, for example.

    Args:
        schedule: a verified schedule.
        output: the file, or the name from which those of several files are made.
        form: one of ``FORMS``.
        num_bytes: size of the whole array, for forms that need one.
        piece_bytes: longest message, for the same forms.

    Raises:
        UsageError: unknown form, one without messages of a given length, or the file cannot be written.
        ScheduleError: the form cannot express the schedule.
    """
    if form == "json":
        files = {output: (schedule.to_json_text() + "\n").encode()}
    elif form == "text":
        files = {output: schedule.to_text().encode()}
    elif form in FORMATS:
        files = files_of(export(schedule, form, num_bytes=num_bytes, piece_bytes=piece_bytes), output)
    else:
        raise UsageError(f"unknown form {form!r}; known: {', '.join(FORMS)}")
    notes: list[str] = []
    system = system_file(schedule, output.stem) if form == "chakra" else None
    if system is not None:
        beside = output.with_suffix(".system.json")
        files[beside] = system.encode()
        notes = [f"{beside}: what ASTRA-sim's system file says to run {schedule.collective.name} so"]
    if form in READERS:
        text = files[output].decode()
        facts = READERS[form].check(Content(text=text, data=json.loads(text) if text.startswith("{") else None))
        notes = [f"verified as written: {facts['summary']}", *facts.get("notes", ())]
    for file, data in files.items():
        try:
            file.write_bytes(data)
        except OSError as error:
            raise UsageError(f"{file}: cannot be written: {error.strerror}") from None
    traces = len(files) - (system is not None)
    written = str(output) if traces == 1 else f"{next(iter(files))} and {traces - 1} more"
    return [f"written to {written}", *notes]

"""Imports: schedules in files of ours and of others, verified; one format a file, each registered by one line here.

=================  ==========================================================================================
format             what it is
=================  ==========================================================================================
``msccl_xml``      thread blocks of MSCCL's runtimes
``mscclpp_json``   thread blocks of MSCCL++'s executor
``mycel``          a mycel schedule, in JSON or text form
=================  ==========================================================================================

Which format a file holds is found in what it says, not in its name. Every reader verifies what it reads: the facts
that ``check_file`` gives are of a schedule that is right.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mycel.collectives.imports import msccl_xml, mscclpp, mycel_schedule
from mycel.collectives.imports.content import Content
from mycel.errors import ScheduleError, UsageError, VerificationError

__all__ = ["READERS", "Content", "Reader", "check_file", "read_content"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One format.

    Attributes:
        is_mine: whether a file is of this format, right or wrong. The first reader that says so has it.
        check: verifies; gives facts for JSON, among them ``summary``: one line for people, and perhaps ``notes``:
            further lines. Raises ``ScheduleError``
            for a malformed file and ``VerificationError`` for a wrong schedule.
    """

    is_mine: Callable[[Content], bool]
    check: Callable[[Content], dict[str, Any]]


#: Formats by name, in the order in which they are asked. The last takes what nobody else knows.
READERS: dict[str, Reader] = {
    "msccl_xml": Reader(is_mine=msccl_xml.is_mine, check=msccl_xml.check),
    "mscclpp_json": Reader(is_mine=mscclpp.is_mine, check=mscclpp.check),
    "mycel": Reader(is_mine=lambda content: True, check=mycel_schedule.check),
}


def read_content(file: Path) -> Content:
    """What a file says.

    Raises:
        UsageError: the file cannot be read.
        ScheduleError: it is not text, or begins as JSON and is none; the message names the file.
    """
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    try:
        text = raw.decode("utf-8-sig")
        return Content(text=text, data=json.loads(text) if text.lstrip().startswith("{") else None)
    except UnicodeDecodeError:
        raise ScheduleError(f"{file}: not a schedule: neither JSON nor text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ScheduleError(f"{file}: line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists without end
        raise ScheduleError(f"{file}: not a schedule: {error}") from None


def check_file(file: Path) -> dict[str, Any]:
    """Facts of the schedule in a file, which is right; its format is ``"format"`` among them.

    Raises:
        UsageError: the file cannot be read.
        ScheduleError: it holds no well-formed schedule; the message names the file.
        VerificationError: the schedule is wrong.
    """
    content = read_content(file)
    name, reader = next((name, reader) for name, reader in READERS.items() if reader.is_mine(content))
    try:
        return {"format": name, **reader.check(content)}
    except VerificationError:
        raise
    except ScheduleError as error:
        raise ScheduleError(f"{file}: {error}") from None

"""Reads the text form of a schedule (``Schedule.to_text``) into its JSON form."""

from __future__ import annotations

import json
import re
from typing import Any

from mycel.errors import ScheduleError

__all__ = ["parse_schedule"]

_STRING = r'"(?:[^"\\]|\\.)*"'
_HEADER = re.compile(r"mycel\.schedule (\d+)")
_COLLECTIVE = re.compile(r"collective (\w+) (\d+)(?: root (\d+))?(?: weights (\d+(?:,\d+)*))?")
_METHOD = re.compile(r"method (\S+)")
_TOPOLOGY = re.compile(rf"topology ({_STRING}) (\S+)")
_VERTEX = re.compile(rf"(rank|switch) (\d+) ({_STRING})(?: in ({_STRING}))?( computes)?")
_LINK = re.compile(r"link (\d+) -> (\d+) (\d+) (\S+)(?: (\w+))?")
_CLASSES = re.compile(r"link_classes (\{.*\})")
_UNITS = re.compile(r"units (\d+)")
_CHUNK = re.compile(r"chunk (\d+) (\d+)\.\.(\d+)")
_TRANSFER = re.compile(
    r"(\d+): (copy|reduce) chunk (\d+) (\d+) -> (\d+) via (\d+(?:>\d+)*)"
    r"(?: places (\d+)>(\d+))?(?: after (\d+(?:,\d+)*))?"
)


def parse_schedule(text: str) -> dict[str, Any]:
    """The JSON form of a schedule in text form. Blank lines and lines that start with ``#`` are passed over.

    Raises:
        ScheduleError: a line cannot be read or is out of order; the message gives its number.
    """
    out: dict[str, Any] = {"format": "mycel.schedule", "chunks": [], "transfers": []}
    fabric: dict[str, Any] = {"vertices": [], "links": []}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if line and not line.startswith("#"):
            try:
                _read_line(line, number, out, fabric)
            except ScheduleError:
                raise
            except ValueError as error:  # a string or a number that only looked like one
                raise ScheduleError(f"line {number}: cannot read {line!r}: {error}") from None
    out["topology"] = fabric
    return out


def _read_line(line: str, number: int, out: dict[str, Any], fabric: dict[str, Any]) -> None:
    if m := _TRANSFER.fullmatch(line):
        _in_order(int(m[1]), len(out["transfers"]), "transfer", number)
        after = [int(i) for i in m[9].split(",")] if m[9] else []
        places = [[int(m[7]), int(m[8])]] if m[7] else []
        via = [int(v) for v in m[6].split(">")]
        out["transfers"].append([int(m[3]), int(m[4]), int(m[5]), m[2], via, after, *places])
    elif m := _CHUNK.fullmatch(line):
        _in_order(int(m[1]), len(out["chunks"]), "chunk", number)
        out["chunks"].append([int(m[2]), int(m[3])])
    elif m := _LINK.fullmatch(line):
        fabric["links"].append([int(m[1]), int(m[2]), int(m[3]), float(m[4]), *([m[5]] if m[5] else [])])
    elif m := _CLASSES.fullmatch(line):
        fabric["link_classes"] = json.loads(m[1])
    elif m := _VERTEX.fullmatch(line):
        _in_order(int(m[2]), len(fabric["vertices"]), "vertex", number)
        box = json.loads(m[4]) if m[4] else None
        fabric["vertices"].append([m[1], json.loads(m[3]), box, *([True] if m[5] else [])])
    elif m := _HEADER.fullmatch(line):
        out["version"] = int(m[1])
    elif m := _COLLECTIVE.fullmatch(line):
        out["collective"] = {"name": m[1], "num_ranks": int(m[2]), "root": int(m[3]) if m[3] else None}
        if m[4]:
            out["collective"]["weights"] = [int(weight) for weight in m[4].split(",")]
    elif m := _METHOD.fullmatch(line):
        out["method"] = m[1]
    elif m := _TOPOLOGY.fullmatch(line):
        fabric["name"], fabric["unit"] = json.loads(m[1]), m[2]
    elif m := _UNITS.fullmatch(line):
        out["num_units"] = int(m[1])
    elif line == "timed":
        out["timed"] = True
    else:
        raise ScheduleError(f"line {number}: cannot read {line!r}")


def _in_order(got: int, expected: int, what: str, number: int) -> None:
    if got != expected:
        raise ScheduleError(f"line {number}: {what} {got} where {what} {expected} was expected")

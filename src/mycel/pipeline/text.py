"""Files of orders: torch's CSV with our additions above it, and JSON; read into the fields of an ``Order``.

The CSV has one row a rank and one cell an action, an empty cell where the rank is idle. What torch has no words for
stands in lines above the rows that begin with ``#``, and are there only where there is something to say::

    # mycel order 1
    # stages 4
    # micro-batches 2
    # routes 0>1>2>3 0>1>3
    # feeds embed>0F 0F>1F 1F>2F

An order without additions is a file that torch reads, and a file of torch's is such an order.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mycel.errors import ScheduleError
from mycel.pipeline.action import Action

__all__ = ["FORMAT", "ORDER_VERSION", "counts_of", "fields_of_csv", "fields_of_json", "head_of", "rows_to_csv"]

FORMAT = "mycel.order"
ORDER_VERSION = 1

Rows = tuple[tuple[Action, ...], ...]

_HEAD = re.compile(r"#\s*(mycel order|stages|micro-batches|name|routes|feeds)(?:\s+(\S.*))?", re.ASCII)
_WHOLE = re.compile(r"\d{1,9}", re.ASCII)
_ROUTE = re.compile(r"\d{1,9}(>\d{1,9})*", re.ASCII)


def counts_of(rows: Rows) -> tuple[int, int]:
    """Stages and micro-batches that rows of actions speak of: one more than the largest of each.

    Args:
        rows: one a rank.
    """
    stages = micro_batches = 0
    for row in rows:
        for action in row:
            for leaf in action.leaves:
                stages = max(stages, leaf.stage + 1)
                micro_batches = max(micro_batches, 0 if leaf.micro_batch is None else leaf.micro_batch + 1)
    return stages, micro_batches


def rows_to_csv(rows: Iterable[Iterable[Action]]) -> str:
    """Torch's part of a CSV file.

    Args:
        rows: one a rank.
    """
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def head_of(
    *,
    stages: int,
    micro_batches: int,
    routes: tuple[tuple[int, ...], ...] | None,
    feeds: tuple[tuple[str, str], ...] | None,
    name: str,
) -> str:
    """The lines above torch's part.

    Args:
        stages: how many.
        micro_batches: how many.
        routes: stages that each micro-batch visits, where they are not all of them in order.
        feeds: what needs the result of what, where that is not what routes say.
        name: of the order, if any.
    """
    lines = [f"mycel order {ORDER_VERSION}", f"stages {stages}", f"micro-batches {micro_batches}"]
    if name:
        lines.append(f"name {json.dumps(name)}")
    if routes is not None:
        lines.append("routes " + " ".join(">".join(map(str, route)) for route in routes))
    if feeds is not None:
        lines.append("feeds " + " ".join(f"{before}>{after}" for before, after in feeds))
    return "".join(f"# {line}\n" for line in lines)


def fields_of_csv(text: str) -> dict[str, Any]:
    """The fields of the order in a CSV file.

    Args:
        text: the file's content.

    Raises:
        ScheduleError: a line or cell that cannot be read whole; the message gives its place.
    """
    lines = text.removeprefix("\ufeff").splitlines()
    while lines and not lines[-1].strip(" \t,"):
        lines.pop()
    head: dict[str, Any] = {}
    start = 0
    while start < len(lines) and lines[start].lstrip().startswith("#"):
        _read_head(lines[start].strip(), start + 1, head)
        start += 1
    version = head.pop("version", ORDER_VERSION)
    _check_version(version)
    rows = tuple(_read_rows(lines[start:], start + 1))
    if not rows:
        raise ScheduleError("the file has no rows: expected one row a rank, such as 0F0,0F1,0B0,0B1")
    num_stages, num_micro_batches = counts_of(rows)
    return {"rows": rows, "num_stages": num_stages, "num_micro_batches": num_micro_batches, **head}


def _read_head(line: str, number: int, head: dict[str, Any]) -> None:
    found = _HEAD.fullmatch(line)
    if found is None:
        known = "mycel order, stages, micro-batches, name, routes and feeds"
        raise ScheduleError(f"line {number}: cannot read {line!r}; above the rows stand {known}")
    word, rest = found[1], found[2] or ""
    key = {"mycel order": "version", "stages": "num_stages", "micro-batches": "num_micro_batches"}.get(word, word)
    if key in head:
        raise ScheduleError(f"line {number}: {word!r} stands there a second time")
    if key in ("version", "num_stages", "num_micro_batches"):
        if _WHOLE.fullmatch(rest) is None:
            raise ScheduleError(f"line {number}: {word} {rest!r} is no whole number of up to nine digits")
        head[key] = int(rest)
    elif key == "name":
        head[key] = _name(rest, number)
    elif key == "routes":
        head[key] = tuple(_route(part, number) for part in rest.split())
    else:
        pairs = tuple(tuple(part.split(">")) for part in rest.split())
        for pair in pairs:
            if len(pair) != 2:
                raise ScheduleError(f"line {number}: {'>'.join(pair)!r} is no pair such as embed>0F")
        head[key] = pairs


def _name(rest: str, number: int) -> str:
    try:
        name = json.loads(rest)
    except (ValueError, RecursionError):
        name = None
    if not isinstance(name, str):
        raise ScheduleError(f"line {number}: name {rest!r} is no text in double quotes")
    return name


def _route(part: str, number: int) -> tuple[int, ...]:
    if _ROUTE.fullmatch(part) is None:
        raise ScheduleError(f"line {number}: {part!r} is no route such as 0>1>3")
    return tuple(map(int, part.split(">")))


def _read_rows(lines: Sequence[str], first_line: int) -> Iterable[tuple[Action, ...]]:
    for rank, line in enumerate(lines):
        where = f"line {first_line + rank} (rank {rank})"
        if line.lstrip().startswith("#"):
            raise ScheduleError(f"{where}: {line.strip()!r} stands among the rows; such lines stand above them")
        try:
            cells = next(csv.reader(io.StringIO(line), strict=True), [])
        except csv.Error as error:
            raise ScheduleError(f"{where}: no row of cells between commas: {error}") from None
        row = tuple(_read_cell(cell, f"{where}, cell {step + 1}") for step, cell in enumerate(cells) if cell.strip())
        if not row:
            raise ScheduleError(f"{where}: the row is empty; every rank has work, so leave no blank lines")
        yield row


def _read_cell(cell: str, where: str) -> Action:
    try:
        return Action.parse(cell)
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from None


def fields_of_json(source: str | Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the order in a JSON object.

    Args:
        source: the object, or its text.

    Raises:
        ScheduleError: not such an object, or of a version that this mycel does not read.
    """
    record = source if isinstance(source, Mapping) else _decoded(source)
    if record.get("format") != FORMAT:
        raise ScheduleError(f'an order\'s JSON has "format": "{FORMAT}"; got {record.get("format")!r}')
    _check_version(record.get("version"))
    expected = {"format", "version", "name", "num_stages", "num_micro_batches", "rows", "routes", "feeds"}
    if unknown := sorted(set(record) - expected):
        raise ScheduleError(f"the order has a field {unknown[0]!r}, which version {ORDER_VERSION} does not have")
    rows: Any = record.get("rows")
    if not _is_table(rows, str):
        raise ScheduleError('"rows" is no list of lists of actions, such as [["0F0", "0B0"]]')
    fields: dict[str, Any] = {
        "rows": tuple(
            tuple(_read_cell(cell, f"rank {rank}, action {step}") for step, cell in enumerate(row))
            for rank, row in enumerate(rows)
        ),
        "num_stages": record.get("num_stages"),
        "num_micro_batches": record.get("num_micro_batches"),
        "name": record.get("name", ""),
    }
    for key, inner, example in (("routes", int, "[[0, 1, 3]]"), ("feeds", str, '[["embed", "0F"]]')):
        value = record.get(key)
        if value is not None:
            if not _is_table(value, inner):
                raise ScheduleError(f'"{key}" is no list such as {example}')
            fields[key] = tuple(map(tuple, value))
    return fields


def _decoded(text: str) -> Mapping[str, Any]:
    try:
        record = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ScheduleError(f"the JSON is no object but a {type(record).__name__}")
    return record


def _is_table(value: Any, inner: type) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(row, (list, tuple)) and all(type(item) is inner for item in row) for row in value
    )


def _check_version(version: Any) -> None:
    if type(version) is not int:
        raise ScheduleError(f"the order's version is {version!r}; expected {ORDER_VERSION}")
    if version > ORDER_VERSION:
        raise ScheduleError(
            f"order version {version} is newer than this mycel, which reads version {ORDER_VERSION}: "
            "update mycel, or write the order again with the older one"
        )
    if version != ORDER_VERSION:
        raise ScheduleError(f"order version {version}; this mycel reads version {ORDER_VERSION}")

"""What a command line asks for: a fabric or a group of its ranks, and a collective with its root and weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from mycel.errors import UsageError
from mycel.topology.model import Topology

__all__ = ["RanksOption", "WeightsOption", "choose_group", "group_record", "parse_ranks", "read_weights"]

RanksOption = Annotated[
    str | None,
    typer.Option(
        "--ranks", help="Only these ranks take part, such as 0,2,4-7; --root is one of them, the first if not given."
    ),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        "--weights",
        help="Relative sizes of the blocks, such as 2,1,1,0, one a rank; or a CSV or JSON file, with a row a sender "
        "for all_to_all.",
    ),
]

#: Ranks that one range may span: a slip of the finger should not fill the memory.
_MOST_RANKS = 1_000_000


def parse_ranks(text: str) -> tuple[int, ...]:
    """Ranks of a group, in ascending order.

    Raises:
        UsageError: not numbers and ranges, or a rank twice.

    Examples:
        >>> parse_ranks("0,2,4-7")
        (0, 2, 4, 5, 6, 7)
    """
    ranks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if match is None:
            raise UsageError(f"--ranks {text!r}: {part!r} is neither a rank nor a range such as 4-7")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + _MOST_RANKS:
            raise UsageError(f"--ranks {text!r}: the range {part!r} is empty or too long")
        ranks += range(first, last + 1)
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise UsageError(f"--ranks {text!r}: rank {twice} is named twice")
    return tuple(sorted(ranks))


def choose_group(fabric: Topology, text: str | None, root: int | None) -> tuple[Topology, int | None]:
    """The fabric as the named ranks see it, and the number that the root has among them.

    Raises:
        UsageError: ranks that cannot be read, or a root outside the group.
        TopologyError: an unknown rank, or fewer than two.
    """
    if text is None:
        return fabric, root
    ranks = parse_ranks(text)
    if root is not None and root not in ranks:
        raise UsageError(f"--root {root} is not among --ranks {text}")
    return fabric.subset(ranks), None if root is None else ranks.index(root)


def group_record(text: str | None) -> dict[str, list[int]]:
    """What the JSON object of a command says of the group that was asked for: its ranks, in the fabric's numbers."""
    return {} if text is None else {"ranks": list(parse_ranks(text))}


def read_weights(text: str) -> tuple[int, ...]:
    """Weights from a list such as ``2,1,1,0``, or from a file: a JSON list (of lists), or lines of numbers.

    Raises:
        UsageError: neither, with the place.

    Examples:
        >>> read_weights("2,1,1,0")
        (2, 1, 1, 0)
    """
    if re.fullmatch(r"[\s\d,+-]*", text):
        return _numbers(text.split(","), "--weights")
    try:
        content = Path(text).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UsageError(
            f"--weights {text!r} is not a list of whole numbers, and not a file either: {reason}"
        ) from None
    if content.lstrip().startswith("["):
        return _from_json(content, text)
    weights: list[int] = []
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            weights += _numbers(re.split(r"[,;\s]+", line.strip().rstrip(",;")), f"{text}:{number}")
    return tuple(weights)


def _from_json(content: str, source: str) -> tuple[int, ...]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source}: not JSON: {error}") from None
    rows = [row if isinstance(row, list) else [row] for row in found]
    return _numbers([json.dumps(value) for row in rows for value in row], source)


def _numbers(parts: list[str], where: str) -> tuple[int, ...]:
    for part in parts:
        if not re.fullmatch(r"\s*[+-]?\d{1,18}\s*", part):
            raise UsageError(f"{where}: {part[:40]!r} is not a whole number of up to 18 digits")
    return tuple(map(int, parts))

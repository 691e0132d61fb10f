"""Loading a topology from whatever a person has at hand: a file in any known form, or the name of a builder.

A new file format is one module with a function ``(text, *, source) -> Topology`` and one line in ``FORMATS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mycel.errors import TopologyError
from mycel.topology.builders import BUILDERS, build
from mycel.topology.json_format import parse_json
from mycel.topology.model import Topology
from mycel.topology.suggest import nearest
from mycel.topology.yaml_format import parse_yaml

__all__ = ["FORMATS", "FileFormat", "TopologyParser", "load_topology", "parse_topology"]


class TopologyParser(Protocol):
    """What a format provides."""

    def __call__(self, text: str, *, source: str) -> Topology:
        """The topology that ``text`` describes; ``source`` names it in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """One file format.

    Attributes:
        name: for messages.
        suffixes: endings of file names, lower case, with the dot.
        opens_with: first character of the contents, for files whose ending says nothing; empty: any.
        parse: reads it.
    """

    name: str
    suffixes: tuple[str, ...]
    opens_with: str
    parse: TopologyParser


#: In the order in which contents are tried where the ending of a file says nothing.
FORMATS: tuple[FileFormat, ...] = (
    FileFormat(name="JSON", suffixes=(".json",), opens_with="{[", parse=parse_json),
    FileFormat(name="YAML", suffixes=(".yaml", ".yml"), opens_with="", parse=parse_yaml),
)


def load_topology(file: str | Path) -> Topology:
    """The topology in a file, or, where there is no such file, that of a builder.

    A file's format follows from its ending, else from how its contents begin.

    Args:
        file: a path, or a builder with its arguments such as ``star:ranks=4`` (see ``builders.build``).

    Raises:
        TopologyError: no such file, or its contents are malformed or describe a fabric that cannot work. The
            message begins with the file's name and, where there is one, the line.

    Examples:
        >>> load_topology("two_boxes:ranks=8,inside=400 Mbit/s,between=50 Mbit/s").num_ranks
        8
    """
    path, name = Path(file), str(file).partition(":")[0]
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        if name in BUILDERS:
            return build(str(file))
        raise TopologyError(f"{path}: no such file, and no builder of that name{nearest(name, BUILDERS)}") from None
    except IsADirectoryError:
        raise TopologyError(f"{path}: is a directory; name the file in it") from None
    except UnicodeDecodeError as error:
        raise TopologyError(f"{path}: not a text file: byte {error.start} is not UTF-8") from None
    except (OSError, ValueError) as error:
        raise TopologyError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return parse_topology(text, source=str(path))


def parse_topology(text: str, *, source: str) -> Topology:
    """The topology that a text describes.

    Args:
        text: contents of a file.
        source: name of the file; its ending chooses the format.

    Raises:
        TopologyError: as for ``load_topology``.
    """
    if not text.strip():
        raise TopologyError(f"{source}: empty; expected a topology as {' or '.join(f.name for f in FORMATS)}")
    suffix = Path(source).suffix.lower()
    for known in FORMATS:
        if suffix in known.suffixes:
            return known.parse(text, source=source)
    for known in FORMATS:
        if not known.opens_with or text.lstrip()[0] in known.opens_with:
            return known.parse(text, source=source)
    endings = ", ".join(ending for known in FORMATS for ending in known.suffixes)
    raise TopologyError(f"{source}: unknown form of topology; known file endings: {endings}")

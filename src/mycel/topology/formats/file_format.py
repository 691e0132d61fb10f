"""What a file format says of itself: how its files are told from others, who reads them, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mycel.topology.formats.description import Description
from mycel.topology.given import Given
from mycel.topology.model import Topology

__all__ = ["FileFormat", "MachineParser", "TopologyParser"]


class TopologyParser(Protocol):
    """What a format provides."""

    def __call__(self, text: str, *, source: str) -> Topology | Description:
        """What ``text`` describes; ``source`` names it in messages."""


class MachineParser(Protocol):
    """What a format provides that describes a machine, and can be told more about it."""

    def __call__(self, text: str, *, source: str, given: Given) -> Description:
        """What ``text`` describes; what is ``given`` goes before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """One file format.

    Attributes:
        name: for messages.
        suffixes: endings of file names, lower case, with the dot.
        signature: regular expression (several lines, case-insensitive) that contents of this form match somewhere.
        parse: reads it.
        becomes: what in such a file becomes what in a topology, for the table of the guide; empty for our own forms.
        written_by: what writes such files, in Markdown, for the same table; ``name`` if not given.
        example: a small right file; tests read it, and break it in many ways. Larger ones stand in
            ``tests/data/formats``; a format that has one there needs none here.
        machine: reads it with what a person says about the machine; ``None`` where the format says all itself.
    """

    name: str
    suffixes: tuple[str, ...]
    signature: str
    parse: TopologyParser
    becomes: str
    written_by: str = ""
    example: str = ""
    machine: MachineParser | None = None

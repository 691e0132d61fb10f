"""Exports: schedules in the forms that other tools read, one format a file, each registered by one line here.

================  =================  ====================================================================
format            file name          for
================  =================  ====================================================================
``dot``           ``.dot``           Graphviz: the ranks and who sends how much to whom
``chrome_trace``  ``.trace.json``    a simulated run as a timeline, for Perfetto and Chromium
``msccl_xml``     ``.xml``           MSCCL's runtimes
``mscclpp_json``  ``.plan.json``     MSCCL++'s executor
``chakra``        ``.et``            ASTRA-sim and other readers of Chakra traces: a file a rank
================  =================  ====================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mycel.collectives.export import chakra, chrome_trace, dot, msccl_xml, mscclpp_json
from mycel.collectives.schedule import Schedule
from mycel.errors import ScheduleError, UsageError
from mycel.names import spelled

__all__ = ["FORMATS", "SUFFIXES", "Exported", "export", "files_of", "format_of"]

#: What a format makes: text, or a binary file of each rank.
Exported = str | tuple[bytes, ...]
#: ``(schedule, num_bytes) -> what it makes``; formats that serve every size ignore the number of bytes.
Exporter = Callable[[Schedule, int], Exported]

#: Formats by name.
FORMATS: dict[str, Exporter] = {
    "dot": dot.export,
    "chrome_trace": chrome_trace.export,
    "msccl_xml": msccl_xml.export,
    "mscclpp_json": mscclpp_json.export,
    "chakra": chakra.export,
}

#: Ends of file names that mean a format.
SUFFIXES: dict[str, str] = {
    ".dot": "dot",
    ".gv": "dot",
    ".trace.json": "chrome_trace",
    ".xml": "msccl_xml",
    ".plan.json": "mscclpp_json",
    ".et": "chakra",
}


#: Formats that say how much each transfer moves, and so can express blocks of different sizes.
_UNEVEN = ("dot", "chrome_trace", "chakra")
#: Formats of one size, whose messages have a length.
_IN_PIECES: dict[str, Callable[[Schedule, int, int | None], Exported]] = {
    "chrome_trace": chrome_trace.export,
    "chakra": chakra.export,
}


def format_of(name: str) -> str | None:
    """Format that a file name means, if any.

    Examples:
        >>> format_of("ring.xml"), format_of("ring.trace.json"), format_of("ring.json")
        ('msccl_xml', 'chrome_trace', None)
    """
    return next((known for suffix, known in SUFFIXES.items() if name.endswith(suffix)), None)


def export(schedule: Schedule, form: str, *, num_bytes: int = 1 << 24, piece_bytes: int | None = None) -> Exported:
    """The schedule in a format.

    Args:
        schedule: a verified schedule.
        form: a key of ``FORMATS``.
        num_bytes: size of the whole array, for formats that need one.
        piece_bytes: longest message, for the same formats; if not given, what fits.

    Returns:
        Text, or for ``chakra`` the bytes of each rank's file.

    Raises:
        UsageError: unknown format, or a length of messages for one that has none.
        ScheduleError: the format cannot express the schedule.

    Examples:
        >>> from mycel.collectives.synth import synthesize
        >>> from mycel.topology import load_topology
        >>> hop = synthesize(load_topology("ring:ranks=4"), "all_gather", "ring")
        >>> print(export(hop, "dot").splitlines()[0])
        digraph "all_gather on ring_4 by ring" {
        >>> len(export(hop, "chakra"))  # a file a rank
        4
    """
    form = spelled(form, FORMATS, "format")
    if schedule.collective.weights is not None and form not in _UNEVEN:
        raise ScheduleError(f"{form} has equal blocks only; uneven ones: {', '.join(_UNEVEN)} and mycel's own JSON")
    if form in _IN_PIECES:
        return _IN_PIECES[form](schedule, num_bytes, piece_bytes)
    if piece_bytes is not None:
        raise UsageError(f"{form} has no messages of a given length; formats that do: {', '.join(_IN_PIECES)}")
    return FORMATS[form](schedule, num_bytes)


def files_of(exported: Exported, output: Path) -> dict[Path, bytes]:
    """What to write where: into ``output`` itself, or each rank's file beside it with the rank before the suffix.

    Examples:
        >>> [path.name for path in files_of((b"a", b"b"), Path("traces.et"))]
        ['traces.0.et', 'traces.1.et']
    """
    if isinstance(exported, str):
        return {output: exported.encode()}
    return {output.with_suffix(f".{rank}{output.suffix}"): data for rank, data in enumerate(exported)}

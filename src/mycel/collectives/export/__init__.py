"""Exports: schedules in the forms that other tools read, one format a file, each registered by one line here.

================  ===============  ======================================================================
format            file name        for
================  ===============  ======================================================================
``dot``           ``.dot``         Graphviz: the ranks and who sends how much to whom
``chrome_trace``  ``.trace.json``  a simulated run as a timeline, for Perfetto and Chromium
``msccl_xml``     ``.xml``         MSCCL's runtimes
================  ===============  ======================================================================
"""

from __future__ import annotations

from collections.abc import Callable

from mycel.collectives.export import chrome_trace, dot, msccl_xml
from mycel.collectives.schedule import Schedule
from mycel.errors import ScheduleError, UsageError

__all__ = ["FORMATS", "SUFFIXES", "export", "format_of"]

#: ``(schedule, num_bytes) -> text``; formats that serve every size ignore the number of bytes.
Exporter = Callable[[Schedule, int], str]

#: Formats by name.
FORMATS: dict[str, Exporter] = {
    "dot": dot.export,
    "chrome_trace": chrome_trace.export,
    "msccl_xml": msccl_xml.export,
}

#: Ends of file names that mean a format.
SUFFIXES: dict[str, str] = {".dot": "dot", ".gv": "dot", ".trace.json": "chrome_trace", ".xml": "msccl_xml"}


#: Formats that say how much each transfer moves, and so can express blocks of different sizes.
_UNEVEN = ("dot", "chrome_trace")


def format_of(name: str) -> str | None:
    """Format that a file name means, if any.

    Examples:
        >>> format_of("ring.xml"), format_of("ring.trace.json"), format_of("ring.json")
        ('msccl_xml', 'chrome_trace', None)
    """
    return next((known for suffix, known in SUFFIXES.items() if name.endswith(suffix)), None)


def export(schedule: Schedule, form: str, *, num_bytes: int = 1 << 24) -> str:
    """The schedule in a format.

    Args:
        schedule: a verified schedule.
        form: a key of ``FORMATS``.
        num_bytes: size of the whole array, for formats that need one.

    Raises:
        UsageError: unknown format.
        ScheduleError: the format cannot express the schedule.
    """
    if form not in FORMATS:
        raise UsageError(f"unknown format {form!r}; known: {', '.join(FORMATS)}")
    if schedule.collective.weights is not None and form not in _UNEVEN:
        raise ScheduleError(f"{form} has equal blocks only; uneven ones: {', '.join(_UNEVEN)} and mycel's own JSON")
    return FORMATS[form](schedule, num_bytes)

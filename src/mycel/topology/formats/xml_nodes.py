"""Reading XML with the line of every element at hand, and without entities that could expand for ever."""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.parsers import expat

from mycel.errors import TopologyError

__all__ = ["Element", "parse_elements"]

_DEEPEST = 64


@dataclass(slots=True, kw_only=True)
class Element:
    """One element.

    Attributes:
        tag: its name.
        attributes: as written.
        line: where it begins, from 1.
        children: elements in it.
    """

    tag: str
    attributes: dict[str, str]
    line: int
    children: list[Element] = field(default_factory=list)


def parse_elements(text: str, *, source: str) -> Element:
    """The root element of an XML text.

    Raises:
        TopologyError: not XML (with line and column), nested too deeply, or with definitions of its own.
    """
    parser = expat.ParserCreate()
    roots: list[Element] = []
    stack: list[Element] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        element = Element(tag=tag, attributes=attributes, line=parser.CurrentLineNumber)
        (stack[-1].children if stack else roots).append(element)
        stack.append(element)
        if len(stack) > _DEEPEST:
            raise TopologyError(f"{source}:{element.line}: nested too deeply")

    def end(tag: str) -> None:
        stack.pop()

    def refuse(name: str, system: str | None, public: str | None, has_definitions: int) -> None:
        # One that only names a file elsewhere, as hwloc writes it, defines nothing: that file is never read.
        if has_definitions:
            raise TopologyError(f"{source}:{parser.CurrentLineNumber}: a document type is not accepted here")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        what = expat.ErrorString(error.code)
        raise TopologyError(f"{source}:{error.lineno}:{error.offset + 1}: not XML: {what}") from None
    except ValueError as error:
        if isinstance(error, TopologyError):
            raise
        raise TopologyError(f"{source}: not XML: {error}") from None
    return roots[0]

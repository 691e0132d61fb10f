"""Reading YAML with the line of everything at hand, so that every complaint can name its place.

The usual loader throws positions away; this works on the composed nodes. Scalars are read by what they should be
at their place, not by what YAML 1.1 guesses: a rank may be called ``no`` or ``007``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import yaml

from mycel.errors import TopologyError
from mycel.names import nearest

__all__ = ["YamlReader", "compose"]

_WHOLE = re.compile(r"-?(?:0|[1-9]\d{0,17})")
_NULL = "tag:yaml.org,2002:null"
_BOOLEAN = "tag:yaml.org,2002:bool"
#: Keys that people write, and what they mean where that is a key.
_SAME = {
    "gpus": "ranks",
    "gpu": "rank",
    "accelerators": "ranks",
    "bw": "bandwidth",
}
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def compose(text: str, *, source: str) -> yaml.Node:
    """The root node of a YAML text.

    Args:
        text: one YAML document.
        source: name of the file, for messages.

    Raises:
        TopologyError: not YAML, with line and column; or no document.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise TopologyError(f"{place}: not YAML: {what}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise TopologyError(f"{source}:{line}: not YAML: {error.reason}") from None
    except RecursionError:
        raise TopologyError(f"{source}: not a topology: nested too deeply") from None
    if root is None:
        raise TopologyError(f"{source}: empty; expected a topology")
    return root


class YamlReader:
    """Takes nodes apart, and says where when they are not what they should be.

    Args:
        source: name of the file, for messages.
    """

    def __init__(self, source: str) -> None:
        self._source = source

    @property
    def source(self) -> str:
        """Name of the file."""
        return self._source

    def error(self, node: yaml.Node, message: str) -> TopologyError:
        """An error whose message begins with the file and line of ``node``."""
        return TopologyError(f"{self._source}:{self.line(node)}: {message}")

    def line(self, node: yaml.Node) -> int:
        """Line of a node, from 1."""
        return int(node.start_mark.line) + 1

    def mapping(
        self, node: yaml.Node, known: Sequence[str], *, required: Sequence[str] = (), what: str
    ) -> dict[str, yaml.Node]:
        """Values of a mapping by key, in the order of the file.

        Raises:
            TopologyError: not a mapping, or a key is unknown, missing or there twice.
        """
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, f"{what} must be a mapping with {_either(known)}; got {shown(node)}")
        found: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else None
            if key not in known and _SAME.get(str(key).lower()) in known:
                key = _SAME[str(key).lower()]
            if key is None or key not in known:
                hint = nearest(key, known) if key else ""
                keys = ", ".join(known)
                raise self.error(key_node, f"{what}: unknown key {shown(key_node)}{hint}; known keys: {keys}")
            if key in found:
                raise self.error(key_node, f"{what}: {key!r} is already given on line {self.line(found[key])}")
            found[key] = value
        for key in required:
            if key not in found:
                raise self.error(node, f"{what}: {key!r} is missing")
        return found

    def items(self, node: yaml.Node, *, what: str) -> list[yaml.Node]:
        """Entries of a list.

        Raises:
            TopologyError: not a list.
        """
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(node, f"{what} must be a list; got {shown(node)}")
        return list(node.value)

    def text(self, node: yaml.Node, *, what: str) -> str:
        """A scalar as written, whatever YAML takes it for.

        Raises:
            TopologyError: empty, or a list or mapping.
        """
        if not isinstance(node, yaml.ScalarNode) or node.tag == _NULL or not node.value:
            raise self.error(node, f"{what} must be a text; got {shown(node)}")
        return str(node.value)

    def whole(self, node: yaml.Node, *, what: str, least: int, most: int) -> int:
        """A whole number in decimal digits.

        Raises:
            TopologyError: anything else, or outside ``least .. most``.
        """
        if not isinstance(node, yaml.ScalarNode) or node.style or not _WHOLE.fullmatch(node.value):
            raise self.error(node, f"{what} must be a whole number; got {shown(node)}")
        number = int(node.value)
        if not least <= number <= most:
            raise self.error(node, f"{what} must be from {least} to {most}; got {number}")
        return number

    def flag(self, node: yaml.Node, *, what: str) -> bool:
        """``true`` or ``false`` (or the other words that YAML has for them).

        Raises:
            TopologyError: anything else.
        """
        if not isinstance(node, yaml.ScalarNode) or node.tag != _BOOLEAN:
            raise self.error(node, f"{what} must be true or false; got {shown(node)}")
        return _TRUTH[node.value.lower()]


def shown(node: yaml.Node) -> str:
    """What a node is, for messages."""
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if node.tag == _NULL or not node.value:
        return "nothing"
    if node.tag == _BOOLEAN:
        return f"the truth value {node.value}"
    text = repr(node.value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _either(known: Sequence[str]) -> str:
    return " and ".join(repr(key) for key in known[:2]) if len(known) <= 2 else ", ".join(known)

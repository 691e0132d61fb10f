"""Slurm's ``topology.conf`` and ``topology.yaml``: which hosts hang on which switches.

Hosts become ranks. Slurm knows no bandwidths: capacities are relative, 1 for a host's cable, and a switch's way up
carries what all hosts below it can send (no over-subscription). Blocks are switches under one that joins them.

References:
    Slurm documentation, topology.conf(5) and topology.yaml(5).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import yaml

from mycel.errors import TopologyError
from mycel.names import nearest
from mycel.topology.formats.description import Description
from mycel.topology.formats.file_format import FileFormat
from mycel.topology.limits import MAX_VERTICES
from mycel.topology.yaml_nodes import YamlReader, compose

__all__ = ["SLURM_CONF", "SLURM_YAML", "expand_hosts", "parse_slurm_conf", "parse_slurm_yaml"]

_CONF_KEYS = ("switchname", "switches", "nodes", "linkspeed", "blockname", "blocksizes")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(slots=True, kw_only=True)
class _Switch:
    name: str
    where: str
    nodes: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)


def expand_hosts(text: str) -> list[str]:
    """Names of a Slurm host list.

    Raises:
        TopologyError: brackets that do not match, a range that counts down, or too many names.

    Examples:
        >>> expand_hosts("gpu[08-10,12],login")
        ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login']
    """
    names: list[str] = []
    for part in _parts(text):
        if not re.fullmatch(r"[^\[\],\s]*(\[[\d,-]+\][^\[\],\s]*){0,3}", part) or not part:
            raise TopologyError(f"cannot read {part[:40]!r} as names; write for example node[1-4,7]")
        found = [""]
        for piece in re.split(r"(\[[^\]]*\])", part):
            choices = _numbers(piece[1:-1]) if piece.startswith("[") else [piece]
            if len(names) + len(found) * len(choices) > MAX_VERTICES:
                raise TopologyError(f"{part[:40]!r} stands for more than {MAX_VERTICES} names")
            found = [start + choice for start in found for choice in choices]
        names += found
    return names


def _parts(text: str) -> list[str]:
    """The text between the commas that stand outside brackets."""
    parts: list[str] = []
    start = depth = 0
    for at, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item)
        if not match:
            raise TopologyError(f"cannot read [{text[:40]}] as numbers; write for example [1-4,7]")
        low, high = match.group(1), match.group(2) or match.group(1)
        if int(low) > int(high) or int(high) - int(low) >= MAX_VERTICES:
            raise TopologyError(f"[{item}] must count up, over at most {MAX_VERTICES} numbers")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


def parse_slurm_conf(text: str, *, source: str) -> Description:
    """The network that a ``topology.conf`` describes.

    Raises:
        TopologyError: not such a file; with the line.
    """
    switches: list[_Switch] = []
    blocks: list[_Switch] = []
    pending, speeds = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = pending + raw.partition("#")[0].rstrip()
        pending = line[:-1] + " " if line.endswith("\\") else ""
        if pending or not line.strip():
            continue
        where = f"{source}:{number}"
        values: dict[str, str] = {}
        for word in line.split():
            key, equals, value = word.partition("=")
            if not equals or key.lower() not in _CONF_KEYS:
                hint = nearest(key.lower(), _CONF_KEYS)
                raise TopologyError(f"{where}: cannot read {word[:40]!r}{hint}; known: {', '.join(_CONF_KEYS)}")
            if key.lower() in values:
                raise TopologyError(f"{where}: {key} is given twice")
            values[key.lower()] = value
        speeds += "linkspeed" in values
        try:
            entry = _Switch(
                name=values.get("switchname") or values.get("blockname") or "",
                where=where,
                nodes=expand_hosts(values["nodes"]) if "nodes" in values else [],
                children=expand_hosts(values["switches"]) if "switches" in values else [],
            )
        except TopologyError as error:
            raise TopologyError(f"{where}: {error}") from None
        if "blocksizes" in values and not entry.name:
            continue
        if not entry.name:
            raise TopologyError(f"{where}: SwitchName or BlockName is missing")
        if not entry.nodes and not entry.children:
            raise TopologyError(f"{where}: {entry.name} has neither Nodes nor Switches")
        (blocks if "blockname" in values else switches).append(entry)
    if blocks and switches:
        raise TopologyError(f"{blocks[0].where}: blocks beside switches; a file has one or the other")
    network = _network(source, switches, blocks, re.sub(r"\.conf$", "", source.rpartition("/")[2]))
    if speeds:
        network.notes.append("LinkSpeed is ignored, as Slurm does: its unit is not defined")
    return network


def parse_slurm_yaml(text: str, *, source: str) -> Description:
    """The network that a ``topology.yaml`` describes: its default topology, else the first that has switches.

    Raises:
        TopologyError: not such a file; with the line.
    """
    read = YamlReader(source)
    root = compose(text, source=source)
    found: list[tuple[bool, str, dict[str, yaml.Node]]] = []
    for item in read.items(root, what="a Slurm topology.yaml"):
        keys = ("topology", "cluster_default", "tree", "block", "flat")
        entry = read.mapping(item, keys, required=("topology",), what="a topology")
        default = "cluster_default" in entry and read.flag(entry["cluster_default"], what="cluster_default")
        if "tree" in entry or "block" in entry:
            found.append((default, read.text(entry["topology"], what="topology"), entry))
        elif "flat" not in entry:
            raise read.error(item, "a topology needs 'tree', 'block' or 'flat'")
    if not found:
        raise read.error(root, "no topology with a tree or blocks: nothing says how hosts are joined")
    _, name, chosen = max(found, key=lambda one: one[0])
    if "tree" in chosen:
        tree = read.mapping(chosen["tree"], ("switches",), required=("switches",), what="a tree")
        switches = _yaml_entries(read, tree["switches"], "switch", source)
        network = _network(source, switches, [], name)
    else:
        block = read.mapping(chosen["block"], ("block_sizes", "blocks"), required=("blocks",), what="a block")
        network = _network(source, [], _yaml_entries(read, block["blocks"], "block", source), name)
    if len(found) > 1:
        network.notes.append(f"of {len(found)} topologies in the file, {name!r} is taken")
    return network


def _yaml_entries(read: YamlReader, node: yaml.Node, kind: str, source: str) -> list[_Switch]:
    entries: list[_Switch] = []
    for item in read.items(node, what=f"the list of {kind}s"):
        keys = (kind, "nodes", "children") if kind == "switch" else (kind, "nodes")
        values = read.mapping(item, keys, required=(kind,), what=f"a {kind}")
        lists: dict[str, list[str]] = {}
        for key in ("nodes", "children"):
            if key in values:
                try:
                    lists[key] = expand_hosts(read.text(values[key], what=key))
                except TopologyError as error:
                    known = str(error).startswith(f"{source}:")
                    raise error if known else read.error(values[key], str(error)) from None
        if not lists:
            raise read.error(item, f"the {kind} has neither nodes nor children")
        entries.append(
            _Switch(
                name=read.text(values[kind], what=kind),
                where=f"{source}:{read.line(item)}",
                nodes=lists.get("nodes", []),
                children=lists.get("children", []),
            )
        )
    return entries


def _network(source: str, switches: list[_Switch], blocks: list[_Switch], name: str) -> Description:
    network = Description(name, source, unit="link")
    network.notes.append(
        "Slurm names no bandwidths: a host's cable counts 1, a switch's way up as its hosts together"
    )
    if blocks:
        network.notes.append("blocks are taken to be joined by one switch at full bandwidth")
        joined = [block.name for block in blocks]
        root = next(n for n in ("core", "core switch", "core of blocks", "") if n not in joined)
        switches = [*blocks, _Switch(name=root, where=blocks[0].where, children=joined)]
    by_name: dict[str, _Switch] = {}
    ranks: set[str] = set()
    for switch in switches:
        if switch.name in by_name:
            raise TopologyError(f"{switch.where}: a second switch {switch.name!r}")
        by_name[switch.name] = switch
        for node in switch.nodes:
            if node not in ranks:
                network.rank(node)
                ranks.add(node)
    for switch in switches:
        if switch.name in ranks:
            raise TopologyError(f"{switch.where}: {switch.name!r} is the name of a host too")
        network.switch(switch.name)
    below = _hosts_below(by_name)
    for switch in switches:
        for node in dict.fromkeys(switch.nodes):
            network.cable(node, switch.name, Fraction(1))
        for child in dict.fromkeys(switch.children):
            if child not in by_name:
                known = nearest(child, by_name)
                raise TopologyError(f"{switch.where}: no switch is called {child!r}{known}")
            network.cable(child, switch.name, Fraction(max(1, below(child))))
    return network


def _hosts_below(by_name: dict[str, _Switch]) -> Callable[[str], int]:
    """How many hosts each switch has below it, counted once a switch."""
    known: dict[str, int] = {}

    def count(top: str) -> int:
        stack: list[tuple[str, bool]] = [(top, False)]
        open_now: set[str] = set()
        while stack:
            name, done = stack.pop()
            if done:
                open_now.discard(name)
                switch = by_name[name]
                known[name] = len(set(switch.nodes)) + sum(known.get(c, 0) for c in set(switch.children))
            elif name in open_now:
                raise TopologyError(f"{by_name[name].where}: switch {name!r} is above itself")
            elif name not in known and name in by_name:
                open_now.add(name)
                stack.append((name, True))
                stack += [(child, False) for child in by_name[name].children]
        return known[top]

    return count


SLURM_CONF = FileFormat(
    name="Slurm topology.conf",
    suffixes=(".conf",),
    signature=r"^[ \t]*(SwitchName|BlockName)[ \t]*=",
    parse=parse_slurm_conf,
    becomes="one rank a host; capacities are relative, because Slurm knows no bandwidths",
    written_by="Slurm `topology.conf`",
)


SLURM_YAML = FileFormat(
    name="Slurm topology.yaml",
    suffixes=(".yaml", ".yml"),
    signature=r"^[ \t]*-[ \t]+topology[ \t]*:",
    parse=parse_slurm_yaml,
    becomes="one rank a host; capacities are relative here too",
    written_by="Slurm `topology.yaml`",
)

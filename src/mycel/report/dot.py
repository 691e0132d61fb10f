"""A fabric, what binds in it, and a tree, as a Graphviz file."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from mycel.collectives.schedule import Transfer
from mycel.topology.model import Topology

__all__ = ["fabric_dot"]

_TREE = "#1d7f55"
_CUT = "#b3541e"
_LINK = "#c3cbc5"


def fabric_dot(topology: Topology, tree: Sequence[Transfer] = (), cut: Collection[tuple[int, int]] = ()) -> str:
    """The text of a ``digraph``; ranks are circles, switches boxes (framed twice if they compute), machines clusters.

    Both directions of a cable are one edge where they have the same capacity and neither is in the tree or the cut.

    Args:
        topology: the fabric.
        tree: transfers drawn over it, in green.
        cut: links that bind, drawn dashed, in red where the tree does not use them.

    Examples:
        >>> from mycel.topology.load import load_topology
        >>> print(fabric_dot(load_topology("ring:ranks=2,bandwidth=3")))
        digraph "ring_2" {
          graph [layout=neato, overlap=false, splines=true];
          node [fontname="sans-serif"];
          edge [fontname="sans-serif", fontsize=9, color="#c3cbc5"];
          v0 [label="0", shape=circle];
          v1 [label="1", shape=circle];
          v0 -> v1 [label="3", dir=none];
        }
    """
    lines = [
        f"digraph {_quoted(topology.name)} {{",
        "  graph [layout=neato, overlap=false, splines=true];",
        '  node [fontname="sans-serif"];',
        f'  edge [fontname="sans-serif", fontsize=9, color="{_LINK}"];',
    ]
    boxes = dict.fromkeys(vertex.node for vertex in topology.vertices)
    for number, box in enumerate(boxes):
        members = [v for v, vertex in enumerate(topology.vertices) if vertex.node == box]
        if box is not None:
            lines += [f"  subgraph cluster_{number} {{", f"    label={_quoted(box)};"]
        indent = "    " if box is not None else "  "
        for v in members:
            shape = "circle" if topology.vertices[v].kind == "rank" else "box"
            frames = ", peripheries=2" if topology.vertices[v].computes else ""
            lines.append(f"{indent}v{v} [label={_quoted(topology.label(v))}, shape={shape}{frames}];")
        if box is not None:
            lines.append("  }")
    used = {hop for transfer in tree for hop in pairwise(transfer.path)}
    special = {
        hop: f'color="{_TREE if hop in used else _CUT}", penwidth=2' + (", style=dashed" if hop in cut else "")
        for hop in (*used, *cut)
    }
    suffix = "" if topology.unit == "link" else f" {topology.unit}"
    for (src, dst), capacity in topology.capacity.items():
        back = topology.capacity.get((dst, src))
        plain = back == capacity and (src, dst) not in special and (dst, src) not in special
        if plain and src > dst:
            continue
        style = [f'label="{capacity}{suffix}"', *([special[src, dst]] if (src, dst) in special else [])]
        lines.append(f"  v{src} -> v{dst} [{', '.join([*style, *(['dir=none'] if plain else [])])}];")
    return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'"{escaped}"'

"""DOT: ranks by box, and an edge for every pair that exchanges data, as thick as its share of the array."""

from __future__ import annotations

import json

from mycel.collectives.schedule import Schedule

__all__ = ["export"]


def export(schedule: Schedule, num_bytes: int) -> str:
    """Graphviz text; reductions are dashed. ``num_bytes`` plays no part."""
    topology = schedule.topology
    load: dict[tuple[int, int, bool], int] = {}
    for t in schedule.transfers:
        key = (t.src, t.dst, t.reduce)
        load[key] = load.get(key, 0) + schedule.chunks[t.chunk].num_units
    lines = [f"digraph {_quoted(f'{schedule.collective.name} on {topology.name} by {schedule.method}')} {{"]
    boxes: dict[str | None, list[int]] = {}
    for rank, vertex in enumerate(topology.ranks):
        boxes.setdefault(topology.vertices[vertex].node, []).append(rank)
    for number, (box, ranks) in enumerate(boxes.items()):
        nodes = [f"  {rank} [label={_quoted(f'{rank}: {topology.label(topology.ranks[rank])}')}];" for rank in ranks]
        if box is not None:
            nodes = [
                f"  subgraph cluster_{number} {{",
                f"    label={_quoted(box)};",
                *(f"  {n}" for n in nodes),
                "  }",
            ]
        lines += nodes
    for node in range(schedule.collective.num_ranks, schedule.num_compute_vertices):
        label = f"{node}: {topology.label(topology.compute_vertices[node])}"
        lines.append(f"  {node} [label={_quoted(label)}, shape=box];")
    most = max(load.values())
    for (src, dst, reduce), units in sorted(load.items()):
        style = "dashed" if reduce else "solid"
        width = 0.5 + 3.5 * units / most
        lines.append(f'  {src} -> {dst} [label="{units}/{schedule.num_units}", style={style}, penwidth={width:.2f}];')
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    """A DOT string: JSON's escapes of quotes and backslashes are DOT's too."""
    return json.dumps(text, ensure_ascii=False)

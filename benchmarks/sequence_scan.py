"""Ways of scanning states over emulated fabrics, in turns in one run, with the bytes that interfaces counted.

    python benchmarks/sequence_scan.py [--only star8,torus_2x4] [--sizes 16384,1048576] [--rounds 7] [--record]

For each fabric and size: the median milliseconds of every way and of the choice that mycel makes by itself, of the
published ways (LASP's chain of sends, LASP-2's all_gather) over Gloo as well, what the model says beside it, and the
bytes of one scan by the interfaces' counters beside the formula. With ``--record`` lines replace those of the last
run and the table of the page is written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from moe_ranks import is_rank, join, mark, on_cluster, say, step_s
from mycel.comm import nodes_of
from mycel.planning.sequence import contiguous
from mycel.sequence import SequenceContext, explain_scan, scan
from mycel.sequence.scan import WAYS
from mycel.sequence.scan.choice import predict
from mycel.sequence.scan.line import line_of
from mycel.sequence.scan.maps import Shape
from mycel.sequence.scan.messages import total_bytes
from mycel.topology import load_topology
from mycel.topology.model import Topology
from record import RECORDED, ROOT, cluster_file, markdown, sweep_fabrics

OUTPUT = RECORDED / "sequence_scan.jsonl"
PAGE = ROOT / "docs" / "concepts" / "sequence_scan.md"
FABRICS = ("star8", "torus_2x4", "two_boxes", "shared_uplink", "ring8", "two_slow_nics")
#: Ways as published, which are measured over Gloo too.
PUBLISHED = ("chain", "all_gather")
SIZES = (1 << 14, 1 << 18, 1 << 20, 1 << 22)
#: Of a state; a head has 16 KiB of float32.
KEYS = 64


def shape_of(num_bytes: int) -> Shape:
    """States of so many bytes."""
    return Shape(heads=max(1, num_bytes // (4 * KEYS * KEYS)), values=KEYS, keys=KEYS, order=0)


def nodes_for(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """The topology's nodes, or halves where it names none."""
    nodes = nodes_of(topology)
    half = topology.num_ranks // 2
    return nodes if 1 < len(nodes) < topology.num_ranks else (tuple(range(half)), tuple(range(half, 2 * half)))


def be_rank(fabric: str, sizes: Sequence[int], rounds: int) -> None:
    """A rank: every way in turns, then the choice, then one of each way between marks."""
    _, size = join()
    nodes = nodes_for(load_topology(cluster_file(fabric)))
    context = SequenceContext(contiguous([64 * size], size))
    context.agree()
    for num_bytes in sizes:
        shape = shape_of(num_bytes)
        transition, update = torch.rand(1, shape.heads), torch.randn(1, shape.heads, KEYS, KEYS)
        names = (*WAYS, "auto") if dist.get_backend() == "mycel" else PUBLISHED
        spent: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(rounds + 1):
            for name, found in spent.items():
                seconds = step_s(partial(scan, transition, update, context, way=name, nodes=nodes))
                if turn:  # the first one connects, and measures for the choice
                    found.append(seconds)
        if dist.get_backend() != "mycel":
            say(size=num_bytes, seconds=spent)
            continue
        own = f"{shape.heads} states"
        chosen = [
            text for text in explain_scan(context).splitlines() if text.startswith(own) and "as asked" not in text
        ]
        say(size=num_bytes, seconds=spent, said=chosen[-1])
        for name in WAYS:
            mark(f"{num_bytes}-{name}-begin")
            scan(transition, update, context, way=name, nodes=nodes)
            mark(f"{num_bytes}-{name}-end")


def lines_of(fabric: str, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A line for each size."""
    topology = load_topology(cluster_file(fabric))
    arguments = [fabric, ",".join(map(str, sizes)), str(rounds)]
    heard = on_cluster(topology, Path(__file__), arguments, timeout_s=600.0)
    over_gloo = {
        said["size"]: {name: 1e3 * median(seconds) for name, seconds in said["seconds"].items()}
        for said in on_cluster(topology, Path(__file__), arguments, timeout_s=600.0, backend="gloo")
    }
    crossed = {line["mark"]: line["crossed"] for line in heard if "mark" in line}
    nodes, count = nodes_for(topology), topology.num_ranks
    named = nodes_of(topology)
    apart = {
        rank: at for at, node in enumerate(named if len(named) > 1 else [[r] for r in range(count)]) for rank in node
    }
    line, found = line_of(contiguous([64 * count], count)), []
    for said in (h for h in heard if "mark" not in h):
        num_bytes = said["size"]
        shape = shape_of(num_bytes)
        counted, formula = {}, {}
        for name, way in WAYS.items():
            sent = total_bytes(way.messages(line, shape, count, nodes), 4)
            formula[name] = sum(n for (a, b), n in sent.items() if apart[a] != apart[b])
            counted[name] = crossed[f"{num_bytes}-{name}-end"] - crossed[f"{num_bytes}-{name}-begin"]
        found.append(
            {
                "fabric": fabric,
                "size": num_bytes,
                "ms": {name: 1e3 * median(seconds) for name, seconds in said["seconds"].items()},
                "gloo_ms": over_gloo[num_bytes],
                "chosen": said["said"].rpartition(": ")[2],
                "modelled_ms": {n: 1e3 * s for n, s in predict(topology, line, shape, 4, nodes).items()},
                "counted": counted,
                "formula": formula,
            }
        )
    return found


def table(lines: list[dict[str, Any]]) -> str:
    """Milliseconds by way; ratios to the chain and to the gather; bytes that cables carried over the formula."""
    rows = []
    for line in lines:
        ms, auto, gloo = line["ms"], line["ms"]["auto"], line["gloo_ms"]
        best = min(ms[name] for name in WAYS)
        ratios = [c / line["formula"][n] for n, c in line["counted"].items() if line["formula"][n] and c]
        rows.append(
            (
                line["fabric"],
                f"{line['size'] >> 10} KiB",
                *(f"{gloo[name]:.1f}" for name in PUBLISHED),
                *(f"{ms[name]:.1f}" for name in WAYS),
                f"{auto:.1f} ({line['chosen']})",
                f"{ms[line['chosen']] / best:.2f}",
                f"{line['modelled_ms'][line['chosen']]:.1f}" if line["chosen"] in line["modelled_ms"] else "-",
                f"{gloo['chain'] / auto:.2f}, {gloo['all_gather'] / auto:.2f}",
                f"{ms['chain'] / auto:.2f}, {ms['all_gather'] / auto:.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-",
            )
        )
    headings = (
        "fabric",
        "state",
        *(f"{name} over Gloo" for name in PUBLISHED),
        *WAYS,
        "chosen",
        "its way to the best",
    )
    headings += ("modelled", "Gloo's chain, gather to it", "chain, gather to it", "bytes to the formula")
    return markdown(headings, rows)


if __name__ == "__main__":
    if is_rank():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        be_rank(sys.argv[1], [int(size) for size in sys.argv[2].split(",")], int(sys.argv[3]))
    else:
        sweep_fabrics(lines_of, table, OUTPUT, PAGE, doc=__doc__, fabrics=FABRICS, sizes=SIZES, rounds=7)

"""Rotations over emulated fabrics: ``permute`` beside straight ways and Gloo, in turns in one run, and the bound.

    python benchmarks/permute.py [--only two_boxes,torus_2x4] [--sizes 1048576] [--rounds 9] [--record]

Every rank gives its block to the next rank, the step of a ring. ``straight`` is torch's ``all_to_all_single`` with
one block that is not empty, as rings are written with it; of ``permute`` all ranks know all blocks. Mbit/s of a rank
are a block's bits over the median time until the last rank has its block; the bound is that of the flow, modelled
from links. With ``--record`` lines replace those of the last run, and the table of the page is written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from moe_ranks import is_rank, join, on_cluster, say, step_s
from mycel.collectives.bound import bound
from mycel.collectives.spec import permutation
from mycel.cost import bytes_per_second
from mycel.runtime import tensor_group
from mycel.topology import load_topology
from record import RECORDED, ROOT, cluster_file, markdown, sweep_fabrics

OUTPUT = RECORDED / "permute.jsonl"
PAGE = ROOT / "docs" / "concepts" / "flow.md"
FABRICS = ("two_boxes", "torus_2x4", "shared_uplink", "ring8")
SIZES = (1 << 18, 1 << 20, 1 << 22)


def be_rank(sizes: list[int], rounds: int) -> None:
    """A rank: ways in turns, results checked once."""
    rank, size = join()
    has_permute = dist.get_backend() == "mycel"
    group = dist.group.WORLD
    assert group is not None
    for num_bytes in sizes:
        count = num_bytes // 4
        given, got = torch.full((count,), float(rank)), torch.empty(count)
        gives, gets = [0] * size, [0] * size
        gives[(rank + 1) % size], gets[(rank - 1) % size] = count, count

        def straight(
            got: torch.Tensor = got, given: torch.Tensor = given, gets: list[int] = gets, gives: list[int] = gives
        ) -> None:
            dist.all_to_all_single(got, given, gets, gives)

        def permute(got: torch.Tensor = got, given: torch.Tensor = given, count: int = count) -> None:
            targets: list[int | None] = [(r + 1) % size for r in range(size)]
            tensor_group(group).permute(got, given, targets, [count] * size).wait()

        ways = {"straight": straight} | ({"permute": permute} if has_permute else {})
        spent: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, way in ways.items():
                got.fill_(-1)
                seconds = step_s(way)
                if not bool((got == (rank - 1) % size).all()):
                    raise SystemExit(f"{name}: rank {rank} got another block than that of rank {(rank - 1) % size}")
                if turn:  # the first one plans and connects
                    spent[name].append(seconds)
        say(size=num_bytes, ms={name: 1e3 * median(found) for name, found in spent.items()})
    dist.destroy_process_group()


def lines_of(fabric: str, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """A line for each size."""
    topology = load_topology(cluster_file(fabric))
    ranks = topology.num_ranks
    rotation = permutation([(rank + 1) % ranks for rank in range(ranks)])
    bound_bytes = float(bound(topology, rotation).algbw) * bytes_per_second(topology)  # of a block
    arguments = [",".join(map(str, sizes)), str(rounds)]
    ours, theirs = (
        on_cluster(topology, Path(__file__), arguments, timeout_s=600.0, backend=backend)
        for backend in ("mycel", "gloo")
    )
    return [
        {
            "fabric": fabric,
            "size": own["size"],
            "bound": bound_bytes,
            "ms": {**own["ms"], "gloo": other["ms"]["straight"]},
        }
        for own, other in zip(ours, theirs, strict=True)
    ]


def table(lines: list[dict[str, Any]]) -> str:
    """Mbit/s of a rank by way, and the part of the bound that ``permute`` reaches."""
    rows = []
    for line in lines:
        rates = {name: line["size"] / ms * 1e3 for name, ms in line["ms"].items()}
        rows.append(
            (
                line["fabric"],
                f"{line['size'] >> 10} KiB",
                *(f"{8 * rates[name] / 1e6:.0f}" for name in ("gloo", "straight", "permute")),
                f"{8 * line['bound'] / 1e6:.0f}",
                f"{rates['permute'] / line['bound']:.2f}",
            )
        )
    return markdown(("fabric", "block", "Gloo", "straight", "permute", "bound", "permute / bound"), rows)


if __name__ == "__main__":
    if is_rank():
        be_rank([int(size) for size in sys.argv[1].split(",")], int(sys.argv[2]))
    else:
        sweep_fabrics(lines_of, table, OUTPUT, PAGE, doc=__doc__, fabrics=FABRICS, sizes=SIZES, rounds=9)

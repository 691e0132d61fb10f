"""What OneFlow claims of layouts: what a change between split, whole and summed sends is known beforehand.

    python benchmarks/claims/oneflow_layouts.py    # one minute; replaces its lines and the table in the page

Every change of a tensor's layout over two, three and four ranks of a star: the bytes that the formula says, and the
bytes that ranks handed to their connections (``mycel.runtime.metrics``), for DTensor's ``redistribute`` and, from one
dimension to another, for an exchange of parts.

References:
    Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", 2021 (arXiv 2110.15032),
    table 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import mycel.runtime
from moe_ranks import is_rank, join, on_cluster, say
from mycel.planning.layouts import change_bytes
from mycel.topology.builders import star
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "oneflow_layouts.jsonl"
PAGE = ROOT / "docs" / "concepts" / "planned_claims.md"
#: Of the tensor: divides by 2, 3 and 4 in both directions, 4.5 MiB.
ROWS, COLUMNS = 1536, 768
PLACEMENTS: dict[str, Placement] = {"S0": Shard(0), "S1": Shard(1), "B": Replicate(), "P": Partial()}
CHANGES = (("S0", "B"), ("S1", "B"), ("P", "B"), ("P", "S0"), ("P", "S1"), ("B", "S0"), ("S0", "S1"))


def sent() -> int:
    """Bytes that this rank has handed to its connections in collectives so far."""
    groups = mycel.runtime.metrics()["groups"].values()
    return sum(each["sent_bytes"] for group in groups for each in group["collectives"].values())


def counted(change: Callable[[], object]) -> int:
    """Bytes that all ranks sent in a change."""
    dist.barrier()
    before = sent()
    change()
    mine = torch.tensor([sent() - before])
    dist.all_reduce(mine)
    return int(mine)


def exchange(part: Tensor, ranks: int) -> Tensor:
    """From rows to columns by parts: every rank sends each other one its corner."""
    corners = torch.stack([corner.contiguous() for corner in part.chunk(ranks, 1)])
    found = torch.empty_like(corners)
    dist.all_to_all_single(found, corners)
    return found.flatten(0, 1)


def be_rank() -> None:
    rank, size = join()
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    whole = torch.randn(ROWS, COLUMNS)
    for before, after in CHANGES:
        place = PLACEMENTS[before]
        local = whole / size if before == "P" else whole
        if isinstance(place, Shard):
            local = whole.chunk(size, place.dim)[rank].contiguous()
        tensor = DTensor.from_local(local, mesh, [place], run_check=False)
        found: list[Any] = []
        change = lambda t=tensor, a=after, f=found: f.append(t.redistribute(placements=[PLACEMENTS[a]]))  # noqa: E731
        num_bytes = counted(change)
        off = float((found[0].full_tensor() - whole).abs().max())
        say(case=f"{before} to {after}", how="DTensor", ranks=size, counted=num_bytes, off=off)
    rows = whole.chunk(size, 0)[rank].contiguous()
    parts: list[Tensor] = []
    num_bytes = counted(lambda: parts.append(exchange(rows, size)))
    off = float((parts[0] - whole.chunk(size, 1)[rank]).abs().max())
    say(case="S0 to S1", how="all_to_all", ranks=size, counted=num_bytes, off=off)
    dist.destroy_process_group()


def measured() -> list[dict[str, Any]]:
    lines = []
    for ranks in (2, 3, 4):
        heard = on_cluster(star(num_ranks=ranks), Path(__file__), [])
        for line in heard:
            before, _, after = line["case"].partition(" to ")
            predicted = change_bytes(before, after, ROWS * COLUMNS * 4, ranks)
            lines.append({**line, "predicted": predicted})
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    rows = [
        (
            line["case"],
            line["how"],
            line["ranks"],
            f"{line['predicted']:,}",
            f"{line['counted']:,}",
            f"{line['counted'] / line['predicted']:.3f}" if line["predicted"] else "",
        )
        for line in lines
    ]
    return markdown(("change", "by", "ranks", "bytes by formula", "bytes counted", "counted to formula"), rows)


def main() -> int:
    if is_rank():
        be_rank()
        return 0
    conclude(OUTPUT, PAGE, "oneflow_layouts", measured(), table)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())

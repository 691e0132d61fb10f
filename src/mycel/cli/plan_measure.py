"""``mycel plan measure``: started once a rank, writes what ranks can do as a machine for ``mycel plan search``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mycel.errors import UsageError
from mycel.extras import needs

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("measure", help="Measure the ranks this runs on, and write them as a machine to plan with.")
    def measure(
        output: Annotated[Path, typer.Option("--output", "-o", help="File that rank 0 writes; .json.")],
        size: Annotated[int, typer.Option(help="Rows of the large product's matrices.", min=64)] = 1024,
        max_bytes: Annotated[str, typer.Option(help="Of the longest message.")] = "4MB",
        backend: Annotated[str, typer.Option(help="gloo, nccl or mycel.")] = "gloo",
        json_output: Annotated[bool, typer.Option("--json", help="Rank 0 prints one JSON object.")] = False,
    ) -> None:
        needs("mycel plan measure", "torch")
        from mycel.units import parse_size

        if output.suffix != ".json":
            raise UsageError(f"{output}: a machine is a file of JSON: its name must end in .json")
        if backend not in ("gloo", "nccl", "mycel"):
            raise UsageError(f"--backend {backend}: there are gloo, nccl and mycel")
        _measure(output, size, parse_size(max_bytes), backend, json_output=json_output)


def _measure(output: Path, size: int, num_bytes: int, backend: str, *, json_output: bool) -> None:
    import os
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from mycel.parallel.measure import RankRates, machine_of, measure_links, measure_rank
    from mycel.planning.machines.machine import to_json

    if "RANK" not in os.environ:
        raise UsageError(
            "mycel plan measure runs once a rank: torchrun --nproc-per-node 8 -m mycel plan measure -o machine.json"
        )
    if backend == "mycel":
        import mycel.runtime  # noqa: F401  (registers the backend)
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if backend == "nccl" else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    try:
        own = measure_rank(device, size=size, ranks_of_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        ranks: list[RankRates] = [own] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        inside, between, short_s = measure_links([rank.node for rank in ranks], num_bytes=num_bytes)
        is_first = dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
    if not is_first:
        return
    text = json.dumps(to_json(machine_of(output.stem, ranks, inside, between, short_s)), indent=1) + "\n"
    half = output.with_suffix(f".{os.getpid()}.part")
    try:
        half.write_text(text, encoding="utf-8")
        half.replace(output)
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from None
    if json_output:
        print(text, end="")
        return
    for number, rank in enumerate(ranks):
        print(
            f"rank {number}, node {rank.node}: {rank.flops / 1e9:.4g} GFLOP/s in products, half of it at "
            f"{rank.half_rows:.0f} rows; memory {rank.memory_gbps:.3g} GB/s"
        )
    print(f"messages: {inside:.3g} GB/s inside nodes, {between:.3g} GB/s between, a short one {1e6 * short_s:.0f} us")
    print(f"{output}: the slowest rank, for mycel plan search --machine {output}")

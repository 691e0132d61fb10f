"""What LASP claims: what ranks exchange does not grow with the sequence, and so ever longer ones fit on more ranks.

    python benchmarks/claims/lasp.py [--only bytes,length]    # some minutes; replaces its lines and the table

*bytes*: one layer forwards and backwards on an emulated star of 4 ranks, by the counters of the interfaces, beside
ring attention of the same width; sequences of three lengths. *length*: the longest sequence that a layer forwards and
backwards can hold where each rank may allocate so much more than it has at the start (a real limit), on 1, 2, 4 and 8
ranks of this machine: linear attention, ring attention and Ulysses over 4 heads. It is doubled from 1,024 tokens a
rank, and from there grows by eighths in new processes. Lengths that did not fit say why.

References:
    Sun et al., "Linear Attention Sequence Parallelism", arXiv 2404.02882, sections 3 and 4.2.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ranks import is_rank, join, mark, on_cluster
from mycel.errors import MycelError
from mycel.planning.sequence import contiguous, zigzag
from mycel.sequence import SequenceContext, attention, linear_attention
from mycel.topology import load_topology
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "lasp.jsonl"
PAGE = ROOT / "docs" / "concepts" / "sequence_scan.md"
LENGTHS = (1024, 4096, 16384)
RANKS = (1, 2, 4, 8)
HEADS, WIDTH = 4, 64
#: Bytes that a rank may allocate beyond what it has before the layer.
LIMIT = 192 << 20
SMALLEST, LARGEST = 1 << 10, 1 << 16
METHODS = ("linear", "ring", "ulysses")


def layer(method: str, length: int) -> None:
    """One layer forwards and backwards on this rank's part of a sequence."""
    size = dist.get_world_size()
    layout = contiguous([length], size) if method == "linear" else zigzag([length], size)
    context = SequenceContext(layout)
    q, k, v = (torch.randn(1, HEADS, context.num_tokens, WIDTH, requires_grad=True) for _ in range(3))
    out: Tensor
    if method == "linear":
        out = linear_attention(q, k, v, context, decay=torch.full((HEADS,), -0.1), way="two_exchanges")
    else:
        out = attention(q, k, v, context, way=method)  # type: ignore[arg-type]
    out.sum().backward()


def count_bytes() -> None:
    """A rank of the star: each method and length between marks."""
    join()
    for method in ("linear", "ring"):
        for length in LENGTHS:
            mark(f"{method}-{length}-begin")
            layer(method, length)
            mark(f"{method}-{length}-end")


def of_bytes() -> list[dict[str, Any]]:
    """Bytes by length and method."""
    heard = on_cluster(load_topology("star:ranks=4,bandwidth=400 Mbit/s"), Path(__file__), ["bytes"], timeout_s=300.0)
    at = {line["mark"]: line["crossed"] for line in heard if "mark" in line}
    return [
        {"bytes": True, "method": m, "length": n, "sent": at[f"{m}-{n}-end"] - at[f"{m}-{n}-begin"]}
        for m in ("linear", "ring")
        for n in LENGTHS
    ]


def lengths_from(longest: int) -> list[int]:
    """Tokens a rank to try, one after the other: doubled from the smallest, or from those that fit by eighths."""
    if longest:
        return [longest * eighths // 8 for eighths in range(9, 16)]
    return [SMALLEST << i for i in range((LARGEST // SMALLEST).bit_length())]


def try_lengths(method: str, known: int) -> None:
    """A rank: tries longer sequences until one does not fit, says how far it came and why; then the process ends.

    Args:
        method: one of ``METHODS``.
        known: tokens a rank that are known to fit, or 0.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    size = dist.get_world_size()
    longest, said = known, ""
    try:
        layer(method, SMALLEST * size)  # what connects and is loaded once does not count
        with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123
            used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + LIMIT, resource.RLIM_INFINITY))
        for tokens in lengths_from(known):
            layer(method, tokens * size)
            dist.barrier()
            longest = tokens
    except (RuntimeError, MemoryError, MycelError) as error:
        said = str(error).splitlines()[0][:120] or type(error).__name__
    print("@ " + json.dumps([longest, said]), flush=True)
    os._exit(0)  # others that wait for this rank lose their connection, and end too


def tried(method: str, size: int, known: int) -> tuple[int, str]:
    """Tokens a rank that fit on all ranks, and what the next length met."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command += [str(Path(__file__)), method, str(known)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "LASP_RANK": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)
    # Ranks that end together may share a line.
    said = [json.JSONDecoder().raw_decode(text)[0] for text in done.stdout.split("@ ")[1:]]
    # Who met the limit says so; others lost it.
    reasons = sorted((text for _, text in said if text), key=lambda text: "memory" not in text)
    if not said:
        reasons = [done.stderr.strip().splitlines()[-1][:120]]
    return min((length for length, _ in said), default=known), next(iter(reasons), "")


def of_length() -> list[dict[str, Any]]:
    """The longest that fits on all ranks, and what the next one met."""
    found = []
    for method in METHODS:
        for size in RANKS:
            longest, reason = tried(method, size, 0)
            if longest:
                longest, reason = tried(method, size, longest)
            found.append({"length": True, "method": method, "ranks": size, "longest": longest * size, "then": reason})
            print(found[-1], file=sys.stderr)
    return found


def table(lines: list[dict[str, Any]]) -> str:
    """Two tables."""
    counted = [line for line in lines if "bytes" in line]
    rows = [
        (method, *(f"{line['sent'] / 1e6:.2f}" for line in counted if line["method"] == method))
        for method in ("linear", "ring")
        if counted
    ]
    text = markdown(("measured MB of all ranks, by tokens", *map(str, LENGTHS)), rows) + "\n" if rows else ""
    found = [line for line in lines if "length" in line and "ranks" in line]
    rows = [(m, *(f"{line['longest']:,}" for line in found if line["method"] == m)) for m in METHODS if found]
    return text + (markdown(("longest sequence that fits, by ranks", *map(str, RANKS)), rows) if rows else "")


def main() -> int:
    """Measures and records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="bytes,length")
    chosen = parser.parse_args().only.split(",")
    lines = (of_bytes() if "bytes" in chosen else []) + (of_length() if "length" in chosen else [])
    kind = chosen[0] if len(chosen) == 1 else None
    conclude(
        OUTPUT,
        PAGE,
        "lasp",
        lines,
        table,
        kind=None if kind is None else {"bytes": "sent", "length": "longest"}[kind],
    )
    return 0


if __name__ == "__main__":
    if is_rank():
        count_bytes()
    elif "LASP_RANK" in os.environ:
        try_lengths(sys.argv[1], int(sys.argv[2]))
    else:
        sys.exit(main())

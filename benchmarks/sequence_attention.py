"""Attention over the ranks of emulated fabrics: every way, forward and backward of one layer, in turns in one run.

    python benchmarks/sequence_attention.py                        # 8 ranks, each fabric, communication alone
    python benchmarks/sequence_attention.py --paced 200            # and computation of 200 ms a rank, paced
    python benchmarks/sequence_attention.py --clusters two_boxes --heads 16 --key-heads 2 --record
    python benchmarks/sequence_attention.py --write                # the page's table, of what was recorded last

Ranks share few processors here, so kernels do not run: they sleep for as long as their pairs of queries and keys
take at a given rate (``--paced``, of forward and backward together; 0: not at all). Messages are real, over paced
links. ``ring over gloo`` is the published ring (zig-zag, every rank passes on what it has met) over torch's own
backend; ``all_gather over gloo`` is what torch's context parallelism does by default. ``ring of sends`` is the
published ring over mycel, where each rank sends to the next; ``ring`` takes steps that use all links. Predicted are
the times of the model that chooses, in a column of their own. ``perfect`` is the longer of the paced computation and
of the soonest communication alone, measured in the same run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from loopback import group_of
from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.comm.pending import Pending
from mycel.planning.sequence import CAUSAL, per_document_zigzag, work_by_rank
from mycel.sequence import SequenceContext, Way, attention, explain, shape_of
from mycel.sequence.softmax import choose, rows
from mycel.sequence.softmax.attention import way_of
from ranks import are_launched, be_rank
from record import RECORDED, ROOT, append, cluster_file, markdown, read, stamp, write_section

OUTPUT = RECORDED / "sequence_attention.jsonl"
PAGE = ROOT / "docs" / "concepts" / "sequence_attention.md"
TIMEOUT = timedelta(seconds=120)
FABRICS = ("two_boxes", "star8", "torus_2x4", "shared_uplink", "ring8", "two_slow_nics")
NAMES = ("ring", "all_gather", "sliced", "needed", "ulysses", "usp")
#: Of the time of both passes, that of the forward one: two products of five and more.
FORWARD_SHARE = 2 / 7


class Sends(SequenceContext):
    """Rows go to another rank as published rings send them: straight, by a pair of point-to-point messages."""

    def start_permute(
        self, rows: Tensor, targets: Sequence[int | None], lengths: Sequence[int], name: str = "permute"
    ) -> Pending[Tensor]:
        group, sent, target = self.group, rows.detach().contiguous(), targets[self.rank]
        source = next((rank for rank, other in enumerate(targets) if other == self.rank), None)
        received = sent.new_empty(0 if source is None else lengths[source], *sent.shape[1:])
        pairs = [(dist.isend, sent, target), (dist.irecv, received, source)]
        messages = [dist.P2POp(do, x, group=group, group_peer=peer) for do, x, peer in pairs if peer is not None]
        works = dist.batch_isend_irecv(messages)

        def finish(_kept: Tensor = sent) -> Tensor:
            for work in works:
                work.wait()
            return received

        return Pending(finish)


class Pace:
    """Kernels that sleep: ``seconds`` for all pairs of the busiest rank, forward and backward."""

    def __init__(self, pairs: int, heads: int) -> None:
        self.pairs, self.heads, self.seconds = pairs * heads, heads, 0.0

    def _sleep(self, q: Tensor, k: Tensor, seen: Any, share: float) -> None:
        count = q.shape[1] * q.shape[2] * k.shape[2] * (0.5 if seen is True else 1.0)
        if self.seconds:
            time.sleep(self.seconds * share * count / self.pairs)

    # What kernels write is part of their time: nothing is written here.
    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Any = None) -> tuple[Tensor, Tensor]:
        self._sleep(q, k, seen, FORWARD_SHARE)
        zero = q.new_zeros(())
        return zero.expand(*q.shape[:3], v.shape[3]), zero.expand(q.shape[:3])

    def attend_back(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        self._sleep(q, k, rest[3], 1 - FORWARD_SHARE)
        zero = q.new_zeros(())
        return zero.expand(q.shape), zero.expand(k.shape), zero.expand(v.shape)

    def kernel_seconds(self, shape: Any, device: torch.device) -> list[float]:
        """As the choice would measure it."""
        each = self.seconds * self.heads / self.pairs
        return [each * FORWARD_SHARE, each * (1 - FORWARD_SHARE)]


def measure(options: argparse.Namespace) -> None:
    """All ways over this fabric, in an initialised job."""
    size, own = dist.get_world_size(), dist.get_rank()
    width = options.width
    per_token = 2 * options.key_heads * width * 4
    layout = per_document_zigzag([options.kilobytes * 1024 // per_token * size], size)
    pace = Pace(int(work_by_rank(layout).max()), options.heads)
    rows.attend, rows.attend_back = pace.attend, pace.attend_back  # type: ignore[assignment]
    choose._kernel_seconds = pace.kernel_seconds  # type: ignore[assignment]
    group = dist.new_group(backend="mycel", timeout=TIMEOUT)
    context = SequenceContext(layout, group)
    over_gloo = SequenceContext(layout, group_of("gloo", TIMEOUT))
    control = dist.new_group(backend="gloo", timeout=TIMEOUT)
    tokens = context.num_tokens
    q, k, v = (torch.randn(1, h, tokens, width) for h in (options.heads, options.key_heads, options.key_heads))
    for paced in sorted({0.0, options.paced / 1000}):
        pace.seconds = paced
        choose._KNOWN.clear()
        said = explain(SequenceContext(layout, group), shape_of(q, k, v))
        ways: dict[str, tuple[SequenceContext, Way]] = {
            "ring over gloo": (over_gloo, Way(between="ring")),
            "all_gather over gloo": (over_gloo, Way(between="gathered")),
            "ring of sends": (Sends(layout, group), Way(between="ring")),
        }
        for name in NAMES:
            if name != "ulysses" or options.heads % size == 0:
                ways[name] = context, way_of(name, q, k, v, context, CAUSAL)  # type: ignore[arg-type]
        ways["chosen"] = context, said.way
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(options.repeats + 1):  # the first is for warming up
            for name, (over, way) in ways.items():
                leaves = [x.clone().requires_grad_() for x in (q, k, v)]
                dist.barrier(group=control)
                begin = time.perf_counter()
                out = attention(leaves[0], leaves[1], leaves[2], over, way=way)
                torch.autograd.backward([out], [out.detach()])
                took = torch.tensor([time.perf_counter() - begin])
                dist.all_reduce(took, dist.ReduceOp.MAX, group=control)
                if number:
                    times[name].append(float(took))
        predicted = {p.way: p for p in said.predictions}
        if own == 0:
            show(
                options,
                paced,
                said.way.name,
                times,
                {n: predicted.get(w) for n, (over, w) in ways.items() if over is context},
                size,
            )
    dist.barrier(group=control)


#: Median seconds of the soonest way without computation, by fabric: what perfect overlap is made of.
ALONE: dict[str, float] = {}


def show(
    options: argparse.Namespace, paced: float, chosen: str, times: dict[str, list[float]], predicted: Any, size: int
) -> None:
    """Print a fabric's table, and record it."""
    medians = {name: float(np.median(took)) for name, took in times.items()}
    if not paced:
        ALONE[options.label] = min(medians.values())
    perfect = max(paced, ALONE[options.label])
    print(
        f"\n{options.label}, {size} ranks, {options.kilobytes} KB of keys and values each, {options.heads} heads, "
        f"{options.key_heads} of keys, computation {1e3 * paced:.0f} ms (paced): chosen is {chosen}"
    )
    print("| way | median ms | of perfect overlap | chosen is faster by | predicted ms | memory (modelled) |")
    print("|---|---|---|---|---|---|")
    lines = []
    for name, median in medians.items():
        model = predicted.get(name)
        of_shard = None if model is None else model.memory / (options.kilobytes * 1024)
        print(
            f"| {name} | {1e3 * median:.0f} | {perfect / median:.2f} | {median / medians['chosen']:.2f} | "
            + ("" if model is None else f"{1e3 * model.seconds:.0f}")
            + f" | {'' if of_shard is None else f'{of_shard:.1f} shards'} |",
            flush=True,
        )
        lines.append(
            {
                "benchmark": "sequence_attention",
                "fabric": options.label,
                "world_size": size,
                "key_value_bytes": options.kilobytes * 1024,
                "heads": options.heads,
                "key_heads": options.key_heads,
                "paced_s": paced,
                "way": name,
                "chosen": chosen,
                "median_s": median,
                "p10_s": float(np.quantile(times[name], 0.1)),
                "p90_s": float(np.quantile(times[name], 0.9)),
                "predicted_s": None if model is None else model.seconds,
                "perfect_s": perfect,
                "repeats": options.repeats,
                "hardware": describe_hardware(),
                "versions": dict(describe_versions()),
                **stamp(),
            }
        )
    if options.record:
        append(OUTPUT, lines)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """What was recorded last of each fabric, heads and pace: published rings, the best of two, and the choice."""
    last: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for line in lines:
        key = (line["heads"], line["key_heads"], line["paced_s"], line["fabric"])
        last.setdefault(key, {})[line["way"]] = line
    found = []
    for (heads, key_heads, paced_s, fabric), ways in last.items():
        chosen = ways["chosen"]
        seconds = {name: line["median_s"] for name, line in ways.items()}
        best = min(seconds.get("all_gather", np.inf), seconds.get("ulysses", np.inf))
        faster = [f"{seconds[n] / chosen['median_s']:.2f}" for n in ("ring over gloo", "ring of sends", "ring")]
        found.append(
            (
                f"{heads} / {key_heads}",
                f"{1e3 * paced_s:.0f} ms" if paced_s else "none",
                fabric,
                chosen["chosen"],
                f"{1e3 * chosen['median_s']:.0f} ms",
                f"{1e3 * chosen['predicted_s']:.0f} ms",
                *faster,
                f"{best / chosen['median_s']:.2f}",
                f"{chosen['perfect_s'] / chosen['median_s']:.2f}",
            )
        )
    headings = ("heads / of keys", "computation, paced", "fabric", "chosen", "takes, measured", "predicted, modelled")
    headings += (
        "ring over Gloo",
        "ring of sends",
        "`ring`",
        "best of `all_gather` and `ulysses`",
        "of perfect overlap",
    )
    return markdown(headings, found)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=lambda text: text.split(","), default=list(FABRICS))
    parser.add_argument("--label", default="this network", help="what the rows call the network")
    parser.add_argument("--kilobytes", type=int, default=1024, help="keys and values of a rank")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--paced", type=float, default=0.0, help="milliseconds of computation of the busiest rank")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="append lines to benchmarks/recorded")
    parser.add_argument("--write", action="store_true", help="only put the table of what was recorded in its page")
    options = parser.parse_args(given)
    if options.write:
        write_section(PAGE, "sequence_attention", table(read(OUTPUT)))
        return 0
    if are_launched():
        be_rank(measure, options, TIMEOUT)
        return 0
    for name in options.clusters:
        command = [sys.executable, "-m", "mycel", "emulate", str(cluster_file(name)), "--"]
        command += [sys.executable, str(Path(__file__).resolve()), *given, "--label", name]
        if subprocess.run(command, check=False).returncode:
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Encrypted sums of gradients over slow links: bytes, step times with the share of encryption, and losses.

    python benchmarks/claims/encrypted.py                   # about five minutes; root, for network namespaces
    python benchmarks/claims/encrypted.py --part digits     # one of timed, judged, digits; the others' lines stay
    python benchmarks/claims/encrypted.py --quick           # one minute, nothing is recorded

Four ranks behind a switch, links of 50 Mbit/s, a byte-level transformer on the standard library's source, as for
PowerSGD. ``sums in the clear`` are the same whole numbers without encryption. Then losses of several seeds on
loopback, where nothing is timed, and, on two ranks, digits. Lines replace those of the same
part's last run in ``benchmarks/recorded/claims/encrypted.jsonl``, and the tables in docs/concepts/encrypted_sums.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
import training
from digits import Digits, network
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Sizes, Way, launch, loss_table, say, train

import mycel.runtime  # noqa: F401  (registers the backend)
from mycel.data_parallel import CompressionPolicy, Encrypted, IntegerSum, Quantised, SumKey, compress
from mycel.topology.load import load_topology
from record import RECORDED, ROOT, conclude_parts, markdown

OUTPUT = RECORDED / "claims" / "encrypted.jsonl"
PAGE = ROOT / "docs" / "concepts" / "encrypted_sums.md"
TIMEOUT = timedelta(seconds=120)
RANKS = 4


def plain(backend: str) -> Any:
    """Uncompressed."""

    def make(model: nn.Module) -> Any:
        return DistributedDataParallel(model, process_group=dist.new_group(backend=backend, timeout=TIMEOUT)), None

    return make


def ours(backend: str, method: Any) -> Any:
    """A compressor for every parameter, so that all of these ways see the same."""

    def make(model: nn.Module) -> Any:
        ddp = DistributedDataParallel(model, process_group=dist.new_group(backend=backend, timeout=TIMEOUT))
        own = dist.new_group(backend=backend, timeout=TIMEOUT)
        return ddp, compress(ddp, CompressionPolicy(method, rules={"*": method}), group=own, feedback=False)

    return make


def timed_ways(key: SumKey) -> list[Way]:
    """For slow links."""
    return [
        Way("uncompressed, gloo", plain("gloo")),
        Way("uncompressed, mycel", plain("mycel")),
        Way("quantised, 8 bits", ours("mycel", Quantised(8))),
        Way("sums in the clear, 8 bits", ours("mycel", IntegerSum(8))),
        Way("encrypted sums, 16 bits", ours("mycel", Encrypted(IntegerSum(16), key=key))),
        Way("encrypted sums, 8 bits", ours("mycel", Encrypted(Quantised(8), key=key))),
        Way("encrypted sums, 4 bits", ours("mycel", Encrypted(Quantised(4), key=key))),
    ]


def judged_ways(key: SumKey) -> list[Way]:
    """For losses."""
    return [
        Way("uncompressed", plain("gloo")),
        Way("quantised, 8 bits", ours("gloo", Quantised(8))),
        Way("sums in the clear, 8 bits", ours("gloo", IntegerSum(8))),
        Way("encrypted sums, 8 bits", ours("gloo", Encrypted(Quantised(8), key=key))),
        Way("sums in the clear, 4 bits", ours("gloo", IntegerSum(4))),
        Way("encrypted sums, 4 bits", ours("gloo", Encrypted(Quantised(4), key=key))),
    ]


def timed(sizes: Sizes, key: SumKey) -> list[dict[str, Any]]:
    """Records of ``training``, and what each way computes for its exchange in a step."""
    ways = timed_ways(key)
    records = train(ways, sizes)
    for record, way in zip(records, ways, strict=True):
        steps = max(1, sizes.steps - training.WARM_UP)
        record["exchange_compute_ms"] = None if way.handle is None else 1e3 * way.handle.stats.compute_s / steps
        record["num_parameters"] = sum(p.numel() for p in way.ddp.parameters())
    return records


def digits_losses(steps: int, seed: int, key: SumKey) -> list[dict[str, Any]]:
    """Held-out losses of a small network."""
    records = []
    for name, method in (
        ("quantised, 8 bits", Quantised(8)),
        ("sums in the clear, 8 bits", IntegerSum(8)),
        ("encrypted sums, 8 bits", Encrypted(Quantised(8), key=key)),
    ):
        digits = Digits(seed)
        ddp, handle = ours("gloo", method)(network(seed))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        for step in range(steps):
            x, y = digits.batch(seed, dist.get_rank(), step, 32)
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
        accuracy, loss = digits.judge(ddp.module)
        records.append({"way": name, "seed": seed, "accuracy": accuracy, "validation_loss": loss})
        handle.close()
    return records


def work(options: argparse.Namespace) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    key = SumKey.load(options.key)
    sizes = Sizes(steps=options.steps)
    if options.worker == "timed":
        say(timed(sizes, key))
    for seed in range(options.seeds):
        if options.worker == "judged":
            training.SEED = 1234 + seed
            records = train(judged_ways(key), Sizes(steps=options.steps, turn=options.steps))
            say([{**record, "seed": seed} for record in records])
        elif options.worker == "digits":
            say(digits_losses(4 * options.steps, seed, key))
    dist.destroy_process_group()


def table(records: list[dict[str, Any]]) -> str:
    """Step times, and how much of them is computing for the exchange."""
    base = records[0]["step_ms"]
    rows = []
    for r in records:
        computing = r["exchange_compute_ms"]
        rows.append(
            (
                r["way"],
                f"{r['step_ms']:.0f}",
                f"{r['step_p10_ms']:.0f}–{r['step_p90_ms']:.0f}",
                f"{base / r['step_ms']:.2f}",
                "" if computing is None else f"{computing:.0f}",
                "" if computing is None else f"{100 * computing / r['step_ms']:.0f} %",
                f"{r['interface_bytes'] / 1e3:.0f}",
                "" if r["metered_bytes"] is None else f"{r['metered_bytes'] / 1e3:.0f}",
                "" if r["metered_bytes"] is None else f"{r['metered_bytes'] / 1.5 / r['num_parameters']:.2f}",
            )
        )
    headings = (
        "",
        "step, ms",
        "p10–p90",
        "times faster",
        "encodes, encrypts, decrypts, ms",
        "share of the step",
        "KB a step by the interface",
        "by the meter",
        "bytes a value",
    )
    return markdown(headings, rows)


def digits_table(records: list[dict[str, Any]]) -> str:
    """Losses by seed."""
    rows = []
    for name in dict.fromkeys(r["way"] for r in records):
        mine = [r for r in records if r["way"] == name]
        rows.append((name, *(f"{r['validation_loss']:.7f}" for r in mine)))
    seeds = sorted({r["seed"] for r in records})
    return markdown(("digits, held-out loss", *(f"seed {seed}" for seed in seeds)), rows)


def of_part(part: str, make: Callable[[list[dict[str, Any]]], str]) -> Callable[[list[dict[str, Any]]], str]:
    """Makes a table of one part's lines; no text where there are none."""

    def text(lines: list[dict[str, Any]]) -> str:
        mine = [line for line in lines if line["part"] == part]
        return make(mine) if mine else ""

    return text


SECTIONS = {
    "encrypted": of_part("timed", table),
    "encrypted_loss": of_part("judged", loss_table),
    "encrypted_digits": of_part("digits", digits_table),
}


def main() -> None:
    """Launches the ranks and shows what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, recorded nowhere")
    parser.add_argument("--part", choices=("timed", "judged", "digits"), default=None, help="the others' lines stay")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--link", default="50 Mbit/s")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--key", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = options.steps or (10 if options.quick else 40)
    options.seeds = options.seeds or (1 if options.quick else 3)
    if options.worker:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/key"
        SumKey.make().save(file)
        sys.argv += ["--key", file]
        slow = load_topology(f"star:ranks={RANKS},bandwidth={options.link}")
        places: dict[str, Any] = {"timed": slow, "judged": RANKS, "digits": 2}
        asked = {part: place for part, place in places.items() if options.part in (None, part)}
        found = launch(asked, timeout_s=1800)
    lines = [{**line, "part": part, "link": options.link} for part, some in found.items() for line in some]
    conclude_parts(OUTPUT, PAGE, SECTIONS, lines, quick=options.quick)


if __name__ == "__main__":
    main()

"""What codecs of rows cost a model: a byte-level model trained with each, from the same weights on the same text.

    python benchmarks/moe_codecs.py          # seven minutes; replaces its lines, and the table in the page on codecs
    python benchmarks/moe_codecs.py --quick  # a minute: few steps, one seed, nothing is written

One process and one rank: a rank's own rows pass through the codec like all others, so what is learned is what it
would be on many. Training amplifies the smallest difference, so the table begins with how much: identity again, from
weights that differ by a millionth. Losses are nats a byte on text that is held out, and their differences from
identity are taken seed by seed.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "moe_lm"))

from byte_model import ByteModel, Sizes, experts, loss_of

from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.demo.corpus import Corpus, load_corpus, sample_batch
from mycel.demo.train import learning_rate
from mycel.moe import ExpertParallel, make_dispatcher, moe_loss
from mycel.moe.lsh import LSHDispatcher
from mycel.wire import make_codec
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

OUTPUT = RECORDED / "moe_codecs.jsonl"
PAGE = ROOT / "docs" / "concepts" / "moe_codecs.md"
CODECS = ("identity", "identity, off by 1e-6", "bf16", "fp8", "int8", "int4")
PEAK_RATE = 4e-3
WINDOWS = 8
HELD_OUT_WINDOWS = 256


def make_feed(sizes: Sizes, codec: str, lsh: Mapping[str, Any] | None, mesh: DeviceMesh) -> Callable[[], Any]:
    """A layer whose rows pass through a codec, and through hashing if settings for that are given."""

    def feed() -> Any:
        inner = make_dispatcher("all_to_all", sizes.num_experts, mesh, codec=make_codec(codec))
        used = inner if lsh is None else LSHDispatcher(inner, **lsh)
        return experts(sizes, ExpertParallel(dispatcher=used))

    return feed


@functools.cache
def text() -> Corpus:
    """Read once."""
    return load_corpus(max_bytes=3 << 20)


def train(
    sizes: Sizes,
    *,
    mesh: DeviceMesh,
    steps: int,
    seed: int,
    codec: str = "identity",
    lsh: Mapping[str, Any] | None = None,
    nudge: float = 0.0,
) -> dict[str, float]:
    """Train once.

    Returns:
        ``loss`` in nats a byte on held-out text, ``rows``: the part of rows that travelled in the last steps,
        ``seconds`` of processor time.
    """
    corpus = text()
    model = ByteModel(sizes, make_feed(sizes, codec, lsh, mesh), seed=seed)
    with torch.no_grad():
        model.head.weight.mul_(1 + nudge)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(1000 + seed)
    begin = time.process_time()
    shares: list[float] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, peak=PEAK_RATE, warm_up=min(20, steps // 4), steps=steps)
        inputs, targets = sample_batch(corpus.train, WINDOWS, sizes.length, generator)
        loss = loss_of(model, inputs, targets) + moe_loss(model)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if lsh is not None and step >= steps - 20:
            counts = [block.feed.dispatcher.sent for block in model.blocks]
            shares.append(sum(sent for sent, _ in counts) / sum(rows for _, rows in counts))
    taken = time.process_time() - begin
    return {"loss": held_out_loss(model, corpus.held_out, sizes), "rows": mean(shares or [1.0]), "seconds": taken}


@torch.no_grad()
def held_out_loss(model: ByteModel, text: Tensor, sizes: Sizes) -> float:
    inputs, targets = sample_batch(text, HELD_OUT_WINDOWS, sizes.length, torch.Generator().manual_seed(1))
    parts = zip(inputs.split(64), targets.split(64), strict=True)
    return mean([loss_of(model, some, wanted).item() for some, wanted in parts])


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def row_bytes(codec: str, width: int) -> int:
    """Of a float32 row of the model."""
    return make_codec(codec).encode(torch.zeros(1, width)).nbytes


def one_rank() -> DeviceMesh:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return DeviceMesh("cpu", [0])


def run(
    variants: Mapping[str, Mapping[str, Any]], *, steps: int, seeds: Sequence[int], file: Path | None
) -> list[dict[str, Any]]:
    """A line for every variant and seed: what ``train`` returned, written to a file as soon as it is there."""
    sizes = Sizes()
    mesh = one_rank()
    common = {"hardware": describe_hardware(), "versions": describe_versions(), **stamp()}
    lines = []
    if file is not None:
        file.unlink(missing_ok=True)
    for seed in seeds:
        for name, options in variants.items():
            found = train(sizes, mesh=mesh, steps=steps, seed=seed, **options)
            num_bytes = row_bytes(options.get("codec", "identity"), sizes.width) * found["rows"]
            lines.append({"codec": name, "seed": seed, "steps": steps, "bytes_a_row": num_bytes, **found, **common})
            if file is not None:
                append(file, lines[-1:])
            print(f"seed {seed}  {name:28} {found['loss']:.4f} nats  {num_bytes:6.1f} bytes a row", flush=True)
    dist.destroy_process_group()
    return lines


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A row a variant: means over seeds, and the difference from the first variant with its standard error."""
    rows = [
        (name, f"{mean([line['bytes_a_row'] for line in mine]):.0f}", *losses_of(mine, lines))
        for name, mine in by_variant(lines).items()
    ]
    return markdown(("codec", "bytes a row", "held-out loss, nats", "more than identity"), rows)


def by_variant(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Every variant's lines, in the order of the first ones."""
    return {
        name: [line for line in lines if line["codec"] == name] for name in dict.fromkeys(x["codec"] for x in lines)
    }


def losses_of(mine: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """A variant's mean loss, and how much it is above the first variant's, seed by seed, with the standard error."""
    base = {line["seed"]: line["loss"] for line in lines if line["codec"] == lines[0]["codec"]}
    apart = [line["loss"] - base[line["seed"]] for line in mine]
    error = f" ± {statistics.stdev(apart) / math.sqrt(len(apart)):.4f}" if len(apart) > 1 else ""
    is_base = mine[0]["codec"] == lines[0]["codec"]
    return f"{mean([line['loss'] for line in mine]):.4f}", "" if is_base else f"{mean(apart):+.4f}{error}"


def main() -> None:
    """Train with every codec, record, renew the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, one seed, no record")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    variants: dict[str, dict[str, Any]] = {name: {"codec": name.partition(",")[0]} for name in CODECS}
    variants[CODECS[1]]["nudge"] = 1e-6
    variants["identity, LSH, radius 0.5"] = {"lsh": {"num_hashes": 1, "directions": 16, "radius": 0.5}}
    if options.quick:
        options.steps, options.seeds = 20, 1
    lines = run(variants, steps=options.steps, seeds=range(options.seeds), file=None if options.quick else OUTPUT)
    print()
    print(table(lines))
    if not options.quick:
        write_section(PAGE, "moe_codecs", table(read(OUTPUT)))


if __name__ == "__main__":
    main()

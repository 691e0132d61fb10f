"""Which method when, from what was measured: rows for docs/guides/choosing.md.

    python benchmarks/choosing.py    # measures nothing; a second

Reads recorded lines and writes two tables: what collectives reach on emulated fabrics, and by which method
(``fabrics.py``); and what each way's step, bytes and loss are beside the same training without it, in the same run,
losers included (the claims' scripts). Run it after any of those.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mycel.units import format_size
from record import RECORDED, ROOT, markdown, read, write_section

PAGE = ROOT / "docs" / "guides" / "choosing.md"
#: Rows by what is trained: file, then the timed and the judged name of the way without, then those of the others.
#: Where a way was not judged over seeds, its loss is that of the timed run.
COMPARED: dict[str, tuple[str, tuple[str, str], Sequence[tuple[str, str]]]] = {
    "DDP, AdamW": (
        "powersgd",
        ("uncompressed, gloo", "uncompressed"),
        [
            ("int4, mycel", ""),
            ("ours, rank 4, gloo", "ours, rank 4"),
            ("ours, rank 4 in bfloat16, mycel", "ours, rank 4 in bfloat16"),
        ],
    ),
    "FSDP2, AdamW": (
        "qsdp",
        ("full precision, gloo", "full precision"),
        [("W8G8, mycel", "W8G8"), ("W4G4, mycel", "W4G4")],
    ),
    "DDP, other optimizers beside AdamW": (
        "dion",
        ("AdamW", "AdamW"),
        [
            (name, name)
            for name in (
                "Muon",
                "Dion 1/4",
                "Dion 1/4, bfloat16 factors",
                "Dion 1/4, momentum 0.8",
                "DeMo",
                "1-bit Adam",
                "AdamW, PowerSGD 4",
            )
        ],
    ),
}


#: Below, what shapers of emulated links let through at once is a large part of what was moved.
WITH_BOUND_BYTES = 1 << 20


def trained(file: str, base: tuple[str, str], ways: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str, str, str]]:
    """Way, step and bytes as shares of those without it, and how much loss it adds; as far as lines are recorded."""
    lines = read(RECORDED / "claims" / f"{file}.jsonl")
    timed = {line["way"]: line for line in lines if line["phase"] == "timed"}
    judged = {(line["way"], line["seed"]): line["validation_loss"] for line in lines if "seed" in line}
    for on_links, on_text in ways:
        step, sent = (share(timed, on_links, base[0], key) for key in ("step_ms", "interface_bytes"))
        beside = [loss - judged[base[1], seed] for (way, seed), loss in judged.items() if way == on_text]
        if not on_text:
            beside = [timed[on_links]["validation_loss"] - timed[base[0]]["validation_loss"]]
        if beside or step:
            yield (
                on_text or on_links,
                step,
                sent,
                f"{statistics.mean(beside):+.3f} ({seeds(beside)})" if beside else "",
            )


def share(timed: Mapping[str, Mapping[str, Any]], way: str, base: str, key: str) -> str:
    """Of the way without; nothing where it was not timed."""
    return f"{timed[way][key] / timed[base][key]:.2f}" if way in timed else ""


def seeds(found: Sequence[object]) -> str:
    """How many, in words."""
    return "1 seed" if len(found) == 1 else f"{len(found)} seeds"


def rounds() -> Iterator[tuple[str, str, str, str]]:
    """Local updates whose changes are compressed, beside those in float32."""
    lines = read(RECORDED / "claims" / "outer.jsonl")
    by_way = {way: [line for line in lines if line["way"] == way] for way in dict.fromkeys(x["way"] for x in lines)}
    base, *others = by_way.values()
    for found in others:
        step, sent = (mean(found, key) / mean(base, key) for key in ("step_s", "interface_bytes"))
        beside = mean(found, "loss") - mean(base, "loss")
        yield found[0]["way"], f"{step:.2f}", f"{sent:.3f}", f"{beside:+.3f} ({seeds(found)})"


def mean(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    """Over seeds; of lists of steps, of their medians."""
    return statistics.mean(statistics.median(x[key]) if isinstance(x[key], list) else x[key] for x in lines)


def collectives(sizes: Sequence[int] = (64 << 10, 1 << 20, 16 << 20)) -> Iterator[tuple[str, ...]]:
    """Collective, size, methods by the number of fabrics, part of the bound, and Gloo's time over mycel's."""
    last = {
        (line["collective"], line["bytes"], line["topology"], line["backend"]): line
        for line in read(RECORDED / "fabrics" / "measured.jsonl")
        if line["mode"] == "blocking"
    }
    for name in dict.fromkeys(collective for collective, *_ in last):
        for size in sizes:
            pairs = [
                (last[name, size, fabric, "gloo"], line)
                for (collective, num_bytes, fabric, backend), line in last.items()
                if (collective, num_bytes, backend) == (name, size, "mycel")
            ]
            methods = Counter(line["method"] for _, line in pairs).most_common()
            shares = [line["fraction_of_bound"] for _, line in pairs]
            gains = [gloo["median_s"] / line["median_s"] for gloo, line in pairs]
            yield (
                name,
                format_size(size),
                ", ".join(f"`{method}` {count}" for method, count in methods),
                f"{min(shares):.2f} to {max(shares):.2f}" if size >= WITH_BOUND_BYTES else "",
                f"{min(gains):.2f} to {max(gains):.2f}",
            )


def main() -> None:
    """Writes the tables."""
    headings: tuple[str, ...] = ("collective", "size", "method, on fabrics", "of the bound", "times as fast as Gloo")
    moved = markdown(headings, collectives())
    print(moved)
    write_section(PAGE, "collectives", moved)
    rows: list[tuple[str, ...]] = []
    for what, (file, base, ways) in COMPARED.items():
        rows += [(what, *row) for row in trained(file, base, ways)]
    rows += [("DiLoCo, rounds of 16 steps, beside float32", *row) for row in rounds()]
    headings = ("training", "way", "step, of that without", "bytes, of those without", "loss, nats a byte")
    text = markdown(headings, rows)
    print(text)
    write_section(PAGE, "choosing", text)


if __name__ == "__main__":
    main()

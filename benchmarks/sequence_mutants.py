"""Do checks of operations along sequences see every mistake? Mutants of layouts, pairs, shifts, resets and losses.

Each mutant is one mistake of the kinds that long sequences suffer from, at a random place of a random layout over 2
to 4 ranks: a segment moved; a pair of blocks skipped or doubled, also in the backward pass alone; keys, rings, halos,
positions or labels one place too far; a document's reset lost; stale keys in the backward pass; gradients of keys
left out; the loss scaled by the number of ranks. The check that is to see it passes without the mistake first. Ranks
are threads of this process.

    python benchmarks/sequence_mutants.py 2000 --write
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from typing import Any

from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

sys.path.append(str(ROOT))

from tests.oracles.sequence_mutants import judged, mutant

FILE = RECORDED / "sequence_mutants.jsonl"
PAGE = ROOT / "docs" / "concepts" / "sequence_attention.md"
FOUND = ("refused", "seen", "missed", "control")


def table(lines: list[dict[str, Any]]) -> str:
    """Of all runs, each with a seed of its own, by kind."""
    if not lines:
        return ""
    by_kind: dict[str, Counter[str]] = {}
    for line in lines:
        for kind, counts in line["kinds"].items():
            by_kind.setdefault(kind, Counter()).update(counts)
    rows = [
        (kind, sum(of.values()), of["refused"], of["seen"], of["missed"] + of["control"])
        for kind, of in sorted(by_kind.items())
    ]
    total = ("all", *(sum(row[column] for row in rows) for column in range(1, 5)))
    return markdown(("mistake", "mutants", "refused", "seen in numbers", "missed"), [*rows, total])


def main() -> int:
    """Judge mutants; the number of those that were missed, or whose check fails without them."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("number", type=int, nargs="?", default=2000)
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after these")
    asked.add_argument(
        "--write", action="store_true", help=f"record it in {FILE.name}, and put the table in its page"
    )
    given = asked.parse_args()
    by_kind: dict[str, Counter[str]] = {}
    until = time.monotonic() + given.seconds
    for one in range(given.seed * 1_000_000, given.seed * 1_000_000 + given.number):
        if time.monotonic() > until:
            break
        mistake = mutant(one)
        found = judged(mistake)
        by_kind.setdefault(mistake.kind, Counter())[found] += 1
        if found in ("missed", "control"):
            print(f"seed {one}: {mistake.kind}: {found}: {mistake.wrong}")
    kinds = {kind: {name: of[name] for name in FOUND if of[name]} for kind, of in sorted(by_kind.items())}
    line = {"mutants": sum(sum(of.values()) for of in by_kind.values()), "seed": given.seed, "kinds": kinds}
    print(table([line]))
    if given.write:
        append(FILE, [{**line, **stamp()}])
        write_section(PAGE, "sequence_mutants", table(read(FILE)))
    return sum(of["missed"] + of["control"] for of in by_kind.values())


if __name__ == "__main__":
    sys.exit(main() > 0)

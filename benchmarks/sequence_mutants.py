"""Do checks of operations along sequences see every mistake? Mutants of layouts, pairs, shifts, resets and losses.

Each mutant is one mistake of the kinds that long sequences suffer from, at a random place of a random layout over 2
to 4 ranks: a segment moved; a pair of blocks skipped or doubled, also in the backward pass alone; keys, rings, halos,
positions or labels one place too far; a document's reset lost; stale keys in the backward pass; gradients of keys
left out; the loss scaled by the number of ranks. The check that is to see it passes without the mistake first. Ranks
are threads of this process.

    python benchmarks/sequence_mutants.py 2000 --record
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.oracles.sequence_mutants import judged, mutant  # noqa: E402

from record import RECORDED, append, stamp  # noqa: E402

FILE = RECORDED / "sequence_mutants.jsonl"


def main(number: int, seed: int, record: bool) -> int:
    """Judge so many mutants; the number of those that were missed, or whose check fails without them."""
    by_kind: dict[str, Counter[str]] = {}
    for one in range(seed * 1_000_000, seed * 1_000_000 + number):
        mistake = mutant(one)
        found = judged(mistake)
        by_kind.setdefault(mistake.kind, Counter())[found] += 1
        if found in ("missed", "control"):
            print(f"seed {one}: {mistake.kind}: {found}: {mistake.wrong}")
    total: Counter[str] = sum(by_kind.values(), Counter())
    print(f"{'kind':58} {'mutants':>8} {'refused':>8} {'seen':>8} {'missed':>8}")
    for kind, counts in [*sorted(by_kind.items()), ("all", total)]:
        print(f"{kind:58} {sum(counts.values()):8} {counts['refused']:8} {counts['seen']:8} {counts['missed']:8}")
    if record:
        kinds = {kind: dict(counts) for kind, counts in sorted(by_kind.items())}
        append(FILE, [{"mutants": number, "seed": seed, "kinds": kinds, **stamp()}])
    return total["missed"] + total["control"]


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("number", type=int, nargs="?", default=2000)
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--record", action="store_true", help=f"add a line to {FILE.name}")
    given = asked.parse_args()
    sys.exit(main(given.number, given.seed, given.record) > 0)

"""Mistakes in operations along divided sequences: each really changes what is computed, at a random place.

``mutant(seed)`` gives a case, the mistake's name, and how it is made; ``judged`` asks the check that is to fail.
Places where a mistake changes nothing (a pair that is all its queries see, counted twice) are not mutants, and
another is drawn.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tests.oracles.attention import ways_over
from tests.oracles.sequence_checks import CHECKS, Case
from torch import Tensor

from mycel.comm import Pending
from mycel.errors import MycelError
from mycel.planning.sequence import CAUSAL, FULL, Layout, Mask, Segment, per_document_zigzag, predecessors, zigzag
from mycel.sequence.models.applied import AppliedSequence
from mycel.sequence.scan import WAYS, call
from mycel.sequence.scan.line import line_of, runs_of
from mycel.sequence.softmax import gathered, ring, rows, ways
from mycel.sequence.softmax.blocks import Block, blocks_of

__all__ = ["KINDS", "Mutant", "judged", "mutant"]

MASKS = (CAUSAL, FULL, Mask(kind="window", width=4), Mask(kind="chunked", width=5))
#: What outputs and gradients in float64 may be off.
MOST = 1e-11
Blocks = tuple[tuple[tuple[Block, ...], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One mistake.

    Attributes:
        kind: of the mistake.
        check: which of ``CHECKS`` is to see it.
        right: the case without it.
        wrong: the case with it.
        made: makes it, for as long as it is entered.
    """

    kind: str
    check: str
    right: Case
    wrong: Case
    made: Callable[[], AbstractContextManager[Any]] = nullcontext


def drawn_layout(chance: random.Random) -> Layout:
    """Documents over two to four ranks, by a rule or cut anywhere."""
    size = chance.randint(2, 4)
    documents = tuple(chance.choice((1, 2, 3, 5, 8, 12)) for _ in range(chance.randint(1, 4)))
    if sum(documents) < 4:
        documents = (*documents, 7)
    made = chance.choice((zigzag, per_document_zigzag, None))
    if made is not None:
        return made(documents, size)
    held: list[list[Segment]] = [[] for _ in range(size)]
    for number, length in enumerate(documents):
        cuts = sorted({0, length, *(chance.randint(0, length) for _ in range(size))})
        for start, stop in pairwise(cuts):
            chance.choice(held).append(Segment(document=number, start=start, stop=stop))
    return Layout(documents=documents, ranks=tuple(map(tuple, held)))


def mutant(seed: int, kind: str | None = None) -> Mutant:
    """The mutant of a seed.

    Args:
        seed: of everything in it.
        kind: of ``KINDS``; drawn if not given.
    """
    chance = random.Random(seed)
    named = chance.choice(list(KINDS)) if kind is None else kind
    while True:
        layout = drawn_layout(chance)
        mask = chance.choice(MASKS)
        way = chance.choice(ways_over(layout.num_ranks))
        case = Case(layout=layout, told=layout, mask=mask, way=way, seed=chance.randrange(1 << 30))
        found = KINDS[named](case, chance)
        if found is not None:
            return found


def judged(mistake: Mutant) -> str:
    """``refused``, ``seen`` or ``missed``; ``control`` where the check does not pass without the mistake."""
    check = CHECKS[mistake.check]
    if not check(mistake.right) < MOST:
        return "control"
    with mistake.made():
        try:
            error = check(mistake.wrong)
        except (MycelError, RuntimeError, ValueError, IndexError):
            return "refused"
    return "missed" if error < MOST else "seen"


# -- layouts ------------------------------------------------------------------------------------------------------


def told_otherwise(kind: str, case: Case, told: Layout, chance: random.Random) -> Mutant:
    check = chance.choice(("softmax", "linear", "filtering"))
    right = replace(case, way=chance.choice(list(WAYS))) if check == "linear" else case
    return Mutant(kind=kind, check=check, right=right, wrong=replace(right, told=told))


def segment_moved(case: Case, chance: random.Random) -> Mutant | None:
    """Two segments change places, or one gives a token to the one after it in its document."""
    held = [list(mine) for mine in case.layout.ranks]
    places = [(r, n) for r, mine in enumerate(held) for n, s in enumerate(mine) if len(s)]
    pairs = [(a, b) for a in places for b in places if a < b]
    chance.shuffle(pairs)
    for (r, n), (other, m) in pairs:
        one, two = held[r][n], held[other][m]
        follow = one.document == two.document and one.stop == two.start and len(one) > 1
        if follow and chance.random() < 0.3:
            held[r][n], held[other][m] = replace(one, stop=one.stop - 1), replace(two, start=two.start - 1)
        elif r == other or len(one) == len(two):
            held[r][n], held[other][m] = two, one
        else:
            continue
        told = Layout(documents=case.layout.documents, ranks=tuple(map(tuple, held)))
        if (told.order == case.layout.order).all() and told.tokens == case.layout.tokens:
            return None  # the same tokens in the same order, cut elsewhere
        return told_otherwise("a segment moved", case, told, chance)
    return None


def border_lost(case: Case, chance: random.Random) -> Mutant | None:
    """Two documents are taken for one."""
    documents = case.layout.documents
    if len(documents) < 2 or case.mask.kind == "chunked":  # chunks may end where the document does
        return None
    first = chance.randrange(len(documents) - 1)
    length = documents[first]

    def joined(s: Segment) -> Segment:
        if s.document <= first:
            return s
        by = length if s.document == first + 1 else 0
        return Segment(document=s.document - 1, start=s.start + by, stop=s.stop + by)

    merged = (*documents[:first], length + documents[first + 1], *documents[first + 2 :])
    told = Layout(documents=merged, ranks=tuple(tuple(map(joined, mine)) for mine in case.layout.ranks))
    return told_otherwise("a reset lost: two documents taken for one", case, told, chance)


# -- pairs of attention -------------------------------------------------------------------------------------------


def counted(found: Blocks, layout: Layout, mask: Mask) -> np.ndarray[Any, Any]:
    """How often each query meets each key, tokens of rank 0 first; keys that a rank does not have are none."""
    at = np.concatenate([[0], np.cumsum(layout.tokens)])
    total = np.zeros((at[-1], at[-1]))
    for a, of_rank in enumerate(found):
        for b, blocks in enumerate(of_rank):
            for block in blocks:
                seen = np.ones((block.num_queries, block.num_keys), dtype=bool)
                if block.sees == "triangle":
                    seen = np.tril(seen)
                elif block.sees == "some":
                    seen = block.visible(mask, torch.device("cpu")).numpy()
                q, k = at[a] + block.query, at[b] + block.key
                there = max(0, min(block.num_keys, layout.tokens[b] - block.key))
                total[q : q + block.num_queries, k : k + there] += seen[:, :there]
    return total


def changes_something(right: Blocks, wrong: Blocks, layout: Layout, mask: Mask) -> bool:
    """Whether some row's weights are not in the same proportion."""
    one, two = (counted(found, layout, mask) for found in (right, wrong))
    one, two = (x / np.maximum(x.sum(1, keepdims=True), 1) for x in (one, two))
    return bool(np.abs(one - two).max() > 1e-9)


def pair_wrong(case: Case, chance: random.Random) -> Mutant | None:
    """Of all blocks of two ranks one is left out, comes twice, or has keys one further."""
    at, how = chance.random(), chance.choice(("skipped", "doubled", "one key too far"))

    @lru_cache(maxsize=8)
    def changed(layout: Layout, mask: Mask) -> Blocks:
        found = [[list(blocks) for blocks in of_rank] for of_rank in blocks_of(layout, mask)]
        sites = [
            (a, b, n)
            for a, of_rank in enumerate(found)
            for b, blocks in enumerate(of_rank)
            for n in range(len(blocks))
        ]
        a, b, number = sites[int(at * len(sites))]
        block = found[a][b][number]
        if how == "skipped":
            del found[a][b][number]
        elif how == "doubled":
            found[a][b].append(block)
        else:
            far = block.key + block.num_keys < layout.tokens[b]
            if not far and not block.key:
                return blocks_of(layout, mask)
            found[a][b][number] = replace(block, key=block.key + (1 if far else -1))
        return tuple(tuple(map(tuple, of_rank)) for of_rank in found)

    groups = {"ulysses": (tuple(range(case.layout.num_ranks)),), "usp": None}.get(str(case.way), ())
    if groups is None or getattr(case.way, "groups", ()):
        return None  # what is told of layouts of groups is what is told of layouts
    layout = case.layout
    if groups:
        layout = Layout(documents=layout.documents, ranks=(ways._joined([s for m in layout.ranks for s in m]),))
    if not changes_something(blocks_of(layout, case.mask), changed(layout, case.mask), layout, case.mask):
        return None
    return Mutant(
        kind=f"a pair {how}",
        check="softmax",
        right=case,
        wrong=case,
        made=lambda: patch.object(ways, "blocks_of", changed),
    )


def backward_pair_wrong(case: Case, chance: random.Random) -> Mutant:
    """As above, of the way back alone, in every meeting."""
    original, twice = rows.BackRows.meet, chance.random() < 0.5

    def meet(self: Any, k: Tensor, v: Tensor, blocks: Any, heads: slice = slice(None)) -> Any:
        listed = list(blocks)
        return original(self, k, v, [*listed, listed[-1]] if twice and listed else listed[:-1], heads)

    return Mutant(
        kind=f"a pair {'doubled' if twice else 'skipped'} in the backward pass",
        check="softmax",
        right=case,
        wrong=case,
        made=lambda: patch.object(rows.BackRows, "meet", meet),
    )


# -- what travels -------------------------------------------------------------------------------------------------


def crosses(case: Case) -> bool:
    """Whether any query sees a key of another rank."""
    found = blocks_of(case.layout, case.mask)
    return any(blocks for a, of_rank in enumerate(found) for b, blocks in enumerate(of_rank) if a != b)


def stale_keys(case: Case, chance: random.Random) -> Mutant | None:
    """Keys and values in the backward pass are those that came last: of another call, or of another step."""
    if str(case.way) not in ("ring", "all_gather", "sliced", "needed") or not crosses(case):
        return None
    if case.way == "ring":
        passes = ring.Ring.pass_on

        def pass_on(self: Any, rows: Tensor, step: int, name: str) -> Pending[Tensor]:
            under_way = passes(self, rows, step, name)
            if name != "attention.backward":
                return under_way

            def finish() -> Tensor:
                came = under_way.wait()
                return rows if rows.shape == came.shape else torch.zeros_like(came)

            return Pending(finish)

        made = lambda: patch.object(ring.Ring, "pass_on", pass_on)  # noqa: E731
    else:
        arriving, last = gathered.Gathered.arriving, {}

        def stale(self: Any, k: Tensor, v: Tensor, name: str) -> Iterator[Any]:
            for number, (heads, delivery, came) in enumerate(arriving(self, k, v, name)):
                key = (self.context.rank, number)
                if name == "attention":
                    last[key] = came
                elif key in last and all(a.shape == b.shape for a, b in zip(last[key], came, strict=True)):
                    came = last[key]
                else:
                    came = tuple(torch.zeros_like(x) for x in came)
                yield heads, delivery, came

        made = lambda: patch.object(gathered.Gathered, "arriving", stale)  # noqa: E731
    return Mutant(
        kind="stale keys and values in the backward pass", check="softmax", right=case, wrong=case, made=made
    )


def ring_too_far(case: Case, chance: random.Random) -> Mutant | None:
    """After the first step a rank takes what is here for that of the rank one further, where that is unlike."""
    found, size = blocks_of(case.layout, case.mask), case.layout.num_ranks
    taken = tuple(
        tuple(row[b] if a == b else row[(b - 1) % size] for b in range(size)) for a, row in enumerate(found)
    )
    if not changes_something(found, taken, case.layout, case.mask):
        return None
    right = replace(case, way="ring")
    original = ring.Ring.whose
    return Mutant(
        kind="a shift one too far: of a ring",
        check="softmax",
        right=right,
        wrong=right,
        made=lambda: patch.object(ring.Ring, "whose", lambda self, step: original(self, step + bool(step))),
    )


def halo_too_far(case: Case, chance: random.Random) -> Mutant | None:
    """Tokens before a segment are those one place further, wherever there are such."""
    by = chance.choice((-1, 1))

    def shifted(layout: Layout, rank: int, width: int) -> Any:
        found = []
        for pieces in predecessors(layout, rank, width):
            moved = [replace(p, first=p.first + by) for p in pieces]
            fits = [p.first >= 0 and p.first + p.count <= layout.tokens[p.rank] for p in moved]
            found.append(tuple(m if fit else p for m, fit, p in zip(moved, fits, pieces, strict=True)))
        return tuple(found)

    if all(shifted(case.layout, r, 2) == predecessors(case.layout, r, 2) for r in range(case.layout.num_ranks)):
        return None
    module = sys.modules["mycel.sequence.halo"]  # the package has a function of this name
    return Mutant(
        kind="a shift one too far: of a halo",
        check="filtering",
        right=case,
        wrong=case,
        made=lambda: patch.object(module, "predecessors", shifted),
    )


def scan_reset_lost(case: Case, chance: random.Random) -> Mutant | None:
    """A run of segments keeps the state of the documents before its last one."""
    runs = runs_of(case.layout)
    sites = [n for n, run in enumerate(runs) if run.tail and run.gives]
    if not sites:
        return None
    chosen = chance.choice(sites)
    kept = tuple(replace(run, tail=0) if n == chosen else run for n, run in enumerate(runs))
    right = replace(case, way=chance.choice(list(WAYS)))
    made = lambda: patch.object(call, "_line", lambda layout: (kept, line_of(layout)))  # noqa: E731
    return Mutant(kind="a reset lost: in a scan", check="linear", right=right, wrong=right, made=made)


# -- positions, labels, losses --------------------------------------------------------------------------------------


def of_layout(kind: str, case: Case, name: str, change: Callable[[Layout, int, Any], Any]) -> Mutant | None:
    original = getattr(Layout, name)
    layout = case.layout
    if all((change(layout, r, original(layout, r)) == original(layout, r)).all() for r in range(layout.num_ranks)):
        return None
    return Mutant(
        kind=kind,
        check="loss",
        right=case,
        wrong=case,
        made=lambda: patch.object(Layout, name, lambda self, rank: change(self, rank, original(self, rank))),
    )


def positions_too_far(case: Case, chance: random.Random) -> Mutant | None:
    """Tokens of one rank are one place further in their documents; some have a next one, which they predict."""
    documents = case.layout.documents
    matters = [
        rank
        for rank, held in enumerate(case.layout.ranks)
        if any(len(part) and part.start < documents[part.document] - 1 for part in held)
    ]
    if not matters:
        return None
    rank = chance.choice(matters)
    return of_layout("a shift one too far: of positions", case, "positions", lambda _, r, found: found + (r == rank))


def labels_too_far(case: Case, chance: random.Random) -> Mutant | None:
    """Labels are those one token further, or over the end of a document."""
    over = chance.random() < 0.5
    if sum(n > 1 for n in case.layout.documents) == 0:
        return None

    def change(layout: Layout, rank: int, nexts: Any) -> Any:
        following = layout.indices(rank) + 1
        last = layout.num_tokens - 1
        if over:
            return np.where((nexts < 0) & (following <= last), following, nexts)
        return np.where(nexts >= 0, np.minimum(nexts + 1, last), nexts)

    kind = "a label over a border" if over else "a shift one too far: of labels"
    return of_layout(kind, case, "labels", change)


def loss_scaled(case: Case, chance: random.Random) -> Mutant | None:
    """Losses are W times too large or too small, or of labels that are counted with those that do not count."""
    documents, size = case.layout.documents, case.layout.num_ranks
    how = chance.choice(("by W", "by 1 / W", "by labels over borders"))
    if not any(n > 1 for n in documents) or (how == "by labels over borders" and len(documents) < 2):
        return None
    original = AppliedSequence.count_labels

    def count(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        right = original(self, *args, **kwargs)
        if how == "by labels over borders":
            return right + len(documents) - 1
        return right / size if how == "by W" else right * size

    return Mutant(
        kind=f"the loss scaled {how}",
        check="loss",
        right=case,
        wrong=case,
        made=lambda: patch.object(AppliedSequence, "count_labels", count),
    )


def gradients_lost(case: Case, chance: random.Random) -> Mutant | None:
    """Gradients of keys that come home are left out, or added twice."""
    if str(case.way) not in ("all_gather", "sliced", "needed") or not crosses(case):
        return None
    original, twice = gathered._land, chance.random() < 0.5

    def land(whole: Tensor, leaving: Any) -> None:
        if leaving is None:
            return
        heads, pending = leaving
        came = pending.wait()
        original(whole, (heads, Pending.done(2 * came if twice else 0 * came)))

    return Mutant(
        kind=f"gradients of keys {'added twice' if twice else 'left out'}",
        check="softmax",
        right=case,
        wrong=case,
        made=lambda: patch.object(gathered, "_land", land),
    )


#: By what is drawn; the names in reports are finer.
KINDS: dict[str, Callable[[Case, random.Random], Mutant | None]] = {
    made.__name__: made
    for made in (
        *(segment_moved, border_lost, pair_wrong, backward_pair_wrong, stale_keys, ring_too_far, halo_too_far),
        *(scan_reset_lost, positions_too_far, labels_too_far, loss_scaled, gradients_lost),
    )
}

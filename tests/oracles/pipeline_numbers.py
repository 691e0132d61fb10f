"""Orders of pipelines carried out with numbers: two steps of a toy model, ranks with messages in queues, in float64.

It reads the text of an order itself and shares nothing with the library. A stage is ``y = tanh(a x + b)`` with two
parameters, a loss is the squared distance from a target. Losses and gradients are compared with those of one process.
What torch's runtime stops at is wrong here, too: a receive posted twice, an input that never came, parameters that
are not whole. A rank posts its receives and goes on; the n-th posted for another rank meets the n-th sent by it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import numpy as np

_CELL = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)(\d*)")
_PAIR = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")

Cell = list[tuple[int, str, int]]


class Wrong(Exception):  # noqa: N818 (a verdict)
    """The order computes something else, or stops."""


def _read(text: str) -> Cell:
    if pair := _PAIR.fullmatch(text):
        return _read(pair[1]) + _read(pair[2])
    cell = _CELL.fullmatch(text)
    assert cell, text
    return [(int(cell[1]), cell[2], int(cell[3] or -1))]


class _Job:
    def __init__(
        self,
        rows: list[list[str]],
        num_stages: int,
        num_micro_batches: int,
        routes: list[list[int]] | None,
        keeps_losses_apart: bool,
    ) -> None:
        self.rows = [[_read(text) for text in row] for row in rows]
        self.m, self.apart = num_micro_batches, keeps_losses_apart
        self.routes = routes or [list(range(num_stages))] * num_micro_batches
        self.has_messages = any(
            kind not in ("F", "B", "I", "W") for row in self.rows for cell in row for _, kind, _ in cell
        )
        self.owner: dict[int, int] = {}
        for rank, row in enumerate(self.rows):
            for cell in row:
                for stage, kind, _ in cell:
                    if kind in ("F", "B", "I", "W") and self.owner.setdefault(stage, rank) != rank:
                        raise Wrong(f"stage {stage} on two ranks")
        rng = np.random.default_rng(1)
        self.a = rng.uniform(0.5, 1.5, (num_stages, 3))
        self.b = rng.uniform(-0.5, 0.5, (num_stages, 3))
        self.x = rng.uniform(-1, 1, (num_micro_batches, 3))
        self.t = rng.uniform(-1, 1, (num_micro_batches, 3))
        self.whole: dict[int, str] = {}  # stages gathered: "coming" until used, then "whole"; lives over steps
        self.gathers = any(
            kind == "UNSHARD" or kind == "RESHARD" for row in self.rows for c in row for _, kind, _ in c
        )
        self.gathered = {s for row in self.rows for c in row for s, kind, _ in c if kind in ("UNSHARD", "RESHARD")}

    def neighbour(self, stage: int, m: int, by: int) -> int | None:
        route = self.routes[m]
        if stage not in route:
            raise Wrong(f"stage {stage} is not visited by {m}")
        at = route.index(stage) + by
        return route[at] if 0 <= at < len(route) else None

    # -- one process --------------------------------------------------------------------------------------

    def reference(self) -> tuple[dict[int, float], np.ndarray]:
        losses, grads = {}, np.zeros((2, *self.a.shape))
        for m, route in enumerate(self.routes):
            xs, x = [], self.x[m]
            for s in route:
                xs.append(x)
                x = np.tanh(self.a[s] * x + self.b[s])
            losses[m] = float(((x - self.t[m]) ** 2).sum())
            d = 2 * (x - self.t[m])
            for s, x in zip(reversed(route), reversed(xs), strict=True):
                inner = d * (1 - np.tanh(self.a[s] * x + self.b[s]) ** 2)
                grads[0][s] += inner * x / self.m
                grads[1][s] += inner / self.m
                d = inner * self.a[s]
        return losses, grads

    # -- ranks --------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.grads = np.zeros((2, *self.a.shape))
        self.made: dict[tuple[str, int, int], np.ndarray] = {}  # outputs "F" and input gradients "B"
        self.kept: dict[tuple[int, int], np.ndarray] = {}  # inputs until the backward
        self.inner: dict[tuple[int, int], np.ndarray] = {}  # between the halves of a backward
        self.losses: list[tuple[int, np.ndarray]] = []
        self.queues: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
        self.posted: dict[tuple[int, int], int] = defaultdict(int)
        self.slots: dict[tuple[str, int, int], tuple[int, int, int]] = {}
        self.did: set[tuple[int, str, int]] = set()
        places = [0] * len(self.rows)
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.rows):
                while places[rank] < len(row) and self.can(rank, row[places[rank]]):
                    for part in row[places[rank]]:
                        self.do(rank, *part)
                    places[rank] += 1
                    moved = True
        if any(place < len(row) for place, row in zip(places, self.rows, strict=True)):
            raise Wrong("it stops")
        if self.slots:
            raise Wrong("a receive was never used")
        if any(len(queue) != self.posted[pair] for pair, queue in self.queues.items()):
            raise Wrong("messages are left")
        if not self.has_messages:
            self.grads /= self.m
        losses, grads = self.reference()
        got = {m: float(((y - self.t[m]) ** 2).sum()) for m, y in self.losses}
        if not self.apart:  # by position
            got = {at: float(((y - self.t[m]) ** 2).sum()) for at, (m, y) in enumerate(self.losses)}
        if set(got) != set(losses) or any(abs(got[m] - losses[m]) > 1e-9 for m in losses):
            raise Wrong("losses differ")
        if not np.allclose(self.grads, grads, rtol=1e-9, atol=1e-12):
            raise Wrong("gradients differ")
        if self.whole:
            raise Wrong("parameters stay whole")

    def can(self, rank: int, cell: Cell) -> bool:
        """Whether what other ranks make is there; what this rank should have made is looked at when it is used."""
        for stage, kind, m in cell:
            if kind not in ("F", "B", "I"):
                continue
            source = self.neighbour(stage, m, -1 if kind == "F" else 1)
            if source is None or self.owner.get(source) == rank:
                continue
            letter = "F" if kind == "F" else "B"
            if self.has_messages:
                slot = self.slots.get((letter, stage, m))
                if slot is None:
                    raise Wrong(f"{stage}{kind}{m}: its message is not asked for")
                if len(self.queues[slot[:2]]) <= slot[2]:
                    return False
            elif (letter, source, m) not in self.made:
                return False
        return True

    def taken(self, rank: int, letter: str, stage: int, source: int, m: int) -> np.ndarray:
        if self.has_messages and self.owner.get(source) != rank:
            slot = self.slots.pop((letter, stage, m))
            return self.queues[slot[:2]][slot[2]]
        if (letter, source, m) not in self.made:
            raise Wrong(f"{stage} needs {source}{letter}{m} on its own rank, later")
        return self.made[letter, source, m]

    def do(self, rank: int, stage: int, kind: str, m: int) -> None:
        if kind in ("F", "B", "I", "W"):
            if (stage, kind, m) in self.did:
                raise Wrong(f"{stage}{kind}{m} twice")
            self.did.add((stage, kind, m))
            if self.gathers and stage in self.gathered:
                if stage not in self.whole:
                    raise Wrong(f"{stage}{kind}{m} without parameters")
                self.whole[stage] = "whole"
            self.compute(rank, stage, kind, m)
        elif kind in ("SEND_F", "SEND_B"):
            target = self.neighbour(stage, m, 1 if kind == "SEND_F" else -1)
            if target is None or self.owner.get(stage) != rank or self.owner.get(target, rank) == rank:
                raise Wrong(f"{stage}{kind}{m} to nobody")
            if (kind[-1], stage, m) not in self.made:
                raise Wrong(f"{stage}{kind}{m} before it was made")
            self.queues[rank, self.owner[target]].append(self.made[kind[-1], stage, m])
        elif kind in ("RECV_F", "RECV_B"):
            source = self.neighbour(stage, m, -1 if kind == "RECV_F" else 1)
            if source is None or self.owner.get(stage) != rank or self.owner.get(source, rank) == rank:
                raise Wrong(f"{stage}{kind}{m} from nobody")
            if (kind[-1], stage, m) in self.slots:
                raise Wrong(f"{stage}{kind}{m} twice")
            pair = self.owner[source], rank
            self.slots[kind[-1], stage, m] = (*pair, self.posted[pair])
            self.posted[pair] += 1
        elif self.owner.get(stage) != rank:
            raise Wrong(f"{stage}{kind} elsewhere")
        elif kind == "REDUCE_GRAD":
            if (
                stage,
                kind,
                m,
            ) in self.did:  # a collective of all replicas, once a step, also where nothing is summed
                raise Wrong(f"{stage} reduced twice")
            self.did.add((stage, kind, m))
            self.grads[:, stage] /= self.m
        elif kind == "UNSHARD":
            if stage in self.whole:
                raise Wrong(f"{stage} gathered twice")
            self.whole[stage] = "coming"
        elif self.whole.pop(stage, None) != "whole":
            raise Wrong(f"{stage} given back without use")

    def compute(self, rank: int, stage: int, kind: str, m: int) -> None:
        a, b = self.a[stage], self.b[stage]
        if kind == "F":
            source = self.neighbour(stage, m, -1)
            x = self.x[m] if source is None else self.taken(rank, "F", stage, source, m)
            self.kept[stage, m] = x
            y = self.made["F", stage, m] = np.tanh(a * x + b)
            if self.neighbour(stage, m, 1) is None:
                self.losses.append((m, y))
            return
        if kind in ("B", "I"):
            if (stage, m) not in self.kept:
                raise Wrong(f"{stage}{kind}{m} without its forward")
            x = self.kept.pop((stage, m))
            source = self.neighbour(stage, m, 1)
            d = self.of_loss(m) if source is None else self.taken(rank, "B", stage, source, m)
            inner = d * (1 - np.tanh(a * x + b) ** 2)
            self.made["B", stage, m] = inner * a
            self.inner[stage, m] = np.stack([inner * x, inner])
        if kind in ("B", "W"):
            if (stage, m) not in self.inner:
                raise Wrong(f"{stage}{kind}{m} without its first half")
            self.grads[:, stage] += self.inner.pop((stage, m))

    def of_loss(self, m: int) -> np.ndarray:
        if self.apart:
            return 2 * (dict(self.losses)[m] - self.t[m])
        if m >= len(self.losses):
            raise Wrong(f"loss {m} is not there")
        other, y = self.losses[m]
        return 2 * (y - self.t[other])


def verdict(
    rows: list[list[str]],
    *,
    num_stages: int,
    num_micro_batches: int,
    routes: list[list[int]] | None = None,
    keeps_losses_apart: bool,
) -> str:
    """What is wrong with an order; empty if two steps of it compute what one process computes.

    Args:
        rows: cells in torch's text, a list a rank.
        num_stages: of the model.
        num_micro_batches: of the batch.
        routes: stages of each micro-batch, if not all of them.
        keeps_losses_apart: by micro-batch; if not, by position, as torch's runtime.
    """
    try:
        job: Any = _Job(rows, num_stages, num_micro_batches, routes, keeps_losses_apart)
        job.step()
        job.step()
    except Wrong as wrong:
        return str(wrong)
    return ""

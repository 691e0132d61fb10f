"""Mutants of right orders, judged by numbers: the examination accepts none that is wrong and refuses none right."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from tests.oracles.pipeline_meetings import ends_without_buffers, meets
from tests.oracles.pipeline_numbers import verdict

from mycel.errors import MycelError, ScheduleError
from mycel.pipeline.check import check
from mycel.pipeline.known import known_order
from mycel.pipeline.lower import lower
from mycel.pipeline.order import Action, Order

BASES = [
    ("gpipe", 2, 3, None),
    ("gpipe", 3, 2, None),
    ("1f1b", 3, 4, None),
    ("1f1b", 4, 3, None),
    ("1f1b", 1, 2, None),
    ("interleaved", 2, 4, 2),
    ("looped_bfs", 2, 3, 2),
    ("zb_h1", 3, 3, None),
    ("zb_h1", 2, 2, 2),
    ("zb_h2", 2, 4, None),
    ("zb_v", 2, 3, None),
    ("v_min", 3, 3, None),
    ("v_half", 2, 3, None),
    ("dualpipe_v", 2, 4, None),
    ("dualpipe", 2, 4, None),
    ("chimera", 2, 4, None),
]


def skipping() -> Order:
    """Micro-batches that skip a stage, or take two in the other order."""
    return Order.from_csv(
        "# mycel order 1\n# stages 4\n# micro-batches 3\n# routes 0>1>2>3 0>2>3 0>2>1>3\n"
        "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F2,1B0,1B2\n2F0,2F1,2F2,2B0,2B1,2B2\n3F0,3B0,3F1,3B1,3F2,3B2\n"
    )


@cache
def bases() -> tuple[Order, ...]:
    plain = [known_order(*base) for base in BASES] + [skipping()]
    return (*plain, *map(lower, plain))


def judged(order: Order, executor: str) -> str:
    return verdict(
        [[str(action) for action in row] for row in order.rows],
        num_stages=order.num_stages,
        num_micro_batches=order.num_micro_batches,
        routes=None if order.routes is None else [list(route) for route in order.routes],
        keeps_losses_apart=executor == "mycel" or order.routes is not None,
    )


WAYS = ("drop", "double", "swap", "neighbours", "move", "redirect", "retarget")


def mutant(order: Order, rng: random.Random, ways: Sequence[str] = WAYS) -> tuple[str, Order]:
    """One cell of an order dropped, doubled, swapped, moved, redirected to another rank or retargeted."""
    rows = [list(row) for row in order.rows]
    rank = rng.randrange(len(rows))
    row = rows[rank]
    step = rng.randrange(len(row))
    how = rng.choice(ways)
    if how == "drop":
        del row[step]
    elif how == "double":
        row.insert(rng.randrange(len(row) + 1), row[step])
    elif how == "swap":
        other = rng.randrange(len(row))
        row[step], row[other] = row[other], row[step]
    elif how == "neighbours":
        other = max(0, step - 1)
        row[step], row[other] = row[other], row[step]
    elif how == "move":
        row.insert(rng.randrange(len(row)), row.pop(step))
    elif how == "redirect":
        other_row = rows[rng.randrange(len(rows))]
        cell = row.pop(step)
        other_row.insert(rng.randrange(len(other_row) + 1), cell)
    else:
        row[step] = retargeted(row[step], order, rng)
    return how, replace(order, rows=tuple(map(tuple, rows)))


def retargeted(action: Action, order: Order, rng: random.Random) -> Action:
    if action.parts:
        parts = [retargeted(part, order, rng) if rng.random() < 0.5 else part for part in action.parts]
        return replace(action, parts=tuple(parts))
    if action.micro_batch is None or (not action.block and rng.random() < 0.5):
        return replace(action, stage=rng.randrange(order.num_stages + 1))
    return replace(action, micro_batch=rng.randrange(order.num_micro_batches + 1))


def examine(count: int, seed: int) -> Counter[tuple[str, str]]:
    rng, tally = random.Random(seed), Counter[tuple[str, str]]()
    for _ in range(count):
        base = rng.choice(bases())
        try:
            how, order = mutant(base, rng)
        except ScheduleError:  # refused when it was made: out of range, or a row without actions
            tally["form", "refused"] += 1
            continue
        executor = rng.choice(["torch", "mycel"])
        wrong = judged(order, executor)
        try:
            check(order, executor=executor)
            refused = ""
        except MycelError as error:
            refused = str(error)
        told = f"{how} of {base.name}, {executor}: judge {wrong!r}, check {refused!r}\n{order.to_csv()}"
        assert bool(wrong) == bool(refused), told
        tally[how, "refused" if refused else "right"] += 1
    return tally


def test_right_orders_are_right() -> None:
    for order in bases():
        for executor in ("torch", "mycel"):
            if executor == "mycel" or order.name != "looped BFS":
                assert judged(order, executor) == "", order.to_csv()
            check(order, executor=executor)


def test_mutants() -> None:
    tally = examine(1500, seed=20)
    for how in ("swap", "neighbours", "move"):
        assert min(tally[how, "right"], tally[how, "refused"]) > 10
    for how in ("drop", "double", "redirect", "retarget", "form"):
        assert tally[how, "refused"] > 10


# -- what needs buffers, and blocks on several ranks -------------------------------------------------------------


def test_what_ends_without_buffers() -> None:
    """Whether moved messages of right orders in chains need buffering is what a world without buffers says."""
    rng, tally = random.Random(7), Counter[bool]()
    chains = [order for order in bases() if order.has_communication and order.routes is None]
    for _ in range(300):
        order = rng.choice(chains)
        for _ in range(rng.choice([0, 1, 3])):
            order = mutant(order, rng, ways=["neighbours", "move"])[1]
        try:
            report = check(order, executor="mycel")
        except MycelError:
            continue
        ends = ends_without_buffers([[str(action) for action in row] for row in order.rows])
        assert ends == (report.buffering == ""), order.to_csv()
        tally[ends] += 1
    assert min(tally.values()) > 20


SHARING = Order.from_csv(
    "# mycel order 1\n# stages 3\n# micro-batches 3\n# feeds e>0F 0F>1F 1F>2F 2F>h h>2B 2B>1B 1B>0B 0B>t\n"
    "SHARED0[e],SHARED1[e],0F0,SHARED2[e],0F1,0F2,SHARED0[h],0B0,SHARED1[h],0B1,SHARED2[h],0B2,"
    "SHARED0[t],SHARED1[t],SHARED2[t]\n"
    "SHARED0[e],SHARED1[e],SHARED2[e],1F0,1F1,SHARED0[h],1B0,1F2,SHARED1[h],1B1,SHARED2[h],1B2,"
    "SHARED0[t],SHARED1[t],SHARED2[t]\n"
    "SHARED0[e],SHARED1[e],SHARED2[e],2F0,SHARED0[h],2I0,2F1,2W0,SHARED1[h],2I1,2W1,2F2,SHARED2[h],2I2,2W2\n"
)


def test_mutants_of_shared_blocks() -> None:
    rng, tally = random.Random(8), Counter[tuple[str, bool]]()
    blocks = {"e": {0, 1, 2}, "h": {0, 1, 2}, "t": {0, 1}}
    feeds = [
        ("e", "0F"),
        ("0F", "1F"),
        ("1F", "2F"),
        ("2F", "h"),
        ("h", "2I"),
        ("2I", "1B"),
        ("1B", "0B"),
        ("0B", "t"),
    ]
    feeds += [("0F", "0B"), ("1F", "1B"), ("2F", "2I"), ("2I", "2W")]
    for _ in range(800):
        try:
            how, order = mutant(SHARING, rng)
        except ScheduleError:
            continue
        wrong = meets([[str(action) for action in row] for row in order.rows], feeds, blocks, 3)
        try:
            check(order, executor="mycel")
            refused = ""
        except MycelError as error:
            refused = str(error)
        assert bool(wrong) == bool(refused), f"{how}: {wrong!r}, {refused!r}\n{order.to_csv()}"
        tally[how, bool(refused)] += 1
    assert min(tally["swap", False], tally["neighbours", False], tally["move", False], tally["swap", True]) > 5


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_many_mutants(seed: int) -> None:
    assert sum(examine(2000, seed=seed).values()) == 2000

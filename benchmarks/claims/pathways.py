"""What Pathways claims of one controller: lists handed out beforehand, not single actions; jobs that cannot hang.

    python benchmarks/claims/pathways.py    # two minutes; 4 ranks and a controller; replaces its lines and the tables

First, steps of a pipeline whose stages take a millisecond: the controller hands out names of steps many at a time,
as Pathways enqueues before predecessors have ended, or one step when the last is done, or every single action. Then
two jobs on the same ranks, which two ranks begin in opposite sequence: by themselves, and under the controller.

References:
    Barham et al., "Pathways: Asynchronous Distributed Dataflow for ML", MLSys 2022, sections 4.4 and 4.5.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn

from moe_ranks import is_rank, join, on_cluster, say
from mycel.errors import CommunicationError
from mycel.parallel import Controller, Pipeline, serve
from mycel.pipeline.known import gpipe, one_f_one_b
from mycel.pipeline.lower import lower
from mycel.pipeline.order import Action, Order
from mycel.topology.builders import star
from paced import WIDTH, PacedStage
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "pathways.jsonl"
PAGE = ROOT / "docs" / "concepts" / "pipeline_claims.md"
RANKS, MICRO_BATCHES, STAGE_S = 4, 8, 0.001
STEPS, ROUNDS, PORT, LIMIT_S = 10, 5, 29611, 3.0
WAYS = ("lists, steps handed out beforehand", "lists, a step at a time", "single actions")


class Actions:
    """Waits for the controller's word before every action."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank, self._number = store, rank, 0

    def before(self, perform: Callable[[Action], None]) -> Callable[[Action], None]:
        def permitted(action: Action) -> None:
            self._store.wait([f"go/{self._rank}/{self._number}"])
            self._number += 1
            perform(action)

        return permitted


def work(rank: int, group: Any, actions: Actions | None = None) -> Callable[[Order], Callable[[int], None]]:
    """What a rank does of a job."""

    def ready(order: Order) -> Callable[[int], None]:
        torch.manual_seed(0)
        module = PacedStage(STAGE_S, STAGE_S)
        pipeline = Pipeline(order, {rank: module}, nn.functional.mse_loss, group=group, timeout_s=LIMIT_S)
        if actions is not None:  # what the claim is about, and no mode of the library
            pipeline.schedule._perform_ours = actions.before(pipeline.schedule._perform_ours)
        batch = torch.ones(MICRO_BATCHES, WIDTH)

        def step(_: int) -> None:
            pipeline.step(*([batch] if rank == 0 else []), target=batch, return_outputs=False)

        return step

    return ready


def control(store: Any, order: Order) -> None:
    """The controller's part of the first comparison."""
    controller = Controller(store, RANKS)
    for job in ("list", "actions"):
        controller.load(job, order)
    controller.run(["list", "actions"])
    count = [0] * RANKS
    rows = [sum(a.kind.value not in ("UNSHARD", "RESHARD") for a in row) for row in lower(order).rows]

    def permit() -> None:
        """Every action of a step by itself, in the sequence of the step."""
        for place in range(max(rows)):
            for rank, number in enumerate(rows):
                if place < number:
                    store.set(f"go/{rank}/{count[rank]}", "")
                    count[rank] += 1

    permit()
    controller.wait()
    for _ in range(ROUNDS):
        for way in WAYS:
            begin = time.perf_counter()
            if way == WAYS[0]:
                controller.run(["list"] * STEPS)
                controller.wait()
            else:
                for _ in range(STEPS):
                    controller.run(["list" if way == WAYS[1] else "actions"])
                    if way == WAYS[2]:
                        permit()
                    controller.wait()
            FIGURES[way].append(STEPS / (time.perf_counter() - begin))
    controller.close()


FIGURES: dict[str, list[float]] = {way: [] for way in WAYS}


def rank_of_it() -> None:
    rank, size = join()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], PORT, is_master=rank == 0, wait_for_workers=False)
    group, pair, other = (dist.new_group(list(range(n))) for n in (RANKS, 2, 2))
    order = one_f_one_b(RANKS, MICRO_BATCHES)
    if rank == size - 1:
        control(store, order)
    else:
        serve(store, rank, {"list": work(rank, group), "actions": work(rank, group, Actions(store, rank))})
    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, FIGURES)
    for way in WAYS:
        say(way=way, steps_a_second=everything[-1][way])
    _two_jobs(rank, size, dist.PrefixStore("two", store), pair, other)
    dist.destroy_process_group()


def _two_jobs(rank: int, size: int, store: Any, pair: Any, other: Any) -> None:
    orders = {"one": one_f_one_b(2, MICRO_BATCHES), "other": gpipe(2, MICRO_BATCHES)}
    begin = time.perf_counter()
    ended = ""
    if rank < 2:
        steps = {"one": work(rank, pair)(orders["one"]), "other": work(rank, other)(orders["other"])}
        try:
            for job in ("one", "other") if rank == 0 else ("other", "one"):
                steps[job](0)
        except CommunicationError as error:
            ended = f"{type(error).__name__}: {error}"
    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, (ended, time.perf_counter() - begin))
    say(way="two jobs, each rank by itself", ended=[each[0] for each in everything[:2]], seconds=everything[0][1])
    fresh = [dist.new_group([0, 1]) for _ in orders]
    begin = time.perf_counter()
    if rank == size - 1:
        controller = Controller(store, 2)
        for job, order in orders.items():
            controller.load(job, order)
        controller.run(["one", "other"] * 20)
        controller.close()
    elif rank < 2:
        serve(store, rank, {job: work(rank, own) for job, own in zip(orders, fresh, strict=True)})
    dist.barrier()
    say(way="two jobs, one controller", ended=["", ""], seconds=time.perf_counter() - begin, gangs=40)


def table(lines: list[dict[str, Any]]) -> str:
    by = {line["way"]: line for line in lines}
    best = median(by[WAYS[0]]["steps_a_second"])
    rows = [
        (way, f"{median(by[way]['steps_a_second']):.1f}", f"{best / median(by[way]['steps_a_second']):.2f}")
        for way in WAYS
    ]
    first = markdown(("what the controller hands out", "steps a second", "beforehand / it"), rows)
    apart, under = by["two jobs, each rank by itself"], by["two jobs, one controller"]
    ends = [(apart["way"], _short(apart["ended"]), f"{apart['seconds']:.1f}")]
    ends.append((under["way"], f"all {under['gangs']} steps done", f"{under['seconds']:.1f}"))
    return first + "\n" + markdown(("two jobs on two ranks, begun in opposite sequence", "end", "s"), ends)


def _short(ended: list[str]) -> str:
    return "; ".join(f"rank {rank}: {text.split(':')[0]}" for rank, text in enumerate(ended) if text)


def main() -> None:
    if is_rank():
        rank_of_it()
        return
    heard = on_cluster(star(num_ranks=RANKS + 1), Path(__file__), [])
    conclude(OUTPUT, PAGE, "pathways", heard, table)


if __name__ == "__main__":
    main()

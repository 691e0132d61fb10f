"""One rank of a job whose ranks are killed and come back. Started by ``run.py``, which does the killing.

It is alone at first. Membership goes by rounds (``mycel.elastic.Roster``): when its collectives fail, or somebody
wants to come in, it enters the next round, and forms the group anew of those who are there.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from state import Training

from mycel import elastic
from mycel.demo.corpus import load_corpus, sample_batch
from mycel.errors import CollectiveTimeoutError, CommunicationError

#: Samples of a step, whoever is there: every run sees the same ones.
SAMPLES = 16
_CORPUS_BYTES = 1 << 19


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of a rank; ``run.py`` has the same and more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    return parser.parse_args(arguments)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the training itself."""
    parser.add_argument("--shards", type=int, default=1, help="ranks that share one copy of the model (HSDP); 1: DDP")
    parser.add_argument("--length", type=int, default=16, help="bytes a window")
    parser.add_argument("--width", type=int, default=16, help="of the embedding")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, from the first step")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds a collective, or forming, may take")


def training_of(options: argparse.Namespace, *, shards: int | None = None) -> Training:
    """As the options say."""
    return Training(
        length=options.length,
        width=options.width,
        shards=options.shards if shards is None else shards,
        seed=options.seed,
        learning_rate=options.learning_rate,
    )


@functools.cache
def text() -> torch.Tensor:
    """Bytes to train on; read once, before there are ranks."""
    return load_corpus(max_bytes=_CORPUS_BYTES).train


class Samples:
    """The samples of each step, the same in every run and on every rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._text = text()
        self._length, self._seed = options.length, options.seed

    def of_step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows, and the byte after each."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        inputs, targets = sample_batch(self._text, SAMPLES, self._length, generator)
        return inputs, targets[:, -1]


def whole_replicas(
    shards: int, world_size: int
) -> Callable[[Sequence[elastic.Candidate]], Sequence[elastic.Candidate] | None]:
    """Whom a round takes: replicas of which all ranks are there, the newest state among them."""

    def choose(candidates: Sequence[elastic.Candidate]) -> Sequence[elastic.Candidate] | None:
        by_place = {candidate.place: candidate for candidate in candidates}
        replicas = sorted({place // shards for place in by_place})
        places = [[replica * shards + i for i in range(shards)] for replica in replicas]
        whole = [row for row in places if all(place in by_place for place in row)]
        newest = max(candidate.note for candidate in candidates)
        if newest < 0 and len(by_place) < world_size:
            return None  # the job begins when all are there
        # Survivors are at most a step apart, and who is behind can follow.
        if not any(all(by_place[place].note >= newest - 1 for place in row) for row in whole):
            return None
        return [by_place[place] for row in whole for place in row]

    return choose


def train(
    options: argparse.Namespace,
    store: dist.Store,
    place: int,
    world_size: int,
    is_over: Callable[[float], bool] | None = None,
) -> None:
    """Train until the time is over; says of each step what it cost, as a line of JSON.

    Args:
        options: of the training.
        store: in which ranks agree on who is there.
        place, world_size: this rank's, and how many there are when all are there.
        is_over: whether to stop, so many seconds after the job's first step; one rank that says so is enough.
    """
    is_over = is_over or (lambda seconds: seconds > options.seconds)
    elastic.start_alone(timeout=timedelta(seconds=options.patience))
    roster = elastic.Roster(
        store, place=place, choose=whole_replicas(options.shards, world_size), expected=world_size, settle_s=0.3
    )
    training, samples = training_of(options), Samples(options)
    in_group = stop = False
    while not stop:
        try:
            if not in_group:
                join(training, roster, store, timedelta(seconds=4 * options.patience))
                began = float(store.compare_set("began", "", str(time.time())))
                in_group = True
            over = is_over(time.time() - began)
            loss, stop, wanted = take_step(training, samples, over=over, wanted=roster.is_wanted)
        except RuntimeError as error:
            if not isinstance(error, CommunicationError) and elastic.failure() is None:
                raise  # no rank was lost: something else is wrong
            if roster.is_closed:
                break  # the others have ended while this rank was away, or behind by the last step
            say({"lost": training.step + 1, "place": place, "at": time.time(), "why": str(error)[:300]})
            in_group = False
            continue
        say({"step": training.step, "loss": loss, "size": dist.get_world_size(), "at": time.time()})
        in_group = not wanted
    roster.close()
    dist.destroy_process_group()


def join(training: Training, roster: elastic.Roster, store: dist.Store, timeout: timedelta) -> None:
    """Form the group anew with whoever is there, and come to the same step."""
    elastic.leave()  # whoever still waits for this rank, in whatever group, need not
    began = time.monotonic()
    note = training.step if training.has_state else -1
    try:
        entered = roster.gather(elastic.get_handle(towards=store), note=note, timeout=timeout)
    except CollectiveTimeoutError as error:
        raise SystemExit(str(error)) from error  # nobody is left to train with
    agreed = time.monotonic()
    elastic.reconfigure(entered.number, entered.handles)
    formed = time.monotonic()
    healed = training.join()
    if dist.get_rank() == 0:
        took = {"agreed_s": agreed - began, "formed_s": formed - agreed, "joined_s": time.monotonic() - formed}
        say({"round": entered.number, "size": dist.get_world_size(), "healed": healed, "at": time.time(), **took})


def take_step(training: Training, samples: Samples, *, over: bool, wanted: bool) -> tuple[float, bool, bool]:
    """One step of all ranks together.

    Args:
        training, samples: of this rank.
        over: the time is over.
        wanted: somebody wants to come in.

    Returns:
        The step's loss, and the other two as any rank says.
    """
    own = training.gradients(*samples.of_step(training.step))
    said = torch.tensor([own, float(over), float(wanted)], dtype=torch.float64)
    dist.all_reduce(said)
    training.take_step()
    loss, any_over, any_wanted = said.tolist()
    return loss, any_over > 0, any_wanted > 0


def reference(options: argparse.Namespace, num_steps: int) -> list[float]:
    """Losses of the same steps in a run that nobody disturbs: one rank, all samples."""
    elastic.start_alone()
    training, samples = training_of(options, shards=1), Samples(options)
    losses = []
    for step in range(num_steps):
        losses.append(training.gradients(*samples.of_step(step)))
        training.take_step()
    dist.destroy_process_group()
    return losses


def say(line: dict[str, object]) -> None:
    """For ``run.py``; in one piece, since a rank may be killed in between."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    """A rank, as ``RANK`` says."""
    options = parse_arguments()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    train(options, store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


if __name__ == "__main__":
    main()

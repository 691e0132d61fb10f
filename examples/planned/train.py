"""Trains a language model over bytes by a plan that ``mycel plan search`` has found, on any mesh.

    mycel plan search examples/clusters/odd.yaml --model tiny --batch 8 --seq 64 -o plan.json
    mycel emulate examples/clusters/odd.yaml -- python examples/planned/train.py --plan plan.json
    python examples/planned/train.py --batch-size 8 --length 64        # one process, no plan: the same losses

The text is the source of Python's standard library. ``--model`` takes ``tiny`` (``model.py``) or a Hugging Face
``config.json``, whose model is trained as it comes. Where the cluster's file says what its ranks compute with, as
emulated ones do, computation is paced: every stage takes as long as the plan says of it (``--no-pace`` for none).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent))

from model import VOCABULARY, Sizes, TinyGPT

from mycel.demo.corpus import load_corpus, sample_batch
from mycel.parallel import Planned, apply, paced
from mycel.planning.plan import Plan, read_plan
from mycel.topology import load_topology

#: Bytes of text that are read.
TEXT_BYTES = 2 << 20
TIMEOUT = timedelta(minutes=5)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, help="of mycel plan search; without one: one process")
    parser.add_argument("--model", default="tiny", help="tiny, or a Hugging Face config.json")
    parser.add_argument("--backend", choices=("gloo", "mycel"), default="mycel")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=8, help="without a plan: sequences of a step")
    parser.add_argument("--length", type=int, default=64, help="without a plan: bytes of a sequence")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--no-pace", action="store_true", help="compute as fast as this machine can")
    parser.add_argument("--losses", type=Path, help="write them into this file, as JSON")
    parser.add_argument("--flight", type=Path, help="folder for records of the last step, for mycel report")
    parser.add_argument("--checkpoint", type=Path, help="folder to begin from, if it is there, and to save into")
    return parser.parse_args(arguments)


def make_model(name: str, seed: int) -> nn.Module:
    """The same on every rank: initial values follow from the seed."""
    torch.manual_seed(seed)
    if name == "tiny":
        return TinyGPT(Sizes(), seed=seed)
    from transformers import AutoConfig, AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    if model.get_input_embeddings().num_embeddings < VOCABULARY:  # type: ignore[operator]
        raise SystemExit(f"{name}: the vocabulary is smaller than the {VOCABULARY} bytes of the text")
    return model


def make_optimizer(learning_rate: float) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """AdamW, for the parameters of a stage or of all."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate, foreach=False)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats a byte."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class OneProcess:
    """Training without a plan, sequence by sequence: what plans are compared with."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self._model, self._optimizer = model, make_optimizer(learning_rate)(list(model.parameters()))

    def step(self, batch: Tensor, target: Tensor) -> Tensor:
        """One step; the mean loss."""
        total = torch.zeros((), dtype=torch.float64)
        for one, aim in zip(batch.split(1), target.split(1), strict=True):
            result = self._model(one)
            logits = result if isinstance(result, Tensor) else result.logits
            loss = loss_of(logits, aim) / len(batch)
            loss.backward()
            total += loss.detach().double()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total


def by_plan(plan: Plan, options: argparse.Namespace) -> Planned:
    """A model that is trained by a plan."""
    file = os.environ.get("MYCEL_TOPOLOGY")
    topology = load_topology(file) if file else None
    has_devices = topology is not None and all(device is not None for device in topology.devices)
    if has_devices and not options.no_pace:
        say("computation is paced: every stage takes as long as the plan says of it; messages and losses are real")
    return apply(
        make_model(options.model, options.seed),
        plan,
        loss=loss_of,
        optimizer=make_optimizer(options.learning_rate),
        wrap=paced(plan) if has_devices and not options.no_pace else None,
        topology=topology,
    )


def train(trained: Any, options: argparse.Namespace, batch_size: int, length: int) -> list[float]:
    """Losses of all steps; rank 0 prints them."""
    text = load_corpus(max_bytes=TEXT_BYTES).train
    generator = torch.Generator().manual_seed(options.seed)
    losses: list[float] = []
    seconds: list[float] = []
    for number in range(1, options.steps + 1):
        inputs, targets = sample_batch(text, batch_size, length, generator)
        begin = time.perf_counter()
        losses.append(float(trained.step(inputs, targets)))
        seconds.append(time.perf_counter() - begin)
        say(f"step {number:3}   loss {losses[-1]:.6f}   {seconds[-1] * 1e3:7.1f} ms")
    say(f"measured: median step {statistics.median(seconds[1:] or seconds) * 1e3:.1f} ms")
    if options.losses and is_first():
        options.losses.write_text(json.dumps({"losses": losses, "seconds": seconds}), encoding="utf-8")
    return losses


def is_first() -> bool:
    """Rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def say(line: str) -> None:
    """Print on rank 0."""
    if is_first():
        print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    if options.plan is None:
        one = OneProcess(make_model(options.model, options.seed), options.learning_rate)
        train(one, options, options.batch_size, options.length)
        return
    plan = read_plan(options.plan)
    if options.backend == "mycel":
        import mycel.runtime  # noqa: F401  (registers the backend)
    dist.init_process_group(options.backend, timeout=TIMEOUT)
    with by_plan(plan, options) as planned:
        if options.checkpoint and options.checkpoint.exists():
            dcp.load({"train": planned}, checkpoint_id=str(options.checkpoint))
        train(planned, options, plan.job.global_batch, plan.job.seq)
        say(f"the plan predicts {plan.predicted} (modelled)")
        if options.checkpoint:
            dcp.save({"train": planned}, checkpoint_id=str(options.checkpoint))
        if options.flight:
            planned.write_flight(options.flight)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

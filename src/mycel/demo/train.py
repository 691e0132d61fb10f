"""What each rank of the demo runs: ``python -m mycel.demo.train --backend gloo|mycel``.

Plain PyTorch: ``DistributedDataParallel``, AdamW, a cosine learning rate. The only word that depends on the
backend is the name given to ``init_process_group``. The same seed gives every rank the same model and its own
batches, whatever the backend, so that two runs differ only in the order in which gradients are added.

Rank 0 prints one JSON line a record on standard output:

=========  ==========================================================================================
``start``  sizes of model, batch and gradient; what it trains on
``alone``  seconds of forward and backward of each warm-up pass without communication
``step``   ``step``, ``loss`` (nats a byte, mean over ranks), ``step_s`` (slowest rank), ``elapsed_s``
``eval``   ``step``, ``bits_per_byte`` on the held-out text, ``elapsed_s``
``end``    final figures
=========  ==========================================================================================
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mycel.demo.corpus import load_corpus, sample_batch
from mycel.demo.model import VOCABULARY, ByteGPT, ModelConfig

__all__ = ["learning_rate", "main", "parse_arguments", "train"]

#: Passes without communication, timed, before training starts.
ALONE_PASSES = 3

#: Windows of held-out text on which a model is judged, over all ranks.
EVAL_WINDOWS = 128


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the worker."""
    sizes = ModelConfig()
    parser = argparse.ArgumentParser(description="Train a byte-level language model with DDP.")
    parser.add_argument("--backend", default="gloo", help="torch.distributed backend")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=2, help="windows a rank and step")
    parser.add_argument("--length", type=int, default=64, help="bytes a window")
    parser.add_argument("--width", type=int, default=sizes.width)
    parser.add_argument("--layers", type=int, default=sizes.num_layers)
    parser.add_argument("--heads", type=int, default=sizes.num_heads)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--warm-up", type=int, default=8, help="steps until the full learning rate")
    parser.add_argument("--eval-every", type=int, default=5, help="steps between looks at the held-out text")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--corpus", type=Path, default=None, help="folder of Python files; default: the stdlib")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds one collective may take")
    return parser.parse_args(arguments)


def learning_rate(step: int, *, peak: float, warm_up: int, steps: int) -> float:
    """Linear up over ``warm_up`` steps, then a cosine down to a tenth.

    Examples:
        >>> [round(learning_rate(s, peak=1.0, warm_up=2, steps=10), 2) for s in (0, 1, 2, 9)]
        [0.5, 1.0, 1.0, 0.13]
    """
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(options: argparse.Namespace) -> None:
    """Trains over the default process group, which is set up already; rank 0 prints the records."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    corpus = load_corpus(options.corpus)
    torch.manual_seed(options.seed)
    config = ModelConfig(
        width=options.width, num_layers=options.layers, num_heads=options.heads, max_length=options.length
    )
    model = ByteGPT(config)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-7, fused=True
    )
    generator = torch.Generator().manual_seed(options.seed * 1009 + rank)
    held_out = _held_out_share(corpus.held_out, options, rank, world_size)
    gradient_bytes = 4 * model.num_parameters()
    _say(
        "start",
        backend=options.backend,
        world_size=world_size,
        steps=options.steps,
        parameters=model.num_parameters(),
        gradient_bytes=gradient_bytes,
        bytes_per_step=world_size * options.batch_size * options.length,
        corpus_bytes=len(corpus.train),
        corpus_files=list(corpus.num_files),
        corpus=corpus.source,
    )
    alone = [_alone(ddp, corpus.train, options) for _ in range(ALONE_PASSES)]
    _say("alone", seconds=_slowest(alone))
    dist.barrier()
    begin = time.perf_counter()
    _evaluate(model, held_out, 0, begin)
    for step in range(1, options.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                step - 1, peak=options.learning_rate, warm_up=options.warm_up, steps=options.steps
            )
        started = time.perf_counter()
        inputs, targets = sample_batch(corpus.train, options.batch_size, options.length, generator)
        loss = _loss(ddp, inputs, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        _report_step(step, loss.detach(), time.perf_counter() - started, begin)
        if step % options.eval_every == 0 or step == options.steps:
            _evaluate(model, held_out, step, begin)
    _say("end", elapsed_s=time.perf_counter() - begin)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the launcher has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    if options.backend == "mycel":
        import mycel.runtime  # noqa: F401  (registers the backend)
    dist.init_process_group(options.backend, timeout=timedelta(seconds=options.timeout))
    try:
        train(options)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model(inputs).view(-1, VOCABULARY), targets.view(-1))


def _alone(ddp: DistributedDataParallel, text: Tensor, options: argparse.Namespace) -> float:
    """Seconds of one forward and backward pass whose gradients stay at home and are thrown away."""
    generator = torch.Generator().manual_seed(options.seed)
    started = time.perf_counter()
    with ddp.no_sync():
        loss = _loss(ddp, *sample_batch(text, options.batch_size, options.length, generator))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    seconds = time.perf_counter() - started
    ddp.zero_grad(set_to_none=True)
    return seconds


def _held_out_share(text: Tensor, options: argparse.Namespace, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """This rank's windows of the held-out text; together they are the same for every world size and backend."""
    generator = torch.Generator().manual_seed(options.seed + 1)
    inputs, targets = sample_batch(text, EVAL_WINDOWS, options.length, generator)
    return inputs[rank::world_size], targets[rank::world_size]


@torch.no_grad()
def _evaluate(model: ByteGPT, held_out: tuple[Tensor, Tensor], step: int, begin: float) -> None:
    inputs, targets = held_out
    total = torch.zeros(2, dtype=torch.float64)
    if len(inputs):
        logits = model(inputs).view(-1, VOCABULARY)
        total[0] = functional.cross_entropy(logits, targets.reshape(-1), reduction="sum").double()
        total[1] = targets.numel()
    dist.all_reduce(total)
    bits = float(total[0] / total[1]) / math.log(2)
    _say("eval", step=step, bits_per_byte=bits, elapsed_s=time.perf_counter() - begin)


def _report_step(step: int, loss: Tensor, seconds: float, begin: float) -> None:
    """Mean loss and slowest rank; this small reduction is outside the timed step, the same for every backend."""
    total = torch.zeros(dist.get_world_size(), 2, dtype=torch.float64)
    total[dist.get_rank(), 0], total[dist.get_rank(), 1] = loss.double(), seconds
    dist.all_reduce(total)
    mean, slowest = float(total[:, 0].mean()), float(total[:, 1].max())
    _say("step", step=step, loss=mean, step_s=slowest, elapsed_s=time.perf_counter() - begin)


def _slowest(seconds: list[float]) -> list[float]:
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return [float(v) for v in values]


def _say(event: str, **fields: object) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    status = main()
    # Everything is closed already; the interpreter's own tear-down of torch would take seconds for many ranks.
    sys.stdout.flush()
    os._exit(status)

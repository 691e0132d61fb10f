"""What each process runs: trains the hybrid on the standard library; all ranks that there are share each sequence.

    python examples/long_context/one_rank.py --until 50
    python examples/long_context/one_rank.py --until 50 --limit 300           # ends, and says what does not fit
    python examples/long_context/one_rank.py --until 50 --limit 300 --plan    # trains, by a plan of memory
    mycel emulate examples/long_context/two_pairs.yaml -- python examples/long_context/one_rank.py --limit 300

Rank 0 prints one JSON object a line. ``--limit`` is kept by the system (``RLIMIT_DATA``): model, optimizer, tokens
and whatever a step computes may take so many MiB beyond what Python, torch and the connections have taken before.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from hybrid import Hybrid, Sizes, token_losses
from packs import Pack, blank, load, packs, whole, windows
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mycel.demo.train import learning_rate
from mycel.errors import SynthesisError
from mycel.memory import Fitted, allocator_limit, fit, needs_of
from mycel.planning.sequence import per_document_zigzag
from mycel.sequence import SequenceContext

MIB = 1 << 20
#: Slowly up: each step makes differences in rounding grow, and the faster, the longer it is.
PEAK_RATE, WARM_UP_STEPS = 4e-3, 100
#: Held-out losses are told apart by how many bytes of the document are before.
EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
#: Of the limit, for a plan: pages are rounded up, and Python and products take some that torch does not count.
PLANNED_SHARE = 0.8
#: Seconds after which it is looked again how much is taken.
EVERY_S = 0.02


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=8192, help="bytes of a sequence")
    parser.add_argument("--seen", type=int, help="bytes of it that the model sees at a time; default: all")
    parser.add_argument("--no-filtering", action="store_true", help="queries and keys of tokens as they are")
    parser.add_argument("--steps", type=int, default=300, help="over which the learning rate falls")
    parser.add_argument("--until", type=int, help="stop after so many of them")
    parser.add_argument("--limit", type=int, help="MiB that a process may take; default: no limit")
    parser.add_argument(
        "--plan", action="store_true", help="keep, move or compute activations again to stay below it"
    )
    parser.add_argument("--held-out", type=int, default=0, help="sequences of other files to predict in the end")
    parser.add_argument("--text", type=int, default=4, help="MiB of text to train on")
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args(arguments)
    if options.plan and options.limit is None:
        parser.error("--plan: needs a --limit to stay below")
    options.seen = options.context if options.seen is None else options.seen
    return options


# -- training ---------------------------------------------------------------------------------------------------


def context_of(pack: Pack) -> SequenceContext:
    """Who holds which part of which document: of each one, each rank an early part and a late one."""
    return SequenceContext(per_document_zigzag(pack.documents, num_ranks()))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, pack: Pack) -> float:
    """One step on a sequence; its mean loss."""
    context = context_of(pack)
    losses = token_losses(model(context.shard(pack.tokens), context), context.shard(pack.targets))
    # DDP takes the mean of the ranks' gradients.
    (losses.sum() * (num_ranks() / pack.tokens.numel())).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(over_ranks(losses.detach().double().sum())) / pack.tokens.numel()


def make(options: argparse.Namespace) -> tuple[Hybrid, torch.optim.Optimizer]:
    """The same on all ranks."""
    model = Hybrid(Sizes(is_filtered=not options.no_filtering), seed=options.seed)
    # Gradients smaller than this eps are rounding, which is another on ranks: they are not to be made steps of.
    rates: dict[str, Any] = {"lr": PEAK_RATE, "betas": (0.9, 0.99), "weight_decay": 0.1, "eps": 1e-6, "fused": True}
    return model, torch.optim.AdamW(model.parameters(), **rates)


def averaged(model: Hybrid) -> nn.Module:
    """With gradients that are averaged over ranks, in one bucket: behind all exchanges along the sequence."""
    if num_ranks() == 1:
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1024)


def train(options: argparse.Namespace, seen: Seen) -> None:
    """Steps, and in the end what other files' bytes cost.

    Args:
        options: of the command.
        seen: by ``looking``; steps are noted in it.
    """
    seen.first = seen.most = taken()
    model, optimizer = make(options)
    budget = int((options.limit or 0) * PLANNED_SHARE * MIB)
    fitted = planned(model, optimizer, blank(options.context), budget) if options.plan else None
    with fitted or nullcontext():
        trained, losses, seconds = averaged(model), [], []
        pieces = load(options.context, held_out=False, max_bytes=options.text * MIB)
        drawn = packs(pieces, options.context, seed=options.seed)
        until, slow = min(options.until or options.steps, options.steps), min(WARM_UP_STEPS, options.steps)
        for number, files in enumerate(islice(drawn, until)):
            pack = whole(files, options.seen)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(number, peak=PEAK_RATE, warm_up=slow, steps=options.steps)
            begin = time.perf_counter()
            losses.append(step(trained, optimizer, pack))
            seconds.append(time.perf_counter() - begin)
            seen.steps = number + 1
            say(event="step", step=number + 1, loss=losses[-1])
        say(
            event="end",
            parameters=sum(p.numel() for p in model.parameters()),
            losses=losses,
            step_s=statistics.median(seconds[1:] or seconds),
            taken_mib=(seen.most - seen.first) / MIB,
            plan=None if fitted is None else fitted.explain(),
            held_out=held_out(model, options),
        )


@torch.no_grad()
def held_out(model: Hybrid, options: argparse.Namespace) -> list[dict[str, float]]:
    """Nats of bytes in other files, by how many bytes are before them; a model that sees few gets windows."""
    found = torch.zeros(2, len(EDGES), dtype=torch.float64)
    drawn = packs(
        load(options.context, held_out=True, max_bytes=options.text * MIB), options.context, seed=options.seed
    )
    for files in islice(drawn, options.held_out):
        is_short = options.seen < options.context
        pack = windows(files, options.seen, options.seen // 4) if is_short else whole(files, options.context)
        context = context_of(pack)
        losses = token_losses(model(context.shard(pack.tokens), context), context.shard(pack.targets)).double()
        counted = context.shard(pack.is_counted, 0).double()
        bucket = torch.bucketize(context.shard(pack.before, 0), torch.tensor(EDGES[1:]), right=True)
        found.index_add_(1, bucket, torch.stack([losses * counted, counted]))
    sums, counts = over_ranks(found).tolist()
    parts = [part for part in zip(EDGES, counts, sums, strict=True) if part[1]]
    return [{"start": start, "bytes": count, "nats": total / count} for start, count, total in parts]


# -- memory -----------------------------------------------------------------------------------------------------


def taken() -> int:
    """Bytes of memory of its own that this process may write to: what the limit is on."""
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[5]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Seen:
    """Of a run so far.

    Attributes:
        first: bytes that were taken before there was a model.
        most: bytes that were, at most, when a thread looked.
        steps: that came to their end.
    """

    first: int
    most: int
    steps: int = 0


@contextmanager
def looking() -> Iterator[Seen]:
    """While it is entered, a thread notes how much is taken at most."""
    before, over = taken(), threading.Event()
    seen = Seen(before, before)

    def look() -> None:
        while not over.wait(EVERY_S):
            seen.most = max(seen.most, taken())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def planned(model: Hybrid, optimizer: torch.optim.Optimizer, pack: Pack, budget: int) -> Fitted:
    """The model by a plan of memory for sequences like this one."""
    return fit(model, optimizer, (pack.tokens, context_of(pack)), budget=budget, loss=of_zeros)


def of_zeros(logits: Tensor) -> Tensor:
    """A loss as large in memory as losses are."""
    return token_losses(logits, logits.new_zeros(logits.shape[:2], dtype=torch.int64)).sum()


def ways_out(options: argparse.Namespace, alone: dist.ProcessGroup | None, seen: Seen) -> str:
    """Of a step that did not fit: what it needs, by how much that is too much, and what can be done. Nothing runs.

    Where it should have fit, by its needs or by its plan, nobody knows how much is missing: then what is known is
    said, which is what was foreseen and what was taken.

    Args:
        options: of the command.
        alone: a group of this rank, where there are others.
        seen: how far it came.
    """
    tokens, room = -(-options.context // num_ranks()), options.limit * MIB
    small = max(256, tokens // 16)
    large = 2 * small  # what a step holds grows evenly with its tokens

    def line(recompute: bool) -> tuple[float, float]:
        """Bytes without tokens, and of each."""
        model, peaks = make(options)[0], []
        for length in (small, large):
            context = SequenceContext(per_document_zigzag([length], 1), alone)
            batch = (torch.zeros(1, length, dtype=torch.int64), context)
            peaks.append(needs_of(model, batch, optimizer=None, loss=of_zeros, recompute=recompute).peak)
        each = (peaks[1] - peaks[0]) / (large - small)
        moments = 2 * sum(p.nbytes for p in model.parameters())  # of the optimizer
        return peaks[0] - each * small + moments, each

    (fixed, each), (fixed_again, each_again) = line(False), line(True)
    needed, again = (fixed + each * tokens) / MIB, (fixed_again + each_again * tokens) / MIB
    if options.plan or needed <= options.limit:
        foreseen = (
            f"its plan keeps what torch allocates below {PLANNED_SHARE * options.limit:.0f} MiB"
            if options.plan
            else f"a rank's {tokens} bytes of a sequence need about {needed:.0f} MiB"
        )
        return (
            f"memory ran out in step {seen.steps + 1} with a limit of {options.limit} MiB, which no step should "
            f"reach: {foreseen}. At most {(seen.most - seen.first) / MIB:.0f} MiB were seen to be taken before what "
            f"was refused; nothing foresees temporary memory of libraries, and freed pieces too small to be used. "
            f"Ways out: a larger --limit; a shorter --context{'' if options.plan else '; --plan'}; more ranks that "
            "share the sequence"
        )
    if fixed >= room:
        return (
            f"no step fits: model and optimizer alone need about {math.ceil(fixed / MIB)} MiB, and a rank may take "
            f"{options.limit}: {math.ceil((fixed - room) / MIB)} MiB too little. The way out: a larger --limit"
        )
    return (
        f"a step on {options.context} bytes does not fit: a rank's {tokens} need about {math.ceil(needed)} MiB, and "
        f"it may take {options.limit}: {math.ceil(needed - options.limit)} MiB too little. Three ways out: "
        f"{-(-int(each * options.context) // int(room - fixed))} ranks or more that share the sequence; "
        f"--plan, which needs about {again:.0f} MiB where it computes all blocks again; --context "
        f"{int((room - fixed) / each) * num_ranks()} or less"
    )


# -- processes --------------------------------------------------------------------------------------------------


def num_ranks() -> int:
    """That share each sequence."""
    return dist.get_world_size() if dist.is_initialized() else 1


def over_ranks(values: Tensor) -> Tensor:
    """Added up."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def say(**record: object) -> None:
    """One line of JSON from rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(record), flush=True)


def warm(options: argparse.Namespace) -> None:
    """A small step, so that code, threads and connections are there before memory is counted."""
    model, optimizer = make(options)
    pack = blank(128 * num_ranks())
    if options.plan:
        peak = needs_of(model, (pack.tokens, context_of(pack)), loss=of_zeros, optimizer=optimizer).peak
        with planned(model, optimizer, pack, peak - min(MIB, peak // 16)):
            step(model, optimizer, pack)
    else:
        step(averaged(model), optimizer, pack)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; 2 where memory does not suffice."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    alone = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import mycel.runtime  # noqa: F401  (registers the backend)

        dist.init_process_group("mycel", timeout=timedelta(minutes=5))
        alone, _ = dist.new_subgroups(1)
    warm(options)
    try:
        limited = nullcontext() if options.limit is None else allocator_limit(options.limit * MIB)
        with looking() as seen, limited:
            train(options, seen)
    except SynthesisError as error:  # no plan fits
        print(f"one_rank.py: --plan: {error}", file=sys.stderr, flush=True)
        return 2
    except (RuntimeError, MemoryError) as error:
        is_full = isinstance(error, MemoryError) or "t allocate memory" in str(error)
        if options.limit is None or not is_full:
            raise
    else:
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        return 0
    print(f"one_rank.py: {ways_out(options, alone, seen)}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())

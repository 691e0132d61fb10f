"""Attention along sequences on real ranks."""

from __future__ import annotations

import itertools
import os
import signal
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.oracles.attention import expected, got, scattered, tensors, ways_over, worst

from mycel.errors import PeerLostError
from mycel.planning.sequence import CAUSAL, Mask, per_document_zigzag
from mycel.sequence import SequenceContext, attention, explain, shape_of, tune_attention


def every_way(rank: int, world_size: int) -> dict[str, Any]:
    """Errors of every way, over layouts with and without an empty rank; and what is chosen."""
    documents = (13, 0, 1, 9, 6)
    layouts = (per_document_zigzag(documents, world_size), scattered(documents, world_size, seed=3, leave_out=1))
    errors = {}
    for number, layout in enumerate(layouts):
        context = SequenceContext(layout)
        context.agree()
        for mask in (CAUSAL, Mask(kind="window", width=4)):
            whole = tensors(layout, (6, 3, 4, 6))
            right = expected(layout, mask, whole, 0.4)
            for way in ways_over(world_size):
                call = partial(attention, mask=mask, scale=0.4, way=way)
                for turn in range(2):
                    errors[f"{number} {mask.kind} {way} {turn}"] = worst(context, got(context, whole, call), right)
        q, k, v = (context.shard(x, 2) for x in whole[:3])
        first = explain(context, shape_of(q, k, v))
        tuned = tune_attention(q, k, v, context, finalists=2)
    return {"errors": errors, "first": first.way, "tuned": tuned.way, "source": first.source}


def killed(rank: int, world_size: int, way: str) -> None:
    """Survivors name a rank that is gone inside a slice (a child of it dies, so that the test's own rank lives)."""
    victim = 1
    if rank == victim and (child := os.fork()):
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return
    store = dist.FileStore(os.environ["STORE_FILE"], world_size)
    dist.init_process_group("mycel", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    context = SequenceContext(per_document_zigzag((64,), world_size))
    q, k, v = (torch.randn(1, 6, context.num_tokens, 8) for _ in range(3))
    attention(q, k, v, context, way=way)  # type: ignore[arg-type]
    if rank == victim:
        calls = itertools.count()

        def dies(begin: Any) -> Any:
            def begun(*arguments: Any, **named: Any) -> Any:
                if next(calls) == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return begin(*arguments, **named)

            return begun

        context.start_gather = dies(context.start_gather)  # type: ignore[method-assign]
        context.start_exchange = dies(context.start_exchange)  # type: ignore[method-assign]
        context.start_permute = dies(context.start_permute)  # type: ignore[method-assign]
    with pytest.raises(PeerLostError, match=f"rank {victim}"):
        for _ in range(3):  # of a ring, some have all they need before they hear of it
            attention(q, k, v, context, way=way)  # type: ignore[arg-type]

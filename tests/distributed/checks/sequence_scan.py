"""Scans and halos on real ranks."""

from __future__ import annotations

import itertools
import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.oracles.sequences import by_one, decayed, drawn, nodes_for, random_layout
from torch import Tensor

from mycel.errors import PeerLostError
from mycel.planning.sequence import Layout, Segment, contiguous, zigzag
from mycel.sequence import LocalizedFiltering, SequenceContext, explain_scan, halo, linear_attention, scan
from mycel.sequence.scan import WAYS
from mycel.sequence.scan.courier import Courier


def _far(got: Tensor | None, want: Tensor) -> float:
    if got is None or not want.numel():
        return 0.0
    return float((got.detach() - want).abs().max() / want.abs().max().clamp(min=1.0))


def every_way(rank: int, world_size: int) -> dict[str, Any]:
    """Errors of scans and linear attention in every way, with and without an empty rank; and what is chosen."""
    last = tuple(Segment(document=0, start=s, stop=s + 4) for s in (0, 4))
    bare = Layout(documents=(8,), ranks=(*[()] * (world_size - 1), last))
    layouts = [contiguous([9, 0, 1, 20], world_size), zigzag([23], world_size), random_layout(3, world_size), bare]
    errors: dict[str, float] = {}
    for number, layout in enumerate(layouts):
        context = SequenceContext(layout)
        context.agree()
        for order, way in itertools.product(range(3), WAYS):
            ms, us, weights = drawn(layout, order, 2, number)
            expected = by_one(layout, ms, us, weights)[rank]
            for turn in range(2 if order == 1 else 1):
                m, u = ms[rank].clone().requires_grad_(), us[rank].clone().requires_grad_()
                found = scan(m, u, context, way=way, nodes=nodes_for(world_size))
                (found * weights[rank]).sum().backward()
                for name, got, want in zip("HMU", (found, m.grad, u.grad), expected, strict=True):
                    errors[f"{number} {order} {way} {turn} {name}"] = _far(got, want)
        errors |= {f"{number} linear {way}": _of_linear_attention(context, layout, way) for way in (*WAYS, "auto")}
    return {"errors": errors, "said": explain_scan(context)}


def _of_linear_attention(context: SequenceContext, layout: Layout, way: str) -> float:
    torch.manual_seed(0)
    whole = [
        torch.randn(1, 2, layout.num_tokens, width, dtype=torch.float64, requires_grad=True) for width in (3, 3, 4)
    ]
    decay = torch.tensor([-0.1, -2.0], dtype=torch.float64)
    rows = []
    for start, stop in zip(layout.offsets[:-1].tolist(), layout.offsets[1:].tolist(), strict=True):
        g = decay[None, :, None].expand(1, 2, stop - start)
        rows.append(decayed(*(x[:, :, start:stop] for x in whole), g))
    out = torch.cat(rows, 2)
    out.square().sum().backward()
    here = [context.shard(x.detach(), 2).requires_grad_() for x in whole]
    found = linear_attention(*here, context, decay=decay, chunk=4, way=way, nodes=nodes_for(context.num_ranks))
    found.square().sum().backward()
    errors = [_far(found, context.shard(out.detach(), 2))]
    errors += [_far(x.grad, context.shard(w.grad, 2)) for x, w in zip(here, whole, strict=True) if w.grad is not None]
    return max(errors)


def halos(rank: int, world_size: int) -> list[float]:
    """Errors of localized filtering, with a rank that has no tokens and halos from several ranks."""
    errors = []
    parts = [Segment(document=0, start=s, stop=s + 1) for s in range(world_size - 1)]
    short = Layout(documents=(world_size - 1,), ranks=((), *((p,) for p in parts)))
    torch.manual_seed(0)
    module = LocalizedFiltering(4).double()
    for layout in (contiguous([9, 0, 1, 20], world_size), short):
        context = SequenceContext(layout)
        whole = torch.randn(2, layout.num_tokens, 4, dtype=torch.float64, requires_grad=True)
        out = torch.cat([module(p) for p in whole.split_with_sizes(list(layout.documents), 1) if p.shape[1]], 1)
        out.square().sum().backward()
        expected = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        module.zero_grad()
        here = context.shard(whole.detach()).requires_grad_()
        found = module(here, context)
        found.square().sum().backward()
        errors += [_far(found, context.shard(out.detach()))]
        if whole.grad is not None:
            errors += [_far(here.grad, context.shard(whole.grad))]
        for p, want in zip(module.parameters(), expected, strict=True):
            if p.grad is None:
                raise AssertionError("a parameter without a gradient")
            dist.all_reduce(p.grad)
            errors.append(_far(p.grad, want))
        module.zero_grad()
    return errors


def killed(rank: int, world_size: int, what: str) -> None:
    """Survivors name a rank that is gone inside an exchange (a child of it dies: the test's own rank lives on)."""
    victim = 1
    if rank == victim and (child := os.fork()):
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL:
            raise AssertionError("it was to be killed")
        return
    store = dist.FileStore(os.environ["STORE_FILE"], world_size)
    dist.init_process_group("mycel", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    context = SequenceContext(contiguous([64], world_size))

    def run() -> None:
        x = torch.randn(1, context.num_tokens, 8, requires_grad=True)
        if what == "halo":
            halo(x, context, 3).sum().backward()
        else:
            q = x[:, None]
            linear_attention(q, q, q, context, way=what, nodes=((0, 1), (2,))).sum().backward()

    run()
    if rank == victim:

        def dies(*arguments: Any, **named: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        context.exchange_with_gradient = dies  # type: ignore[method-assign]
        for name in ("exchange", "gather", "send"):
            setattr(Courier, name, dies)
    with pytest.raises(PeerLostError, match=f"rank {victim}"):
        run()

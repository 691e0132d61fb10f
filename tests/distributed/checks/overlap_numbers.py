"""Gradients of overlapped operators by differences, and errors beside those of the plain programs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from mycel.comm import ByteMeter, all_gather_rows, copy_to_ranks, keep_exchanges, reduce_scatter_rows, sum_over_ranks
from mycel.overlap import Norm, all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

STEP = 1e-6
#: Leaves that all ranks have alike; others are each rank's own.
SHARED = ("bias", "weight_n", "bias_n", "whole")


def leaves(rank: int, size: int) -> dict[str, Tensor]:
    """In float64; of unlike numbers of rows."""
    own = torch.Generator().manual_seed(rank + 1)
    shared = torch.Generator().manual_seed(0)
    total = 2 * size + 1
    sizes = {
        "x": (total, 3),
        "rows": (2 + (rank == 0), 3),
        "w": (3, 4),
        "own_bias": (4,),
        "slice": (2 + (rank == 0), 4),
    }
    made = {name: torch.randn(*s, generator=own, dtype=torch.float64) for name, s in sizes.items()}
    made |= {n: torch.randn(4, generator=shared, dtype=torch.float64) for n in ("bias", "weight_n", "bias_n")}
    made["whole"] = torch.randn(total, 4, generator=shared, dtype=torch.float64)
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def operators(size: int) -> dict[str, Callable[[dict[str, Tensor]], Tensor]]:
    counts = [3] + [2] * (size - 1)

    def norm(leaf: dict[str, Tensor]) -> Norm:
        return Norm(kind="layer_norm", weight=leaf["weight_n"], bias=leaf["bias_n"])

    def gathered(leaf: dict[str, Tensor]) -> Tensor:
        return all_gather_matmul(leaf["rows"], leaf["w"], leaf["own_bias"], rows=counts, tiles=2)

    def scattered(leaf: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(5)
        options = {"bias": leaf["bias"], "residual": leaf["slice"], "norm": norm(leaf), "dropout": 0.3}
        return matmul_reduce_scatter(leaf["x"], leaf["w"], rows=counts, tiles=2, **options)  # type: ignore[arg-type]

    def everywhere(leaf: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(5)
        options = {"bias": leaf["bias"], "residual": leaf["whole"], "norm": norm(leaf), "dropout": 0.3}
        return matmul_all_reduce(leaf["x"], leaf["w"], tiles=2, **options)  # type: ignore[arg-type]

    return {"gathered": gathered, "scattered": scattered, "everywhere": everywhere}


def gradients_by_differences(rank: int, size: int) -> dict[str, float]:
    """The largest difference of a gradient's element from that of two losses, by operator and leaf."""
    found: dict[str, float] = {}
    for name, operator in operators(size).items():
        leaf = leaves(rank, size)
        result = operator(leaf)
        upstream = torch.randn(
            result.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
        )  # of a result that all ranks have alike: the same
        (result * upstream).sum().backward()

        def loss(operator: Callable[[dict[str, Tensor]], Tensor] = operator, upstream: Tensor = upstream) -> float:
            with torch.no_grad():
                total = (operator(leaf) * upstream).sum()  # noqa: B023
                if name != "everywhere":  # noqa: B023
                    dist.all_reduce(total)
            return float(total)

        for key, tensor in leaf.items():
            if tensor.grad is None:
                continue
            worst = 0.0
            for changed in [None] if key in SHARED else range(size):
                sizes = torch.tensor([tensor.numel()])
                if changed is not None:
                    dist.broadcast(sizes, changed)
                for place in range(int(sizes)):
                    is_mine = changed in (None, rank)
                    losses = []
                    for sign in (1, -2, 1):
                        if is_mine:
                            tensor.data.view(-1)[place] += sign * STEP
                        losses.append(loss())
                    if is_mine:
                        expected = (losses[0] - losses[1]) / (2 * STEP)
                        worst = max(worst, abs(expected - float(tensor.grad.view(-1)[place])))
            found[f"{name} {key}"] = worst
    return found


def beside_plain(rank: int, size: int, kind: str) -> dict[str, tuple[float, float]]:
    """Errors against float64, of the operators and of the plain programs, in one type."""
    dtype, group, meter = getattr(torch, kind), dist.group.WORLD, ByteMeter()
    assert group is not None
    rows, inner, columns = 24 * size, 96, 80

    def leaf(*shape: int, seed: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)

    def all_gather_(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        (whole,) = all_gather_rows([x[: rows // size]], group, meter, "plain")
        return torch.addmm(b, whole, w)

    def scatter_(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        (b,) = copy_to_ranks([b], group, meter, "plain")
        return functional.rms_norm(reduce_scatter_rows(x @ w, group, meter, "plain") + b, (columns,))

    def everywhere_(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return functional.rms_norm(sum_over_ranks(x @ w, group, meter, "plain") + b, (columns,))

    norm = Norm(kind="rms_norm")
    pairs: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "gathered": (lambda x, w, b: all_gather_matmul(x[: rows // size], w, b, tiles=3), all_gather_),
        "scattered": (lambda x, w, b: matmul_reduce_scatter(x, w, bias=b, norm=norm, tiles=3), scatter_),
        "everywhere": (lambda x, w, b: matmul_all_reduce(x, w, bias=b, norm=norm, tiles=3), everywhere_),
    }
    found: dict[str, tuple[float, float]] = {}
    for name, (ours, plain) in pairs.items():
        outcomes = []
        for way, as_type in ((plain, torch.float64), (plain, dtype), (ours, dtype)):
            given = [
                t.to(as_type).requires_grad_()
                for t in (
                    leaf(rows, inner, seed=rank + 1),
                    leaf(inner, columns, seed=rank + 50),
                    leaf(columns, seed=99),
                )
            ]
            result = way(*given)
            upstream = leaf(*result.shape, seed=7).to(as_type)
            result.backward(upstream)
            outcomes.append([result.detach(), *(t.grad for t in given)])
        exact, theirs, mine = outcomes
        for place, what in enumerate(("result", "x", "w", "b")):
            found[f"{name} {what}"] = tuple(  # type: ignore[assignment]
                float((o[place].double() - exact[place]).square().mean().sqrt()) for o in (mine, theirs)
            )
    return found


def checkpointed(rank: int, size: int) -> dict[str, bool]:
    """Under activation checkpointing that keeps exchanges nothing is sent again, and gradients stay the same."""
    from torch.utils.checkpoint import checkpoint

    same: dict[str, bool] = {}
    for name, operator in operators(size).items():
        results = []
        for again in (False, True):
            leaf = leaves(rank, size)
            if again:
                result = checkpoint(operator, leaf, use_reentrant=False, context_fn=keep_exchanges)
            else:
                result = operator(leaf)
            result.square().sum().backward()
            results.append([result.detach(), *(t.grad for t in leaf.values() if t.grad is not None)])
        same[name] = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return same

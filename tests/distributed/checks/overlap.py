"""Overlapped operators against whole arrays in float64, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from mycel.comm import ByteMeter
from mycel.overlap import (
    Norm,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    receive_slices,
    send_slices,
)

INNER, COLUMNS = 12, 10
#: Rows of the ranks: alike, unlike, and one without any.
ROWS: dict[str, Callable[[int], list[int]]] = {
    "even": lambda size: [8] * size,
    "uneven": lambda size: [5 + 3 * (rank % 2) for rank in range(size)],
    "one empty": lambda size: [0] + [7] * (size - 1),
}


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Parts(dict[str, Tensor]):
    """Named whole arrays in float64, of which each rank takes its own."""

    def leaf(self, name: str, *shape: int) -> Tensor:
        self[name] = randn(*shape, seed=len(self) + 1).requires_grad_()
        return self[name]


def norm_of(kind: str | None, weight: Tensor | None, bias: Tensor | None) -> Norm | None:
    if kind is None:
        return None
    return Norm(kind=kind, weight=weight, bias=bias if kind == "layer_norm" else None, eps=1e-5)  # type: ignore[arg-type]


def masks(rows: int, dropout: float, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return functional.dropout(torch.ones(rows, COLUMNS, dtype=torch.float64), dropout)


def compare(errors: dict[str, float], name: str, found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None and expected is not None, name
    assert found.shape == expected.shape, (name, found.shape, expected.shape)
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    errors[name] = float((found.double() - expected).abs().max()) / scale if found.numel() else 0.0


def gathered_product(
    rank: int, size: int, rows: Sequence[int], dtype: torch.dtype, **options: Any
) -> dict[str, float]:
    """``all_gather_matmul``, against one product of everything."""
    whole = Parts()
    x, b = whole.leaf("x", sum(rows), INNER), whole.leaf("bias", size, COLUMNS)
    w = whole.leaf("w", size, INNER, COLUMNS)
    upstream = randn(size, sum(rows), COLUMNS, seed=99)
    products = torch.stack([x @ w[r] + b[r] for r in range(size)])
    (products * upstream).sum().backward()
    start = sum(rows[:rank])
    own = slice(start, start + rows[rank])
    xr, wr, br = (t.detach().to(dtype).requires_grad_() for t in (x[own], w[rank], b[rank]))
    meter = ByteMeter()
    y = all_gather_matmul(xr, wr, br, rows=rows, meter=meter, **options)
    y.backward(upstream[rank].to(dtype))
    errors: dict[str, float] = {}
    compare(errors, "y", y, products[rank].detach())
    compare(errors, "x", xr.grad, x.grad[own])  # type: ignore[index]
    compare(errors, "w", wr.grad, w.grad[rank])  # type: ignore[index]
    compare(errors, "bias", br.grad, b.grad[rank])  # type: ignore[index]
    assert size == 1 or meter.total(["all_gather_matmul"]) > 0 or not max(rows)
    return errors


def scattered_product(
    rank: int, size: int, rows: Sequence[int], dtype: torch.dtype, norm: str | None, dropout: float, tiles: int
) -> dict[str, float]:
    """``matmul_reduce_scatter`` with everything behind it."""
    whole = Parts()
    x, w = whole.leaf("x", size, sum(rows), INNER), whole.leaf("w", size, INNER, COLUMNS)
    b, nw, nb = whole.leaf("bias", COLUMNS), whole.leaf("nw", COLUMNS), whole.leaf("nb", COLUMNS)
    residual = whole.leaf("residual", sum(rows), COLUMNS)
    upstream = randn(sum(rows), COLUMNS, seed=99)
    mask = torch.cat([masks(rows[r], dropout, 40 + r) for r in range(size)]).double()
    h = (torch.einsum("rsi,rio->so", x, w) + b) * mask + residual
    made = norm_of(norm, nw, nb)
    z = h if made is None else made(h)
    (z * upstream).sum().backward()
    start = sum(rows[:rank])
    own = slice(start, start + rows[rank])
    xr, wr, rr = (t.detach().to(dtype).requires_grad_() for t in (x[rank], w[rank], residual[own]))
    br, nwr, nbr = (t.detach().to(dtype).requires_grad_() for t in (b, nw, nb))
    torch.manual_seed(40 + rank)
    zr = matmul_reduce_scatter(
        xr, wr, bias=br, dropout=dropout, residual=rr, norm=norm_of(norm, nwr, nbr), rows=rows, tiles=tiles
    )
    zr.backward(upstream[own].to(dtype))
    errors: dict[str, float] = {}
    compare(errors, "z", zr, z.detach()[own])
    pairs = {"x": (xr, x.grad[rank]), "w": (wr, w.grad[rank]), "residual": (rr, residual.grad[own])}  # type: ignore[index]
    pairs |= {"bias": (br, b.grad)}
    pairs |= {"nw": (nwr, nw.grad)} if norm else {}
    pairs |= {"nb": (nbr, nb.grad)} if norm == "layer_norm" else {}
    for name, (mine, expected) in pairs.items():
        compare(errors, name, mine.grad, expected)
    # Without anything behind the sum.
    xr.grad = x.grad = None
    plain = matmul_reduce_scatter(xr, wr, rows=rows, tiles=tiles)
    plain.backward(upstream[own].to(dtype))
    product = torch.einsum("rsi,rio->so", x, w)
    product.backward(upstream)
    compare(errors, "plain", plain, product.detach()[own])
    compare(errors, "plain x", xr.grad, x.grad[rank])  # type: ignore[index]
    return errors


def summed_product(
    rank: int, size: int, num_rows: int, dtype: torch.dtype, norm: str | None, dropout: float, tiles: int
) -> dict[str, float]:
    """``matmul_all_reduce`` with everything behind it."""
    whole = Parts()
    x, w = whole.leaf("x", size, num_rows, INNER), whole.leaf("w", size, INNER, COLUMNS)
    b, nw, nb = whole.leaf("bias", COLUMNS), whole.leaf("nw", COLUMNS), whole.leaf("nb", COLUMNS)
    residual = whole.leaf("residual", num_rows, COLUMNS)
    upstream = randn(num_rows, COLUMNS, seed=99)
    h = (torch.einsum("rsi,rio->so", x, w) + b) * masks(num_rows, dropout, 40).double() + residual
    made = norm_of(norm, nw, nb)
    z = h if made is None else made(h)
    (z * upstream).sum().backward()
    xr, wr = (t.detach().to(dtype).requires_grad_() for t in (x[rank], w[rank]))
    br, nwr, nbr, rr = (t.detach().to(dtype).requires_grad_() for t in (b, nw, nb, residual))
    torch.manual_seed(40)
    zr = matmul_all_reduce(xr, wr, bias=br, dropout=dropout, residual=rr, norm=norm_of(norm, nwr, nbr), tiles=tiles)
    zr.backward(upstream.to(dtype))
    errors: dict[str, float] = {}
    compare(errors, "z", zr, z.detach())
    pairs = {"x": (xr, x.grad[rank]), "w": (wr, w.grad[rank]), "residual": (rr, residual.grad), "bias": (br, b.grad)}  # type: ignore[index]
    pairs |= {"nw": (nwr, nw.grad)} if norm else {}
    pairs |= {"nb": (nbr, nb.grad)} if norm == "layer_norm" else {}
    for name, (mine, expected) in pairs.items():
        compare(errors, name, mine.grad, expected)
    # Without anything behind the sum.
    xr.grad = x.grad = None
    plain = matmul_all_reduce(xr, wr, tiles=tiles)
    plain.backward(upstream.to(dtype))
    product = torch.einsum("rsi,rio->so", x, w)
    product.backward(upstream)
    compare(errors, "plain", plain, product.detach())
    compare(errors, "plain x", xr.grad, x.grad[rank])  # type: ignore[index]
    return errors


def through_a_boundary(rank: int, size: int, first: int, rows: int) -> dict[str, float]:
    """From a stage of so many ranks to one of the others, and a gradient back; what is wrong, by case."""
    stages = [list(range(first)), list(range(first, size))]
    groups = [dist.new_group(ranks) for ranks in stages]
    parts = torch.stack([randn(rows, 3, 2, seed=7 + r) for r in range(size)])
    errors: dict[str, float] = {}
    for tiles in (1, 2, 5, None):
        for here, there in ((0, 1), (1, 0)):
            for is_sum in (True, False):
                members = stages[here]
                expected = parts[members].sum(0) if is_sum else parts[0]
                if rank in members:
                    given = parts[rank] if is_sum else parts[0]
                    send_slices(given, stages[there], group=groups[here], is_sum=is_sum, tiles=tiles)
                    continue
                found = receive_slices((rows, 3, 2), members, dtype=torch.float64, group=groups[there], tiles=tiles)
                name = f"{tiles} {here} {is_sum}"
                compare(errors, name, found, expected)
                if tiles == 1 and is_sum and len(members) == 2:
                    assert torch.equal(found, expected)
    return errors


def every_combination(rank: int, size: int, kind_of_element: str) -> dict[str, float]:
    """The largest error of each operator and case, relative."""
    dtype = getattr(torch, kind_of_element)
    worst: dict[str, float] = {}
    for kind, rows_of in ROWS.items():
        rows = rows_of(size)
        if kind == "one empty" and size == 1:
            continue
        for tiles in (1, 2, 3, 16):
            for keep in (True, False):
                errors = gathered_product(rank, size, rows, dtype, tiles=tiles, keep_gathered=keep)
                worst |= {f"gather {kind} {tiles} {keep} {name}": e for name, e in errors.items()}
            for norm, dropout in ((None, 0.0), ("rms_norm", 0.4), ("layer_norm", 0.4)):
                errors = scattered_product(rank, size, rows, dtype, norm, dropout, tiles)
                worst |= {f"scatter {kind} {tiles} {norm} {name}": e for name, e in errors.items()}
                errors = summed_product(rank, size, sum(rows), dtype, norm, dropout, tiles)
                worst |= {f"everywhere {kind} {tiles} {norm} {name}": e for name, e in errors.items()}
    return worst


def rewritten_programs(rank: int, size: int, case: str, most: int) -> dict[str, Any]:
    """Every program that rewrites come to, run here, against the unrewritten one in one process."""
    from tests.oracles.overlap_cases import CASES, inputs_of, rewritten
    from tests.oracles.overlap_programs import evaluate

    from mycel.overlap.language import run

    program = CASES[case]()
    inputs = inputs_of(program, size)
    expected = evaluate(program, inputs, size)
    worst, count, kinds = 0.0, 0, set()
    for steps, candidate in rewritten(program, most):
        found = run(candidate, {name: parts[rank] for name, parts in inputs.items()})
        for name, parts in found.items():
            assert parts.shape == expected[name][rank].shape, (steps, name)
            error = float((parts - expected[name][rank]).abs().max()) if parts.numel() else 0.0
            assert error < 1e-9, (steps, name, error)
            worst = max(worst, error)
        count += 1
        kinds |= {step.split("(")[0] for step in steps}
    return {"worst": worst, "count": count, "kinds": kinds}

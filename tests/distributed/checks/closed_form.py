"""What every rank runs for ``test_closed_form.py``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.comm import ByteMeter
from mycel.data_parallel import closed_form
from mycel.errors import UsageError

RIDGE, WIDTH, OUTPUTS = 0.1, 9, 2


def data(num: int, activation: str) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(num)
    x = torch.randn(num, WIDTH, generator=made, dtype=torch.float64)
    z = torch.randn(num, OUTPUTS, generator=made, dtype=torch.float64)
    return x, z if activation == "linear" else z.sigmoid()


def cuts(num: int, size: int) -> list[int]:
    """Uneven, and none empty."""
    sizes = [2 + rank for rank in range(size - 1)]
    return [*sizes, num - sum(sizes)]


def complaint(call: Any) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    return "nothing"


def everything(rank: int, size: int) -> dict[str, Any]:
    """Equal models with the bytes that the formula says, and complaints on all ranks."""
    found: dict[str, Any] = {"away": [], "bytes": [], "same": [], "forms": []}
    for activation in ("linear", "logistic"):
        for num in (3 * size + 3, 80):
            x, d = data(num, activation)
            whole = closed_form.solve_ridge(closed_form.ridge_parts(x, d, activation=activation), RIDGE)
            own = [t.split(cuts(num, size))[rank] for t in (x, d)]
            for form in ("auto", "sums", "factors"):
                meter = ByteMeter()
                parts = closed_form.ridge_parts(*own, activation=activation, form=form)
                merged = closed_form.merge_over_ranks(parts, form=form, meter=meter)
                weights = closed_form.solve_ridge(merged, RIDGE)
                found["away"].append(float((weights - whole).abs().max()))
                matrices = 1 if activation == "linear" else OUTPUTS
                columns = min(WIDTH + 1, max(cuts(num, size)))
                numbers = closed_form.exchange_numbers(WIDTH + 1, OUTPUTS, matrices, columns, size)
                sent = meter.total(["closed_form.sums", "closed_form.factors"])
                found["bytes"].append((sent, 8 * numbers[merged.form], meter.total(["closed_form.header"])))
                found["forms"].append(merged.form)
                theirs = [torch.empty_like(weights) for _ in range(size)]
                dist.all_gather(theirs, weights)
                found["same"].append(all(torch.equal(weights, other) for other in theirs))
    x, d = data(12, "linear")
    none = closed_form.ridge_parts(x[:0], d[:0])
    some = closed_form.ridge_parts(x, d)
    other = closed_form.ridge_parts(x, d[:, :1])
    broken = x * (torch.nan if rank == size - 1 else 1.0)
    batches = [] if rank == 0 else [(x.float(), torch.zeros(12, dtype=torch.int64))]
    found["complaints"] = [
        complaint(lambda: closed_form.merge_over_ranks(none if rank == 1 else some)),
        complaint(lambda: closed_form.merge_over_ranks(other if rank == 1 else some)),
        complaint(lambda: closed_form.merge_over_ranks(lambda: closed_form.ridge_parts(broken, d))),
        complaint(lambda: closed_form.linear_probe(nn.Identity(), batches, 2)),
        complaint(lambda: closed_form.merge_over_ranks(some.as_sums(), form="factors")),
    ]
    labels = (x[:, 0] > 0).long()
    mine = [(x[i : i + 1], labels[i : i + 1]) for i in range(rank, 12, size)]
    probe = closed_form.linear_probe(lambda some: some * 2, mine, 2, ridge=0.5)
    alone = closed_form.ridge_linear(
        closed_form.ridge_parts(2 * x, nn.functional.one_hot(labels, 2) * 2.0 - 1), ridge=0.5
    )
    found["probe"] = float((probe.weight - alone.weight).abs().max())
    return found

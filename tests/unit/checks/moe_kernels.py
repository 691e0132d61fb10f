"""Triton's kernels in its interpreter, beside references in float64; a process of its own, started by the tests.

    TRITON_INTERPRET=1 python tests/unit/checks/moe_kernels.py

prints one JSON object: for each check, numbers by name. Memory that nobody wrote holds NaN and huge integers.
"""

# ruff: noqa: N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mycel.moe import CapacityPolicy, MoE, SwitchLoss
from mycel.moe.kernels import fused, operations, use_kernels
from mycel.moe.kernels.best import best_experts
from mycel.moe.rows import combine_rows, gather_rows, order_slots
from mycel.triton_kernels import Launch

CHECKS: dict[str, Callable[[], dict[str, float]]] = {}

#: Tokens, width, hidden size, experts, slots; sizes that are and are not multiples of the interpreter's 16.
CASES: dict[str, dict[str, Any]] = {
    "even": {"sizes": (24, 32, 16, 4, 2)},
    "partial tiles": {"sizes": (19, 24, 20, 3, 2)},
    "one hot expert, others empty": {"sizes": (37, 16, 24, 5, 1), "hot": True},
    "empty slots": {"sizes": (21, 18, 10, 4, 3), "empty": 3},
    "all slots empty": {"sizes": (5, 16, 16, 3, 2), "empty": 1},
    "no tokens": {"sizes": (0, 16, 16, 3, 2)},
    "silu": {"sizes": (11, 16, 18, 3, 2), "activation": "silu"},
    "gelu": {"sizes": (11, 16, 18, 3, 2), "activation": "gelu"},
    "relu": {"sizes": (11, 16, 18, 3, 2), "activation": "relu"},
}


def check(name: str) -> Callable[[Callable[[], dict[str, float]]], Callable[[], dict[str, float]]]:
    def register(function: Callable[[], dict[str, float]]) -> Callable[[], dict[str, float]]:
        CHECKS[name] = function
        return function

    return register


def error(got: Tensor, wanted: Tensor) -> float:
    """Relative to the norm; infinite where a number is not one."""
    if got.shape != wanted.shape:
        return math.inf
    difference = float((got.detach().double() - wanted.detach()).norm() / max(float(wanted.detach().norm()), 1e-30))
    return difference if math.isfinite(difference) else math.inf


def inputs(case: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Slots, a gradient, and what is differentiated."""
    T, D, F, E, K = case["sizes"]
    torch.manual_seed(T + D)
    index = torch.stack([torch.randperm(E - 1)[:K] for _ in range(T)]) if T else torch.zeros(0, K, dtype=torch.int64)
    if case.get("hot"):
        index.fill_(1)
    if case.get("empty"):
        index.view(-1)[:: case["empty"]] = E
    wide = 2 if case.get("activation", "swiglu") == "swiglu" else 1
    values = {
        "x": torch.randn(T, D).to(dtype),
        "weights": torch.rand(T, K),
        "up": (torch.randn(E, wide * F, D) / math.sqrt(D)).to(dtype),
        "down": (torch.randn(E, D, F) / math.sqrt(F)).to(dtype),
    }
    return index, torch.randn(T, D).to(dtype), values


def activate(z: Tensor, name: str) -> Tensor:
    """By formulas."""
    if name == "swiglu":
        gate, up = z[: len(z) // 2], z[len(z) // 2 :]
        return gate / (1 + torch.exp(-gate)) * up
    if name == "silu":
        return z / (1 + torch.exp(-z))
    return z.clamp_min(0) if name == "relu" else 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))


def token_by_token(case: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients in float64, shared nothing with what is tested."""
    index, grad, values = inputs(case, dtype)
    E = case["sizes"][3]
    v = {name: value.double().requires_grad_() for name, value in values.items()}
    y = [torch.zeros(v["x"].shape[1], dtype=torch.float64)] * len(index)
    for t, slots in enumerate(index.tolist()):
        for k, e in enumerate(slots):
            if e < E:
                a = activate(v["up"][e] @ v["x"][t], case.get("activation", "swiglu"))
                y[t] = y[t] + v["weights"][t, k] * (v["down"][e] @ a)
    out = torch.stack(y) if y else torch.zeros_like(v["x"])
    grads = torch.autograd.grad((out * grad.double()).sum() + sum(0 * p.sum() for p in v.values()), list(v.values()))
    return [out.detach(), *grads]


def by_kernels(case: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    index, grad, values = inputs(case, dtype)
    v = {name: value.requires_grad_() for name, value in values.items()}
    order = fused.sort_slots(index, case["sizes"][3], full=not case.get("empty"))
    activation = case.get("activation", "swiglu")
    y = fused.experts_of_tokens(v["x"], order, v["weights"], v["up"], v["down"], activation)
    return [y.detach(), *torch.autograd.grad(y, list(v.values()), grad)]


NAMES = ("output", "tokens", "weights", "up", "down")


def experts_check(case: dict[str, Any]) -> dict[str, float]:
    wanted = token_by_token(case, torch.float32)
    got = by_kernels(case, torch.float32)
    return {name: error(a, b) for name, a, b in zip(NAMES, got, wanted, strict=True)}


for _name, _case in CASES.items():
    CHECKS["experts: " + _name] = lambda case=_case: experts_check(case)


def half_check(dtype: torch.dtype) -> dict[str, float]:
    """In parts of twice what plain torch loses in the same type."""
    case = CASES["partial tiles"]
    wanted = token_by_token(case, dtype)
    got = by_kernels(case, dtype)
    use_kernels("loop")
    plain = by_kernels(case, dtype)
    use_kernels("triton")
    return {name: error(a, b) / (2 * error(p, b)) for name, a, b, p in zip(NAMES, got, wanted, plain, strict=True)}


CHECKS["half precision: bfloat16"] = lambda: half_check(torch.bfloat16)
CHECKS["half precision: float16"] = lambda: half_check(torch.float16)


@check("rows after the last group")
def rows_after_the_last() -> dict[str, float]:
    """They hold NaN, in rows and in gradients, and come out as zeros."""
    torch.manual_seed(3)
    counts, R, D, F = torch.tensor([5, 0, 18, 2]), 31, 20, 12
    x, grad = torch.randn(R, D), torch.randn(R, D)
    x[25:], grad[25:] = math.nan, math.nan
    x.requires_grad_()
    up, down = torch.randn(4, 2 * F, D).requires_grad_(), torch.randn(4, D, F).requires_grad_()
    y = fused.experts_of_rows(x, counts, up, down, "swiglu")
    got = torch.autograd.grad(y, (x, up, down), grad)
    wide = [t.detach().double().requires_grad_() for t in (x, up, down)]
    groups = [0] * 5 + [2] * 18 + [3] * 2
    rows = [wide[2][e] @ activate(wide[1][e] @ wide[0][i], "swiglu") for i, e in enumerate(groups)]
    wanted_y = torch.stack(rows)
    wanted = torch.autograd.grad((wanted_y * grad[:25].double()).sum(), wide)
    return {
        "output": error(y[:25], wanted_y.detach()),
        "rows": error(got[0][:25], wanted[0][:25]),
        "up": error(got[1], wanted[1]),
        "down": error(got[2], wanted[2]),
        "after": float(y[25:].abs().sum() + got[0][25:].abs().sum()),
    }


@check("same bits again")
def same_bits() -> dict[str, float]:
    first, second = (by_kernels(CASES["empty slots"], torch.bfloat16) for _ in range(2))
    return {name: float(not torch.equal(a, b)) for name, a, b in zip(NAMES, first, second, strict=True)}


@check("nothing kept without gradients")
def nothing_kept() -> dict[str, float]:
    index, _, v = inputs(CASES["even"], torch.float32)
    order = fused.sort_slots(index, 4, full=True)
    arguments = (v["x"], v["up"], v["down"], v["weights"], *order, "swiglu")
    y, z = torch.ops.mycel.experts(*arguments, False, True)
    kept, _ = torch.ops.mycel.experts(*arguments, True, True)
    return {"rows of z": z.shape[0], "output": float(not torch.equal(y, kept))}


@check("slots in order")
def slots_in_order() -> dict[str, float]:
    """More slots than one program has, duplicates and empty ones among them."""
    torch.manual_seed(1)
    wrong = 0
    for T, K, E in ((700, 3, 5), (1, 1, 1), (40, 2, 300), (0, 2, 3)):
        index = torch.randint(0, E + 1, (T, K))
        order = fused.sort_slots(index, E, full=False)
        flat = index.flatten().tolist()
        used = sorted((e, s) for s, e in enumerate(flat) if e < E)
        wrong += order.slot_of_row[: len(used)].tolist() != [s for _, s in used]
        rows = {s: r for r, (_, s) in enumerate(used)}
        wrong += order.row_of_slot.flatten().tolist() != [rows.get(s, T * K) for s in range(T * K)]
        wrong += order.counts.tolist() != [flat.count(e) for e in range(E)]
    return {"wrong": wrong}


@check("tiles of groups")
def tiles_of_groups() -> dict[str, float]:
    wrong = 0
    for counts, rows in (([3, 0, 40, 16], 70), ([0, 0], 0), ([33], 33), ([1] * 140, 150)):
        for tail in (False, True):
            plan, launch = operations.make_kernel_args(torch.tensor(counts), rows, 16, tail=tail)
            launch.run()
            groups = [*counts, rows - sum(counts)] if tail else counts
            wanted, begin = [], 0
            for group, count in enumerate(groups):
                wanted += [(group, begin + first) for first in range(0, count, 16)]
                begin += count
            got = list(zip(plan.tile_group.tolist(), plan.tile_row.tolist(), strict=True))
            wrong += got[: len(wanted)] != wanted or any(group != -1 for group, _ in got[len(wanted) :])
            offsets = [sum(counts[:e]) for e in range(len(counts) + 1)]
            wrong += plan.offsets.tolist() != [*offsets, rows]
    return {"wrong": wrong}


@check("sums over slots")
def sums_over_slots() -> dict[str, float]:
    """What dispatchers use: gathers and weighted sums of rows, both ways."""
    torch.manual_seed(4)
    T, K, D, E = 9, 3, 20, 4
    index = torch.randint(0, E + 1, (T, K))
    used = int((index < E).sum())
    order = order_slots(index, used)
    x, w = torch.randn(T, D, requires_grad=True), torch.rand(T, K, requires_grad=True)
    gain = torch.rand(used, 1) + 0.5
    y = combine_rows(gather_rows(x, order) * gain, w, order)
    grad = torch.randn(T, D)
    got = torch.autograd.grad(y, (x, w), grad)
    wide_x, wide_w = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    total = torch.zeros(T, D, dtype=torch.float64)
    for row, slot in enumerate(order.slot_of_row.tolist()):
        part = torch.zeros_like(total)
        part[slot // K] = 1
        total = total + part * wide_w[slot // K, slot % K] * wide_x[slot // K] * gain[row].double()
    wanted = torch.autograd.grad((total * grad.double()).sum(), (wide_x, wide_w))
    return {
        "output": error(y, total.detach()),
        "tokens": error(got[0], wanted[0]),
        "weights": error(got[1], wanted[1]),
    }


def best_check(score: str, biased: bool) -> dict[str, float]:
    torch.manual_seed(5)
    T, E, K = 37, 11, 4
    logits = torch.randn(T, E)
    logits[3] = 0.25  # all equal: the first ones
    bias = torch.randn(E) if biased else None
    logits.requires_grad_()
    index, weights, scores, counts = best_experts(logits, bias, K, score)
    of_weights, of_scores = torch.randn(T, K), torch.randn(T, E)
    (got,) = torch.autograd.grad((weights * of_weights).sum() + (scores * of_scores).sum(), logits)
    (of_weights_only,) = torch.autograd.grad((best_experts(logits, bias, K, score)[1] * of_weights).sum(), logits)
    wide = logits.detach().double().requires_grad_()
    wanted_scores = wide.softmax(1) if score == "softmax" else wide.sigmoid()
    keys = scores.detach() if bias is None else scores.detach() + bias
    wrong = sum(
        index[t].tolist() != sorted(range(E), key=lambda e, t=t: (-float(keys[t, e]), e))[:K] for t in range(T)
    )
    wanted_weights = wanted_scores.gather(1, index)
    first = (wanted_weights * of_weights).sum()
    (wanted,) = torch.autograd.grad(first + (wanted_scores * of_scores).sum(), wide, retain_graph=True)
    (wanted_only,) = torch.autograd.grad(first, wide)
    return {
        "index": wrong,
        "counts": float(counts.tolist() != [int((index == e).sum()) for e in range(E)]),
        "weights": error(weights, wanted_weights.detach()),
        "scores": error(scores, wanted_scores.detach()),
        "gradient": error(got, wanted),
        "gradient of weights": error(of_weights_only, wanted_only),
    }


for _score in ("softmax", "sigmoid"):
    for _biased in (False, True):
        CHECKS[f"best experts: {_score}{', biased' if _biased else ''}"] = lambda s=_score, b=_biased: best_check(
            s, b
        )


@check("best experts of broken logits")
def broken_logits() -> dict[str, float]:
    """Any index is an expert's, and no expert comes twice."""
    logits = torch.full((4, 6), math.nan)
    logits[1, 2:] = 1.0
    logits[2] = -math.inf
    logits[3, 0] = math.inf
    index = best_experts(logits, None, 4, "softmax")[0].tolist()
    return {"wrong": sum(len({e for e in row if 0 <= e < 6}) != 4 for row in index)}


def layer_check(router: str, factor: float, *, compiled: bool = False) -> dict[str, float]:
    """A layer by kernels against the same by plain torch, or compiled whole against itself."""
    torch.manual_seed(6)
    layer = MoE(16, 12, 5, 2, router=router, capacity=CapacityPolicy(factor=factor), balancing=SwitchLoss(0.1))
    x, grad = torch.randn(13, 16), torch.randn(13, 16)

    def step(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        layer.zero_grad()
        tokens = x.clone().requires_grad_()
        y = run(tokens)
        ((y * grad).sum() + layer.loss).backward()
        return [y.detach(), tokens.grad, *(p.grad for p in layer.parameters())]

    calls: list[str] = []
    run_launch = Launch.run

    def counting(launch: Launch) -> None:
        calls.append(launch.kernel.__name__)
        run_launch(launch)

    Launch.run = counting
    by_kernels = step(layer)
    Launch.run = run_launch
    use_kernels("loop")
    plain = step(layer)
    use_kernels("triton")
    if compiled:
        again = step(torch.compile(layer, fullgraph=True, backend="aot_eager"))
        return {"different": sum(not torch.equal(a, b) for a, b in zip(by_kernels, again, strict=True))}
    errors = [error(a, b.double()) for a, b in zip(by_kernels, plain, strict=True)]
    products = sum(calls.count(name) for name in ("gate_up_kernel", "rows_kernel", "outer_kernel"))
    return {"error": max(errors), "products missing": 6 - products}


CHECKS["layer: top_k"] = lambda: layer_check("top_k", 0.0)
CHECKS["layer: relu"] = lambda: layer_check("relu", 0.0)
CHECKS["layer: capacity"] = lambda: layer_check("sigmoid", 0.6)
CHECKS["layer compiled"] = lambda: layer_check("top_k", 0.0, compiled=True)


def main() -> None:
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    assert torch.empty(8).isnan().all() and torch.ones(2).new_empty(8).isnan().all()
    torch.set_num_threads(1)
    use_kernels("triton")
    found: dict[str, dict[str, float]] = {}
    for name in sys.argv[1:] or list(CHECKS):
        try:
            found[name] = CHECKS[name]()
        except Exception:  # the others are worth knowing; the test of this one fails
            traceback.print_exc()
            found[name] = {"raised": math.inf}
    print(json.dumps(found))


if __name__ == "__main__":
    main()

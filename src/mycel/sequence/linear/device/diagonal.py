"""One chunk of linear attention with a decay for each key: its map of states, its outputs, and their gradients.

A program has one chunk of ``L`` tokens in float32: ``q``, ``k``, ``g`` (L, K) and ``v`` (L, V), all contiguous. What
decays between two tokens is summed for each pair, token by token from the later one back, as plain torch does it:
no exponent is positive, and nothing of the shape (L, L, K) is ever in memory, which plain torch holds several of.
"""

# mypy: ignore-errors
# ruff: noqa: N803, N806  (compile-time constants and matrices are capitals)
# Triton compiles these functions; Python's types do not describe them.
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["maps_back_kernel", "maps_kernel", "outputs_back_kernel", "outputs_kernel"]


@triton.jit
def _after(g, base, rows, keys, K, L: tl.constexpr, BK: tl.constexpr):
    """Sums of what decays after each token (L, K), and of all (K)."""
    after = tl.zeros((L, BK), dtype=tl.float32)
    for m in range(L):
        row = tl.load(g + base + m * K + keys, mask=keys < K, other=0.0)
        after = tl.where(rows < m, after + row, after)
    first = tl.sum(tl.where(rows == 0, after, 0.0), axis=0, keep_dims=True)
    return after, first + tl.load(g + base + keys, mask=keys < K, other=0.0)


@triton.jit
def maps_kernel(
    k, v, g, transition, update, K, V, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr
):
    """``M = e^G`` (K) and ``U = sum_j (e^(G - G_j) k_j) v_j^T`` (K, V), one block of values a program."""
    chunk, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, keys = tl.arange(0, L)[:, None], tl.arange(0, BK)[None, :]
    values = block * BV + tl.arange(0, BV)[None, :]
    after, whole = _after(g, chunk * L * K, rows, keys, K, L, BK)
    kept = tl.load(k + chunk * L * K + rows * K + keys, mask=keys < K, other=0.0) * tl.exp(after)
    brought = tl.load(v + chunk * L * V + rows * V + values, mask=values < V, other=0.0)
    U = tl.dot(tl.trans(kept), brought, input_precision=PRECISION)
    down = tl.arange(0, BK)[:, None]
    tl.store(update + chunk * K * V + down * V + values, U, mask=(down < K) & (values < V))
    if block == 0:
        tl.store(transition + chunk * K + keys, tl.exp(whole), mask=keys < K)


@triton.jit
def maps_back_kernel(
    k,
    v,
    g,
    d_transition,
    d_update,
    dk,
    dv,
    dg,
    K,
    V,
    L: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of ``k``, ``v`` and ``g`` through ``M`` and ``U``."""
    chunk = tl.program_id(0).to(tl.int64)
    rows, keys, down = tl.arange(0, L)[:, None], tl.arange(0, BK)[None, :], tl.arange(0, BK)[:, None]
    at = chunk * L * K + rows * K + keys
    after, whole = _after(g, chunk * L * K, rows, keys, K, L, BK)
    decayed = tl.exp(after)
    own = tl.load(k + at, mask=keys < K, other=0.0)
    d_kept = tl.zeros((L, BK), dtype=tl.float32)
    for start in range(0, V, BV):
        values = start + tl.arange(0, BV)[None, :]
        dU = tl.load(d_update + chunk * K * V + down * V + values, mask=(down < K) & (values < V), other=0.0)
        there = chunk * L * V + rows * V + values
        brought = tl.load(v + there, mask=values < V, other=0.0)
        d_kept = tl.dot(brought, tl.trans(dU), d_kept, input_precision=PRECISION)
        tl.store(dv + there, tl.dot(own * decayed, dU, input_precision=PRECISION), mask=values < V)
    d_own = d_kept * decayed
    tl.store(dk + at, d_own, mask=keys < K)
    d_after = own * d_own  # of each token's sum of later decays
    before = tl.cumsum(d_after, axis=0) - d_after
    dM = tl.load(d_transition + chunk * K + keys, mask=keys < K, other=0.0)
    tl.store(dg + at, before + dM * tl.exp(whole), mask=keys < K)


@triton.jit
def outputs_kernel(
    q, k, v, g, state, out, K, V, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr
):
    """``o_i = sum_(j <= i) (q_i . e^(G_i - G_j) k_j) v_j + S^T e^(G_i) q_i``, one block of values a program."""
    chunk, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, keys, across = tl.arange(0, L)[:, None], tl.arange(0, BK)[None, :], tl.arange(0, L)[None, :]
    base = chunk * L * K
    asked = tl.load(q + base + rows * K + keys, mask=keys < K, other=0.0)
    between = tl.zeros((L, BK), dtype=tl.float32)
    A = tl.zeros((L, L), dtype=tl.float32)
    for back in range(L):
        j = L - 1 - back
        row = tl.load(k + base + j * K + keys, mask=keys < K, other=0.0)
        seen = tl.sum(asked * tl.exp(between) * row, axis=1, keep_dims=True)
        A = tl.where((across == j) & (rows >= j), seen, A)
        between = tl.where(rows >= j, between + tl.load(g + base + j * K + keys, mask=keys < K, other=0.0), 0.0)
    values = block * BV + tl.arange(0, BV)[None, :]
    down = tl.arange(0, BK)[:, None]
    there = chunk * L * V + rows * V + values
    S = tl.load(state + chunk * K * V + down * V + values, mask=(down < K) & (values < V), other=0.0)
    o = tl.dot(A, tl.load(v + there, mask=values < V, other=0.0), input_precision=PRECISION)
    o = tl.dot(asked * tl.exp(between), S, o, input_precision=PRECISION)
    tl.store(out + there, o, mask=values < V)


@triton.jit
def outputs_back_kernel(
    q,
    k,
    v,
    g,
    state,
    d_out,
    dq,
    dk,
    dv,
    dg,
    d_state,
    K,
    V,
    L: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of all that ``outputs_kernel`` takes."""
    chunk = tl.program_id(0).to(tl.int64)
    rows, keys, across = tl.arange(0, L)[:, None], tl.arange(0, BK)[None, :], tl.arange(0, L)[None, :]
    down = tl.arange(0, BK)[:, None]
    base = chunk * L * K
    at = base + rows * K + keys
    asked = tl.load(q + at, mask=keys < K, other=0.0)
    dA = tl.zeros((L, L), dtype=tl.float32)
    d_through = tl.zeros((L, BK), dtype=tl.float32)  # of e^(G_i) q_i
    for start in range(0, V, BV):
        values = start + tl.arange(0, BV)[None, :]
        there = chunk * L * V + rows * V + values
        do = tl.load(d_out + there, mask=values < V, other=0.0)
        dA = tl.dot(do, tl.trans(tl.load(v + there, mask=values < V, other=0.0)), dA, input_precision=PRECISION)
        S = tl.load(state + chunk * K * V + down * V + values, mask=(down < K) & (values < V), other=0.0)
        d_through = tl.dot(do, tl.trans(S), d_through, input_precision=PRECISION)
    between = tl.zeros((L, BK), dtype=tl.float32)
    A = tl.zeros((L, L), dtype=tl.float32)
    d_asked = tl.zeros((L, BK), dtype=tl.float32)
    d_decay = tl.zeros((L, BK), dtype=tl.float32)
    for back in range(L):
        j = L - 1 - back
        row = tl.load(k + base + j * K + keys, mask=keys < K, other=0.0)
        decayed = tl.exp(between)
        seen = tl.sum(asked * decayed * row, axis=1, keep_dims=True)
        A = tl.where((across == j) & (rows >= j), seen, A)
        d_seen = tl.sum(tl.where((across == j) & (rows >= j), dA, 0.0), axis=1, keep_dims=True)
        d_asked += d_seen * decayed * row
        pair = d_seen * decayed * asked
        tl.store(dk + base + j * K + keys, tl.sum(pair, axis=0, keep_dims=True), mask=keys < K)
        # A decay is between the tokens before it and itself and those after it.
        d_decay += tl.where(rows > j, tl.cumsum(pair * row, axis=0, reverse=True), 0.0)
        between = tl.where(rows >= j, between + tl.load(g + base + j * K + keys, mask=keys < K, other=0.0), 0.0)
    until = tl.exp(between)
    through = asked * until
    tl.store(dq + at, d_asked + d_through * until, mask=keys < K)
    tl.store(dg + at, d_decay + tl.cumsum(d_through * through, axis=0, reverse=True), mask=keys < K)
    for start in range(0, V, BV):
        values = start + tl.arange(0, BV)[None, :]
        there = chunk * L * V + rows * V + values
        do = tl.load(d_out + there, mask=values < V, other=0.0)
        tl.store(dv + there, tl.dot(tl.trans(A), do, input_precision=PRECISION), mask=values < V)
        dS = tl.dot(tl.trans(through), do, input_precision=PRECISION)
        tl.store(d_state + chunk * K * V + down * V + values, dS, mask=(down < K) & (values < V))

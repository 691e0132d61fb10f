"""What one layer and the head take on one rank: products, scores, everything that is bound by memory, launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mycel.cost import Device
from mycel.planning.step.coefficients import Coefficients
from mycel.planning.step.points import Numbers, Points

__all__ = ["Layer", "head_seconds", "layer_seconds"]

#: Forward, the scores' products are two; backward twice as many, and flash attention makes the scores again.
_FLASH_BACKWARD = 2.5
#: A backward pass reads and writes about twice what a forward pass does.
_BACKWARD = 2.0
#: A fused loss writes a logit, reads it twice and writes its gradient in its place, in 16 bits.
_FUSED_LOGIT_BYTES = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Seconds of one layer of one micro-batch on one rank, without exchanges.

    Attributes:
        forward: of it.
        backward: of it, without anything done again.
        again: what recomputation adds.
        host: of the host for one layer forward, which hides behind the device or the device behind it.
        products: of all, in matrix products (what a compiler cannot make faster).
    """

    forward: Numbers
    backward: Numbers
    again: Numbers
    host: Numbers
    products: Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    """Seconds of operations and bytes on one device, as arrays of the points' length."""

    points: Points
    device: Device
    coefficients: Coefficients

    def product(self, rows: Numbers, columns: Numbers, inner: Numbers) -> Numbers:
        """Of a product of two matrices: as operations or as bytes, whichever takes longer.

        References:
            Williams et al., "Roofline: An Insightful Visual Performance Model", CACM 2009.
        """
        c, device = self.coefficients, self.device
        eight = device.float8_flops * c.float8_speedup
        peak = np.where(self.points.float8 > 0, max(eight, device.flops), device.flops)
        seconds = 2.0 * rows * columns * inner * (1.0 + c.matmul_rows / np.maximum(rows, 1.0))
        seconds = seconds / (peak * c.matmul_efficiency)
        moved = self.points.element_bytes * (rows * columns + rows * inner + columns * inner)
        longer: Numbers = np.maximum(seconds, self.memory(moved))
        return longer

    def memory(self, num_bytes: Numbers) -> Numbers:
        """Of bytes to or from the device's memory."""
        return num_bytes / (self.device.memory_gbps * 1e9 * self.coefficients.memory_efficiency)


def layer_seconds(points: Points, device: Device, coefficients: Coefficients) -> Layer:
    """Of one layer, with experts counted by their share of the layers.

    Args:
        points: jobs.
        device: what it runs on.
        coefficients: how near it comes to what the device can do.

    References:
        Narayanan et al., SC 2021, section 3.2 and appendix (operations of a layer under tensor parallelism);
        Korthikanti et al., MLSys 2023, section 4; Dao, "FlashAttention-2", ICLR 2024 (backward 2.5 times forward).
    """
    p, c = points, coefficients
    rates = _Rates(points=p, device=device, coefficients=c)
    tokens = p.tokens
    # Pieces of a layer are narrower products, one after the other.
    share = p.tp * p.coshard
    shapes = [
        (tokens, (p.heads + 2 * p.kv_heads) * p.head_dim / share, p.hidden, p.coshard),
        (tokens, p.hidden, p.heads * p.head_dim / share, p.coshard),
    ]
    dense = p.coshard * (1.0 - p.moe_share)
    shapes += _feed_forward(p, tokens, p.ffn, dense)
    if np.any(p.experts > 0):
        per_expert = np.where(p.experts > 0, tokens * p.top_k * p.ep / np.maximum(p.experts, 1.0), 1.0)
        count = p.moe_share * np.maximum(p.experts, 1.0) / p.ep
        shapes += _feed_forward(p, per_expert, p.expert_ffn, count)
        shapes += _feed_forward(p, tokens, p.shared_ffn, p.moe_share)
    forward = sum((n * rates.product(rows, cols, inner) for rows, cols, inner, n in shapes), np.zeros(len(p)))
    backward = sum(
        (
            n * (rates.product(rows, inner, cols) + rates.product(inner, cols, rows))
            for rows, cols, inner, n in shapes
        ),
        np.zeros(len(p)),
    )
    core, core_back, core_again = _attention(p, rates)
    alone = np.where(p.sequence_parallel > 0, 1.0 / p.tp, 1.0)
    fused = np.where(p.compiled > 0, c.compiled_elements, 1.0)
    elements = c.layer_elements * tokens * p.hidden * fused * (0.5 * alone + 0.5 / p.tp)
    around = rates.memory(p.element_bytes * elements)
    again = np.where(
        p.full > 0,
        forward + core + around,
        np.where(p.alternate > 0, 0.5 * forward + around, np.where(p.attention > 0, core_again, 0.0)),
    )
    # Pieces are done again one by one, and where a layer was before, attention is once more: for its result.
    attention = sum((n * rates.product(rows, cols, inner) for rows, cols, inner, n in shapes[:2]), core)
    again = np.where(p.coshard > 1, forward + core + around + np.where(p.full > 0, attention, 0.0), again)
    odd = (p.micro_batch * p.heads / p.tp) % 4 != 0
    host = c.launch_s * p.coshard * np.where(odd & (p.flash == 0), 1.0 + c.unfused_launch, 1.0)
    return Layer(
        forward=forward + core + around,
        backward=backward + core_back + _BACKWARD * around,
        again=again,
        host=host,
        products=forward + backward,
    )


def head_seconds(points: Points, device: Device, coefficients: Coefficients) -> Numbers:
    """Of the head and the loss, forward and backward, for one micro-batch on a rank of the last stage."""
    p, c = points, coefficients
    rates = _Rates(points=_sixteen(p), device=device, coefficients=c)
    rows, vocab = p.tokens, p.vocab / p.tp
    products = (
        rates.product(rows, vocab, p.hidden)
        + rates.product(rows, p.hidden, vocab)
        + rates.product(p.hidden, vocab, rows)
    )
    fused = np.where(p.compiled > 0, c.compiled_elements, 1.0)
    whole = np.where(p.tp > 1, 1.0, c.unsplit_head)
    moved = np.where(p.loss_fused > 0, _FUSED_LOGIT_BYTES, c.logit_bytes * fused)
    seconds: Numbers = products * whole + rates.memory(moved * rows * vocab)
    return seconds


def _feed_forward(
    p: Points, rows: Numbers, inner: Numbers, count: Numbers
) -> list[tuple[Numbers, Numbers, Numbers, Numbers]]:
    inner = np.maximum(inner, 1e-9) / (p.tp * p.coshard)
    return [(rows, inner * (1.0 + p.gated), p.hidden, count), (rows, p.hidden, inner, count)]


def _attention(p: Points, rates: _Rates) -> tuple[Numbers, Numbers, Numbers]:
    """Scores and their product with values: forward, backward, and what doing them again takes.

    Attention on the chip does half of the products (the rest is masked) at an efficiency of its own; attention that
    writes its scores does all of them and moves the scores through memory several times.
    """
    c, device = rates.coefficients, rates.device
    heads = p.micro_batch * p.heads / p.tp
    rows, keys = p.seq / p.cp, p.seq
    on_chip = 2.0 * heads * rows * keys * p.head_dim / (device.flops * c.attention_efficiency)
    written = heads * (rates.product(rows, keys, p.head_dim) + rates.product(rows, p.head_dim, keys))
    scores = rates.memory(p.element_bytes * c.softmax_elements * heads * rows * keys)
    forward = np.where(p.flash > 0, on_chip, written + scores)
    backward = np.where(p.flash > 0, _FLASH_BACKWARD * on_chip, 2.0 * written + 1.5 * scores)
    return forward, backward, np.where(p.flash > 0, 0.0, written + scores)


def _sixteen(p: Points) -> Points:
    """The same in 16 bits: heads stay there."""
    return replace(p, float8=np.zeros(len(p)))

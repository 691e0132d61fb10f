"""What experts compute: rows sorted by expert through two maps, whoever keeps the weights."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mycel.errors import UsageError
from mycel.moe.kernels import fused
from mycel.moe.kernels.choice import triton_takes
from mycel.moe.kernels.grouped_gemm import grouped_linear, groups_with_rows
from mycel.moe.slots import RoutingResult, narrow

__all__ = [
    "ApartWeights",
    "ExpertKind",
    "ExpertWeights",
    "OneExpert",
    "compute_dtype",
    "expert_mlp",
    "tokens_mlp",
]


class ExpertWeights(NamedTuple):
    """Weights of one call: ``gate_up [E, O, D]``, ``down [E, D, F]``, and biases ``[E, O]``, ``[E, D]`` or none."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def split(self, parts: Sequence[range]) -> list[ExpertWeights]:
        """Those of consecutive experts each; experts that are not there are left out."""
        here = self.gate_up.shape[0]
        sizes = [min(part.stop, here) - min(part.start, here) for part in parts]
        each = [[None] * len(parts) if t is None else torch.split(t, sizes) for t in self]
        return [ExpertWeights(*part) for part in zip(*each, strict=True)]


class OneExpert(Protocol):
    """An expert that computes by itself, as one whose weights are codes."""

    def through(self, rows_RD: Tensor, kind: ExpertKind) -> Tensor:
        """Its rows through both maps, shape ``[R, D]``."""


class ApartWeights(Protocol):
    """Weights that are not in one place, as those of experts in far memory; for inference."""

    def near(self, experts: Sequence[int]) -> AbstractContextManager[Sequence[ExpertWeights | OneExpert]]:
        """Each of these experts alone, ``E = 1``, as long as the context is open."""

    def split(self, parts: Sequence[range]) -> list[ExpertWeights]:
        """As of ``ExpertWeights``.

        Raises:
            UsageError: they cannot be taken in parts.
        """


class ExpertKind(NamedTuple):
    """What happens between and after the two maps.

    Attributes:
        activate: of the first map's rows, ``[R, O]`` to ``[R, F]``.
        fused: its name among those that kernels know, where nothing else stands in the way of one.
        fused_tokens: kernels may take tokens with their slots at once.
        after: of the second map's rows.
        watch: is told what comes out between the maps, ``[R, F]``, and the rows of each expert.
    """

    activate: Callable[[Tensor], Tensor]
    fused: str | None = None
    fused_tokens: bool = True
    after: Callable[[Tensor], Tensor] | None = None
    watch: Callable[[Tensor, Tensor], None] | None = None


def expert_mlp(rows_RD: Tensor, counts_E: Tensor, weights: ExpertWeights | ApartWeights, kind: ExpertKind) -> Tensor:
    """Every row through its expert.

    Args:
        rows_RD: sorted by expert.
        counts_E: rows of each expert, ``int64``; those of experts without weights are zero, and left out.
        weights: of the experts here.
        kind: of experts.

    Returns:
        Shape ``[R, D]``; rows after the last expert's are zero.

    Raises:
        UsageError: gradients are wanted of experts in far memory.
    """
    if not isinstance(weights, ExpertWeights):
        return _one_by_one(rows_RD, counts_E, weights, kind)
    counts_E = counts_E[: weights.gate_up.shape[0]]
    rows_RD = rows_RD.to(weights.gate_up.dtype)
    if _is_fused(weights, kind) and kind.fused is not None:
        return fused.experts_of_rows(rows_RD, counts_E, weights.gate_up, weights.down, kind.fused)
    with torch.autocast(rows_RD.device.type, enabled=False):
        biased = weights.gate_up_bias is not None or weights.down_bias is not None
        group_R = _group_of_rows(counts_E, rows_RD.shape[0]) if biased else None
        z_RO = grouped_linear(rows_RD, weights.gate_up, counts_E)
        inside_RF = kind.activate(_with_bias(z_RO, weights.gate_up_bias, group_R))
        if kind.watch is not None:
            kind.watch(inside_RF, counts_E)
        y_RD = _with_bias(grouped_linear(inside_RF, weights.down, counts_E), weights.down_bias, group_R)
        return y_RD if kind.after is None else kind.after(y_RD)


def _one_by_one(rows_RD: Tensor, counts_E: Tensor, weights: ApartWeights, kind: ExpertKind) -> Tensor:
    if torch.is_grad_enabled() and rows_RD.requires_grad:
        raise UsageError("experts in far memory have no gradients; call the model in torch.inference_mode()")
    active = groups_with_rows(counts_E)
    y_RD = torch.zeros_like(rows_RD)
    with weights.near([expert for expert, _, _ in active]) as brought:
        for (expert, begin, end), alone in zip(active, brought, strict=True):
            rows = rows_RD[begin:end]
            if isinstance(alone, ExpertWeights):
                y_RD[begin:end] = expert_mlp(rows, counts_E[expert : expert + 1], alone, kind)
            else:
                y_RD[begin:end] = alone.through(rows, kind)
    return y_RD


def tokens_mlp(
    x_TD: Tensor, routing: RoutingResult, weights: ExpertWeights | ApartWeights, kind: ExpertKind
) -> Tensor | None:
    """Tokens whose experts are all here to their weighted sums by one kernel; ``None`` where none does that."""
    if not isinstance(weights, ExpertWeights) or not kind.fused_tokens or not _is_fused(weights, kind):
        return None
    num_rows = None
    if not routing.full and not torch.compiler.is_compiling():
        routing, num_rows = narrow(routing)
    order = fused.sort_slots(routing.top_k_index, routing.num_experts, full=routing.full)
    here = weights.gate_up.shape[0]
    order = order._replace(slot_of_row=order.slot_of_row[:num_rows], counts=order.counts[:here])
    arguments = (routing.top_k_weights, weights.gate_up, weights.down, str(kind.fused))
    return fused.experts_of_tokens(x_TD.to(weights.gate_up.dtype), order, *arguments)


def _is_fused(weights: ExpertWeights, kind: ExpertKind) -> bool:
    """Whether both maps and the activation are one node of the graph: on GPUs, and wherever Triton computes."""
    known = kind.fused in fused.ACTIVATIONS and weights.gate_up_bias is None and kind.watch is None
    return known and (weights.gate_up.is_cuda or triton_takes(weights.gate_up))


def compute_dtype(rows: Tensor) -> torch.dtype:
    """The type of autocast where that is on and takes such rows, else the rows' own."""
    kind = rows.device.type
    if torch.is_autocast_enabled(kind) and rows.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return rows.dtype


def _group_of_rows(counts_E: Tensor, num_rows: int) -> Tensor:
    """Expert of each row; the number of experts for rows after the last one's."""
    rows = torch.arange(num_rows, device=counts_E.device)
    return torch.searchsorted(counts_E.cumsum(0), rows, right=True)


def _with_bias(rows_RO: Tensor, bias_EO: Tensor | None, group_R: Tensor | None) -> Tensor:
    """Each row plus its group's vector; rows after the last group's as they are."""
    if bias_EO is None or group_R is None:
        return rows_RO
    padded = torch.cat([bias_EO, bias_EO.new_zeros(1, bias_EO.shape[1])])
    return rows_RO + padded.index_select(0, group_R)

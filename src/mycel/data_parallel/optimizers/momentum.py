"""Optimizers whose momentum is what travels: strong frequencies of it (DeMo), or its signs (1-bit Adam)."""

from __future__ import annotations

from typing import Any

import torch

from mycel.data_parallel.optimizers.matrix import MatrixOptimizer

__all__ = ["DeMo", "OneBitAdam"]


class DeMo(MatrixOptimizer):
    """DeMo: each rank has a momentum of its own and tells a few frequencies of it; the update is the mean's sign.

    For a model in DDP, after ``attach``. A rank sends ``top_k`` numbers and their places, 6 bytes each, of every
    chunk to every other rank. Any parameter can be moved by it; groups that say ``algorithm="adamw"`` are AdamW's.

    Args:
        params: parameters, named parameters or groups; as of ``Dion``.
        lr: by which every element moves in every step.
        momentum: share of the momentum that stays (beta in the paper).
        chunk: side of the squares into which matrices are cut, and length of vectors' chunks; at most 256. Of
            tensors of more dimensions, all but the first count as one.
        top_k: frequencies of each chunk that travel in a step.
        weight_decay: times ``lr``, taken off the weights in each step.
        wire: type in which frequencies travel, such as ``torch.bfloat16``; ``None``: the parameters'.
        betas: of AdamW.
        eps: of AdamW.

    Raises:
        UsageError: an option or a parameter that its algorithm cannot do.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 4))
        >>> optimizer = DeMo([weight], lr=0.5, top_k=1)
        >>> weight.grad = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
        >>> optimizer.step()
        >>> weight.tolist()  # the strongest frequency is the mean
        [[-0.5, -0.5, -0.5, -0.5], [-0.5, -0.5, -0.5, -0.5]]

    References:
        Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", 2024, arXiv 2411.19870, algorithm 1.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        momentum: float = 0.999,
        chunk: int = 64,
        top_k: int = 32,
        weight_decay: float = 0.0,
        wire: torch.dtype | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        given: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "wire": wire}
        given |= {"chunk": chunk, "top_k": top_k, "betas": betas, "eps": eps}
        super().__init__(params, {"algorithm": "demo", **given}, 0)


class OneBitAdam(MatrixOptimizer):
    """1-bit Adam: AdamW for ``warm_up`` steps, then its momentum travels as signs and second moments stay.

    For a model in DDP, after ``attach``. Groups that say ``algorithm="adamw"`` are AdamW's for ever; tables of
    tokens belong there (``matrix_groups``), since second moments of rows that were not seen in the warm-up say
    nothing.

    Args:
        params: parameters, named parameters or groups; as of ``Dion``.
        lr: as of AdamW.
        warm_up: steps of AdamW, of each parameter; a sixth of the training in the paper. Warm-up of the rate should
            be over by then, and second moments steady.
        betas: of AdamW and of the momentum.
        eps: of AdamW.
        weight_decay: times ``lr``, taken off the weights in each step.

    Raises:
        UsageError: an option or a parameter that its algorithm cannot do.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = OneBitAdam([weight], lr=0.1, warm_up=1, betas=(0.0, 0.999))
        >>> for gradient in (2.0, 4.0):  # twice as long under the same second moment
        ...     weight.grad = torch.full((2,), gradient)
        ...     optimizer.step()
        >>> [round(x, 4) for x in weight.tolist()]
        [-0.3, -0.3]

    References:
        Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML
        2021, arXiv 2102.02888, algorithm 1.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        warm_up: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        given = {"lr": lr, "warm_up": warm_up, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"algorithm": "one_bit_adam", **given}, 0)

"""1-bit Adam: Adam until its second moments are steady, then momentum in one bit a value under those that stay.

Feedback before Adam is weak, since what is paid late meets second moments that have not seen it. Second moments that
no longer change make Adam linear in the gradients, and what is linear can owe:

    m_i = beta1 m + (1 - beta1) g_i + owed_i,  m = signs of m_i, averaged, signs again,  X -= lr m / (sqrt(v) + eps)

All ranks go on with the same ``m``, which is what travelled. ``Scattered`` has the feedback of both sides, worker and
server, in one memory, and a rank's own share of the vector stays exact.

Every parameter has its own warm-up, so that one that is used late has second moments too. An element whose second
moment is zero when it freezes (a gradient that was zero in every step) would move by ``1 / eps``: it gets its
tensor's mean.

References:
    Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML 2021,
    arXiv 2102.02888, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mycel.data_parallel.compress.context import Context
from mycel.data_parallel.compress.rounds import Item
from mycel.data_parallel.compress.sign import Sign
from mycel.data_parallel.exchange import exchange
from mycel.data_parallel.optimizers import adamw_update
from mycel.data_parallel.optimizers.entries import Change, Entry, Ranks
from mycel.data_parallel.stats import CommStats

__all__ = ["changes", "is_warm", "warm_up"]


def is_warm(options: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether a parameter's second moments stay what they are; the same on all ranks."""
    return float(state.get("step", 0)) >= float(options["warm_up"])


def warm_up(entries: Sequence[Entry]) -> None:
    """A step of AdamW, with averaged gradients; the last one of a warm-up freezes the second moments."""
    adamw_update.apply(entries)
    for entry in entries:
        if is_warm(entry.options, entry.state):
            _freeze(entry)


def changes(entries: Sequence[Entry], ranks: Ranks, stats: CommStats) -> list[Change]:
    """A change for each entry, of parameters that are warm; two collectives for all of them.

    Where gradients are averaged already, momenta stay exact and nothing travels.
    """
    momenta = [
        torch.lerp(entry.kept("exp_avg"), entry.gradient, 1 - entry.options["betas"][0]).add_(entry.kept("owed"))
        for entry in entries
    ]
    if ranks.replicas is None:
        return [_change(entry, m, torch.zeros_like(m)) for entry, m in zip(entries, momenta, strict=True)]
    rank, size = ranks.replicas.rank(), ranks.replicas.size()
    items = [
        Item(
            tensor=momentum.float().contiguous(),
            context=Context(name=entry.name, step=stats.steps, rank=rank, world_size=size),
        )
        for entry, momentum in zip(entries, momenta, strict=True)
    ]
    outcomes = exchange([Sign().converse(items, keep_residual=True)], ranks.replicas, stats)[0]
    made = []
    for entry, outcome in zip(entries, outcomes, strict=True):
        assert outcome.residual is not None
        made.append(_change(entry, outcome.mean, outcome.residual))
    return made


def _freeze(entry: Entry) -> None:
    second = entry.kept("exp_avg_sq")
    if not second.any():  # nothing came in the whole warm-up, so it begins again
        entry.state["step"].zero_()
        return
    second /= 1 - entry.options["betas"][1] ** float(entry.state["step"])
    second[second == 0] = second.mean()


def _change(entry: Entry, momentum: Tensor, owed: Tensor) -> Change:
    def apply() -> None:
        entry.kept("exp_avg").copy_(momentum)
        entry.kept("owed").copy_(owed)
        entry.state["step"] += 1
        unbiased = 1 - entry.options["betas"][0] ** float(entry.state["step"])
        below = entry.kept("exp_avg_sq").sqrt().add_(entry.options["eps"])
        entry.move(lambda x, factor: x.addcdiv_(entry.kept("exp_avg"), below, value=factor), 1 / unbiased)

    return Change(values=momentum, apply=apply)

"""AdamW for what is no matrix of a hidden layer: torch's own, on this rank's part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from mycel.data_parallel.optimizers.entries import Entry

__all__ = ["apply"]


def apply(entries: Sequence[Entry]) -> None:
    """Change parameters and state of the entries, group by group."""
    groups: dict[int, list[Entry]] = {}
    for entry in entries:
        entry.state.setdefault("step", torch.zeros(()))
        groups.setdefault(id(entry.options), []).append(entry)
    for members in groups.values():
        options = members[0].options
        adamw(
            [entry.local for entry in members],
            [entry.gradient for entry in members],
            [entry.kept("exp_avg") for entry in members],
            [entry.kept("exp_avg_sq") for entry in members],
            [],
            [entry.state["step"] for entry in members],
            amsgrad=False,
            beta1=options["betas"][0],
            beta2=options["betas"][1],
            lr=options["lr"],
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            maximize=False,
        )

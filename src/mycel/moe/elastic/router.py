"""A router from a latency target to widths, and the surrogate that tells it what they cost in loss.

Widths are chosen, not computed, so the model's loss has no gradient with respect to what chose them. A small network
learns to predict the loss from choices that were tried; the router descends on its prediction, which has a gradient,
and on the distance between the latency of what it chooses and what was asked.

References:
    R. Cai et al., "Flextron", ICML 2024, arXiv 2406.10260, section 4 (routers; surrogate model).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycel.arguments import real_number, whole_number
from mycel.moe.elastic.latency import LatencyTable

__all__ = ["WidthRouter", "train_width_router"]


class WidthRouter(nn.Module):
    """From a latency to a width for each layer of experts.

    Args:
        table: of the layers' latencies.
        hidden: width of the network.

    Examples:
        >>> table = LatencyTable(widths=((4, 8),) * 2, seconds=((1.0, 2.0),) * 2, source="modelled")
        >>> router = WidthRouter(table)
        >>> router.widths(2.0), router.widths(4.0)
        ((4, 4), (8, 8))
    """

    def __init__(self, table: LatencyTable, hidden: int = 32) -> None:
        super().__init__()
        self.table = table
        self.sizes = [len(widths) for widths in table.widths]
        self.maps = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, sum(self.sizes)))
        least, greatest = table.range
        self.register_buffer("span", torch.tensor([least, max(greatest - least, 1e-30)], dtype=torch.float64))

    def forward(self, target_s: Tensor) -> list[Tensor]:
        """Logits of each layer's widths, ``[targets, widths]``.

        Args:
            target_s: seconds, ``[targets]``.
        """
        span: Tensor = self.get_buffer("span")
        asked = ((target_s.double() - span[0]) / span[1]).float()
        logits: Tensor = self.maps(torch.stack([asked, asked.square()], dim=1) * 4 - 2)
        return list(torch.split(logits, self.sizes, dim=1))

    @torch.no_grad()
    def widths(self, target_s: float, *, tolerance: float | None = 0.05) -> tuple[int, ...]:
        """What to ``use`` for a latency.

        Args:
            target_s: of all layers' experts together.
            tolerance: how far from it the widths' latency may be: of those that come as near, the likeliest;
                ``None``: the likeliest of each layer, however long they take.

        Raises:
            UsageError: no widths come as near.
        """
        target_s = real_number(target_s, "target_s", above=0)
        likely = [logits[0].softmax(0).tolist() for logits in self(torch.tensor([target_s]))]
        if tolerance is not None:
            return self.table.choose(likely, target_s=target_s, tolerance=tolerance)
        best = [layer.index(max(layer)) for layer in likely]
        return tuple(widths[place] for widths, place in zip(self.table.widths, best, strict=True))


def train_width_router(
    router: WidthRouter,
    loss_at: Callable[[Sequence[int]], float],
    *,
    steps: int = 400,
    weight: float = 4.0,
    lr: float = 1e-2,
    seed: int = 0,
) -> list[float]:
    """Train a router and its surrogate together; the model itself is only evaluated, once a step.

    Args:
        router: is changed.
        loss_at: the model's loss with these widths, on some data; of all ranks where data are divided, so that they
            train the same router.
        steps: of training, each with one evaluation.
        weight: of the distance from the target, as a share of it, beside the loss in units of its own spread.
        lr: learning rate of both networks.
        seed: of targets and choices: the same on all ranks.

    Returns:
        How far the surrogate was from the loss, in each step, in units of the losses' spread.

    Raises:
        UsageError: no steps.

    Examples:
        >>> table = LatencyTable(widths=((1, 2),) * 2, seconds=((1.0, 2.0),) * 2, source="modelled")
        >>> _ = torch.manual_seed(0)
        >>> router = WidthRouter(table)
        >>> _ = train_width_router(router, lambda widths: 1.0 / widths[0], steps=200)  # only the first one matters
        >>> router.widths(3.0)
        (2, 1)
    """
    steps = whole_number(steps, "steps", least=1)
    made = torch.Generator().manual_seed(seed)
    surrogate = _Surrogate(sum(router.sizes), seed)
    router_steps = torch.optim.Adam(router.parameters(), lr=lr)
    surrogate_steps = torch.optim.Adam(surrogate.parameters(), lr=lr)
    seconds = [torch.tensor(layer) for layer in router.table.seconds]
    least, greatest = router.table.range
    tried: list[Tensor] = []
    losses: list[float] = []
    away: list[float] = []
    for step in range(steps):
        targets = least + (greatest - least) * torch.rand(16, generator=made, dtype=torch.float64)
        temperature = max(0.3, 1.0 - step / steps)
        # What the surrogate learns of has to be tried: half of the choices are the router's, half anybody's.
        with torch.no_grad():
            logits = [one[:1] * (step % 2) for one in router(targets)]
            picks = [_gumbel(one, made, 1.0).argmax(1) for one in logits]
        losses.append(loss_at([w[int(p)] for w, p in zip(router.table.widths, picks, strict=True)]))
        tried.append(torch.cat([functional.one_hot(p, n) for p, n in zip(picks, router.sizes, strict=True)], 1)[0])
        away.append(_learn(surrogate, surrogate_steps, tried, losses, made))
        soft = [_gumbel(one, made, temperature).softmax(1) for one in router(targets)]
        latency = torch.stack([choice @ takes for choice, takes in zip(soft, seconds, strict=True)]).sum(0)
        missed = ((latency - targets) / targets).abs().mean().float()
        objective = surrogate(torch.cat(soft, dim=1)).mean() + weight * missed
        router_steps.zero_grad()
        objective.backward()
        router_steps.step()
    return away


class _Surrogate(nn.Module):
    """From choices, one-hot or soft, to the loss; in units of the spread of those that it has seen."""

    def __init__(self, num_choices: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.maps = nn.Sequential(nn.Linear(num_choices, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, choices: Tensor) -> Tensor:
        predicted: Tensor = self.maps(choices.float()).squeeze(1)
        return predicted


def _learn(
    surrogate: _Surrogate,
    optimizer: torch.optim.Optimizer,
    tried: Sequence[Tensor],
    losses: Sequence[float],
    made: torch.Generator,
) -> float:
    """One step on a batch of what was tried; the error of the latest, before the step."""
    known = torch.tensor(losses)
    spread = float(known.std()) if len(losses) > 1 else 1.0
    scaled = (known - known.mean()) / max(spread, 1e-12)
    batch = torch.randint(len(tried), (32,), generator=made)
    batch[0] = len(tried) - 1
    errors = surrogate(torch.stack([tried[int(i)] for i in batch])) - scaled[batch]
    optimizer.zero_grad()
    errors.square().mean().backward()
    optimizer.step()
    return abs(float(errors[0].detach()))


def _gumbel(logits: Tensor, made: torch.Generator, temperature: float) -> Tensor:
    uniform = torch.rand(logits.shape, generator=made).clamp(1e-9, 1 - 1e-7)
    return (logits - torch.log(-torch.log(uniform))) / temperature

"""What DAEF is compared with: an autoencoder of the same widths, trained at one place, and by federated averaging.

References:
    B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (FedAvg), AISTATS
    2017, arXiv 1602.05629.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

RATE, BATCH = 5e-3, 32


def network(width: int, widths: list[int], seed: int) -> nn.Sequential:
    """Logistic hidden layers, as DAEF has them."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in zip([width, *widths], widths, strict=False):
        layers += [nn.Linear(before, after), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], width)).double()


def train(model: nn.Module, x: Tensor, epochs: int, seed: int) -> None:
    """Adam on the squared error."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    made = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for some in torch.randperm(len(x), generator=made).split(BATCH):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[some]), x[some]).backward()
            optimizer.step()


@torch.no_grad()
def errors(model: nn.Module, x: Tensor) -> Tensor:
    """See ``DAEF.errors``; of inputs that are scaled already."""
    difference: Tensor = model(x) - x
    return difference.square().mean(1)


def fed_avg(model: nn.Module, own: Tensor, rounds: int, epochs: int, seed: int) -> Iterator[int]:
    """Rounds of local training and averaging, weighted by examples; gives the bytes a rank has sent after each.

    Args:
        model: the same on all ranks; is changed.
        own: examples of this rank.
        rounds: at most.
        epochs: between two averages.
        seed: of this rank's batches.
    """
    size = dist.get_world_size()
    sent = 0
    share = torch.tensor(float(len(own)), dtype=torch.float64)
    total = share.clone()
    dist.all_reduce(total)
    for number in range(rounds):
        train(model, own, epochs, seed * 1000 + number)
        with torch.no_grad():
            flat = nn.utils.parameters_to_vector(model.parameters()) * (share / total)
            dist.all_reduce(flat)
            nn.utils.vector_to_parameters(flat, model.parameters())
        sent += 2 * (size - 1) * 4 * flat.numel() // size  # as float32, which is enough for it
        yield sent

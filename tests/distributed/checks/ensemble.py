"""What every rank runs for ``test_ensemble.py``; the reference has all members in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mycel.data_parallel.ensemble import Ensemble, MultipleChoice
from mycel.data_parallel.ensemble.choice import choose, measures
from mycel.errors import UsageError

CHOICES = (MultipleChoice(overlap=1, beta=0.0), MultipleChoice(overlap=2), MultipleChoice(labels="stochastic"))
STEPS, BATCH = 4, 12


def member(number: int) -> nn.Sequential:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=generator), torch.randint(0, 3, (BATCH,), generator=generator)


def go(model: nn.Module, loss: Tensor) -> None:
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.3 * parameter.grad


def alone(choice: MultipleChoice, size: int, drawn: list[list[Tensor]]) -> tuple[list[list[float]], list[nn.Module]]:
    """Losses by step and member, and the members, all in this process."""
    models: list[nn.Module] = [member(m) for m in range(size)]
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        outputs = [model(x) for model in models]
        told = [measures(logits, y) for logits in outputs]
        chosen = choose(
            torch.stack([t[0].detach() for t in told]), torch.stack([t[1].detach() for t in told]), choice
        )
        losses.append([])
        for number, (model, (errors, divergences)) in enumerate(zip(models, told, strict=True)):
            unknown = divergences
            if choice.labels == "stochastic":
                unknown = functional.cross_entropy(outputs[number], drawn[step][number], reduction="none")
            own = torch.where(chosen[number], errors, choice.beta * unknown).mean()
            losses[-1].append(float(own))
            go(model, own)
    return losses, models


def same_as_one_process(rank: int, size: int) -> dict[str, Any]:
    """Whether losses and weights equal those of one process, bit for bit; bytes a step."""
    found: dict[str, Any] = {}
    for choice in CHOICES:
        ensemble, model = Ensemble(choice), member(rank)
        drawn = [[_drawn(ensemble, step, m) for m in range(size)] for step in range(STEPS)]
        losses = []
        for step in range(STEPS):
            x, y = batch(step)
            own = ensemble.loss(model(x), y)
            losses.append(float(own))
            go(model, own)
        wanted, models = alone(choice, size, drawn)
        mine = zip(model.parameters(), models[rank].parameters(), strict=True)
        found[f"{choice}"] = losses == [each[rank] for each in wanted] and all(torch.equal(a, b) for a, b in mine)
        sent = ensemble.meter.total(["choice"]) / STEPS / (size - 1) if size > 1 else 8.0 * BATCH
        found["bytes"] = found.get("bytes", True) and sent == 8 * BATCH
        x, y = batch(99)
        scores = ensemble.evaluate(model(x), y)
        right = torch.stack([m(x).argmax(1) == y for m in models])
        found["oracle"] = scores.oracle_error == 1 - float(right.any(0).double().mean())
        said = torch.stack([functional.softmax(m(x), 1).double() for m in models]).mean(0).argmax(1)
        found["top1"] = scores.top1_error == 1 - float((said == y).double().mean())
    found["sharing"] = sharing(rank, size)
    return found


def _drawn(ensemble: Ensemble, step: int, number: int) -> Tensor:
    """Labels that a member draws, by the function of seed, step and member that all of them use."""
    from mycel.wire.noise import uniform

    return (uniform(ensemble._seed_of(step, 0, number), BATCH) * 3).long()


def sharing(rank: int, size: int) -> float:
    """Feature sharing: values are as the masks say, and gradients come back from whoever took the features."""
    ensemble = Ensemble(seed=5)
    features = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    shared = ensemble.share(features)
    (shared * (rank + 1)).sum().backward()
    each = [torch.randn(4, 5, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    masks: list[Any] = [None] * size
    mine = [((shared - features).detach() if size == 2 else None)]
    dist.all_gather_object(masks, mine[0])
    wrong = 0.0
    if size == 2:  # whatever of the other's came, came as it is or not at all, and its gradient goes where it is from
        other = each[1 - rank]
        taken = masks[rank].abs() > 1e-6
        wrong = float((masks[rank] - taken * other).abs().max())
        back = (rank + 1) + (masks[1 - rank].abs() > 1e-6) * (2 - rank)
        wrong = max(wrong, float((features.grad - back).abs().max()))
        wrong = max(wrong, 0.0 if 0.2 < float(taken.float().mean()) < 1 else 1.0)
    steady = ensemble.share(each[rank], training=False)
    total = each[rank] + 0.7 * (sum(each) - each[rank])
    return max(wrong, float((steady - total).abs().max()))


def groups(rank: int, size: int) -> bool:
    """Members that are data-parallel groups: a mesh of replicas and members; replicas stay equal."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replica", "member"))
    number, replica = mesh.get_local_rank("member"), mesh.get_local_rank("replica")
    model = DistributedDataParallel(member(number), process_group=mesh["replica"].get_group())
    ensemble = Ensemble(MultipleChoice(overlap=1), group=mesh["member"].get_group())
    for step in range(STEPS):
        x, y = batch(step * (size // 2) + replica)
        go(model, ensemble.loss(model(x), y))
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    every = [torch.empty_like(flat) for _ in range(size)]
    dist.all_gather(every, flat)
    same = all(torch.equal(every[i], every[i % 2]) for i in range(size))
    return same and not torch.equal(every[0], every[1])


def different_batches(rank: int, size: int) -> list[str]:
    """What members are told that do not have the same examples."""
    told = []
    ensemble = Ensemble(MultipleChoice())
    for count, target in ((3 + rank, 0), (3, rank)):
        try:
            ensemble.loss(torch.zeros(count, 2, requires_grad=True), torch.full((count,), target))
        except UsageError as error:
            told.append(str(error))
    try:
        Ensemble(MultipleChoice(overlap=size + 1))
    except UsageError as error:
        told.append(str(error))
    try:
        ensemble.evaluate(torch.zeros(3, 2), torch.zeros(4, dtype=torch.int64))
    except UsageError as error:
        told.append(str(error))
    return told

"""Ranks that share sequences within a budget of memory, by as many as it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mycel.errors import SynthesisError, UsageError
from mycel.memory import Fitted, fit
from mycel.memory.needs import counted_peak
from mycel.sequence import SequenceDegrees

WIDTH, LAYERS, TOKENS, RUNS = 32, 4, 384, 30


class Layer(nn.Module):
    """Attention and a network."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    """A token's loss is what it predicts of itself: there are no labels to shift."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(61, WIDTH), nn.Linear(WIDTH, 61)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), ids, reduction="none")


def ids(step: int, replica: int) -> Tensor:
    """What ranks get that share a sequence."""
    return torch.randint(0, 61, (1, TOKENS), generator=torch.Generator().manual_seed(100 * step + replica))


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and AdamW, the same everywhere."""
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def summed(losses: Tensor) -> Tensor:
    """Of the tokens here."""
    return losses.sum()


def alone(num_replicas: int, steps: int) -> list[float]:
    """Losses of one process on all replicas' batches."""
    model, optimizer = made()
    found = []
    for step in range(steps):
        loss = torch.stack([model(ids(step, replica)).mean() for replica in range(num_replicas)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, fitted: Fitted, number: int) -> float:
    """One step, with gradients averaged by hand; its loss."""
    here = fitted.sequence.shard(ids(number, fitted.sequence.replica))
    size = dist.get_world_size()
    loss = fitted.sequence.mean(model(here), TOKENS * size // fitted.degree)
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= size
    optimizer.step()
    optimizer.zero_grad()
    return float(fitted.sequence.average(loss))


def least(degree: int) -> int:
    """The smallest budget in which so many ranks can share a sequence."""
    model, optimizer = made()
    try:
        fit(model, optimizer, (ids(0, 0),), budget=1, loss=summed, degrees=SequenceDegrees([degree]))
    except SynthesisError as error:
        return int(str(error).split("which needs ")[1].split(",")[0])
    raise AssertionError("a byte is enough")


def fits(rank: int, world_size: int) -> list[dict[str, Any]]:
    """What is chosen for all that one rank needs, for half of it, and for too little for fewer than all ranks.

    And what is learnt then, and taken.
    """
    model, optimizer = made()
    with fit(model, optimizer, (ids(0, 0),), budget=1 << 30, loss=summed, degrees=SequenceDegrees([1])) as fitted:
        peak = fitted.needs.peak
    small = (least(world_size) + least(world_size // 2)) // 2
    found = []
    for budget in (peak, peak // 2, small):
        model, optimizer = made()
        with fit(model, optimizer, (ids(0, 0),), budget=budget, loss=summed, degrees=SequenceDegrees()) as fitted:
            losses = [step_of(model, optimizer, fitted, step) for step in range(3)]
            found.append(
                {
                    "way": fitted.way,
                    "degree": fitted.degree,
                    "choices": [(c.degree, c.way, c.peak, c.seconds) for c in fitted.choices],
                    "losses": losses,
                    "wanted": alone(world_size // fitted.degree, 3),
                    "told": fitted.explain(),
                }
            )
        found[-1]["given back"] = model(ids(0, 0)).shape == (1, TOKENS)
    return found


def _counted(model: nn.Module, backward: Callable[[], None]) -> int:
    model.zero_grad()
    return counted_peak(backward)


def predicted(rank: int, world_size: int) -> dict[str, float]:
    """Predicted peaks over counted ones, with everything near, by degree and way of attention."""
    found = {}
    for degree, way in ((1, "auto"), (world_size, "needed"), (world_size, "ring"), (world_size, "ulysses")):
        model, optimizer = made()
        degrees = SequenceDegrees([degree], way=way)  # type: ignore[arg-type]
        with fit(model, optimizer, (ids(0, 0),), budget=1 << 30, loss=summed, degrees=degrees) as fitted:
            step_of(model, optimizer, fitted, 0)
            here = fitted.sequence.shard(ids(1, fitted.sequence.replica))
            states = sum(3 * p.nbytes for p in model.parameters())
            backward = lambda: fitted.sequence.mean(model(here), TOKENS).backward()  # noqa: B023, E731 (called here)
            # What a collective's own thread lets go of last is not heard: in up to four of five runs that adds.
            counted = states + here.nbytes + min(_counted(model, backward) for _ in range(RUNS))
            found[f"{degree} by {way}"] = fitted.needs.peak / counted
    return found


def refused(rank: int, world_size: int) -> list[str]:
    """What is said where nothing fits, of degrees that do not divide, and of models whose exchanges are unknown."""
    model, optimizer = made()
    said = []
    for batch, budget, degrees in (
        ((ids(0, 0),), 20_000, lambda: SequenceDegrees()),
        ((ids(0, 0),), 1 << 30, lambda: SequenceDegrees([world_size + 1])),
        ((ids(0, 0),), 1 << 30, lambda: [1, 2]),
        ((ids(0, 0), ids(0, 0)), 1 << 30, lambda: SequenceDegrees()),
    ):
        try:
            fit(model, optimizer, batch, budget=budget, loss=summed, degrees=degrees())  # type: ignore[arg-type]
        except (SynthesisError, UsageError) as error:
            said.append(str(error))
    said.append(str(tuple(model(ids(0, 0)).shape)))  # nothing of it stays
    return said


def hugging_face(rank: int, world_size: int) -> list[dict[str, Any]]:
    """A Llama that is not edited: what is chosen for two budgets, and losses beside those of one process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 4}

    def llama() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    tokens = torch.randint(0, 64, (1, 256), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    model, optimizer = llama()
    wanted = []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    found = []
    peak = 0
    for part in (None, 0.6, 0.35):
        model, optimizer = llama()
        budget = 1 << 30 if part is None else round(part * peak)
        # Ranks that do not share a sequence get the same one, so that losses are those of one process.
        with fit(model, optimizer, batch, budget=budget, degrees=SequenceDegrees()) as fitted:
            peak = peak or fitted.needs.peak
            losses = []
            for _ in range(3):
                loss = model(**fitted.sequence.shard(batch)).loss
                loss.backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world_size
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(fitted.sequence.average(loss)))
            found.append({"way": fitted.way, "degree": fitted.degree, "losses": losses, "told": fitted.explain()})
            found[-1]["wanted"] = wanted
    return found

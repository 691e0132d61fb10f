"""Proximal policy optimization with environments on several ranks: the same parameters however they are divided.

Every environment draws the noise of its actions from its own number, mini-batches are the same steps of all
environments, and advantages are normalised over all ranks by one sum of three numbers. What differs between one rank
with four environments and four with one each is the order of additions, in float64.

Where some ranks' environments are slow, ``preempt`` has them stop when most others are through: nobody waits for the
slowest, samples that are missing are missing from the means, and results depend on who was how fast.

References:
    J. Schulman et al., "Proximal Policy Optimization Algorithms", 2017, arXiv 1707.06347.
    J. Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", ICLR 2016.
    B. Jaeger et al., "CaRL", 2025, arXiv 2504.17838 (mini-batches that grow with the ranks).
    E. Wijmans et al., "DD-PPO", ICLR 2020, arXiv 1911.00357, section 3 (pre-emption of stragglers).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mycel.errors import UsageError

Array = NDArray[np.float64]


class World(Protocol):
    """Several environments that are stepped together."""

    observations: int
    actions: int
    discrete: bool

    def observe(self) -> Array:
        """What each sees."""
        ...

    def step(self, actions: Array) -> tuple[Array, NDArray[np.bool_], Array]:
        """Rewards, which episodes are over, and their scores, nan for the others."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of one training.

    Attributes:
        environments: over all ranks; each rank has as many.
        horizon: steps of each between two updates.
        minibatch: samples over all ranks that one optimizer step sees.
        epochs: times that an update goes through its samples.
        rate: of Adam at the beginning; it falls linearly to nothing.
        discount: of rewards a step later.
        smoothing: of advantages, lambda.
        clip: of the ratio of probabilities.
        entropy: weight of the policy's entropy.
        steps: of all environments together.
        preempt: share of ranks that are through with their steps when the others stop; with 1 nobody is stopped.
        seed: decides everything, unless ranks are stopped.
    """

    environments: int = 16
    horizon: int = 256
    minibatch: int = 256
    epochs: int = 4
    rate: float = 1e-3
    discount: float = 0.99
    smoothing: float = 0.95
    clip: float = 0.2
    entropy: float = 0.0
    steps: int = 61_440
    preempt: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.minibatch % self.environments or not self.environments <= self.minibatch <= self.samples:
            raise UsageError(
                f"a mini-batch of {self.minibatch} samples: it has the same steps of all {self.environments} "
                f"environments, so it is a multiple of that, and at most {self.samples}"
            )
        if not 0 < self.preempt <= 1:
            raise UsageError(f"preempt {self.preempt}: a share of the ranks, above 0 and at most 1")

    @property
    def samples(self) -> int:
        """Between two updates."""
        return self.environments * self.horizon


@dataclass(slots=True)
class Learned:
    """What training gave, the same on every rank but for the seconds.

    Attributes:
        scores: of all episodes that ended in an update, their mean, and nan where none did.
        seconds: of the whole training.
        acting_s: of these, while environments were stepped.
        steps: of all ranks' environments.
    """

    scores: list[float] = field(default_factory=list)
    seconds: float = 0.0
    acting_s: float = 0.0
    steps: int = 0

    def last(self, share: float = 0.2) -> float:
        """Mean score of the last updates."""
        tail = [s for s in self.scores[-max(1, round(share * len(self.scores))) :] if not math.isnan(s)]
        return sum(tail) / len(tail) if tail else float("nan")


class Policy(nn.Module):
    """Two small networks: what to do, and what that is worth."""

    def __init__(self, world: World, width: int = 64) -> None:
        super().__init__()

        def layers(outputs: int, gain: float) -> nn.Sequential:
            made = nn.Sequential(
                nn.Linear(world.observations, width),
                nn.Tanh(),
                nn.Linear(width, width),
                nn.Tanh(),
                nn.Linear(width, outputs),
            )
            for layer in made[::2]:
                nn.init.orthogonal_(layer.weight, math.sqrt(2.0))
                nn.init.zeros_(layer.bias)
            nn.init.orthogonal_(made[-1].weight, gain)
            return made

        self.acts, self.worth = layers(world.actions, 0.01), layers(1, 1.0)
        self.discrete = world.discrete
        self.spread = nn.Parameter(torch.full((0 if world.discrete else world.actions,), -0.5))

    def forward(self, seen: Tensor) -> tuple[torch.distributions.Distribution, Tensor]:
        """Distributions of actions, and values, ``[samples]``."""
        outputs, worth = self.acts(seen), self.worth(seen)[:, 0]
        if self.discrete:
            return torch.distributions.Categorical(logits=outputs, validate_args=False), worth
        scale = self.spread.exp().expand_as(outputs)
        normal = torch.distributions.Normal(outputs, scale, validate_args=False)
        return torch.distributions.Independent(normal, 1, validate_args=False), worth


@dataclass(slots=True)
class Rollout:
    """Steps of this rank's environments, ``[steps, environments, ...]``; fewer than the horizon if it was stopped."""

    seen: Tensor
    actions: Tensor
    chances: Tensor
    gains: Tensor
    returns: Tensor


def share(settings: Settings) -> range:
    """Numbers of the environments of this rank.

    Raises:
        UsageError: ranks would have different numbers of them, or none.
    """
    rank, size = _rank_and_size()
    if settings.environments % size:
        raise UsageError(
            f"{settings.environments} environments on {size} ranks: each rank has as many as the others; take a "
            f"multiple of {size}"
        )
    each = settings.environments // size
    return range(rank * each, (rank + 1) * each)


class Finish:
    """Ranks say in a store that they are through; the others look, and need not wait for each other.

    Args:
        store: that all ranks have; a prefix of its own.
        ranks: how many of them have to be through.
    """

    #: Steps between two looks, each a message there and back.
    EVERY = 4

    def __init__(self, store: dist.Store, ranks: int) -> None:
        self._store, self._ranks = store, ranks
        self._update = 0

    def is_near(self, step: int, horizon: int) -> bool:
        """Whether to stop before this step; not in the first quarter, so that every rank contributes."""
        if step < horizon / 4 or step % self.EVERY:
            return False
        return self._store.add(str(self._update), 0) >= self._ranks

    def through(self) -> None:
        """This rank's steps of the update are done, or were stopped; the next ones are of the next update."""
        self._store.add(str(self._update), 1)
        self._update += 1


def learn(
    make: Callable[[Sequence[int]], World], settings: Settings, store: dist.Store | None = None
) -> tuple[Policy, Learned]:
    """Train on all ranks of the default group, or alone.

    Args:
        make: environments from their numbers.
        settings: of the training.
        store: where ranks say that they are through; needed where they may be stopped.

    Raises:
        UsageError: environments cannot be divided among the ranks, or there is no store.
    """
    numbers = share(settings)
    size = _rank_and_size()[1]
    finish = None
    if settings.preempt < 1 and size > 1:
        if store is None:
            raise UsageError(
                "preempt below 1: ranks say in a store that they are through; give learn(..., store=...)"
            )
        finish = Finish(store, math.ceil(settings.preempt * size))
    world = make(numbers)
    torch.manual_seed(settings.seed)
    policy = Policy(world).double()
    wrapped: nn.Module = policy
    if dist.is_initialized():
        wrapped = DistributedDataParallel(policy, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(policy.parameters(), lr=settings.rate, eps=1e-5)
    noise = [np.random.default_rng((settings.seed, 5, n)) for n in numbers]
    shuffle = np.random.default_rng((settings.seed, 9))  # the same on all ranks
    learned, begin = Learned(), time.perf_counter()
    updates = max(1, settings.steps // settings.samples)
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate * (1 - update / updates)
        started = time.perf_counter()
        rollout, scores = act(policy, world, noise, settings, finish)
        learned.acting_s += time.perf_counter() - started
        learned.scores.append(mean_over_ranks(scores))
        learned.steps += improve(wrapped, optimizer, rollout, shuffle, settings)
    learned.seconds = time.perf_counter() - begin
    return policy, learned


@torch.no_grad()
def act(
    policy: Policy,
    world: World,
    noise: Sequence[np.random.Generator],
    settings: Settings,
    finish: Finish | None = None,
) -> tuple[Rollout, list[float]]:
    """Step the environments, and work out what was gained; with the scores of episodes that ended."""
    horizon, count = settings.horizon, len(noise)
    width = 1 if policy.discrete else world.actions
    drawn = np.stack(
        [g.random((horizon, 1)) if policy.discrete else g.normal(size=(horizon, width)) for g in noise], 1
    )
    seen = torch.zeros(horizon, count, world.observations, dtype=torch.float64)
    actions = torch.zeros((horizon, count) if policy.discrete else (horizon, count, width), dtype=torch.float64)
    chances, worth = torch.zeros(horizon, count, dtype=torch.float64), torch.zeros(horizon + 1, count).double()
    rewards, overs = np.zeros((horizon, count)), np.zeros((horizon, count), np.bool_)
    scores: list[float] = []
    done = horizon
    for step in range(horizon):
        if finish is not None and finish.is_near(step, horizon):
            done = step
            break
        seen[step] = torch.from_numpy(world.observe())
        choice, worth[step] = policy(seen[step])
        if policy.discrete:
            below = choice.probs.cumsum(-1)
            actions[step] = (torch.from_numpy(drawn[step]) > below[:, :-1]).sum(-1)
        else:
            actions[step] = choice.mean + policy.spread.exp() * torch.from_numpy(drawn[step])
        chances[step] = choice.log_prob(actions[step])
        rewards[step], overs[step], ended = world.step(actions[step].numpy())
        scores += ended[~np.isnan(ended)].tolist()
    if finish is not None:
        finish.through()
    worth[done] = policy(torch.from_numpy(world.observe()))[1]
    gains, running = torch.zeros_like(chances), torch.zeros(count, dtype=torch.float64)
    goes_on = torch.from_numpy(1.0 - overs)
    for step in reversed(range(done)):
        next_worth = settings.discount * worth[step + 1] * goes_on[step]
        running = (
            torch.from_numpy(rewards[step])
            + next_worth
            - worth[step]
            + settings.discount * settings.smoothing * goes_on[step] * running
        )
        gains[step] = running
    taken = (x[:done] for x in (seen, actions, chances, gains, gains + worth[:-1]))
    return Rollout(*taken), scores


def improve(
    wrapped: nn.Module,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    shuffle: np.random.Generator,
    settings: Settings,
) -> int:
    """A few epochs over the steps that were taken; mini-batches are the same steps of all ranks' environments.

    DDP takes the mean over ranks; a mini-batch's samples count alike whichever ranks have how many of them.

    Returns:
        Samples of all ranks.
    """
    gains = normalised(rollout.gains)
    times = settings.minibatch // settings.environments
    done, count = torch.tensor(steps_of_ranks(rollout)), rollout.gains.shape[1]
    for _ in range(settings.epochs):
        order = torch.from_numpy(shuffle.permutation(settings.horizon))
        for steps in order.split(times):
            samples = count * int((steps[:, None] < done).sum())  # of all ranks
            chosen = steps[steps < len(rollout.gains)]  # this rank may have none, and goes through DDP all the same
            seen, actions = rollout.seen[chosen].flatten(0, 1), rollout.actions[chosen].flatten(0, 1)
            choice, worth = wrapped(seen)
            ratio = (choice.log_prob(actions) - rollout.chances[chosen].flatten()).exp()
            gain = gains[chosen].flatten()
            gained = torch.minimum(ratio * gain, ratio.clamp(1 - settings.clip, 1 + settings.clip) * gain).sum()
            missed = (worth - rollout.returns[chosen].flatten()).pow(2).sum()
            loss = (0.5 * missed - gained - settings.entropy * choice.entropy().sum()) * (len(done) / samples)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
            optimizer.step()
    return count * int(done.sum())


def steps_of_ranks(rollout: Rollout) -> list[int]:
    """How many steps each rank has taken of each of its environments."""
    rank, size = _rank_and_size()
    steps = torch.zeros(size, dtype=torch.int64)
    steps[rank] = len(rollout.gains)
    if dist.is_initialized():
        dist.all_reduce(steps)
    return steps.tolist()


def normalised(gains: Tensor) -> Tensor:
    """Mean 0 and deviation 1 over all ranks' samples: otherwise each rank would follow a goal of its own."""
    sums = torch.stack([gains.sum(), gains.pow(2).sum(), torch.tensor(float(gains.numel()), dtype=torch.float64)])
    if dist.is_initialized():
        dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    return (gains - mean) / ((sums[1] / sums[2] - mean**2).clamp_min(0).sqrt() + 1e-8)


def mean_over_ranks(scores: Sequence[float]) -> float:
    """Of all ranks' episodes; nan where none ended."""
    sums = torch.tensor([sum(scores), len(scores)], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(sums)
    return float(sums[0] / sums[1]) if sums[1] else float("nan")


def _rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

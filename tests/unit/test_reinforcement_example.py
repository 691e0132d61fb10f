"""examples/reinforcement: worlds of any division are the same, and the algorithm learns."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import drive
import numpy as np
import proximal
import pytest
import torch
import torch.distributed as dist
from poles import Poles
from proximal import Settings
from route import ALLOWED, PENALTY, Routes

from mycel.errors import MissingExtraError, UsageError

SMALL = Settings(environments=4, horizon=32, minibatch=32, steps=256, epochs=2)
if find_spec("gymnasium") is not None:
    import gymnasium  # noqa: F401  (it sets a variable of the environment, and no test may)
with_gymnasium = pytest.mark.skipif(find_spec("gymnasium") is None, reason="gymnasium is not installed")


def test_cars_are_the_same_wherever_they_are_driven() -> None:
    together, apart = (
        Routes(range(4), seed=1, reward="simple"),
        [Routes([n], seed=1, reward="simple") for n in range(4)],
    )
    random = np.random.default_rng(0)
    for _ in range(200):  # episodes end in between
        actions = random.normal(size=(4, 2))
        reward, over, ended = together.step(actions)
        for car, alone in enumerate(apart):
            one = alone.step(actions[car : car + 1])
            assert (one[0] == reward[car]).all() and (one[1] == over[car]).all()
            assert np.array_equal(one[2], ended[car : car + 1], equal_nan=True)
        assert np.array_equal(together.observe(), np.concatenate([alone.observe() for alone in apart]))


def steered(reward: str) -> tuple[np.ndarray, np.ndarray]:
    """Rewards and scores of cars that follow the lane by a rule."""
    world = Routes(range(6), seed=2, reward=reward)
    got, scores = np.zeros(6), []
    for _ in range(150):
        left, angle, speed, bend = world.observe()[:, :4].T
        steering = np.arctan(2.7 * bend / 10) / 0.5 - 0.8 * left - 0.6 * angle
        gained, _, ended = world.step(np.stack([steering, 2 * (0.85 - speed)], 1))
        got += gained
        scores += ended[~np.isnan(ended)].tolist()
    return got, np.array(scores)


def test_a_simple_rule_completes_the_route_and_gets_its_percent_as_reward() -> None:
    got, scores = steered("simple")
    assert len(scores) >= 6 and np.median(scores) == 100.0
    assert (got > 80).all()


def standing(reward: str) -> float:
    world = Routes(range(6), seed=2, reward=reward)
    return float(sum(world.step(np.tile([0.0, -1.0], (6, 1)))[0].mean() for _ in range(149)))


def test_the_shaped_reward_pays_for_standing_still_and_the_simple_one_does_not() -> None:
    assert standing("simple") == 0.0
    assert standing("shaped") > 0.5 * steered("shaped")[0].mean()


def test_leaving_the_lane_ends_the_episode_and_costs() -> None:
    world = Routes([0], seed=3, reward="simple")
    for _ in range(100):
        reward, over, ended = world.step(np.array([[1.0, 1.0]]))
        if over[0]:
            break
    assert over[0] and reward[0] < -PENALTY / 2 and 0 < ended[0] < 50
    assert abs(world.observe()[0, 0]) < 0.5 and world.observe()[0, 2] * ALLOWED == 0.0  # another one has begun


def test_a_minibatch_has_the_same_steps_of_all_environments() -> None:
    with pytest.raises(UsageError, match="a mini-batch of 30 samples"):
        replace(SMALL, minibatch=30)
    with pytest.raises(UsageError, match="at most 128"):
        replace(SMALL, minibatch=256)


def test_advantages_are_those_of_the_definition() -> None:
    """Against a sum over all later steps, with an episode that ends in between."""
    random = np.random.default_rng(4)

    class Fixed:
        observations, actions, discrete = 1, 1, False
        at = 0

        def observe(self) -> np.ndarray:
            return np.full((1, 1), float(self.at))

        def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            self.at += 1
            return rewards[self.at - 1 : self.at], np.array([self.at == 5]), np.array([np.nan])

    rewards, settings = random.normal(size=8), replace(SMALL, environments=1, horizon=8, minibatch=8)
    world = Fixed()
    torch.manual_seed(0)
    policy = proximal.Policy(world).double()
    rollout, _ = proximal.act(policy, world, [np.random.default_rng(0)], settings)
    with torch.no_grad():
        worth = policy(torch.arange(9.0, dtype=torch.float64)[:, None])[1].numpy()
    for step in range(8):
        wanted, weight = 0.0, 1.0
        for later in range(step, 8):
            ends = later == 4
            wanted += weight * (rewards[later] + 0.99 * worth[later + 1] * (not ends) - worth[later])
            weight *= 0.99 * 0.95
            if ends:
                break
        assert rollout.gains[step, 0].item() == pytest.approx(wanted, abs=1e-12)
        assert rollout.returns[step, 0].item() == pytest.approx(wanted + worth[step], abs=1e-12)


def test_the_same_seed_gives_the_same_parameters_and_another_does_not() -> None:
    def parameters(seed: int) -> torch.Tensor:
        make = partial(Routes, seed=seed, reward="simple")
        policy, learned = proximal.learn(make, replace(SMALL, seed=seed))
        assert learned.steps == 256 and len(learned.scores) == 2
        return torch.cat([p.detach().flatten() for p in policy.parameters()])

    first = parameters(0)
    assert torch.equal(first, parameters(0))
    assert not torch.equal(first, parameters(1))


def test_normalised_advantages_have_mean_nothing_and_deviation_one() -> None:
    made = proximal.normalised(torch.tensor([[1.0, 2.0], [3.0, 6.0]], dtype=torch.float64))
    assert made.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert made.std(unbiased=False).item() == pytest.approx(1.0, abs=1e-6)


@with_gymnasium
def test_poles_stand_longer_after_some_training() -> None:
    settings = Settings(**{**drive.POLE, "environments": 8, "steps": 10_240, "horizon": 128})
    learned = drive.train("cartpole", settings)
    assert learned.scores[0] < 40
    assert learned.last() > 2 * learned.scores[0]


@with_gymnasium
def test_poles_are_the_same_wherever_they_are_balanced() -> None:
    together, apart = Poles(range(3), seed=5), [Poles([n], seed=5) for n in range(3)]
    random = np.random.default_rng(0)
    for _ in range(60):
        actions = random.integers(0, 2, 3)
        _, over, lasted = together.step(actions)
        for pole, alone in enumerate(apart):
            assert alone.step(actions[pole : pole + 1])[1][0] == over[pole]
        assert np.array_equal(together.observe(), np.concatenate([alone.observe() for alone in apart]))
        assert np.isnan(lasted[~over]).all() and (lasted[over] > 5).all()


def test_without_the_extra_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(MissingExtraError, match=r"CartPole needs gymnasium, .*mycel\[rl\]"):
        Poles([0], seed=0)


def test_a_table_names_scores_by_what_they_are() -> None:
    learned = proximal.Learned(scores=[math.nan, 50.0], seconds=2.0, steps=100)
    lines = [drive.line(task, Settings(), learned) for task in ("simple", "cartpole")]
    made = drive.table(lines)
    assert "50.0 % of the route" in made and "50 steps of 500" in made
    assert lines[0]["steps_per_s"] == 50.0


# -- ranks that are stopped ---------------------------------------------------------------------------------------


def stopped_at(step: int) -> proximal.Finish:
    """Says that enough ranks are through from a step on."""
    finish = proximal.Finish(dist.HashStore(), 0)
    finish.EVERY = step
    return finish


class Recording(Routes):
    """Notes what was gained, and what ended."""

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        made = super().step(actions)
        self.last = made[0].copy(), made[1].copy()
        return made


def test_a_rank_that_is_stopped_has_what_it_took_until_then() -> None:
    worlds = [Recording(range(4), seed=1, reward="simple") for _ in range(2)]
    torch.manual_seed(0)
    policy = proximal.Policy(worlds[0]).double()
    noise = [[np.random.default_rng(n) for n in range(4)] for _ in range(2)]
    whole, _ = proximal.act(policy, worlds[0], noise[0], SMALL)
    cut, _ = proximal.act(policy, worlds[1], noise[1], SMALL, stopped_at(20))
    assert len(whole.gains) == 32 and len(cut.gains) == 20
    assert torch.equal(cut.seen, whole.seen[:20]) and torch.equal(cut.actions, whole.actions[:20])
    # What would have followed is worth what the policy thinks of the place where it was stopped.
    reward, over = (torch.from_numpy(x) for x in worlds[1].last)
    with torch.no_grad():
        before, behind = policy(whole.seen[19])[1], policy(whole.seen[20])[1]
    assert torch.allclose(cut.gains[19], reward + 0.99 * behind * ~over - before, atol=1e-12)


def test_means_are_of_the_steps_that_were_taken() -> None:
    settings = replace(SMALL, minibatch=128, epochs=1)
    world = Routes(range(4), seed=1, reward="simple")
    torch.manual_seed(0)
    policy = proximal.Policy(world).double()
    cut, _ = proximal.act(policy, world, [np.random.default_rng(n) for n in range(4)], settings, stopped_at(24))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    assert proximal.improve(policy, optimizer, cut, np.random.default_rng(0), settings) == 96
    found = torch.cat([p.grad.flatten() for p in policy.parameters()])
    policy.zero_grad()
    choice, worth = policy(cut.seen.flatten(0, 1))
    gain = proximal.normalised(cut.gains).flatten()
    ratio = (choice.log_prob(cut.actions.flatten(0, 1)) - cut.chances.flatten()).exp()
    loss = 0.5 * (worth - cut.returns.flatten()).square().mean() - (ratio * gain).mean()  # nothing is clipped yet
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    assert torch.allclose(found, torch.cat([p.grad.flatten() for p in policy.parameters()]), atol=1e-12)


def test_nobody_is_stopped_before_enough_are_through() -> None:
    store = dist.HashStore()
    slow, fast = (proximal.Finish(store, 1) for _ in range(2))
    assert not slow.is_near(40, 64)
    fast.through()
    assert slow.is_near(40, 64) and not slow.is_near(41, 64) and not slow.is_near(12, 64)
    slow.through()
    assert not slow.is_near(40, 64)  # the next update
    with pytest.raises(UsageError, match="preempt 0: a share of the ranks"):
        replace(SMALL, preempt=0)

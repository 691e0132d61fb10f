"""What every rank runs for ``test_annex_examples.py``: the examples, one after the other, in the group at hand."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mycel.errors import UsageError

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FOLDERS = (
    "pose", "reinforcement", "point_clouds", "diffusion_schedule", "encrypted_inference", "tasks", "ensemble",
)  # fmt: skip


def load(*names: str) -> list[Any]:
    """Modules of the examples."""
    sys.path[:0] = [str(EXAMPLES / folder) for folder in FOLDERS if str(EXAMPLES / folder) not in sys.path]
    return [importlib.import_module(name) for name in names]


def pose() -> dict[str, Any]:
    """Moments of a few hundred runs."""
    (monte_carlo,) = load("monte_carlo")
    found = monte_carlo.estimate(monte_carlo.make_scene(1), 1, 301)
    return {"count": found.count, "total": found.total, "products": found.products, "normalised": found.normalised}


def reinforcement(environments: int) -> dict[str, Any]:
    """Parameters and scores after three updates; the environments are divided among the ranks."""
    proximal, route = load("proximal", "route")
    settings = proximal.Settings(environments=environments, horizon=64, minibatch=64, steps=3 * 64 * environments)
    policy, learned = proximal.learn(partial(route.Routes, seed=3, reward="simple"), settings)
    flat = torch.cat([p.detach().flatten() for p in policy.parameters()])
    return {"parameters": flat.numpy(), "scores": learned.scores, "steps": learned.steps}


def stopped_early(rank: int, size: int) -> dict[str, Any]:
    """A gradient where all ranks but the first were stopped, and that of the mean over all of their samples."""
    proximal, route = load("proximal", "route")
    settings = proximal.Settings(environments=2 * size, horizon=32, minibatch=64 * size, epochs=1)
    finish = proximal.Finish(dist.HashStore(), 2 if rank == 0 else 0)  # a store of its own: nobody else says a word
    torch.manual_seed(0)
    world = route.Routes(proximal.share(settings), seed=1, reward="simple")
    policy = proximal.Policy(world).double()
    noise = [np.random.default_rng(n) for n in proximal.share(settings)]
    rollout, _ = proximal.act(policy, world, noise, settings, finish)
    wrapped = torch.nn.parallel.DistributedDataParallel(policy)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    samples = proximal.improve(wrapped, optimizer, rollout, np.random.default_rng(0), settings)
    found = torch.cat([p.grad.flatten() for p in policy.parameters()])
    every: list[Any] = [None] * size
    parts = (rollout.seen, rollout.actions, rollout.chances, proximal.normalised(rollout.gains), rollout.returns)
    dist.all_gather_object(every, [part.flatten(0, 1) for part in parts])
    seen, actions, chances, gains, returns = (torch.cat(same) for same in zip(*every, strict=True))
    policy.zero_grad()
    choice, worth = policy(seen)
    ratio = (choice.log_prob(actions) - chances).exp()
    (0.5 * (worth - returns).square().mean() - (ratio * gains).mean()).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    wanted = torch.cat([p.grad.flatten() for p in policy.parameters()])
    return {"samples": samples, "steps": len(rollout.gains), "off": float((found - wanted).abs().max())}


def point_clouds() -> dict[str, Any]:
    """Losses of pre-training and of adapters."""
    (tune_clouds,) = load("tune_clouds")
    settings = tune_clouds.Settings(width=32, rank=4, batch=16, pretrain=(16, 2), tune=(16, 2), held_out=8)
    before = tune_clouds.pretrained(settings)
    found = tune_clouds.tune(before, "adapters", settings)
    return {"losses": found.losses, "trained": found.trained}


def diffusion_schedule() -> dict[str, Any]:
    """The schedule that a small search finds; the model is not trained, which the search does not know."""
    denoiser, search_schedule = load("denoiser", "search_schedule")
    torch.manual_seed(0)
    model = denoiser.Denoiser(width=32)
    settings = search_schedule.Settings(population=5, kept=2, generations=2, pictures=48)
    found = search_schedule.search(model, settings)
    return {"schedule": str(found.schedule), "course": found.course, "judged": found.judged}


def encrypted_inference(rank: int, size: int) -> dict[str, Any]:
    """How far logits are from the clear ones, on the rank that may decrypt."""
    circuits, encrypted_digits, prices = load("circuits", "encrypted_digits", "prices")
    random = np.random.default_rng(0)
    network = circuits.Network("10 classes", (circuits.Dense(random.normal(size=(10, 64)) / 8, np.zeros(10)),))
    images = random.uniform(size=(5, 64))
    traced = prices.candidates(network, images, 5)
    candidate = next(c for c in traced if c.layout.name == "giant steps")
    found = encrypted_digits.classify(candidate, images, 1)
    if found is None:
        return {}
    return {"off": float(np.abs(found.logits - network(images)).max()), "bytes": found.text_bytes}


def tasks() -> dict[str, Any]:
    """Errors by methods of every kind after a few steps; ranks of a task divide its batch."""
    (shared_encoder,) = load("shared_encoder")
    settings = shared_encoder.Settings(width=4, batch=16, steps=6, seed=1)
    methods = ("an encoder each", "MGDA, normalised", "PCGrad", "FAMO")
    found = {method: shared_encoder.train(method, settings) for method in methods}
    return {method: (learned.errors, learned.against) for method, learned in found.items()}


def ensemble() -> dict[str, Any]:
    """What ensembles of four members are worth after a few steps; nothing of it is rounded."""
    (unseen_digits,) = load("unseen_digits")
    settings = unseen_digits.Settings(images=60, width=6, batch=12, steps=8, seed=1)
    found = {way: unseen_digits.train(way, settings) for way in ("independent", "confident, K = 2")}
    return {way: (asdict(judged.scores), judged.sure, judged.told_apart) for way, judged in found.items()}


def refusals(size: int) -> list[str]:
    """What ranks say that cannot share the work evenly."""
    proximal, route, tune_clouds = load("proximal", "route", "tune_clouds")
    shared_encoder, unseen_digits = load("shared_encoder", "unseen_digits")
    said = []
    uneven = proximal.Settings(environments=size + 1, horizon=8, minibatch=size + 1, steps=8)
    for call in (
        lambda: proximal.learn(partial(route.Routes, seed=0, reward="simple"), uneven),
        lambda: tune_clouds.pretrained(tune_clouds.Settings(batch=2 * size + 1)),
        lambda: unseen_digits.train("independent", unseen_digits.Settings(members=size + 1)),
        *([lambda: shared_encoder.train("mean", shared_encoder.Settings(batch=size + 1))] if size > 2 else []),
    ):
        try:
            call()
        except UsageError as error:
            said.append(str(error))
    return said


def with_one_rank(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """In a group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = run()
    dist.destroy_process_group()
    return found


def results(rank: int, size: int, encrypted: bool) -> dict[str, Any]:
    """All of them."""
    torch.set_num_threads(1)
    return {
        "pose": pose(),
        "reinforcement": reinforcement(4),
        "stopped_early": stopped_early(rank, size) if size > 1 else {},
        "point_clouds": point_clouds(),
        "diffusion_schedule": diffusion_schedule(),
        "encrypted_inference": encrypted_inference(rank, size) if encrypted else {},
        "tasks": tasks() if dist.is_initialized() else with_one_rank(tasks),
        "ensemble": ensemble() if dist.is_initialized() else with_one_rank(ensemble),
        "refusals": refusals(size) if size > 1 else [],
    }

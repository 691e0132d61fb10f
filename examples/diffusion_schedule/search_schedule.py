"""Search for a cheaper schedule of a diffusion model, candidates divided over the ranks: only scores travel.

torchrun --nproc-per-node 4 examples/diffusion_schedule/search_schedule.py
python examples/diffusion_schedule/search_schedule.py --write      # the same schedule, and table.md

A schedule has a few equal segments, each with a number of active steps and a branch. Good ones are changed a little
and crossed, and judged by how far their pictures are from the teacher's. Every candidate is judged on the same noise,
so that it does not matter which rank does it.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import denoiser
import numpy as np
import torch
import torch.distributed as dist
from denoiser import BLOCKS, STEPS, Denoiser, Schedule, Segment
from numpy.typing import NDArray

from mycel.errors import UsageError

TABLE = Path(__file__).with_name("table.md")
#: Full steps of the schedule that a searched one is compared with.
BASELINE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of a search.

    Attributes:
        segments: of a schedule.
        budget: full steps that a schedule may cost.
        population: candidates of a generation.
        kept: best ones that the next generation is made of.
        generations: of the search.
        pictures: on which a candidate is judged.
        seed: decides everything.
    """

    segments: int = 5
    budget: float = 7.5
    population: int = 24
    kept: int = 8
    generations: int = 8
    pictures: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if STEPS % self.segments:
            raise UsageError(f"{self.segments} segments of {STEPS} steps are not equal; take a divisor of {STEPS}")
        if self.budget < self.segments:
            raise UsageError(f"a budget of {self.budget} full steps; {self.segments} segments begin with one each")


@dataclass(slots=True)
class Found:
    """What a search gave, the same on every rank.

    Attributes:
        schedule: the best.
        distance: from the teacher's pictures, on the search's noise.
        judged: candidates.
        course: best distance after each generation.
        exchanged: numbers that each rank has given to the others.
    """

    schedule: Schedule
    distance: float = float("inf")
    judged: int = 0
    course: list[float] = field(default_factory=list)
    exchanged: int = 0


def noise(pictures: int, seed: int) -> torch.Tensor:
    """``[pictures, 64]``."""
    return torch.randn(pictures, denoiser.PIXELS, generator=torch.Generator().manual_seed(seed))


def teacher(model: Denoiser, pictures: int, seed: int) -> NDArray[np.float64]:
    """Features of pictures by all steps."""
    return denoiser.features(denoiser.sample(model, denoiser.uniform(STEPS), noise(pictures, seed)))


def random_schedule(model: Denoiser, settings: Settings, random: np.random.Generator) -> Schedule:
    """Any that the budget allows."""
    return within(model, [_random_segment(settings, random) for _ in range(settings.segments)], settings, random)


def _random_segment(settings: Settings, random: np.random.Generator) -> Segment:
    steps = STEPS // settings.segments
    return Segment(steps, int(random.integers(1, steps + 1)), int(random.integers(0, BLOCKS)))


def within(model: Denoiser, segments: Sequence[Segment], settings: Settings, random: np.random.Generator) -> Schedule:
    """With less active steps, one after the other taken at random, until the budget allows it."""
    made = list(segments)
    while denoiser.cost(model, tuple(made)) > settings.budget:
        able = [i for i, s in enumerate(made) if s.active > 1]
        which = able[int(random.integers(len(able)))]
        made[which] = Segment(made[which].steps, made[which].active - 1, made[which].branch)
    return tuple(made)


def child(model: Denoiser, parents: Sequence[Schedule], settings: Settings, random: np.random.Generator) -> Schedule:
    """Segments of two parents, some of them changed."""
    one, other = (parents[int(random.integers(len(parents)))] for _ in range(2))
    segments = [one[i] if random.random() < 0.5 else other[i] for i in range(settings.segments)]
    for i, segment in enumerate(segments):
        chance = random.random()
        if chance < 0.15:
            segments[i] = _random_segment(settings, random)
        elif chance < 0.4:
            active = int(np.clip(segment.active + random.choice((-1, 1)), 1, segment.steps))
            segments[i] = Segment(segment.steps, active, segment.branch)
    return within(model, segments, settings, random)


def search(model: Denoiser, settings: Settings) -> Found:
    """The best schedule found; all ranks call this and have the same one."""
    random = np.random.default_rng((settings.seed, 3))  # the same on all ranks
    start, wanted = noise(settings.pictures, 101), teacher(model, settings.pictures, 202)
    known: dict[Schedule, float] = {}
    candidates = [random_schedule(model, settings, random) for _ in range(settings.population)]
    found = Found(candidates[0])
    for _ in range(settings.generations):
        fresh = [c for c in dict.fromkeys(candidates) if c not in known]
        known |= dict(zip(fresh, scores(model, fresh, start, wanted), strict=True))
        found.judged, found.exchanged = len(known), found.exchanged + len(fresh)
        best = sorted(known, key=lambda schedule: known[schedule])[: settings.kept]
        found.schedule, found.distance = best[0], known[best[0]]
        found.course.append(found.distance)
        candidates = [child(model, best, settings, random) for _ in range(settings.population)]
    return found


def scores(
    model: Denoiser, candidates: Sequence[Schedule], start: torch.Tensor, wanted: NDArray[np.float64]
) -> list[float]:
    """Distance of every candidate's pictures; each rank judges its share, and one sum brings them together."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    judged = torch.zeros(len(candidates), dtype=torch.float64)
    for number in range(rank, len(candidates), size):
        made = denoiser.features(denoiser.sample(model, candidates[number], start))
        judged[number] = denoiser.frechet(made, wanted)
    if size > 1 and len(candidates):
        dist.all_reduce(judged)  # all but one summand are zero
    scored: list[float] = judged.tolist()
    return scored


def compare(model: Denoiser, found: Found, seeds: int, pictures: int) -> list[dict[str, Any]]:
    """The searched schedule beside uniform ones, and the teacher against itself, on noise that no search has seen."""
    ways: dict[str, Schedule] = {
        f"all {STEPS} steps": denoiser.uniform(STEPS),
        f"{BASELINE} uniform full steps": denoiser.uniform(BASELINE),
        "searched": found.schedule,
    }
    spent = int(denoiser.cost(model, found.schedule))
    ways[f"{spent} uniform full steps"] = denoiser.uniform(spent)
    distances: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(seeds):
        wanted = teacher(model, pictures, 1001 + 2 * seed)
        for way, schedule in ways.items():
            made = denoiser.features(denoiser.sample(model, schedule, noise(pictures, 1000 + 2 * seed)))
            distances[way].append(denoiser.frechet(made, wanted))
    return [
        {"way": way, "cost": denoiser.cost(model, schedule), "distances": distances[way]}
        for way, schedule in ways.items()
    ]


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    base = next(line for line in lines if line["way"].startswith(str(BASELINE)))
    rows = ["| schedule | work, full steps | of the baseline's | distance, fresh noise |", "|---|---|---|---|"]
    for line in lines:
        mean, spread = statistics.mean(line["distances"]), statistics.stdev(line["distances"])
        share = line["cost"] / base["cost"]
        rows.append(f"| {line['way']} | {line['cost']:.2f} | {share:.2f} | {mean:.2f} ± {spread:.2f} |")
    return "\n".join(rows) + "\n"


def spelled(schedule: Schedule) -> str:
    """Active steps and branch of each segment."""
    return ", ".join(f"{s.active} of {s.steps} at branch {s.branch}" for s in schedule)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, search and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "mycel"), default="mycel")
    parser.add_argument("--train-steps", type=int, default=2500, help="of the denoiser")
    parser.add_argument("--generations", type=int, default=Settings().generations)
    parser.add_argument("--budget", type=float, default=Settings().budget, help="full steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"put the table into {TABLE.name}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ranks = "WORLD_SIZE" in os.environ
    if ranks:
        if options.backend == "mycel":
            import mycel.runtime  # noqa: F401  (registers the backend)
        dist.init_process_group(options.backend)
    model = denoiser.train(options.train_steps, options.seed)  # the same on all ranks: it takes less than sending it
    settings = Settings(generations=options.generations, budget=options.budget, seed=options.seed)
    found = search(model, settings)
    if not ranks or dist.get_rank() == 0:
        made = table(compare(model, found, seeds=5, pictures=1000))
        made += f"\n{found.judged} candidates judged. The schedule: {spelled(found.schedule)}.\n"
        print(made, end="")
        if options.write:
            TABLE.write_text(made, encoding="utf-8")
    if ranks:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Whether MASHA solves a game over compressed exchange where compressed extragradient stalls, and what it saves.

    python benchmarks/claims/masha.py            # four ranks on loopback, three minutes; also draws a plot
    python benchmarks/claims/masha.py --quick    # fewer steps; records nothing

Each rank holds a part of a strongly monotone bilinear game of two players with 100 numbers each; parts differ, and
only their mean has the solution. The table says how near each method came, at the best of a few learning rates, and
how many bytes a rank had sent on average when it was within 1e-5. Lines replace those of the last run in
``benchmarks/recorded/claims/masha.jsonl``, the table in docs/concepts/beyond_averaging.md, and docs/images/masha.png.

References:
    A. Beznosikov, P. Richtárik, M. Diskin, M. Ryabinin, A. Gasnikov, "Distributed Methods with Compressed
    Communication for Solving Variational Inequalities, with Theoretical Guarantees", NeurIPS 2022, arXiv 2110.03313.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from digits import run_ranks
from torch import Tensor, nn

from mycel.data_parallel import MASHA, Cast, CommStats, Compressor, ErrorFeedback, Quantised, RandomK, TopK
from mycel.data_parallel.compress import Context, Item
from mycel.data_parallel.exchange import exchange
from record import RECORDED, ROOT, conclude, markdown, read

OUTPUT = RECORDED / "claims" / "masha.jsonl"
PAGE = ROOT / "docs" / "concepts" / "beyond_averaging.md"
PLOT = ROOT / "docs" / "images" / "masha.png"
RANKS, SIZE, CURVATURE, NEAR, POINTS = 4, 100, 0.1, 1e-5, 80
DENSITY = 0.1

#: Distance, relative to where it began, and bytes a rank has sent, after each step.
Course = Iterator[tuple[float, float]]


class Game:
    """``min_x max_y x'Ay + b'x - c'y + mu/2 (|x|^2 - |y|^2)``; ``A``, ``b`` and ``c`` are means over the ranks."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        ranks = dist.get_world_size()
        shared = torch.randn(SIZE, SIZE, generator=random, dtype=torch.float64) / SIZE**0.5 / 2
        parts = shared + torch.randn(ranks, SIZE, SIZE, generator=random, dtype=torch.float64) / SIZE**0.5 / 2
        ends = torch.randn(ranks, 2 * SIZE, generator=random, dtype=torch.float64)
        eye, a = CURVATURE * torch.eye(SIZE, dtype=torch.float64), parts.mean(0)
        matrix = torch.cat((torch.cat((eye, a), 1), torch.cat((-a.T, eye), 1)))
        self.solution = torch.linalg.solve(matrix, -ends.mean(0)).float()
        self.a, self.end = parts[dist.get_rank()].float(), ends[dist.get_rank()].float()

    def operator(self, z: Tensor) -> Tensor:
        """This rank's part."""
        x, y = z[:SIZE], z[SIZE:]
        return torch.cat((self.a @ y + CURVATURE * x, CURVATURE * y - self.a.T @ x)) + self.end

    def distance(self, z: Tensor) -> float:
        """From the solution; 1 at zero, where all begin."""
        return float((z - self.solution).norm() / self.solution.norm())


def extragradient(game: Game, rate: float, compressor: Compressor) -> Course:
    """With the operator's parts compressed, with error feedback where the compressor wants it."""
    stats, feedback = CommStats(), ErrorFeedback()
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    z = torch.zeros(2 * SIZE)

    def mean(values: Tensor, step: int) -> Tensor:
        items = []
        for player, part in zip("xy", values.split(SIZE), strict=True):
            context = Context(name=f"{player}{step % 2}", step=step, rank=rank, world_size=size)
            items.append(Item(tensor=feedback.compensate(context.name, part), context=context))
        keep = compressor.wants_feedback and not isinstance(compressor, Cast)
        (outcomes,) = exchange([compressor.converse(items, keep_residual=keep)], group, stats)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome.residual is not None:
                feedback.remember(item.context.name, outcome.residual)
        feedback.settle(keep=True)  # nothing overflows in these games
        compressor.settle(keep=True)
        return torch.cat([outcome.mean for outcome in outcomes])

    step = 0
    while True:
        ahead = z - mean(rate * game.operator(z), step)
        z = z - mean(rate * game.operator(ahead), step + 1)
        step += 2
        yield game.distance(z), stats.sent_bytes


def masha(game: Game, rate: float, compressor: Compressor) -> Course:
    """With the compressor on differences."""
    z = torch.zeros(2 * SIZE)
    players = [nn.Parameter(part) for part in z.split(SIZE)]
    optimizer = MASHA(list(zip("xy", players, strict=True)), compressor, lr=rate)

    def closure() -> None:
        for player, part in zip(players, game.operator(z).split(SIZE), strict=True):
            player.grad = part

    while True:
        optimizer.step(closure)
        yield game.distance(z), optimizer.stats.sent_bytes


KEPT = f"{DENSITY:.0%}"
METHODS: dict[str, tuple[Callable[[Game, float, Compressor], Course], Compressor]] = {
    "extragradient, exact": (extragradient, Cast(torch.float32)),
    f"extragradient, random {KEPT}": (extragradient, RandomK(DENSITY, unbiased=True)),
    f"extragradient, largest {KEPT} with feedback": (extragradient, TopK(DENSITY)),
    "extragradient, 4 bits": (extragradient, Quantised(4)),
    f"MASHA1, random {KEPT}": (masha, RandomK(DENSITY, unbiased=True)),
    "MASHA1, 4 bits": (masha, Quantised(4)),
    f"MASHA2, largest {KEPT}": (masha, TopK(DENSITY)),
}
#: Learning rates: noise wants small ones.
EXACT_RATES, COMPRESSED_RATES, MASHA_RATES = (1.0, 0.8, 0.5), (0.2, 0.05, 0.02), (0.8, 0.5, 0.3, 0.15)


def be_rank(steps: int) -> None:
    """What every rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    game = Game()
    for name, (run, compressor) in METHODS.items():
        exact = isinstance(compressor, Cast)
        for rate in MASHA_RATES if run is masha else EXACT_RATES if exact else COMPRESSED_RATES:
            course = []
            for distance, num_bytes in run(game, rate, compressor):  # never ends by itself
                course.append((distance, num_bytes))
                if distance < NEAR or distance > 1e3 or distance != distance or len(course) == steps:
                    break
            sent = torch.tensor([num_bytes for _, num_bytes in course], dtype=torch.float64)
            dist.all_reduce(sent)
            sent /= dist.get_world_size()
            places = sorted({round(i * (len(course) - 1) / (POINTS - 1)) for i in range(POINTS)})
            line = {
                "method": name,
                "ranks": dist.get_world_size(),
                "rate": rate,
                "steps": len(course),
                "distance": course[-1][0],
                "sent_bytes": float(sent[-1]),
                "course": [(float(f"{sent[i]:.4g}"), float(f"{course[i][0]:.3g}")) for i in places],
            }
            if dist.get_rank() == 0:
                print(json.dumps(line), flush=True)
    dist.destroy_process_group()


def best(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best line of each method: the fewest bytes where it came near, else the nearest."""
    found = []
    for name in METHODS:
        of = [line for line in lines if line["method"] == name and line["distance"] == line["distance"]]
        near = [line for line in of if line["distance"] < NEAR]
        key = "sent_bytes" if near else "distance"
        found.append(min(near or of, key=lambda line: line[key]))
    return found


def table(lines: list[dict[str, Any]]) -> str:
    """A row a method."""
    rows = []
    bests = best(lines)
    exact = bests[0]["sent_bytes"]
    for line in bests:
        near = line["distance"] < NEAR
        figures = (f"{line['sent_bytes'] / 1e3:.0f}", f"{exact / line['sent_bytes']:.2f}") if near else ("never", "-")
        rows.append((line["method"], f"{line['rate']:g}", line["steps"], f"{line['distance']:.0e}", *figures))
    headings = ("method", "best rate", "steps", "distance at the end", f"KB a rank until {NEAR:g}", "times fewer")
    return markdown(headings, rows)


def draw(lines: list[dict[str, Any]]) -> None:
    """Distance over bytes, at each method's best learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panel = plt.subplots(figsize=(10, 4), layout="constrained")
    colours = ("#202020", "#c9b8a0", "#b98d5f", "#c2682b", "#7fc3a4", "#1d7f55", "#3b5fa8")
    for line, colour in zip(best(lines), colours, strict=True):
        num_bytes, distances = zip(*line["course"], strict=True)
        dashes = "-" if line["distance"] < NEAR else ":"
        panel.plot([n / 1e3 for n in num_bytes], distances, dashes, color=colour, label=line["method"])
    exact = best(lines)[0]["sent_bytes"] / 1e3
    panel.set(xlabel="KB sent by a rank", ylabel="distance from the solution", yscale="log", xlim=(0, 1.6 * exact))
    panel.axhline(NEAR, color="#808080", linewidth=0.6)
    panel.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(PLOT, dpi=110)
    plt.close(figure)


def main() -> None:
    """Run and print; also what ranks call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.steps = 300
    if options.rank:
        be_rank(options.steps)
        return

    def say(line: dict[str, Any]) -> None:
        print(*(line[k] for k in ("method", "rate", "steps", "distance", "sent_bytes")), flush=True)

    lines = run_ranks(RANKS, __file__, ["--steps", str(options.steps)], say)
    if options.quick:
        print(table(lines))
        return
    conclude(OUTPUT, PAGE, "masha", lines, table)
    draw(read(OUTPUT))


if __name__ == "__main__":
    main()

"""What the Frontier study did by hundreds of runs: which parameter of a job matters, and how many trials that takes.

    python benchmarks/claims/frontier.py    # a minute; replaces its lines and the table

The study searched micro-batch, degrees and sharding by measured trials, counted failures, and asked afterwards which
parameter mattered. *Measured*: over vTrain's published runs, for each parameter, how much slower the best run is with
the parameter's worst value than with its best, all others free. *Modelled*: the same over the space of a model of 175
billion parameters on 1,024 dies of MI250X, where most jobs do not fit at all, with how many of 100 jobs by chance
would have failed. *Trials*: ``refine`` on those jobs, with the model's times made wrong at random by the error that
predictions have, against random trials; what does not fit fails in both. Modelled and measured stand in tables of
their own.

References:
    Dash et al., "Optimizing Distributed Training on Frontier for Large Language Models", arXiv:2312.12705, sections
    IV and V.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from numpy.typing import NDArray

import published
from mycel.planning.cluster import load_cluster
from mycel.planning.job import Job, Mesh
from mycel.planning.models import ModelShape
from mycel.planning.search.bounds import least_seconds, room_of
from mycel.planning.search.guide import Guide
from mycel.planning.search.limits import Limits
from mycel.planning.search.space import space_of
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "frontier.jsonl"
PAGE = ROOT / "docs" / "concepts" / "plan_search.md"
GPT3 = ModelShape(
    name="175 B", num_layers=96, hidden=12288, num_heads=96, num_kv_heads=96, head_dim=128, ffn=4 * 12288,
    vocab=51200, is_gated=False, is_tied=True, norm_width=2, has_qkv_bias=True, has_out_bias=True, has_ffn_bias=True,
)  # fmt: skip
CLUSTER, BATCH, SEQ = "mi250x:nodes=128", 1024, 2048
SEEDS, GOAL = 20, 0.97


def _spread(column: NDArray[Any], seconds: NDArray[np.float64]) -> float:
    """Best time with a parameter's worst value over that with its best, less 1."""
    best = [seconds[column == value].min() for value in np.unique(column)]
    return max(best) / min(best) - 1.0


def measured() -> list[dict[str, Any]]:
    """Over the groups of vTrain's runs."""
    lines = []
    for name in ("vtrain_single_a100", "vtrain_multi_a100"):
        rows = published.vtrain(name)
        units = [unit for unit in published.groups(rows.published) if len(unit) >= 5]
        for parameter in ("micro_batch", "tp", "pp", "dp"):
            values = np.array([getattr(job, parameter, None) or getattr(job.mesh, parameter) for _, job in rows.jobs])
            spreads = [_spread(values[unit], rows.seconds[unit]) for unit in units]
            lines.append(
                {
                    "part": "measured",
                    "set": name,
                    "parameter": parameter,
                    "median": float(np.median(spreads)),
                    "largest": float(np.max(spreads)),
                    "groups": len(units),
                }
            )
    return lines


def modelled() -> list[dict[str, Any]]:
    """Over the space of 175 B on 1,024 dies."""
    cluster = load_cluster(CLUSTER)
    base = Job(mesh=Mesh(), global_batch=BATCH, micro_batch=1, seq=SEQ)
    space = space_of(cluster, GPT3, base, Limits.from_text("cp=1"))
    points = space.points(GPT3)
    room = room_of(points, cluster.memory_bytes[0])
    seconds = least_seconds(points, cluster, room.fullest_layers)
    fits = room.fits
    lines: list[dict[str, Any]] = [
        {
            "part": "modelled",
            "parameter": parameter,
            "spread": float(_spread(space.columns[parameter][fits], seconds[fits])),
        }
        for parameter in ("micro_batch", "tp", "pp", "chunks", "zero", "recompute")
    ]
    lines.sort(key=lambda row: -row["spread"])
    lines.append({"part": "space", "jobs": len(space), "fit": float(np.mean(fits))})
    return [*lines, _trials(space.columns, seconds, fits)]


def _trials(
    columns: Mapping[str, NDArray[np.int64]],
    seconds: NDArray[np.float64],
    fits: NDArray[np.bool_],
) -> dict[str, Any]:
    """Until within 3 % of the best, of 300 jobs by chance; the truth is the model with an error it does not know."""
    error = load_cluster(CLUSTER).fit.mean_error
    ours, by_chance, failures = [], [], []
    for seed in range(SEEDS):
        chance = np.random.default_rng(seed)
        rows = chance.choice(len(seconds), size=min(300, len(seconds)), replace=False)
        if not fits[rows].any():
            continue
        truth = seconds[rows] * np.exp(chance.normal(0.0, error, len(rows)))
        goal = truth[fits[rows]].min() / GOAL
        features = np.log2(
            np.stack([np.maximum(columns[name][rows], 1) for name in ("pp", "dp", "tp", "micro_batch", "chunks")], 1)
        )
        guide = Guide(features=features, predicted=seconds[rows], error=error, memory=np.where(fits[rows], 0.0, 1.0))
        order: list[int] = []
        while (row := guide.next(is_endless=True)) is not None:
            order.append(row)
            # The model knows what fits, so that ours begins with what does; its memory is taken to be right.
            if fits[rows][row]:
                guide.measured(row, float(truth[row]))
                if truth[row] <= goal:
                    break
            else:
                guide.has_failed(row)
        ours.append(len(order))
        shuffled = chance.permutation(len(rows))
        good = fits[rows][shuffled] & (truth[shuffled] <= goal)
        by_chance.append(int(np.argmax(good)) + 1)
        failures.append(int(np.count_nonzero(~fits[rows][shuffled][: by_chance[-1]])))
    return {
        "part": "trials",
        "ours": float(np.mean(ours)),
        "random": float(np.mean(by_chance)),
        "random_failures": float(np.mean(failures)),
        "seeds": len(ours),
        "error": error,
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Measured, then modelled."""
    of = {part: [row for row in lines if row["part"] == part] for part in ("measured", "modelled", "space", "trials")}
    sets = {"vtrain_single_a100": "one box", "vtrain_multi_a100": "many boxes"}
    first = markdown(
        ("measured, A100", "parameter", "median loss, %", "largest, %", "groups"),
        (
            (
                sets[row["set"]], row["parameter"], f"{row['median'] * 100:.0f}", f"{row['largest'] * 100:.0f}",
                row["groups"],
            )
            for row in of["measured"]
        ),
    )  # fmt: skip
    second = markdown(
        ("modelled, 175 B on 1,024 dies of MI250X: parameter", "worst value's best over best value's, less 1, %"),
        ((row["parameter"], f"{row['spread'] * 100:.0f}") for row in of["modelled"]),
    )
    space, trials = of["space"][0], of["trials"][0]
    third = (
        f"Of {space['jobs']} jobs {space['fit'] * 100:.0f} % fit. Trials to 97 % of the best of 300 by chance, with "
        f"an error of {trials['error'] * 100:.0f} % that the model does not know (mean of {trials['seeds']} draws): "
        f"{trials['ours']:.1f} led by the model, {trials['random']:.0f} by chance, of which "
        f"{trials['random_failures']:.0f} run out of memory.\n"
    )
    return f"{first}\n{second}\n{third}"


def main() -> None:
    """Both parts."""
    conclude(OUTPUT, PAGE, "frontier", [*measured(), *modelled()], table)


if __name__ == "__main__":
    main()

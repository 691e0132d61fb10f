"""Search for plans: how long it takes, whether it finds the best, what it finds for published clusters, and trials.

    python benchmarks/plan_search.py             # tables; about three minutes of one core
    python benchmarks/plan_search.py --write     # ... and the lines that docs/concepts/plan_search.md is made of
    python benchmarks/plan_search.py --only times equal published trials

*times*: seconds of a process that has just started, with its imports. *equal*: 200 small clusters and models, most of
them unequal, against trying every mesh, order of ranks and cut in simulation (``brute_force``). *published*: what is
found for clusters of publications, beside the published plan's time by the same model. *trials*: ``plan_trials``.
Times of steps are modelled, all of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import plan_trials
import published
from brute_force import brute_force, random_case
from mycel.planning.cluster import Cluster, load_cluster
from mycel.planning.job import Job, Mesh
from mycel.planning.models import ModelShape, named
from mycel.planning.predict import predict_step
from mycel.planning.search import Found, Limits, search
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

OUTPUT = RECORDED / "plan_search.jsonl"
PAGE = ROOT / "docs" / "concepts" / "plan_search.md"
CASES = 200
#: Cluster, model, batch, sequence.
TIMED = (
    ("h100", "llama3-8b", 16, 8192),
    ("h100:nodes=16", "llama3-70b", 512, 8192),
    ("h100:nodes=128", "llama3-405b", 2048, 8192),
)
_PROGRAM = """
import sys, time
begun = time.perf_counter()
from mycel.planning.cluster import load_cluster
from mycel.planning.models import named
from mycel.planning.search import search
cluster, model, batch, seq = sys.argv[1:]
found = search(load_cluster(cluster), named(model), batch=int(batch), seq=int(seq))
mesh = found.best.job.mesh
print(time.perf_counter() - begun, time.process_time(), found.visited, found.simulated, found.best.seconds.seconds,
      found.gap, f"{mesh.pp}x{mesh.dp}x{mesh.tp}x{mesh.cp}")
"""


def times() -> list[dict[str, Any]]:
    """A search in a process of its own, three times; the median by wall clock."""
    lines = []
    for cluster, model, batch, seq in TIMED:
        runs = []
        for _ in range(3):
            words = [sys.executable, "-c", _PROGRAM, cluster, model, str(batch), str(seq)]
            out = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
            runs.append(out)
        out = sorted(runs, key=lambda run: float(run[0]))[1]
        lines.append(
            {
                "what": "times",
                "cluster": cluster,
                "model": model,
                "ranks": load_cluster(cluster).num_ranks,
                "wall_s": float(out[0]),
                "processor_s": float(out[1]),
                "jobs": int(out[2]),
                "simulated": int(out[3]),
                "step_s": float(out[4]),
                "gap": float(out[5]),
                "mesh": out[6],
            }
        )
    return lines


def equal() -> list[dict[str, Any]]:
    """Random small searches against trying everything."""
    same = proved = unequal = 0
    tried_s = searched_s = worst = 0.0
    for seed in range(CASES):
        case = random_case(seed)
        begun = time.process_time()
        best = brute_force(case)
        between = time.process_time()
        found = search(case.cluster, case.shape, batch=case.batch, seq=case.seq, limits=case.limits)
        tried_s += between - begun
        searched_s += time.process_time() - between
        assert best is not None
        off = found.best.seconds.seconds / best[0] - 1.0
        worst = max(worst, abs(off))
        same += abs(off) < 1e-9
        proved += found.is_proved
        unequal += len(set(case.cluster.devices)) > 1
    return [
        {
            "what": "equal",
            "cases": CASES,
            "unequal": unequal,
            "same": same,
            "proved": proved,
            "largest_difference": worst,
            "tried_s": tried_s,
            "searched_s": searched_s,
        }
    ]


def _cases() -> list[tuple[str, Cluster, ModelShape, Job, float | None]]:
    """Name, cluster, model, published job, measured seconds."""
    found: list[tuple[str, Cluster, ModelShape, Job, float | None]] = []
    rows = published.selene()
    for (shape, job), row, seconds in zip(rows.jobs, rows.published, rows.seconds, strict=True):
        if row["gpus"] not in (512, 1920, 2520, 3072) or job.recompute != "full" or job.mesh.dp < 2:
            continue
        cluster = load_cluster(f"a100:nodes={row['gpus'] // 8}", way="megatron")
        size = f"{shape.num_parameters / 1e9:.0f} B"
        found.append((f"Megatron-LM, SC 2021, {size}, {row['gpus']} A100", cluster, shape, job, float(seconds)))
    llama = named("llama3-405b")
    job = Job(
        mesh=Mesh(pp=16, dp=64, tp=8), global_batch=1024, micro_batch=1, seq=8192, zero=1,
        is_sequence_parallel=True, is_scattered=True,
    )  # fmt: skip
    found.append(("Llama 3, 405 B, 8192 H100", load_cluster("h100:nodes=1024"), llama, job, None))
    return found


def _search_like(cluster: Cluster, shape: ModelShape, job: Job, *texts: str) -> Found:
    """With what the published run had: kernels, executor, batch; what limits do not say is free."""
    limits = Limits.from_text("cp=1", *texts)
    return search(cluster, shape, batch=job.global_batch, seq=job.seq, base=job, limits=limits, top=1)


def published_clusters() -> list[dict[str, Any]]:
    """What is found for each, and the published plan's time by the same model."""
    lines = []
    for name, cluster, shape, job, measured in _cases():
        begun = time.process_time()
        found = _search_like(cluster, shape, job)
        like = _search_like(cluster, shape, job, f"recompute={job.recompute}", f"zero={job.zero}").best
        best = found.best
        theirs = predict_step(shape, job, cluster.machine, way=cluster.way)
        assert theirs.parts is not None and best.seconds.parts is not None
        gains = {part: theirs.parts[part] - best.seconds.parts[part] for part in theirs.parts}
        most = sorted(gains, key=lambda part: -abs(gains[part]))[:2]
        lines.append(
            {
                "what": "published",
                "name": name,
                "published": _text(job),
                "published_s": theirs.seconds,
                "measured_s": measured,
                "found": _text(best.job),
                "found_s": best.seconds.seconds,
                "like": _text(like.job).partition(f", {job.recompute}")[0],
                "like_s": like.seconds.seconds,
                "gap": found.gap,
                "differs_in": {part: gains[part] for part in most},
                "search_s": time.process_time() - begun,
            }
        )
    return lines


def _text(job: Job) -> str:
    mesh = job.mesh
    chunks = f", {job.chunks} chunks" if job.chunks > 1 else ""
    return (
        f"tp {mesh.tp}, pp {mesh.pp}, dp {mesh.dp}, micro-batch {job.micro_batch}{chunks}, {job.recompute}, "
        f"zero {job.zero}"
    )


def trials() -> list[dict[str, Any]]:
    """Trials to 97 % of the best: ours, random and Bayesian search."""
    groups = plan_trials.groups_of()
    lines = []
    for name in ("megatron_deepspeed_node", "megatron_deepspeed"):
        own = [group for group in groups if group.name.startswith(f"{name}:")]
        stopped = [plan_trials.guided(group, is_endless=False) for group in own]
        good = [
            min(group.seconds[order]) <= group.seconds.min() / plan_trials.GOAL
            for group, order in zip(own, stopped, strict=True)
        ]
        seeds = range(plan_trials.SEEDS)
        model = [plan_trials.trials_to(g, lambda group: [int(i) for i in np.argsort(group.predicted)]) for g in own]
        lines.append(
            {
                "what": "trials",
                "set": name,
                "groups": len(own),
                "configurations": float(np.mean([len(group.seconds) for group in own])),
                "ours": float(np.mean([plan_trials.trials_to(g, plan_trials.guided) for g in own])),
                "model_alone": float(np.mean(model)),
                "random": _mean(own, plan_trials.random_order, seeds),
                "bayesian": _mean(own, plan_trials.bayesian, seeds),
                "stops_after": float(np.mean([len(order) for order in stopped])),
                "found_when_stopped": int(sum(good)),
                "seeds": plan_trials.SEEDS,
            }
        )
    return lines


def _mean(
    groups: Sequence[plan_trials.Group], make: Callable[[int], Callable[[plan_trials.Group], list[int]]], seeds: range
) -> float:
    return float(np.mean([[plan_trials.trials_to(group, make(seed)) for group in groups] for seed in seeds]))


def tables(lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The page's tables by name."""
    of = {what: [line for line in lines if line["what"] == what] for what in SECTIONS}
    made = {}
    if of["times"]:
        made["times"] = markdown(
            ("cluster", "model", "ranks", "wall, s", "processor, s", "jobs", "pp, dp, tp, cp", "step, s", "gap, %"),
            (
                (
                    row["cluster"], row["model"], row["ranks"], f"{row['wall_s']:.1f}", f"{row['processor_s']:.1f}",
                    row["jobs"], row["mesh"], f"{row['step_s']:.3g}", f"{row['gap'] * 100:.2g}",
                )
                for row in of["times"]
            ),
        )  # fmt: skip
    if of["equal"]:
        made["equal"] = markdown(
            ("cases", "with unlike ranks", "same time", "proved", "trying all, s", "search, s"),
            (
                (
                    row["cases"], row["unequal"], row["same"], row["proved"], f"{row['tried_s']:.0f}",
                    f"{row['searched_s']:.0f}",
                )
                for row in of["equal"]
            ),
        )  # fmt: skip
    if of["published"]:
        made["published"] = markdown(
            (
                "cluster", "published plan", "modelled, s", "measured, s", "plan found", "modelled, s",
                "differs most in", "found with their policy, s",
            ),
            (
                (
                    row["name"], row["published"], f"{row['published_s']:.4g}",
                    f"{row['measured_s']:.4g}" if row["measured_s"] else "-", row["found"], f"{row['found_s']:.4g}",
                    ", ".join(f"{part} {-gain:+.3g} s" for part, gain in row["differs_in"].items()),
                    f"{row['like_s']:.4g} ({row['like']})",
                )
                for row in of["published"]
            ),
        )  # fmt: skip
    if of["trials"]:
        made["trials"] = markdown(
            ("set", "groups", "of", "ours", "model alone", "random", "Bayesian", "ours stops after", "and has it in"),
            (
                (
                    row["set"], row["groups"], f"{row['configurations']:.1f}", f"{row['ours']:.2f}",
                    f"{row['model_alone']:.2f}", f"{row['random']:.2f}", f"{row['bayesian']:.2f}",
                    f"{row['stops_after']:.2f}", f"{row['found_when_stopped']} of {row['groups']}",
                )
                for row in of["trials"]
            ),
        )  # fmt: skip
    return made


SECTIONS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "times": times,
    "equal": equal,
    "published": published_clusters,
    "trials": trials,
}


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--write", action="store_true", help="replace recorded lines and the page's tables")
    arguments = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for name in arguments.only:
        lines += SECTIONS[name]()
        sys.stdout.write(f"{tables(lines).get(name, '')}\n")
    if arguments.write:
        kept = [line for line in read(OUTPUT) if line["what"] not in arguments.only]
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, [*kept, *({**line, **stamp()} for line in lines)])
        for name, table in tables(read(OUTPUT)).items():
            write_section(PAGE, f"search-{name}", table)


if __name__ == "__main__":
    main()

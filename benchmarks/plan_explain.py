"""Plans explained, and every answer asked again: is what binds what binds, and do what-ifs come true?

    python benchmarks/plan_explain.py              # all of them; several minutes of one core
    python benchmarks/plan_explain.py --first 5    # some of them
    python benchmarks/plan_explain.py --record     # ... and figures kept, the table of the guide written
    python benchmarks/plan_explain.py --guide      # what the guide's two commands print, written into it

For each plan ``explain`` says what binds and what more of everything would buy. Then the cluster is *described* anew
(another preset, an edited machine file, an edited topology file, limits without one) and searched from nothing. What
binds is confirmed if the fresh search without it is faster than the plan, and no other relaxation gains more;
computation binds where none of the others gains 2 %. Searches may take two minutes each instead of the command's 20
seconds, so that answers are those of searches that ended, also on a busy machine. All figures are modelled.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mycel.bench.measurement import describe_hardware
from mycel.errors import UsageError
from mycel.planning.cluster import Cluster, load_cluster
from mycel.planning.machines import load_machine
from mycel.planning.machines.machine import to_json
from mycel.planning.models import load_model
from mycel.planning.plan import plan_of
from mycel.planning.plan.explain import BINDS, ways
from mycel.planning.search import Limits, search
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

PAGE = ROOT / "docs" / "guides" / "which_parallelism.md"
GIB = 1 << 30
#: Of each search.
SEARCH_S = 120.0
#: Lines of a command that the guide shows.
LINES = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan to explain.

    Attributes:
        cluster: machine, nodes and ranks of a node; or two boxes with unequal devices.
        model, batch, seq: what is trained.
        limits: that are kept.
    """

    cluster: tuple[str, int, int]
    model: str
    batch: int
    seq: int
    limits: tuple[str, ...] = ()


CASES = (
    Case(cluster=("h100", 1, 8), model="llama3-8b", batch=16, seq=8192),
    Case(cluster=("h100", 2, 8), model="llama3-8b", batch=32, seq=8192),
    Case(cluster=("h100", 2, 8), model="llama3-8b", batch=32, seq=8192, limits=("tp=8",)),
    Case(cluster=("h100", 1, 8), model="llama3-8b", batch=16, seq=8192, limits=("memory<=30GiB",)),
    Case(cluster=("h100", 1, 8), model="llama3-8b", batch=16, seq=8192, limits=("recompute=full",)),
    Case(cluster=("h100", 4, 8), model="llama3-8b", batch=32, seq=4096, limits=("pp=4",)),
    Case(cluster=("a100", 1, 8), model="llama3-8b", batch=16, seq=4096),
    Case(cluster=("a100", 2, 4), model="llama3-8b", batch=32, seq=4096),
    Case(cluster=("a100", 2, 8), model="qwen3-8b", batch=32, seq=4096, limits=("dp=1",)),
    Case(cluster=("a100", 4, 2), model="qwen3-8b", batch=16, seq=4096),
    Case(cluster=("h200", 1, 8), model="qwen3-8b", batch=16, seq=8192, limits=("zero=3",)),
    Case(cluster=("h200", 2, 4), model="llama3-8b", batch=16, seq=8192),
    Case(cluster=("h100", 4, 8), model="qwen3-32b", batch=32, seq=4096),
    Case(cluster=("h100", 2, 8), model="qwen3-32b", batch=32, seq=4096, limits=("tp in node", "cp=1")),
    Case(cluster=("mi250x", 2, 8), model="llama3-8b", batch=32, seq=4096),
    Case(cluster=("a100", 16, 1), model="llama3-8b", batch=32, seq=2048, limits=("micro_batch=1", "pp=1")),
    Case(cluster=("two boxes", 25, 100), model="llama3-8b", batch=16, seq=2048, limits=("recompute=full",)),
    Case(cluster=("two boxes", 5, 100), model="llama3-8b", batch=16, seq=2048, limits=("tp=2",)),
    Case(cluster=("two boxes", 1, 100), model="llama3-8b", batch=16, seq=2048, limits=("pp=2",)),
    Case(cluster=("two boxes", 5, 25), model="qwen3-8b", batch=16, seq=2048, limits=("recompute=full",)),
    # Replicas of unlike many micro-batches, and layers in pieces.
    Case(cluster=("two boxes", 25, 100), model="llama3-8b", batch=24, seq=2048, limits=("offload=yes", "pp=1")),
    Case(
        cluster=("two boxes", 5, 100), model="qwen3-8b", batch=32, seq=2048, limits=("offload=yes", "shares=unequal")
    ),
    Case(
        cluster=("two boxes", 100, 100), model="llama3-8b", batch=15, seq=4096, limits=("offload=yes", "cp=1", "pp=1")
    ),
    Case(cluster=("h100", 1, 8), model="llama3-8b", batch=8, seq=31744, limits=("tp=1", "cp=1", "coshard<=8")),
)


# -- clusters, as people describe them ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A cluster by its description, which ``change`` edits.

    Attributes:
        kind: ``case.cluster``.
        folder: for files.
        memory: bytes more on every rank, and times as many.
        nodes: more of them.
        inside, network, compute: times as fast.
    """

    kind: tuple[str, int, int]
    folder: Path
    memory: int = 0
    memory_times: int = 1
    nodes: int = 0
    inside: int = 1
    network: int = 1
    compute: int = 1

    def load(self) -> Cluster:
        """The cluster that this describes."""
        return self._boxes() if self.kind[0] == "two boxes" else self._preset()

    def _preset(self) -> Cluster:
        name, nodes, per = self.kind
        data: dict[str, Any] = json.loads(json.dumps(to_json(load_machine(name))))
        device, links = data["device"], data["links"]
        for key in ("flops", "memory_gbps", "float8_flops"):
            device[key] *= self.compute
        links["link_gbps"] *= self.inside
        links["network_gbps"] *= self.network
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(data))
        size = int(load_machine(name).device.memory_bytes) * self.memory_times + self.memory
        spec = f"{name}:nodes={nodes + self.nodes},ranks_per_node={per}"
        return load_cluster(spec, machine=file, memory_bytes=size)

    def _boxes(self) -> Cluster:
        """Two ranks with an A100 and two with half of one, in boxes with one uplink each."""
        _, network, inside = self.kind
        boxes = []
        for name, share in [("left", 1.0), ("right", 0.5)] + [("right+2", 0.5)] * self.nodes:
            size = (80 * GIB if share == 1.0 else 40 * GIB) * self.memory_times + self.memory
            boxes.append(
                {
                    "name": name,
                    "ranks": 2,
                    "inside": {"bandwidth": f"{inside * self.inside} GB/s", "latency": "3us"},
                    "uplink": {
                        "to": "core",
                        "bandwidth": f"{network * self.network} GB/s",
                        "latency": "5us",
                        "per": "box",
                    },
                    "device": {
                        "name": f"A100 x {share:g}",
                        "flops": 312e12 * share * self.compute,
                        "memory": f"{size // GIB}GiB",
                        "memory_gbps": 2039 * share * self.compute,
                    },
                }
            )
        file = self.folder / "boxes.yaml"
        file.write_text(yaml.safe_dump({"boxes": boxes, "switches": ["core"]}))
        return load_cluster(file, machine="a100")


# -- one case ---------------------------------------------------------------------------------------------------


def examined(case: Case, folder: Path) -> dict[str, Any]:
    """What explaining and asking again give."""
    model = load_model(case.model)
    limits = Limits.from_text(*case.limits)
    cluster = Described(kind=case.cluster, folder=folder).load()

    def fresh(kept: Limits = limits, **changes: int) -> float:
        """Seconds of the best; infinite where nothing divides or fits."""
        there = Described(kind=case.cluster, folder=folder, **changes).load()
        try:
            found = search(there, model.shape, batch=case.batch, seq=case.seq, limits=kept, limit_s=SEARCH_S)
        except UsageError:
            return float("inf")
        return found.best.seconds.seconds

    found = search(cluster, model.shape, batch=case.batch, seq=case.seq, limits=limits)
    plan = plan_of(found, model=model, cluster=cluster, limits=case.limits)
    plan.validate(cluster=cluster)
    began = time.process_time()
    told = plan.explain(cluster, limit_s=SEARCH_S)
    explain_s = time.process_time() - began
    again: dict[str, float] = {}
    for change in told.relaxed:
        if change.name == "memory":
            again[change.name] = fresh(memory_times=2)
        elif change.name in ("inside", "network", "compute"):
            again[change.name] = fresh(**{change.name: 2})
        else:
            again[change.name] = fresh(limits.without(change.name))
    what_ifs = {"10 GiB": fresh(memory=10 * GIB), "node": fresh(nodes=1)}
    what_ifs |= {name: again[name] for name in ("inside", "network") if name in again}
    errors = {change.name: _apart(change.seconds, what_ifs[change.name]) for change in told.what_ifs}
    step = plan.predicted.seconds
    binding = told.binding.name
    others = sorted((name for name in again if name not in (binding, "compute")), key=lambda name: again[name])
    second = others[0] if others else ""
    confirmed = again[binding] < step and (not second or again[binding] <= again[second] * (1.0 + 1e-6))
    if binding == "compute":
        # Nothing else is worth having.
        confirmed = again[binding] < step and (not second or step / again[second] < 1.0 + BINDS)
    return {
        "cluster": cluster.name if case.cluster[0] != "two boxes" else f"two boxes, {case.cluster[1]} GB/s",
        "ranks": cluster.num_ranks,
        "model": case.model,
        "batch": case.batch,
        "seq": case.seq,
        "limits": list(case.limits),
        "plan": ways(plan.job),
        "step_s": step,
        "binding": binding,
        "told_s": told.binding.seconds,
        "again_s": again[binding],
        "second": second,
        "second_s": again.get(second),
        "confirmed": confirmed,
        "what_if_errors": errors,
        "is_best": told.is_best,
        "stopped": [change.name for change in (*told.relaxed, *told.what_ifs) if change.gap],
        "explain_processor_s": round(explain_s, 2),
    }


def _apart(told: float | None, again: float) -> float:
    """By how much two answers differ; not at all where neither finds a plan."""
    if told is None or again == float("inf"):
        return 0.0 if told is None and again == float("inf") else 1.0
    return abs(told / again - 1.0)


def lines_of(results: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Rows of the table."""
    for one in results:
        limits = ", ".join(one["limits"])
        yield [
            f"{one['model']}, {one['ranks']} ranks, {one['cluster']}" + (f"; {limits}" if limits else ""),
            one["plan"],
            f"{one['step_s']:.3g}",
            one["binding"],
            f"{one['told_s']:.3g}",
            f"{one['again_s']:.3g}",
            f"{one['second']} {one['second_s']:.3g}" if one["second"] else "",
            "yes" if one["confirmed"] else "NO",
            f"{max(one['what_if_errors'].values(), default=0.0) * 100:.2f}",
        ]


HEADS = [
    *("what", "plan", "step, s", "binds", "relaxed, told, s", "searched again, s"),
    *("next, again, s", "confirmed", "what-ifs, largest difference, %"),
]


def record(results: list[dict[str, Any]]) -> None:
    """Lines in place of those of the same cases, and the guide's table from all lines there are."""
    file = RECORDED / "plan_explain.jsonl"
    shared = {"hardware": describe_hardware(), **stamp()}
    lines = {_case_of(line): line for line in read(file)}
    lines |= {_case_of(one): {**one, **shared} for one in results}
    file.unlink(missing_ok=True)
    append(file, lines.values())
    good = sum(line["confirmed"] for line in lines.values())
    worst = max(max(line["what_if_errors"].values(), default=0.0) for line in lines.values())
    told = f"{good} of {len(lines)} confirmed; what-ifs differ by {worst:.2%} at most.\n"
    write_section(PAGE, "explained", markdown(HEADS, list(lines_of(list(lines.values())))) + "\n" + told)


def _case_of(line: dict[str, Any]) -> tuple[str, ...]:
    return (line["cluster"], line["model"], str(line["batch"]), str(line["seq"]), *line["limits"])


def write_guide() -> None:
    """What the guide's commands print, in the guide; the page that they write is where this runs."""
    shown = re.findall(r"^\$ mycel (plan (?:search|explain) .+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    for name, words in zip(("answer", "explain"), shown, strict=False):
        command = [sys.executable, "-m", "mycel", *shlex.split(words)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        lines = done.stdout.splitlines()
        shown_of = lines if len(lines) <= LINES else [*lines[:LINES], f"... and {len(lines) - LINES} lines more"]
        write_section(PAGE, name, "```text\n" + "\n".join(shown_of) + "\n```\n")


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=len(CASES), help="so many of the cases")
    parser.add_argument("--skip", type=int, default=0, help="after so many")
    parser.add_argument("--record", action="store_true", help="keep figures, and write the guide's table")
    parser.add_argument("--guide", action="store_true", help="write what the guide's commands print")
    options = parser.parse_args()
    if options.guide:
        write_guide()
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES[options.skip : options.skip + options.first]:
            results.append(examined(case, Path(folder)))
            print(" | ".join(next(lines_of(results[-1:]))), flush=True)
    table = markdown(HEADS, list(lines_of(results)))
    print(table)
    good = sum(one["confirmed"] for one in results)
    worst = max((max(one["what_if_errors"].values(), default=0.0) for one in results), default=0.0)
    print(f"{good} of {len(results)} confirmed; what-ifs differ by {worst:.2%} at most")
    if options.record:
        record(results)


if __name__ == "__main__":
    main()

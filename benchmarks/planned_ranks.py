"""Plans against plans on emulated clusters: computation is paced, messages, orders and losses are real.

Every rank trains the same small model by each of several plans, one step of each in turns, so that what disturbs one
disturbs all. A stage computes, and sleeps until its modelled time is over (``mycel.parallel.paced``): the devices of
the clusters are made up, and far slower than the ranks' processor.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from moe_ranks import join, mark, on_cluster, say, step_s
from mycel.demo.corpus import load_corpus, sample_batch
from mycel.parallel import Planned, apply, describe, paced
from mycel.planning.cluster import Cluster
from mycel.planning.job import Job
from mycel.planning.models import ModelDescription, read_model
from mycel.planning.plan import Plan
from mycel.planning.plan.build import plan_of
from mycel.planning.search import Found
from mycel.planning.search.score import candidate_of, pipeline_seconds
from mycel.planning.search.stages import stages_of
from mycel.topology import load_topology
from mycel.topology.model import Topology
from record import ROOT

sys.path.insert(0, str(ROOT / "examples" / "planned"))

from model import Sizes, TinyGPT

LEARNING_RATE, SEED, TEXT_BYTES = 1e-3, 1234, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan and the model that it trains.

    Attributes:
        name: in tables.
        plan: its JSON.
        sizes: of the small model that differ from its usual ones; or ``config``, a Hugging Face configuration.
        more: to be kept with the figures.
    """

    name: str
    plan: Mapping[str, Any]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


def make_model(sizes: Mapping[str, Any]) -> nn.Module:
    """The same on every rank."""
    if "config" in sizes:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(SEED)
        given = dict(sizes["config"])
        found: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(given.pop("model_type"), **given))
        return found
    return TinyGPT(Sizes(**sizes), seed=SEED)


def describe_model(sizes: Mapping[str, Any], seq: int, name: str) -> ModelDescription:
    """What a planner knows of it."""
    return read_model(describe(make_model(sizes), torch.zeros(1, seq, dtype=torch.long), name=name))


def plan_by_hand(
    cluster: Cluster, model: ModelDescription, job: Job, counts: Sequence[int], ranks: Sequence[int] | None = None
) -> Plan:
    """A plan that somebody writes down without a search: stages of so many layers, on these ranks."""
    places = tuple(ranks or range(job.mesh.num_ranks))
    stages = stages_of(cluster, model.shape, job, places, cluster.memory_bytes)
    whole = tuple(
        sum(counts[place :: job.mesh.pp]) for place in range(job.mesh.pp)
    )  # layers of every place, all chunks
    candidate = candidate_of(stages, whole, pipeline_seconds(stages, whole))
    plan = plan_of(Found(best=candidate, candidates=(candidate,)), candidate, model, cluster)
    plan.validate(model)
    return plan


def one_process(case: Case, steps: int) -> list[float]:
    """Losses without a plan, sequence by sequence."""
    model = make_model(case.sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    plan = Plan.from_json(case.plan)
    batches = _Batches(plan)
    losses = []
    for _ in range(steps):
        total = 0.0
        inputs, targets = batches.draw()
        for one, aim in zip(inputs.split(1), targets.split(1), strict=True):
            result = model(one)
            logits = result if isinstance(result, torch.Tensor) else result.logits
            loss = nn.functional.cross_entropy(logits.flatten(0, -2), aim.flatten()) / len(inputs)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


class _Batches:
    """The same batches wherever they are drawn."""

    def __init__(self, plan: Plan) -> None:
        self._text = load_corpus(max_bytes=TEXT_BYTES).train
        self._generator = torch.Generator().manual_seed(SEED)
        self._size = plan.job.global_batch, plan.job.seq

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        return sample_batch(self._text, *self._size, self._generator)


def be_rank(file: str) -> None:
    """A rank: a step of every case in turns; rank 0 says seconds and losses."""
    join()
    work = json.loads(Path(file).read_text(encoding="utf-8"))
    trained: list[tuple[Case, Planned, _Batches]] = []
    for given in work["cases"]:
        case = Case(**given)
        plan = Plan.from_json(case.plan)
        planned = apply(
            make_model(case.sizes),
            plan,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=False),
            wrap=paced(plan),
            topology=load_topology(os.environ["MYCEL_TOPOLOGY"]),
            timeout_s=120,
        )
        trained.append((case, planned, _Batches(plan)))
    seconds: list[list[float]] = [[] for _ in trained]
    losses: list[list[float]] = [[] for _ in trained]
    for turn in range(work["rounds"]):
        for place, (case, planned, batches) in enumerate(trained):
            batch = batches.draw()
            counted = work["counted"] and turn == work["rounds"] - 1
            if counted:
                mark(f"before {case.name}")
            found: list[torch.Tensor] = []
            spent = step_s(lambda planned=planned, batch=batch, found=found: found.append(planned.step(*batch)))
            if counted:
                mark(f"after {case.name}")
            else:
                seconds[place].append(spent)
            losses[place].append(float(found[0]))
    for place, (case, planned, _) in enumerate(trained):
        if work["flights"]:
            planned.write_flight(Path(work["flights"]) / case.name)
        say(
            case=case.name,
            seconds=seconds[place][1:],  # the first warms up
            losses=losses[place],
            state_bytes=_state_bytes(planned),
            predicted_s=planned.plan.predicted.seconds,
            more=dict(case.more),
        )
    dist.destroy_process_group()


def _state_bytes(planned: Planned) -> int:
    """Of this rank's optimizers."""
    return sum(
        (value.to_local() if isinstance(value, DTensor) else value).nbytes
        for optimizer in planned.optimizers.values()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def measure(
    topology: Topology,
    cases: Sequence[Case],
    *,
    rounds: int,
    counted: bool = False,
    flights: Path | None = None,
    backend: str = "mycel",
) -> list[dict[str, Any]]:
    """Run cases in turns on an emulated cluster.

    Args:
        topology: the cluster.
        cases: of as many ranks.
        rounds: steps of each case; the first warms up.
        counted: whether the last step of each is counted by the cables between the nodes instead of timed.
        flights: folder for records of the last steps.
        backend: that carries the messages.

    Returns:
        A line for each case; ``predicted_s`` is modelled, ``crossed`` are bytes by interface counters.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cases.json"
        work = {
            "rounds": rounds,
            "counted": counted,
            "flights": str(flights) if flights else "",
            "cases": [asdict(case) for case in cases],
        }
        file.write_text(json.dumps(work), encoding="utf-8")
        heard = on_cluster(topology, Path(__file__), [str(file)], backend=backend)
    marks = {line["mark"]: line["crossed"] for line in heard if "mark" in line}
    lines = [line for line in heard if "case" in line]
    for line in lines:
        if counted:
            line["crossed"] = marks[f"after {line['case']}"] - marks[f"before {line['case']}"]
    return lines


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    be_rank(sys.argv[1])

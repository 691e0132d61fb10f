"""Models trained by plans, against one process that has the whole model and the whole batch."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from mycel.errors import MycelError, UsageError
from mycel.parallel.description import describe
from mycel.parallel.planned import Planned, apply
from mycel.parallel.planned.experts import check_experts
from mycel.parallel.planned.fit import check_fit, example_of
from mycel.pipeline.known import known_order
from mycel.planning.cluster import load_cluster
from mycel.planning.job import Job, Mesh
from mycel.planning.models import read_model
from mycel.planning.plan import Plan, PlannedCluster, PlannedModel, plan_of
from mycel.planning.plan.held import held_total
from mycel.planning.plan.modules import cut_modules, digest_of_model, layers_among, layouts_of, module_names
from mycel.planning.predict import Prediction
from mycel.planning.search import Limits, search

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "planned"
SEQ, BATCH, STEPS = 16, 8, 3


def module_of_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"planned_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


def model_called(name: str) -> nn.Module:
    torch.manual_seed(5)
    if name == "tiny":
        example = module_of_example("model")
        return example.TinyGPT(example.Sizes(width=32, num_layers=4, length=SEQ))
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 64,
    }
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    more = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **more))


def plan_for(
    model: nn.Module,
    *,
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    counts: Sequence[int] | None = None,
    chunks: int = 1,
    ranks: Sequence[int] | None = None,
    num_ranks: int | None = None,
    order: str | None = None,
    shares: Sequence[int] = (),
    **job: Any,
) -> Plan:
    """A plan made by hand: stages of so many layers, on these ranks."""
    description = read_model(describe(model, torch.zeros(1, SEQ, dtype=torch.long), name="model"))
    names, layers = module_names(description), layers_among(description)
    made = Job(
        mesh=Mesh(pp=pp, dp=dp, tp=tp, cp=cp, ep=ep),
        global_batch=BATCH,
        micro_batch=1,
        seq=SEQ,
        chunks=chunks,
        shares=tuple(shares),
        **job,
    )
    stages = pp * chunks
    whole = tuple(ranks or range(made.mesh.num_ranks))
    each = len(layers) // stages
    cut = cut_modules(names, layers, counts or [each] * stages)
    kind = order or ("1f1b" if chunks == 1 else "interleaved")
    known = known_order(kind, pp, made.num_micro_batches, chunks)
    size = len(whole) // pp
    places = [whole[place * size : (place + 1) * size] for place in range(pp)]
    count = num_ranks or len(whole)
    plan = Plan(
        model=PlannedModel(
            shape=description.shape, digest=digest_of_model(description.shape, names), modules=names, layers=layers
        ),
        cluster=PlannedCluster(
            name="ranks",
            digest="0" * 12,
            rank_names=tuple(f"rank{r}" for r in range(count)),
            memory_bytes=(8 << 30,) * count,
        ),
        job=made,
        ranks=whole,
        cut=cut,
        stage_ranks=tuple(places[place] for place in known.stage_ranks),
        layouts=layouts_of(description) if tp * made.coshard > 1 else (),
        order=known,
        stage_seconds=((0.01, 0.02),) * stages,
        predicted=Prediction(seconds=1.0, error=0.1),
        memory=(0,) * count,
        replica_seconds=(((0.01, 0.02),) * stages,) * len(made.shares),
    )
    needed = held_total(plan)
    held = [plan.place_of(rank) for rank in range(count)]
    return dataclasses.replace(plan, memory=tuple(0 if at is None else round(needed[at]) for at in held))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(100 + step)
    text = torch.randint(0, 256, (BATCH, SEQ + 1), generator=made)
    return text[:, :-1], text[:, 1:]


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def in_one_process(
    model: nn.Module, steps: range, max_norm: float | None = None, norms: list[float] | None = None
) -> list[float]:
    """Losses of the whole model, trained on whole batches, sequence by sequence; the model is changed."""
    optimizer = adam(list(model.parameters()))
    losses = []
    for step in steps:
        tokens, targets = batch_of(step)
        total = 0.0
        for one, target in zip(tokens.split(1), targets.split(1), strict=True):
            out = model(one)
            logits = out if isinstance(out, Tensor) else out.logits
            loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten()) / BATCH
            loss.backward()
            total += loss.item()
        if max_norm is not None:
            found = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            if norms is not None:
                norms.append(found.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def compare_parameters(planned: Planned, right: nn.Module) -> None:
    known = dict(right.named_parameters())
    whole = planned.state_dict()["model"]  # of experts, too
    for name, _ in planned.named_parameters():
        mine = whole[name].full_tensor() if isinstance(whole[name], DTensor) else whole[name]
        off = float((mine.detach() - known[name].detach()).abs().max())
        assert off <= 2e-5, f"{name} is off by {off:.1e}"


def carry_out(plan: Plan, name: str, max_norm: float | None = None) -> list[float]:
    """Losses of some steps by a plan; they, and all parameters afterwards, are those of one process."""
    model = model_called(name)
    right = copy.deepcopy(model)
    with apply(model, plan, optimizer=adam, max_norm=max_norm, timeout_s=60) as planned:
        losses = [planned.step(*batch_of(step)).item() for step in range(STEPS)]
        norms: list[float] = []
        expected = in_one_process(right, range(STEPS), max_norm, norms)
        if max_norm is None:
            assert planned.norm is None
        else:
            assert planned.norm is not None and abs(planned.norm / norms[-1] - 1) < 1e-4 and norms[-1] > max_norm
        for step, (mine, other) in enumerate(zip(losses, expected, strict=True)):
            assert abs(mine - other) <= 1e-5, f"step {step}: loss {mine} by the plan, {other} in one process"
        compare_parameters(planned, right)
        check_shared(planned, right)
    return losses


def check_shared(planned: Planned, right: nn.Module) -> None:
    """Sequences and experts are shared, and not merely everything done by everybody."""
    mesh, whole = planned.plan.job.mesh, dict(right.named_parameters())
    assert (planned.report()["sequence_bytes"] > 0) == (mesh.cp > 1)
    experts = {name: p for name, p in planned.named_parameters() if ".experts." in name and mesh.ep > 1}
    assert bool(experts) == (mesh.ep > 1)
    for name, parameter in experts.items():
        assert parameter.shape[0] * mesh.ep == whole[name].shape[0], name
        assert not isinstance(parameter, DTensor)


def trains(rank: int, size: int, name: str, kinds: Sequence[dict[str, Any]]) -> None:
    for kind in kinds:
        max_norm = kind.get("max_norm")
        given = {key: value for key, value in kind.items() if key != "max_norm"}
        carry_out(plan_for(model_called(name), **given), name, max_norm)


def searched(rank: int, size: int, name: str, texts: Sequence[str]) -> dict[str, Any]:
    """What a search finds for a model as it is described, trained; the job that was found."""
    model = model_called(name)
    described = read_model(describe(model, torch.zeros(1, SEQ, dtype=torch.long), name=name))
    cluster, limits = load_cluster(f"h100:nodes=1,ranks_per_node={size}"), Limits.from_text(*texts)
    found = search(cluster, described.shape, batch=BATCH, seq=SEQ, limits=limits)
    plan = plan_of(found, model=described, cluster=cluster, limits=limits.texts)
    carry_out(Plan.from_json(plan.to_text()), name)
    return dataclasses.asdict(plan.job)


def resumes(rank: int, size: int, name: str, folder: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Saved under one plan, loaded under another, and trained on: as one process that never stopped."""
    right = model_called(name)
    expected = in_one_process(right, range(2 * STEPS))
    model = model_called(name)
    with apply(model, plan_for(model, **before), optimizer=adam) as planned:
        for step in range(STEPS):
            planned.step(*batch_of(step))
        dcp.save({"train": planned}, checkpoint_id=folder)
    other = model_called(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)  # what is loaded has to take its place
    with apply(other, plan_for(other, **after), optimizer=adam) as planned:
        dcp.load({"train": planned}, checkpoint_id=folder)
        losses = [planned.step(*batch_of(step)).item() for step in range(STEPS, 2 * STEPS)]
        for mine, one in zip(losses, expected[STEPS:], strict=True):
            assert abs(mine - one) <= 1e-5, (losses, expected)
        compare_parameters(planned, right)
    plain = model_called(name)  # and without any plan at all
    states = {"train": {"model": plain.state_dict()}}
    dcp.load(states, checkpoint_id=folder)


def idle_and_reported(rank: int, size: int, folder: str) -> dict[str, Any]:
    """A plan that leaves a rank out: it learns the losses; records go where they are asked for."""
    model = model_called("tiny")
    plan = plan_for(model, pp=2, counts=[3, 1], ranks=[2, 0], num_ranks=3)
    with apply(model, plan, optimizer=adam) as planned:
        losses = [planned.step(*batch_of(step)).item() for step in range(2)]
        before = planned.eval(*batch_of(0)).item()
        written = planned.write_flight(folder)
        said = planned.report()
    assert abs(before - losses[0]) < 1.0 and before < losses[0]
    return {"losses": losses, "written": written is not None, "report": json.loads(json.dumps(said))}


def shares(rank: int, size: int) -> int:
    """Bytes of pipeline messages that this rank has sent whole and in shares; the losses are the same."""
    sent = {}
    for scattered in (False, True):
        model = model_called("tiny")
        plan = plan_for(model, pp=2, tp=2, is_scattered=scattered)
        with apply(model, plan, optimizer=adam) as planned:
            losses = [planned.step(*batch_of(step)).item() for step in range(2)]
            assert planned.pipeline is not None
            sent[scattered] = planned.pipeline.buffers()["received_bytes"]
        right = in_one_process(model_called("tiny"), range(2))
        assert all(abs(a - b) <= 1e-5 for a, b in zip(losses, right, strict=True))
    return sent[False] * 10 // max(1, sent[True])


def message_of(call: Any) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    except MycelError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


class Adding(nn.Module):
    """Does something between two modules that belongs to neither."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = self.layers[0](x) + 1
        return self.head(self.layers[1](x))


class Counting(nn.Module):
    """Is not told where in a sequence its tokens are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(256, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Deaf(Counting):
    """Is told, and has nothing by which a token would see another."""

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(x)


def refused(rank: int, size: int) -> dict[str, str]:
    """What is refused before anything is changed."""
    model = model_called("tiny")
    good = plan_for(model, pp=2)
    wider = model_called("llama")
    tied = model_called("tiny")
    tied.head.weight = tied.embedding.of_byte.weight
    few, many = model_called("llama"), model_called("qwen3_moe")
    copies = plan_for(many, dp=4, ep=2, zero=1)
    halves = plan_for(model, pp=2, dp=2, zero=3, order="zb_h1")
    with_tp, with_cp = plan_for(model, tp=2), plan_for(model, cp=2)
    job = dataclasses.replace(good.job, is_float8=True)
    example = module_of_example("model")
    larger = example.TinyGPT(example.Sizes(width=48, num_layers=4, length=SEQ))
    found = {
        "larger": message_of(lambda: apply(larger, good)),
        "another model": message_of(lambda: apply(wider, good)),
        "more ranks": message_of(lambda: apply(model, plan_for(model, pp=4, num_ranks=4))),
        "tied": message_of(lambda: apply(tied, good)),
        "tied and shared": message_of(lambda: apply(tied, with_tp)),
        "float8": message_of(lambda: apply(model, dataclasses.replace(good, job=job))),
        "odd": message_of(
            lambda: apply(model, dataclasses.replace(with_tp, layouts=(("blocks.*.attention_norm", "colwise"),)))
        ),
        "no experts": message_of(lambda: apply(model_called("llama"), plan_for(model_called("llama"), dp=2, ep=2))),
        "copies": message_of(lambda: check_fit(many, copies, 4, torch.device("cpu"), example_of(copies))),
        "halves": message_of(lambda: check_fit(model, halves, 4, torch.device("cpu"), example_of(halves))),
        "no numbers": message_of(lambda: check_experts(copy.deepcopy(many).to("meta"), 2)),
        "apart": message_of(lambda: check_experts(few, 2)),
        "no positions": message_of(lambda: apply(Counting(), plan_for(Counting(), cp=2))),
        "nothing mixes": message_of(lambda: apply(Deaf(), plan_for(Deaf(), cp=2))),
        "no pieces": message_of(lambda: apply(model, plan_for(model, dp=2, coshard=2))),
        "batch": "",
    }
    with apply(model_called("tiny"), good) as planned:
        found["batch"] = message_of(lambda: planned.step(*(part[:3] for part in batch_of(0))))
    with apply(model_called("tiny"), with_cp) as planned:
        found["length"] = message_of(lambda: planned.step(*(part[:, :-2] for part in batch_of(0))))
    return found

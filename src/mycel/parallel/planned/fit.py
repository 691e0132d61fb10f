"""What is refused before anything is changed: plans for other models or ranks, and what torch cannot run."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from mycel.errors import UsageError
from mycel.parallel.chain import check_chain
from mycel.parallel.description import describe
from mycel.parallel.planned.coshard import blocks_of
from mycel.parallel.planned.experts import check_experts
from mycel.pipeline.order import Kind, Order
from mycel.planning.models import read_model
from mycel.planning.plan import Plan
from mycel.sequence.models.attach import find_attached

__all__ = ["check_fit", "example_of"]

#: What a plan may say that is not carried out, and the way out.
_NOT_RUN = (
    ("is_float8", "products in 8 bits", "convert the model's Linear modules before apply, and search without float8"),
    ("is_async_tp", "asynchronous tensor parallelism", "search without it"),
    ("is_compiled", "compilation", "give apply(..., wrap=) a function that compiles a stage, and search without it"),
)

#: What a plan's times and memory follow from; lengths and names may differ.
_SIZES = ("num_layers", "hidden", "num_heads", "num_kv_heads", "ffn", "vocab", "num_experts")


def example_of(plan: Plan) -> tuple[torch.Tensor]:
    """A micro-batch of tokens, all 0.

    Args:
        plan: that says how large.
    """
    return (torch.zeros(plan.job.micro_batch, plan.job.seq, dtype=torch.long),)


def check_fit(
    model: nn.Module, plan: Plan, num_ranks: int, device: torch.device, example: tuple[torch.Tensor, ...]
) -> None:
    """That a plan can train a model on so many ranks.

    Args:
        model: the whole.
        plan: for it.
        num_ranks: of the job.
        device: where stages compute.
        example: arguments of a forward on one micro-batch.

    Raises:
        UsageError: it cannot; the message says what, where, and the nearest way out.
    """
    plan.validate()
    job, mesh = plan.job, plan.job.mesh
    if plan.cluster.num_ranks != num_ranks:
        raise UsageError(
            f"the plan is for the {plan.cluster.num_ranks} ranks of {plan.cluster.name}, and this job has "
            f"{num_ranks}: start as many, or search again for {num_ranks}"
        )
    if mesh.cp > 1:
        _check_sequences(model, mesh.cp)
    if mesh.ep > 1:
        check_experts(model, mesh.ep)
        if job.zero and mesh.ep < mesh.dp * mesh.cp:
            replicas = mesh.dp * mesh.cp
            raise UsageError(
                f"ep={mesh.ep} of {replicas} replicas with zero={job.zero}: copies of experts would have to be "
                f"sharded over other ranks than the rest: search with --limit zero=0, or --limit ep={replicas}"
            )
    if job.zero == 3 and mesh.dp * mesh.cp > 1 and _has_halves(plan.order):
        raise UsageError(
            f"zero=3 with the order {plan.order.name}, whose backwards come in two halves: gradients of modules that "
            "FSDP2 shards one by one would be wrong: search with --limit zero<=2, or use an order of whole backwards"
        )
    for name, what, way in _NOT_RUN:
        if getattr(job, name):
            raise UsageError(f"{name}: {what} is not done by apply: {way}")
    if job.is_offloaded and device.type == "cpu":
        raise UsageError("is_offloaded: the ranks compute on processors, whose memory the optimizer is in anyway")
    shape = plan.model.shape
    if shape.num_kv_heads % mesh.tp:
        raise UsageError(
            f"tp={mesh.tp} does not divide the {shape.num_kv_heads} heads of keys and values of {shape.name}: search "
            f"with --limit tp<={shape.num_kv_heads}"
        )
    if mesh.tp > 1 and not any(layout != "replicate" for _, layout in plan.layouts):
        raise UsageError(f"tp={mesh.tp}, and the plan has no layout by which a module could be shared: set tp=1")
    described = read_model(describe(model, example))
    if _differs(model, plan):
        plan.validate(described)
    for name in _SIZES:
        planned, real = getattr(shape, name), getattr(described.shape, name)
        if planned != real:
            raise UsageError(
                f"the plan is for {shape.name} with {name} {planned}, and {type(model).__name__} has {real}: search "
                "for a plan of this model"
            )
    if job.coshard > 1:
        blocks_of(model, plan.model.layers, plan.layouts, job.coshard)
    check_chain(model, [name for stage in plan.cut for name in stage], example)
    _check_tied(model, plan)


def _has_halves(order: Order) -> bool:
    leaves = (leaf for row in order.rows for action in row for leaf in action.leaves)
    return any(leaf.kind in (Kind.INPUT, Kind.WEIGHT) for leaf in leaves)


def _check_sequences(model: nn.Module, degree: int) -> None:
    """That a model can be told which tokens of a sequence it has, and that all that mixes tokens is understood."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UsageError(
            f"cp={degree}: the forward of {type(model).__name__} takes no position_ids, so that every rank "
            "would count its own tokens from 0: give it that argument, or search with --limit cp=1"
        )
    try:
        find_attached(model)
    except UsageError as error:
        raise UsageError(f"cp={degree}: {error}; or search with --limit cp=1") from None


def _differs(model: nn.Module, plan: Plan) -> bool:
    """Whether a module of the plan is not the model's, or has a numbered neighbour that the plan does not know."""
    known = dict(model.named_modules())
    named = {name for stage in plan.cut for name in stage}
    parents = {name.rpartition(".")[0] for name in named if name.rpartition(".")[2].isdigit()}
    beside = {name for name in known if name.rpartition(".")[0] in parents and name.rpartition(".")[2].isdigit()}
    return not named <= set(known) or not beside <= named


def _check_tied(model: nn.Module, plan: Plan) -> None:
    owner: dict[int, tuple[int, str]] = {}
    for stage, names in enumerate(plan.cut):
        inside = tuple(f"{name}." for name in names)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name.startswith(inside):
                first = owner.setdefault(id(parameter), (stage, name))
                job = plan.job
                if first[1] != name and (job.mesh.tp > 1 or (job.zero == 3 and job.mesh.dp > 1)):
                    what = f"tp={job.mesh.tp}" if job.mesh.tp > 1 else "zero=3"
                    raise UsageError(
                        f"{first[1]} and {name} are one parameter, and {what} would make two of it: search with "
                        "--limit tp=1 and --limit zero<=2, or do not tie them (tie_word_embeddings=False)"
                    )
                if first[0] != stage:
                    raise UsageError(
                        f"{first[1]} of stage {first[0]} and {name} of stage {stage} are one parameter, and each "
                        "stage would go its own way with it: put both into one stage, or do not tie them "
                        "(tie_word_embeddings=False)"
                    )

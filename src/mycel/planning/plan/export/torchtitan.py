"""A configuration of torchtitan 0.2, with the order as a CSV and the modules of each stage by name.

References:
    torchtitan, ``torchtitan/config/job_config.py`` of release 0.2 (names of options). Its later main branch takes the
    same names as flags, but for ``pipeline_parallel_module_fqns_per_model_part`` and ``num_pp_microbatches``.
"""

from __future__ import annotations

import json
import re

from mycel.errors import UsageError
from mycel.pipeline.known import known_order
from mycel.planning.plan.export.places import one_a_rank, rank_order, refused
from mycel.planning.plan.record import PlanRecord

__all__ = ["torchtitan", "torchtitan_name"]

#: torchtitan's own decoders name the same parts otherwise than Hugging Face does.
_NAMES = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
_LAYER = re.compile(r"model\.layers\.(\d+)", re.ASCII)
_FOLDED = {"zb_v": "ZBVZeroBubble", "dualpipe_v": "DualPipeV"}
_RECOMPUTE = {"none": "none", "full": "full", "alternate": "selective"}


def torchtitan(plan: PlanRecord) -> dict[str, str]:
    """TOML for ``--job.config_file``, and beside it ``schedule.csv`` where the order is none of torch's classes.

    Args:
        plan: a right one.

    Raises:
        UsageError: replicas that share nothing but the optimizer's state, recomputation of attention alone, or
            experts beyond the shards, none of which torchtitan has.
    """
    job, mesh = plan.job, plan.job.mesh
    if job.recompute not in _RECOMPUTE:
        raise refused(
            "torchtitan", "it does not recompute attention alone", "limit the search to recompute=alternate"
        )
    if job.zero == 1 and mesh.dp > 1:
        raise refused(
            "torchtitan",
            "replicas share the optimizer's state alone, and it replicates or shards parameters",
            "limit the search to zero!=1",
        )
    shards = job.zero >= 2
    local = job.micro_batch * (job.num_micro_batches if mesh.pp > 1 else 1)
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": 1 if shards else mesh.dp,
        "data_parallel_shard_degree": mesh.dp if shards else 1,
        "fsdp_reshard_after_forward": "never" if job.zero == 2 or mesh.pp > 1 else "always",
        "tensor_parallel_degree": mesh.tp,
        "enable_async_tensor_parallel": job.is_async_tp,
        "context_parallel_degree": mesh.cp,
        "expert_parallel_degree": mesh.ep,
        "pipeline_parallel_degree": mesh.pp,
    }
    files: dict[str, str] = {}
    if mesh.pp > 1:
        schedule = _schedule(plan)
        parallelism |= {
            "pipeline_parallel_schedule": schedule or "PipelineScheduleMulti",
            **({} if schedule else {"pipeline_parallel_schedule_csv": "schedule.csv"}),
            "pipeline_parallel_microbatch_size": job.micro_batch,
            "module_fqns_per_model_part": [[torchtitan_name(name) for name in modules] for modules in plan.cut],
        }
        files = {} if schedule else {"schedule.csv": plan.order.torch_csv()}
    tables: dict[str, dict[str, object]] = {
        "training": {
            "local_batch_size": local,
            "global_batch_size": job.global_batch,
            "seq_len": job.seq,
            "enable_cpu_offload": job.is_offloaded,
        },
        "parallelism": parallelism,
        "activation_checkpoint": {
            "mode": _RECOMPUTE[job.recompute],
            **({"selective_ac_option": "op"} if job.recompute == "alternate" else {}),
        },
        "compile": {"enable": job.is_compiled},
    }
    text = [f"# {plan.model.shape.name} on {plan.cluster.name}, {mesh.num_ranks} ranks; for torchtitan 0.2."]
    for name, values in tables.items():
        text += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return {"torchtitan.toml": "\n".join(text) + "\n", **files, **rank_order(plan)}


def _schedule(plan: PlanRecord) -> str:
    """Torch's class where stages lie in a V; empty where they lie in turn, which a CSV can order in any way.

    torchtitan puts stage ``s`` at place ``s`` modulo ``pp`` whatever a CSV says, but for the two classes of a V.
    """
    if one_a_rank(plan):
        return ""
    pp, count = plan.job.mesh.pp, plan.job.num_micro_batches
    for name, theirs in _FOLDED.items():
        try:
            known = known_order(name, pp, count)
        except UsageError:
            continue
        if known.rows == plan.order.rows:
            return theirs
    raise refused(
        "torchtitan",
        "it places stages in turn, or in a V for its own ZBVZeroBubble and DualPipeV, and the plan does otherwise",
        "run the plan by mycel.parallel.apply",
    )


def torchtitan_name(name: str) -> str:
    """What torchtitan's own models call a module; names that no Hugging Face decoder has stay as they are.

    Args:
        name: of a module of the plan.

    Examples:
        >>> torchtitan_name("model.layers.3"), torchtitan_name("lm_head")
        ('layers.3', 'output')
    """
    found = _LAYER.fullmatch(name)
    return f"layers.{found[1]}" if found else _NAMES.get(name, name)

"""A configuration of DeepSpeed 0.17 and later.

References:
    DeepSpeed, "Configuration JSON" (keys of batches, ``zero_optimization``, ``tensor_parallel``, ``pipeline``);
    ``deepspeed/runtime/pipe/module.py`` (how layers are shared out to stages).
"""

from __future__ import annotations

import json

from mycel.pipeline.known import known_order
from mycel.planning.plan.export.places import layers_by_stage, one_a_rank, rank_order, refused
from mycel.planning.plan.record import PlanRecord

__all__ = ["deepspeed"]


def deepspeed(plan: PlanRecord) -> dict[str, str]:
    """JSON for ``deepspeed --deepspeed_config``.

    Args:
        plan: a right one.

    Raises:
        UsageError: what DeepSpeed does not compose: pipelines with sharded gradients or other orders than 1F1B,
            unequal stages, context or expert parallelism.
    """
    job, mesh = plan.job, plan.job.mesh
    if mesh.cp > 1 or mesh.ep > 1:
        raise refused(
            "DeepSpeed",
            f"its configuration has no context or expert parallelism, and the plan has cp={mesh.cp}, ep={mesh.ep}",
            "limit the search to cp=1 and ep=1",
        )
    if job.recompute not in ("none", "full"):
        raise refused("DeepSpeed", f"it does not recompute by {job.recompute!r}", "limit to recompute=full")
    replicas = mesh.dp
    zero: dict[str, object] = {"stage": job.zero}
    if job.zero:
        zero |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
    if job.is_offloaded:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, object] = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.global_batch // (job.micro_batch * replicas),
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "data_types": {"grad_accum_dtype": "fp32" if job.gradient_bytes == 4 else "bf16"},
    }
    if mesh.tp > 1:
        config["tensor_parallel"] = {"autotp_size": mesh.tp}
    if mesh.pp > 1:
        config["pipeline"] = _pipeline(plan)
    elif job.recompute == "full":
        config["activation_checkpointing"] = {"partition_activations": False, "contiguous_memory_optimization": False}
    return {"deepspeed.json": json.dumps(config, indent=2) + "\n", **rank_order(plan)}


def _pipeline(plan: PlanRecord) -> dict[str, object]:
    job, mesh = plan.job, plan.job.mesh
    if job.zero > 1:
        raise refused("DeepSpeed", f"its pipelines go with zero=1 at most, not {job.zero}", "limit to zero=1")
    layers = layers_by_stage(plan)
    if job.chunks > 1 or not one_a_rank(plan) or len(set(layers)) > 1:
        raise refused(
            "DeepSpeed",
            "it cuts layers evenly or by parameters, one stage a rank, and the plan has stages of "
            f"{', '.join(map(str, layers[:8]))}{', ...' if len(layers) > 8 else ''} layers",
            "run the plan by mycel.parallel.apply, or export it for torchtitan",
        )
    if known_order("1f1b", mesh.pp, job.num_micro_batches).rows != plan.order.rows:
        raise refused("DeepSpeed", "it runs 1F1B, and the plan another order", "limit the order to 1f1b")
    return {
        "stages": mesh.pp,
        # One class of layers, evenly: embedding and head stay with the first and the last.
        "partition": "type:layer",
        "activation_checkpoint_interval": 1 if job.recompute == "full" else 0,
    }

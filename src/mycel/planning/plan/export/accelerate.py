"""A configuration of Hugging Face accelerate 1.12 and later, for ``accelerate launch --config_file``.

References:
    accelerate, ``commands/config/config_args.py`` and ``commands/config/cluster.py`` (keys),
    ``parallelism_config.py`` (what composes with what).
"""

from __future__ import annotations

from mycel.planning.plan.export.places import layers_by_stage, one_a_rank, rank_order, refused
from mycel.planning.plan.record import PlanRecord

__all__ = ["accelerate"]


def accelerate(plan: PlanRecord) -> dict[str, str]:
    """YAML: plain replicas, FSDP2 with tensor and context parallelism, DeepSpeed for ``zero=1``, Megatron-LM for
    pipelines.

    Args:
        plan: a right one.

    Raises:
        UsageError: degrees that accelerate does not compose, or a cut that it has no words for.
    """
    job, mesh = plan.job, plan.job.mesh
    if mesh.ep > 1:
        raise refused("accelerate", "it has no expert parallelism", "limit the search to ep=1")
    if job.recompute not in ("none", "full") and mesh.pp == 1:
        raise refused(
            "accelerate", f"it does not recompute by {job.recompute!r}", "limit the search to recompute=full"
        )
    if mesh.pp > 1:
        kind, rows = "MEGATRON_LM", _megatron(plan)
    elif job.zero in (2, 3):
        kind, rows = "FSDP", _fsdp(plan)
    elif mesh.tp > 1 or mesh.cp > 1:
        raise refused(
            "accelerate",
            f"it has tp={mesh.tp}, cp={mesh.cp} only beside sharded parameters, and zero is {job.zero}",
            "limit the search to zero=3",
        )
    elif job.zero == 1 or job.is_offloaded:
        kind, rows = "DEEPSPEED", _deepspeed(plan)
    else:
        kind, rows = "MULTI_GPU" if mesh.num_ranks > 1 else "NO", []
    nodes = len({plan.cluster.node_of(rank) for rank in plan.ranks})
    lines = [
        f"# {plan.model.shape.name} on {plan.cluster.name}: batches of {job.micro_batch} on each replica, and",
        f"# Accelerator(gradient_accumulation_steps={1 if mesh.pp > 1 else job.num_micro_batches}).",
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {kind}",
        "mixed_precision: bf16",
        f"num_machines: {nodes}",
        f"num_processes: {mesh.num_ranks}",
        "machine_rank: 0",
        *rows,
    ]
    return {"accelerate.yaml": "\n".join(lines) + "\n", **rank_order(plan)}


def _fsdp(plan: PlanRecord) -> list[str]:
    job, mesh = plan.job, plan.job.mesh
    return [
        "fsdp_config:",
        "  fsdp_version: 2",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        f"  fsdp_reshard_after_forward: {_yes(job.zero == 3)}",
        f"  fsdp_offload_params: {_yes(job.is_offloaded)}",
        f"  fsdp_activation_checkpointing: {_yes(job.recompute == 'full')}",
        "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        "  fsdp_cpu_ram_efficient_loading: true",
        "parallelism_config:",
        "  parallelism_config_dp_replicate_size: 1",
        f"  parallelism_config_dp_shard_size: {mesh.dp}",
        f"  parallelism_config_tp_size: {mesh.tp}",
        f"  parallelism_config_cp_size: {mesh.cp}",
        *(["  parallelism_config_cp_comm_strategy: allgather"] if mesh.cp > 1 else []),
    ]


def _deepspeed(plan: PlanRecord) -> list[str]:
    job = plan.job
    return [
        "deepspeed_config:",
        f"  zero_stage: {job.zero}",
        f"  gradient_accumulation_steps: {job.num_micro_batches}",
        f"  offload_optimizer_device: {'cpu' if job.is_offloaded else 'none'}",
    ]


def _megatron(plan: PlanRecord) -> list[str]:
    job, mesh = plan.job, plan.job.mesh
    layers = layers_by_stage(plan)
    if len(set(layers)) > 1 or job.chunks > 1 or not one_a_rank(plan) or mesh.cp > 1:
        raise refused(
            "accelerate",
            "its pipelines have equal stages, one a rank, without context parallelism, and the plan has "
            f"{job.chunks} a rank of {', '.join(map(str, layers[:8]))}{', ...' if len(layers) > 8 else ''} layers",
            "export --to megatron, or run it by mycel.parallel.apply",
        )
    if job.zero not in (0, 1):
        raise refused("accelerate", f"its pipelines shard by zero=1 at most, not {job.zero}", "limit to zero=1")
    if job.recompute in ("full", "alternate"):
        raise refused(
            "accelerate", f"its pipelines do not recompute by {job.recompute!r}", "limit to recompute=attention"
        )
    return [
        "megatron_lm_config:",
        f"  megatron_lm_tp_degree: {mesh.tp}",
        f"  megatron_lm_pp_degree: {mesh.pp}",
        f"  megatron_lm_num_micro_batches: {job.num_micro_batches}",
        f"  megatron_lm_sequence_parallelism: {_yes(job.is_sequence_parallel and mesh.tp > 1)}",
        f"  megatron_lm_recompute_activations: {_yes(job.recompute == 'attention')}",
        f"  megatron_lm_use_distributed_optimizer: {_yes(job.zero == 1)}",
    ]


def _yes(value: bool) -> str:
    return "true" if value else "false"

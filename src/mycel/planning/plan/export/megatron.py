"""Arguments of Megatron-LM (Megatron-Core 0.13 and later), with the cut as its layout string.

The string's grammar, as ``megatron/core/transformer/pipeline_parallel_layer_layout.py`` reads it: ``E`` is the
embedding, ``t`` a layer, ``L`` the head and the loss; ``|`` ends a stage, ``x*3`` is ``xxx``, commas mean nothing.
Stage ``s`` is on pipeline rank ``s`` modulo ``pp``.
"""

from __future__ import annotations

from collections.abc import Sequence

from mycel.pipeline.known import known_order
from mycel.planning.plan.export.places import layers_by_stage, one_a_rank, rank_order, refused
from mycel.planning.plan.record import PlanRecord

__all__ = ["layout_string", "megatron"]


def layout_string(layers: Sequence[int]) -> str:
    """The layout of stages with so many layers each; the embedding on the first, the head on the last.

    Args:
        layers: of each stage.

    Examples:
        >>> layout_string([3, 4, 4, 1])
        'Et*3|t*4|t*4|tL'
    """
    stages = ["" if not count else "t" if count == 1 else f"t*{count}" for count in layers]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return "|".join(stages)


def megatron(plan: PlanRecord) -> dict[str, str]:
    """Arguments for ``pretrain_gpt.py``, one a line, quoted for a shell.

    Args:
        plan: a right one.

    Raises:
        UsageError: an order that is neither 1F1B nor interleaved, stages placed otherwise than in turn, or
            recomputation that Megatron-LM does not have.
    """
    job, mesh = plan.job, plan.job.mesh
    if not one_a_rank(plan):
        raise refused("Megatron-LM", "it places stages in turn, and the plan does not", "limit the order to 1f1b")
    if mesh.pp > 1 and not _is_known(plan):
        raise refused(
            "Megatron-LM",
            f"it runs 1F1B and interleaved orders, and this one ({plan.order.name or 'searched'}) is neither",
            "limit the order to 1f1b, or run the plan by mycel.parallel.apply",
        )
    if job.recompute == "alternate":
        raise refused("Megatron-LM", "it does not recompute every second product", "limit to recompute=attention")
    if job.zero == 2:
        raise refused("Megatron-LM", "its distributed optimizer is zero=1", "limit the search to zero=1 or zero=3")
    flags: list[tuple[str, object]] = [
        *_model(plan),
        ("--seq-length", job.seq),
        ("--micro-batch-size", job.micro_batch),
        ("--global-batch-size", job.global_batch),
        ("--tensor-model-parallel-size", mesh.tp),
        ("--pipeline-model-parallel-size", mesh.pp),
        ("--context-parallel-size", mesh.cp),
    ]
    if mesh.ep > 1:
        flags.append(("--expert-model-parallel-size", mesh.ep))
    if mesh.pp > 1:
        flags.append(("--pipeline-model-parallel-layout", f"'{layout_string(layers_by_stage(plan))}'"))
    flags += [(name, None) for name, is_on in _switches(plan) if is_on]
    if job.recompute == "full":
        flags += [
            ("--recompute-granularity", "full"),
            ("--recompute-method", "uniform"),
            ("--recompute-num-layers", 1),
        ]
    elif job.recompute == "attention":
        flags += [("--recompute-granularity", "selective"), ("--recompute-modules", "core_attn")]
    text = "".join(name + ("" if value is None else f" {value}") + "\n" for name, value in flags)
    return {"megatron.args": text, **rank_order(plan)}


def _is_known(plan: PlanRecord) -> bool:
    name = "1f1b" if plan.job.chunks == 1 else "interleaved"
    known = known_order(name, plan.order.ranks, plan.order.num_micro_batches, plan.job.chunks)
    return known.rows == plan.order.rows


def _switches(plan: PlanRecord) -> list[tuple[str, bool]]:
    job = plan.job
    return [
        ("--sequence-parallel", job.is_sequence_parallel and job.mesh.tp > 1),
        ("--use-distributed-optimizer", job.zero == 1),
        ("--overlap-grad-reduce", job.zero == 1),
        ("--overlap-param-gather", job.zero == 1),
        ("--use-torch-fsdp2", job.zero == 3),
        ("--use-flash-attn", job.is_flash),
        ("--optimizer-cpu-offload", job.is_offloaded),
        ("--cross-entropy-loss-fusion", job.is_loss_fused),
        ("--accumulate-allreduce-grads-in-fp32", job.gradient_bytes == 4),
        ("--bf16", True),
    ]


def _model(plan: PlanRecord) -> list[tuple[str, object]]:
    shape = plan.model.shape
    flags: list[tuple[str, object]] = [
        ("--num-layers", shape.num_layers),
        ("--hidden-size", shape.hidden),
        ("--ffn-hidden-size", shape.ffn or shape.expert_ffn),
        ("--num-attention-heads", shape.num_heads),
        ("--kv-channels", shape.head_dim),
        ("--max-position-embeddings", max(shape.max_seq, plan.job.seq)),
    ]
    if shape.num_kv_heads != shape.num_heads:
        flags += [("--group-query-attention", None), ("--num-query-groups", shape.num_kv_heads)]
    if shape.num_experts:
        flags += [
            ("--num-experts", shape.num_experts),
            ("--moe-router-topk", shape.top_k),
            ("--moe-ffn-hidden-size", shape.expert_ffn),
        ]
    if shape.is_gated:
        flags.append(("--swiglu", None))
    if shape.norm_width == 1:
        flags.append(("--normalization", "RMSNorm"))
    if not shape.num_positions:
        flags.append(("--position-embedding-type", "rope"))
    if not shape.is_tied:
        flags.append(("--untie-embeddings-and-output-weights", None))
    if shape.has_qk_norm:
        flags.append(("--qk-layernorm", None))
    if not (shape.has_qkv_bias or shape.has_out_bias or shape.has_ffn_bias):
        flags.append(("--disable-bias-linear", None))
    return flags

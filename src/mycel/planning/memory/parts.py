"""What one rank holds at the fullest moment of a step, by what it is, for many jobs at once."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from mycel.planning.step.points import Numbers, Points

__all__ = ["LOGIT_BYTES", "MemoryParts", "activation_bytes", "again_bytes", "memory_parts"]

#: Bytes held for one logit: in 16 bits, in 32 for the loss, and the gradients of both. Where all is in 32 bits there
#: is one of each.
LOGIT_BYTES, _LOGIT_BYTES_IN_32 = 12.0, 8.0
#: Two moments of Adam, and the master copy of parameters in 16 bits, all in 32.
_MOMENT_BYTES, _MASTER_BYTES = 8.0, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes of one rank, one value a job, in parts that add up.

    Attributes:
        parameters: as they are computed with; of FSDP the shards that are the master copy too.
        gradients: as they are kept between micro-batches.
        optimizer: master copy and moments, where they are on the device.
        activations: kept for the backward pass, of all micro-batches in flight, and of the layer that is done again,
            or the piece of one.
        boundary: buffers of messages between stages.
        logits: of one micro-batch with their gradients, on the last stage.
        gathered: parameters that FSDP has gathered, and activations that sequence parallelism has.
    """

    parameters: Numbers
    gradients: Numbers
    optimizer: Numbers
    activations: Numbers
    boundary: Numbers
    logits: Numbers
    gathered: Numbers

    @property
    def total(self) -> Numbers:
        """Of all parts."""
        whole: Numbers = np.sum([getattr(self, f.name) for f in fields(self)], axis=0)
        return whole


def memory_parts(points: Points, stage: Numbers) -> MemoryParts:
    """What a rank of a stage holds.

    Args:
        points: jobs.
        stage: of the pipeline, from 0, one value a job; with chunks the first of its stages.

    References:
        Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, sections 4
        and 5 (activations by policy; first rank of an interleaved pipeline); Rajbhandari et al., "ZeRO", SC 2020,
        section 3 (bytes of a parameter's states); Zhao et al., "PyTorch FSDP", VLDB 2023.
    """
    p = points
    is_first, is_last = stage == 0, stage == p.pp - 1
    layers = p.stage_layers
    dense = _dense(p, is_first, is_last)
    counted = dense + p.rank_experts
    # Experts have ``ep`` times fewer replicas, so that shards of them are as much larger.
    shard = dense / (p.dp * p.cp) + p.rank_experts * p.ep / (p.dp * p.cp)
    shards = p.dp * p.cp
    is_sharded = p.zero >= 3
    # FSDP's shards are in 32 bits: they are the master copy.
    has_master = ~is_sharded & (p.element_bytes < 4)
    parameters = np.where(is_sharded, 4.0 * shard, p.element_bytes * counted)
    gradients = np.where(is_sharded, 4.0, p.gradient_bytes) * np.where(p.zero >= 2, shard, counted)
    state = _MOMENT_BYTES + np.where(has_master, _MASTER_BYTES, 0.0)
    optimizer = state * np.where(p.zero >= 1, shard, counted) * (1.0 - p.offloaded)
    kept, _ = activation_bytes(p)
    flight = _in_flight(p, stage)
    # Where the loss is fused there is the logit, and what its gradient needs beside it.
    apart = np.where(p.element_bytes < 4, LOGIT_BYTES, _LOGIT_BYTES_IN_32)
    each = np.where(p.loss_fused > 0, 2.0 * p.element_bytes, apart)
    logits = np.where(is_last, each * p.tokens * p.vocab / p.tp, 0.0)
    unit = p.layer_parameters / p.tp + p.moe_share * p.routed_parameters / (p.tp * p.ep)
    unit = np.maximum(unit, np.where(is_first | is_last, p.outer_parameters / p.tp, 0.0))
    # In a pipeline what is gathered stays, and so do its gradients, as they are summed, until the last micro-batch.
    units = np.where(p.pp > 1, (p.element_bytes + p.gradient_bytes) * counted, 2.0 * p.element_bytes * unit)
    gathered = np.where(is_sharded & (shards > 1), units, 0.0) + _sequence(p)
    return MemoryParts(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=layers / p.chunks * kept * flight + again_bytes(p),
        boundary=_boundary(p, is_first, is_last),
        logits=logits,
        gathered=gathered,
    )


def activation_bytes(points: Points) -> tuple[Numbers, Numbers]:
    """Bytes that one layer keeps of one micro-batch: by the job's policy, and without doing anything again.

    What tensor parallelism does not share: two norms' inputs and outputs (8 bytes for each token and width, in 16
    bits) and two masks. What it shares: queries, keys and values, attention's result, the feed-forward network's
    inner activations (two tensors, or four with a gate), and the scores where they are written (weights, mask and
    masked weights).

    Examples:
        >>> from mycel.planning.job import Job, Mesh
        >>> from mycel.planning.models import from_megatron
        >>> model = from_megatron({"num_layers": 48, "hidden_size": 6144, "num_attention_heads": 64})
        >>> job = Job(mesh=Mesh(tp=8), global_batch=4, micro_batch=4, seq=2048, is_flash=False, has_dropout=True)
        >>> kept, _ = activation_bytes(Points.of([(model, job)]))
        >>> float(kept[0]) == 4 * 2048 * 6144 * (10 + 24 / 8 + 5 * 64 * 2048 / (6144 * 8))
        True
    """
    p = points
    alone = np.where(p.sequence_parallel > 0, p.tp, 1.0)
    width = p.tokens * p.hidden
    norms, inner = _outside(p), _inside(p)
    scores = _scores(p)
    whole = norms + inner + scores
    core = p.heads * p.head_dim
    # Every second product's result, the layer's input and attention's result are kept.
    matrices = core + 2.0 * p.kv_heads * p.head_dim + p.ffn * (1.0 + p.gated)
    products = p.tokens * p.element_bytes / 2.0 * matrices / p.tp
    some = products + p.element_bytes * (2.0 * width / alone + p.tokens * core / p.tp)
    kept = np.where(
        p.full > 0,
        p.element_bytes * width / alone,
        np.where(p.alternate > 0, some, np.where(p.attention > 0, norms + inner, whole)),
    )
    return np.where((p.coshard > 1) & (p.full == 0), norms, kept), whole


def again_bytes(points: Points) -> Numbers:
    """Bytes of what is done again at one moment: a layer, or a piece of it.

    Where layers are in pieces, gradients of a layer's matrices wait until the last piece has its own.

    References:
        Lin et al., "nnScaler", OSDI 2024, section 3.3 (co-shard).
    """
    p = points
    again = np.where((p.full > 0) | (p.alternate > 0), _outside(p), 0.0)
    again += np.where((p.full > 0) | (p.alternate > 0) | (p.coshard > 1), (_inside(p) + _scores(p)) / p.coshard, 0.0)
    waiting: Numbers = np.where(p.coshard > 1, p.element_bytes * p.layer_parameters, 0.0)
    return again + waiting


def _outside(p: Points) -> Numbers:
    """Of a layer: inputs and outputs of its norms, and masks."""
    alone = np.where(p.sequence_parallel > 0, p.tp, 1.0)
    kept: Numbers = (4.0 * p.element_bytes + 2.0 * p.dropout) * p.tokens * p.hidden / alone
    return kept


def _inside(p: Points) -> Numbers:
    """Of a layer: what heads and inner columns share among them, but for scores."""
    core = p.heads * p.head_dim
    heads = core + 2.0 * p.kv_heads * p.head_dim + core
    inner = 2.0 + 2.0 * p.gated
    feed = (1.0 - p.moe_share) * inner * p.ffn
    feed += p.moe_share * (inner * (p.top_k * p.expert_ffn + p.shared_ffn) + 2.0 * p.top_k * p.hidden)
    kept: Numbers = p.element_bytes * p.tokens * (heads + feed) / p.tp
    return kept


def _scores(p: Points) -> Numbers:
    """Of a layer: weights, mask and masked weights; on the chip one number for each query."""
    each = p.element_bytes + (1.0 + p.element_bytes) * p.dropout
    scores = p.micro_batch * p.heads * (p.seq / p.cp) * p.seq * each / p.tp
    kept: Numbers = np.where(p.flash > 0, 4.0 * p.tokens * p.heads / p.tp, scores)
    return kept


def _dense(p: Points, is_first: Numbers, is_last: Numbers) -> Numbers:
    """Parameters on one rank of a stage but for routed experts: layers, embedding on the first, head on the last."""
    embedding = np.where(is_first, p.outer_parameters / p.tp + p.position_parameters, 0.0)
    # A tied head on another stage is a copy of the embedding.
    head = np.where(is_last & ~((p.tied > 0) & (p.pp == 1)), p.outer_parameters / p.tp, 0.0)
    count: Numbers = p.stage_layers * p.layer_parameters / p.tp + embedding + head
    return count


def _in_flight(p: Points, stage: Numbers) -> Numbers:
    """Chunks' micro-batches that a rank holds at once, with 1F1B or interleaved."""
    plain = np.minimum(p.pp - stage, p.micro_batches)
    warm = 2.0 * (p.pp - stage - 1.0) + (p.chunks - 1.0) * p.pp + 1.0
    flight: Numbers = np.where(p.chunks > 1, np.minimum(warm, p.chunks * p.micro_batches), plain)
    return flight


def _sequence(p: Points) -> Numbers:
    """Activations that sequence parallelism gathers around a layer's products.

    Inputs of attention and of the feed-forward network, the gradient that comes back and what is on its way; Megatron
    gathers inputs a second time instead of keeping them. Asynchronous exchanges go in pieces.
    """
    tensors = np.where(p.megatron_executor > 0, 0.0, np.where(p.async_tp > 0, 2.0, 4.0))
    is_on = (p.sequence_parallel > 0) & (p.tp > 1)
    held: Numbers = np.where(is_on, tensors * p.element_bytes * p.tokens * p.hidden, 0.0)
    return held


def _boundary(p: Points, is_first: Numbers, is_last: Numbers) -> Numbers:
    """Buffers of messages: activations on every stage but the first, gradients on every one but the last."""
    share = np.where((p.sequence_parallel > 0) | (p.scattered > 0), p.tp, 1.0)
    message = p.element_bytes * p.tokens * p.hidden / share
    every = p.micro_batches * p.chunks
    forward = np.where(p.torch_executor > 0, every, np.where(p.megatron_executor > 0, 1.0, 2.0))
    backward = np.where(p.torch_executor > 0, every, 1.0)
    count = np.where(is_first & (p.chunks == 1), 0.0, forward) + np.where(is_last & (p.chunks == 1), 0.0, backward)
    held: Numbers = np.where(p.pp > 1, count * message, 0.0)
    return held

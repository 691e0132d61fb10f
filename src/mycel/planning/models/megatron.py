"""A model from Megatron-LM's arguments: ``--num-layers 96 --hidden-size 12288 ...``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from mycel.errors import UsageError
from mycel.planning.models.fields import MOST_LAYERS, flag, size
from mycel.planning.models.shape import ModelShape

__all__ = ["from_megatron", "megatron_arguments", "padded_vocab"]


def megatron_arguments(words: str | Sequence[str]) -> dict[str, Any]:
    """Arguments of a command line as a mapping, with underscores; an argument without a value is ``True``.

    Examples:
        >>> megatron_arguments("--num-layers 96 --swiglu --position-embedding-type rope")
        {'num_layers': 96, 'swiglu': True, 'position_embedding_type': 'rope'}
    """
    tokens = shlex.split(words) if isinstance(words, str) else list(words)
    found: dict[str, Any] = {}
    name = ""
    for token in tokens:
        if token.startswith("--"):
            name = token[2:].replace("-", "_")
            found[name] = True
        elif name:
            found[name] = int(token) if token.lstrip("-").isdigit() else token
            name = ""
    return found


def padded_vocab(vocab: int, tp: int, *, multiple: int = 128) -> int:
    """Rows of the embedding after padding: a multiple of 128 on each tensor-parallel rank, as Megatron makes it.

    Examples:
        >>> padded_vocab(50257, 8)
        51200
    """
    step = multiple * tp
    return -(-vocab // step) * step


def from_megatron(arguments: Mapping[str, Any], *, where: str = "Megatron-LM's arguments") -> ModelShape:
    """A model's sizes from Megatron-LM's own names.

    Args:
        arguments: by name, with underscores, as in its YAML and in ``megatron_arguments``.
        where: for messages.

    Raises:
        UsageError: a size that is missing or out of range.

    References:
        Megatron-LM, ``megatron/training/arguments.py``.

    Examples:
        >>> gpt3 = from_megatron({"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96,
        ...     "padded_vocab_size": 51200, "max_position_embeddings": 2048, "seq_length": 2048})
        >>> gpt3.num_parameters
        174615846912
    """
    hidden = size(arguments, "hidden_size", where=where, least=1)
    heads = size(arguments, "num_attention_heads", where=where, least=1, most=MOST_LAYERS)
    layers = size(arguments, "num_layers", where=where, least=1, most=MOST_LAYERS)
    gated = flag(arguments, "swiglu", where=where, default=False)
    is_grouped = flag(arguments, "group_query_attention", where=where, default=False)
    experts = size(arguments, "num_experts", where=where, default=0)
    ffn = size(
        arguments,
        "ffn_hidden_size",
        where=where,
        default=int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden,
    )
    longest = size(arguments, "max_position_embeddings", "seq_length", where=where, default=2048, least=1)
    learned = arguments.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    biased = not flag(arguments, "disable_bias_linear", where=where, default=False)
    is_rms = arguments.get("normalization", "LayerNorm") == "RMSNorm"
    vocab = size(arguments, "padded_vocab_size", "vocab_size", where=where, default=51200, least=1)
    if "padded_vocab_size" not in arguments:
        tp = size(arguments, "tensor_model_parallel_size", where=where, default=1, least=1)
        vocab = padded_vocab(
            vocab, tp, multiple=size(arguments, "make_vocab_size_divisible_by", where=where, default=128, least=1)
        )
    return ModelShape(
        name=str(arguments.get("name") or "megatron"),
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=size(arguments, "num_query_groups", where=where, default=heads, least=1)
        if is_grouped
        else heads,
        head_dim=size(arguments, "kv_channels", where=where, default=max(1, hidden // heads), least=1),
        ffn=ffn,
        vocab=vocab,
        max_seq=longest,
        is_gated=gated,
        num_experts=experts,
        top_k=size(arguments, "moe_router_topk", where=where, default=2, least=1) if experts else 0,
        expert_ffn=size(arguments, "moe_ffn_hidden_size", where=where, default=ffn) if experts else 0,
        shared_ffn=size(arguments, "moe_shared_expert_intermediate_size", where=where, default=0) if experts else 0,
        num_dense_layers=_dense(arguments, layers, where) if experts else 0,
        is_tied=not flag(arguments, "untie_embeddings_and_output_weights", where=where, default=False),
        num_positions=longest if learned else 0,
        norm_width=1 if is_rms else 2,
        has_qk_norm=flag(arguments, "qk_layernorm", where=where, default=False),
        has_qkv_bias=biased or flag(arguments, "add_qkv_bias", where=where, default=False),
        has_out_bias=biased,
        has_ffn_bias=biased,
    )


def _dense(arguments: Mapping[str, Any], layers: int, where: str) -> int:
    """Layers without experts: ``--moe-layer-freq`` is a number, or a list of 0 and 1 that may be repeated."""
    said = arguments.get("moe_layer_freq", 1)
    if isinstance(said, list) and len(said) == layers and all(one in (0, 1) for one in said):
        return layers - sum(said)
    if isinstance(said, int) and said >= 1:
        return layers - -(-layers // said)
    raise UsageError(
        f"{where}: moe_layer_freq is {said!r}; it must be a number from 1, or {layers} of 0 and 1, one a layer"
    )

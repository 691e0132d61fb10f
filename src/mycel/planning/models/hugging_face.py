"""A model from the ``config.json`` that Hugging Face keeps beside its weights, without transformers or torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mycel.errors import UsageError
from mycel.names import nearest
from mycel.planning.models.fields import MOST_LAYERS, flag, listing, size
from mycel.planning.models.shape import ModelShape

__all__ = ["FAMILIES", "from_hugging_face"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a ``model_type`` has that its configuration does not say.

    Attributes:
        is_gated, norm_width, norms_per_layer, has_qk_norm: as in ``ModelShape``.
        qkv_bias, out_bias, ffn_bias: always there, or a key of the configuration that says so.
        positions: a key with the number of learned positions, and how many are added to it.
        is_tied: where the configuration is silent.
        is_shared_gated: the shared expert has a gate of its own.
    """

    is_gated: bool = True
    norm_width: int = 1
    norms_per_layer: int = 2
    has_qk_norm: bool = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    ffn_bias: bool | str = False
    positions: tuple[str, int] | None = None
    is_tied: bool = False
    is_shared_gated: bool = False


_LLAMA = _Family(qkv_bias="attention_bias", out_bias="attention_bias", ffn_bias="mlp_bias")
_BIASED = _Family(is_gated=False, norm_width=2, qkv_bias=True, out_bias=True, ffn_bias=True)
#: By ``model_type``. Sources: the configuration and modelling files of transformers 5; every count is checked against
#: a model on the meta device in the tests where transformers is installed.
FAMILIES: dict[str, _Family] = {
    "llama": _LLAMA,
    "mistral": _Family(),
    "mixtral": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen2_moe": _Family(qkv_bias="qkv_bias", is_shared_gated=True),
    "qwen3": _Family(has_qk_norm=True, qkv_bias="attention_bias", out_bias="attention_bias"),
    "qwen3_moe": _Family(has_qk_norm=True, qkv_bias="attention_bias", out_bias="attention_bias"),
    "gemma": _Family(is_tied=True, qkv_bias="attention_bias", out_bias="attention_bias"),
    "gemma2": _Family(is_tied=True, norms_per_layer=4, qkv_bias="attention_bias", out_bias="attention_bias"),
    "gemma3_text": _Family(
        is_tied=True, norms_per_layer=4, has_qk_norm=True, qkv_bias="attention_bias", out_bias="attention_bias"
    ),
    "phi3": _Family(),
    "olmo": _Family(norm_width=0, qkv_bias="attention_bias", out_bias="attention_bias"),
    "starcoder2": _Family(
        is_gated=False, norm_width=2, qkv_bias="use_bias", out_bias="use_bias", ffn_bias="use_bias", is_tied=True
    ),
    "gpt2": _Family(
        is_gated=False,
        norm_width=2,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        positions=("n_positions", 0),
        is_tied=True,
    ),
    "gpt_neox": _BIASED,
    "opt": _Family(
        is_gated=False,
        norm_width=2,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        positions=("max_position_embeddings", 2),
        is_tied=True,
    ),
    "mpt": _Family(is_gated=False, is_tied=True),
}


def from_hugging_face(config: Mapping[str, Any], *, where: str = "config.json") -> ModelShape:
    """A model's sizes from its configuration.

    Models of several parts (``text_config``) give their text's. What counts are exact for is the families of
    ``FAMILIES``; another ``model_type`` is refused rather than guessed.

    Args:
        config: the object that the file holds.
        where: the file's name, for messages.

    Raises:
        UsageError: a family that is not known, or a size that is missing or out of range.

    Examples:
        >>> llama = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        ...     "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
        >>> from_hugging_face(llama).num_parameters
        8030261248
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = {"tie_word_embeddings": config.get("tie_word_embeddings"), **inner}
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UsageError(
            f"{where}: model_type {kind!r} is not known{nearest(str(kind), FAMILIES)}; known: {', '.join(FAMILIES)}. "
            "Any other module is described by mycel.parallel.describe(model, example)"
        )
    family = FAMILIES[kind]
    hidden = size(config, "hidden_size", "n_embd", "d_model", where=where, least=1)
    heads = size(config, "num_attention_heads", "n_head", "n_heads", where=where, least=1, most=MOST_LAYERS)
    layers = size(config, "num_hidden_layers", "n_layer", "n_layers", where=where, least=1, most=MOST_LAYERS)
    positions = 0
    if family.positions:
        key, more = family.positions
        positions = size(config, key, where=where, least=1) + more
    width = size(config, "word_embed_proj_dim", where=where, default=hidden)
    if width != hidden:
        raise UsageError(
            f"{where}: word_embed_proj_dim {width} is not hidden_size {hidden}: embeddings of another width are not "
            "counted; describe the model by mycel.parallel.describe(model, example)"
        )
    default_ffn = hidden * size(config, "expansion_ratio", where=where, default=4, least=1)
    experts = size(config, "num_experts", "num_local_experts", where=where, default=0)
    ffn = size(
        config,
        "intermediate_size",
        "n_inner",
        "ffn_dim",
        where=where,
        default=default_ffn if kind in ("gpt2", "mpt") else 0 if experts else None,
    )
    return ModelShape(
        name=_name(config, kind),
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=size(config, "num_key_value_heads", where=where, default=heads, least=1),
        head_dim=size(config, "head_dim", where=where, default=max(1, hidden // heads), least=1),
        ffn=ffn,
        vocab=size(config, "vocab_size", where=where, least=1),
        max_seq=size(
            config, "max_position_embeddings", "n_positions", "max_seq_len", where=where, default=2048, least=1
        ),
        is_gated=family.is_gated,
        num_experts=experts,
        top_k=size(config, "num_experts_per_tok", where=where, least=1) if experts else 0,
        expert_ffn=size(config, "moe_intermediate_size", where=where, default=ffn) if experts else 0,
        shared_ffn=size(config, "shared_expert_intermediate_size", where=where, default=0) if experts else 0,
        is_shared_gated=family.is_shared_gated,
        num_dense_layers=_dense_layers(config, layers, where) if experts else 0,
        is_tied=flag(config, "tie_word_embeddings", where=where, default=family.is_tied),
        num_positions=positions,
        norm_width=family.norm_width,
        norms_per_layer=family.norms_per_layer,
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias=_bias(config, family.qkv_bias, where, default=kind == "qwen2_moe" or kind == "starcoder2"),
        has_out_bias=_bias(config, family.out_bias, where, default=kind == "starcoder2"),
        has_ffn_bias=_bias(config, family.ffn_bias, where, default=kind == "starcoder2"),
    )


def _dense_layers(config: Mapping[str, Any], layers: int, where: str) -> int:
    """Layers without experts: all but every ``decoder_sparse_step``-th, and those in ``mlp_only_layers``."""
    every = size(config, "decoder_sparse_step", where=where, default=1, least=1)
    named = listing(config, "mlp_only_layers", where=where)
    return sum(layer in named or (layer + 1) % every != 0 for layer in range(layers))


def _bias(config: Mapping[str, Any], said: bool | str, where: str, *, default: bool) -> bool:
    return flag(config, said, where=where, default=default) if isinstance(said, str) else said


def _name(config: Mapping[str, Any], kind: str) -> str:
    name = config.get("_name_or_path") or config.get("name")
    return name if isinstance(name, str) and name else kind

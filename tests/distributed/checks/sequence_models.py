"""Tiny random models of fourteen families of transformers, whole in one process and divided over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
#: What each family adds to ``COMMON``.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {**_EXPERTS, "head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": 9, "head_dim": 8},
    "gpt_oss": {
        "head_dim": 8,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "minimax": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "qwen3_5_text": {**_DELTA},
    "olmo_hybrid": {**_DELTA},
    "kimi_linear": {
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "num_experts": 4,
        "n_routed_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8, "expand": 2, "chunk_size": 16},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "head_dim": 8},
    "lfm2": {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
}


def make(family: str, seed: int = 1, **others: Any) -> nn.Module:
    """A random model; weights are large enough for every part to matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(COMMON | FAMILIES[family] | others))
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=others.get("attn", "eager"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "A_log" in name or "dt_bias" in name:
                continue
            parameter.copy_(
                0.1 * torch.randn(parameter.shape) + (1.0 if parameter.dim() == 1 and "norm" in name else 0)
            )
    return model.train()


def batch_of(lengths: list[int], rows: int = 1, seed: int = 2) -> dict[str, Tensor]:
    """Random tokens of some documents, packed; without positions where there is one."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 64, (rows, sum(lengths)), generator=generator)
    labels = ids.clone()
    labels[torch.rand(ids.shape, generator=generator) < 0.1] = -100
    batch = {"input_ids": ids, "labels": labels}
    if len(lengths) > 1:
        batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths]).expand(rows, -1).contiguous()
    return batch


def alone(model: nn.Module, batch: dict[str, Tensor], lengths: list[int]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process, each document by itself, so that nothing is seen over a border."""
    model.zero_grad()
    ids, labels = (batch[name].split(lengths, 1) for name in ("input_ids", "labels"))
    count = sum(int((of[:, 1:] != -100).sum()) for of in labels)
    total = 0.0
    for tokens, wanted in zip(ids, labels, strict=True):
        if tokens.shape[1] < 2:
            continue
        loss = model(
            input_ids=tokens, labels=wanted, num_items_in_batch=torch.tensor(float(count)), use_cache=False
        ).loss
        loss.backward()
        total += loss.item()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return total, gradients

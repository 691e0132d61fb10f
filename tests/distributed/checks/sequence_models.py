"""Tiny random models of fourteen families of transformers, whole in one process and divided over ranks."""

from __future__ import annotations

import contextlib
import copy
import io
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mycel.errors import UsageError
from mycel.sequence import SequenceTrainer, apply

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

    config = AutoConfig.for_model(family, **(COMMON | FAMILIES.get(family, {}) | others))
    config._experts_implementation = "eager"  # the others have no float64
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


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """How far all gradients together are from others, relative to those."""
    far = sum(float((found[name].double() - gradient).norm()) ** 2 for name, gradient in wanted.items())
    return (far / sum(float(gradient.norm()) ** 2 for gradient in wanted.values())) ** 0.5


def divided(rank: int, world_size: int, families: list[str]) -> dict[str, dict[str, Any]]:
    """Of each family and set of documents how far loss and gradients under DDP are from float64 in one process.

    Beside them how far float32 in one process is, and whether the model is given back as it was.
    """
    found: dict[str, dict[str, Any]] = {}
    for family in families:
        model = make(family)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for lengths in ([29], [14, 1, 2, 11]):
            batch = batch_of(lengths)
            _, plain = alone(model, batch, lengths)
            wanted, gradients = alone(copy.deepcopy(model).double(), batch, lengths)
            with torch.no_grad():
                before = model(input_ids=batch["input_ids"], use_cache=False).logits
            config = model.config
            handle = apply(model)
            wrapped = DistributedDataParallel(model, find_unused_parameters=True)
            loss = wrapped(**handle.shard(batch)).loss
            loss.backward()
            got = float(handle.average(loss))
            handle.close()
            with torch.no_grad():
                after = model(input_ids=batch["input_ids"], use_cache=False).logits
            ours = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            found[f"{family} {lengths}"] = {
                "loss": abs(got - wanted) / wanted,
                "gradients": apart(ours, gradients),
                "plain": apart(plain, gradients),
                "given_back": after.equal(before)
                and model.config is config
                and all(tensor.equal(state[name]) for name, tensor in model.state_dict().items()),
            }
            model.zero_grad()
    return found


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What is said of calls and models of transformers that ranks would get wrong."""
    model = make("llama")
    batch = batch_of([12, 9])
    said = {}

    def saying(name: str, values: dict[str, Any]) -> None:
        try:
            model(**values)
        except UsageError as error:
            said[name] = str(error)

    with apply(model) as handle:
        made = handle.shard(batch)
        others = {name: value for name, value in made.items() if name not in ("position_ids", "shift_labels")}
        saying("absent", others | {"shift_labels": made["shift_labels"]})
        counted = torch.arange(made["input_ids"].shape[1])[None]
        saying("per rank", made | {"position_ids": counted if int(made["position_ids"][0, 0]) else counted + 0})
        restarts = made["position_ids"].clone()
        restarts[0, 2:] -= int(restarts[0, 2])
        saying("restarting", made | {"position_ids": restarts})
        saying("not shifted", {name: value for name, value in made.items() if name != "shift_labels"})
        if (handle.context.layout.labels(rank) < 0).any():  # a rank with no document's end has nothing to refuse
            saying("over a border", made | {"shift_labels": torch.full_like(made["shift_labels"], 7)})
        mask = torch.ones_like(made["input_ids"])
        mask[0, 1] = 0
        saying("mask", made | {"attention_mask": mask})
        saying("whole", batch)
        for name, more in {
            "left padding": {"attention_mask": torch.tensor([[0] * 3 + [1] * 18])},
            "rows": {"position_ids": torch.stack([torch.arange(21), batch["position_ids"][0]])},
            "labels": {"shift_labels": torch.full((1, 21), 5)},
        }.items():
            rows = {n: v.expand(2, -1) for n, v in batch.items()} if name == "rows" else batch
            try:
                handle.shard(rows | more)
            except UsageError as error:
                said[name] = str(error)
    for family in ("mamba", "gemma2"):
        other = make(family, state_size=8, head_dim=8)
        try:
            with apply(other) as handle:
                other(**handle.shard(batch))
        except UsageError as error:
            said[family] = str(error)
    return said


def trained(rank: int, world_size: int, folder: str, steps: int) -> dict[str, list[float]]:
    """What the trainer logs on ranks and, on each for itself, in one process."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class LongTrainer(SequenceTrainer, Trainer):
        pass

    class Same(TrainerCallback):
        """Nothing: trainers take callbacks as they did."""

    class Data(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return 4 * steps

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            ids = torch.randint(3, 64, (24,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": ids, "labels": ids.clone()}

    model = make("qwen3_moe")
    number, size = dist.get_rank(), dist.get_world_size()
    numbers = {"LOCAL_RANK": number, "RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in numbers.items()}  # as torchrun does
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # which nobody listens at: the group is there
    arguments = TrainingArguments(
        str(Path(folder) / str(rank)),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=steps,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        include_num_input_tokens_seen="all",
        disable_tqdm=True,
        learning_rate=1e-3,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = LongTrainer(
            model,
            arguments,
            train_dataset=Data(),
            eval_dataset=torch.utils.data.Subset(Data(), range(6)),
            sequence=apply(model),
            callbacks=[Same()],
        )
        trainer.train()
        held_out = trainer.evaluate()["eval_loss"]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    alone_losses, own = _by_hand(trainer, Data(), steps)
    return {
        "losses": [entry["loss"] for entry in logged],
        "tokens": [entry["num_input_tokens_seen"] for entry in logged],
        "wanted": alone_losses,
        "held_out": [held_out, own],
        "world": [float(dist.get_world_size())],
    }


def _by_hand(trainer: Any, data: Any, steps: int) -> tuple[list[float], float]:
    """The same training in one process: the trainer's own order of examples and its optimizer, step by step."""
    # Before a model is made: the order follows from the generator's seed, which that sets.
    order = list(torch.utils.data.BatchSampler(trainer.get_train_dataloader().batch_sampler.sampler, 2, False))
    model = make("qwen3_moe")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for batch in order[2 * step : 2 * step + 2]:
            ids = torch.stack([data[i]["input_ids"] for i in batch])
            loss = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(4.0 * 23), use_cache=False).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (steps - step) / steps
        optimizer.step()
        losses.append(total)
    with torch.no_grad():
        ids = torch.stack([data[i]["input_ids"] for i in range(6)])
        own = model(input_ids=ids, labels=ids, use_cache=False).loss.item()
    return losses, own

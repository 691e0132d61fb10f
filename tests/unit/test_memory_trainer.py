"""Models of Hugging Face under its ``Trainer``, within a budget: losses of training without one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from mycel.errors import UsageError
from mycel.memory import EmulatedLink, trainer_callback

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None,
    reason="the trainer is of transformers and accelerate",
)

THEIRS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 320, "tie_word_embeddings": True, "attention_dropout": 0.1},
    "qwen3_moe": {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
}


def model_of(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    common = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    model: nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, vocab_size=96, **common, **THEIRS[kind])
    )
    return model


def texts(count: int = 24) -> list[dict[str, list[int]]]:
    """Of several lengths, the longest in the middle."""
    made = []
    for place in range(count):
        ids = torch.randint(0, 96, (32 - abs(place - 12),), generator=torch.Generator().manual_seed(place)).tolist()
        made.append({"input_ids": ids, "labels": ids})
    return made


def padded(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(example["input_ids"]) for example in examples)
    return {
        name: torch.tensor([example[name] + [fill] * (longest - len(example[name])) for example in examples])
        for name, fill in (("input_ids", 0), ("labels", -100))
    }


def trainer(model: nn.Module, folder: Path, data: Any, callbacks: list[Any], **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    chosen: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **options,
    }
    arguments = TrainingArguments(str(folder), **chosen)
    return Trainer(model, arguments, train_dataset=data, data_collator=padded, callbacks=callbacks)


def losses(made: Any) -> list[float]:
    return [line["loss"] for line in made.state.log_history if "loss" in line]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", THEIRS)
def test_losses_are_those_without_a_budget(kind: str, tmp_path: Path) -> None:
    wanted = model_of(kind)
    plain = trainer(wanted, tmp_path, texts(), [])
    plain.train()
    model = model_of(kind)
    budget = round(1.3 * sum(p.nbytes for p in model.parameters()))
    link = EmulatedLink(bandwidth_gbps=50)
    callback = trainer_callback(budget=budget, link=link)
    held = trainer(model, tmp_path, texts(), [callback])
    held.train()
    assert callback.fitted.way.startswith("residency"), callback.fitted.explain()
    chosen = next(choice for choice in callback.fitted.choices if choice.way == callback.fitted.way)
    assert chosen.peak <= budget < callback.fitted.needs.peak and link.fetched_bytes > 0
    assert len(losses(held)) == 3 and losses(held) == losses(plain)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted.parameters(), strict=True))
    assert held.evaluate(texts(4))["eval_loss"] == plain.evaluate(texts(4))["eval_loss"]
    held.save_model(str(tmp_path / "saved"))  # far tensors, as any others
    callback.fitted.close()
    link.close()
    loaded = type(model).from_pretrained(tmp_path / "saved")  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), wanted.parameters(), strict=True))


@pytest.mark.filterwarnings("default")
def test_a_ring_of_slots_and_a_loss_of_ones_own(tmp_path: Path) -> None:
    asked: list[Any] = []

    def loss(out: Any) -> torch.Tensor:
        asked.append(out)
        value: torch.Tensor = out.logits.float().square().mean()
        return value

    trained = []
    for slots in (None, 2):
        model = model_of("llama")
        options: dict[str, Any] = {} if slots is None else {"slots": slots, "loss": loss}
        callback = trainer_callback(budget=2 * sum(p.nbytes for p in model.parameters()), **options)
        trainer(model, tmp_path, texts(), [callback], max_steps=1).train()
        trained.append([p.detach().clone() for p in model.parameters()])
        text = callback.fitted.explain()
        assert ("in a ring of 2 slots" in text) == (slots == 2), text
        assert bool(asked) == (slots == 2)
        callback.fitted.close()
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))
    with pytest.raises(UsageError, match="slots of a ring: 1 is not"):
        trainer(model_of("llama"), tmp_path, texts(), [trainer_callback(budget=1 << 20, slots=1)]).train()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(texts())


@pytest.mark.filterwarnings("default")
def test_data_that_cannot_be_looked_into_needs_a_batch(tmp_path: Path) -> None:
    model = model_of("llama")
    made = trainer(model, tmp_path, Stream(), [trainer_callback(budget=1 << 30)])
    with pytest.raises(UsageError, match="Stream cannot be looked into: give trainer_callback a batch="):
        made.train()
    callback = trainer_callback(budget=1 << 30, batch=padded(texts()[:2]))
    trainer(model, tmp_path, Stream(), [callback], max_steps=1).train()
    assert callback.fitted is not None and callback.fitted.way == "keep"
    trainer(model, tmp_path, Stream(), [callback], max_steps=1).train()  # closes the first one

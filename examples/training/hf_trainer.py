"""Hugging Face's ``Trainer``: it uses the process group that it finds. Needs ``pip install 'mycel[examples]'``.

torchrun --nproc-per-node 4 examples/training/hf_trainer.py
mycel emulate examples/clusters/two_boxes.yaml -- python examples/training/hf_trainer.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from mycel.demo.corpus import load_corpus


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of text, one behind the other."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.rows = text[: len(text) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.rows[index].long()
        return {"input_ids": tokens, "labels": tokens}


class Clock(TrainerCallback):
    """Losses and seconds of the steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.begin = 0.0

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.begin = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.begin)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if logs and "loss" in logs:  # the trainer has averaged it over the ranks
            self.losses.append(float(logs["loss"]))
            common.say(f"step {state.global_step:3}   loss {self.losses[-1]:.4f}   {self.seconds[-1] * 1e3:7.1f} ms")


def train(options: argparse.Namespace) -> list[float]:
    """Losses of all steps, as rank 0 logs them; none on the other ranks."""
    torch.manual_seed(options.seed)
    sizes = GPT2Config(
        vocab_size=common.VOCABULARY,
        n_positions=options.length,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=options.width // 32,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            seed=options.seed,
            ddp_find_unused_parameters=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        text = load_corpus(max_bytes=common.TEXT_BYTES).train
        trainer = Trainer(
            model=GPT2LMHeadModel(sizes),
            args=arguments,
            train_dataset=Windows(text, options.length),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)  # it prints what the clock prints
        trainer.train()
    if dist.get_rank() == 0:
        common.summarise(options, clock.losses, clock.seconds)
    return clock.losses


if __name__ == "__main__":
    common.main(train, __doc__)

"""A model for ``mycel advise``: what it is, and how a batch's loss is computed.

mycel emulate examples/clusters/star4.yaml -- mycel advise examples.compression.byte_model:make
mycel emulate examples/clusters/star4.yaml -- mycel advise examples.compression.byte_model:make_sharded
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from mycel.demo.corpus import load_corpus, sample_batch
from mycel.demo.model import VOCABULARY, ByteGPT, ModelConfig

LENGTH, BATCH = 64, 2


def make() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A byte-level transformer, and the loss of its next batch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = load_corpus(max_bytes=1 << 20).train
    generator = torch.Generator().manual_seed(0)

    def loss_of(module: nn.Module) -> Tensor:
        inputs, targets = sample_batch(text, BATCH, LENGTH, generator)
        return functional.cross_entropy(module(inputs).view(-1, VOCABULARY), targets.view(-1))

    return ByteGPT(ModelConfig(width=128, num_layers=4, num_heads=4, max_length=LENGTH)), loss_of


def make_sharded() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """The same model, sharded over all ranks."""
    model, loss_of = make()
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    return fully_shard(model), loss_of

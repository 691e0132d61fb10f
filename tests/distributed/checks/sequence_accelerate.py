"""Each family of transformers under accelerate's context parallelism, beside ours, against one process.

Accelerate divides sequences with torch's ``context_parallel`` and prepares models by hooks of its own; those are
called here, as its ``Accelerator`` and transformers' ``Trainer`` call them. On the CPU torch refuses causal
attention, so ours serves it underneath: what is wrong then is of the way, not of the machine.
"""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.checks.sequence_models import alone, apart, batch_of, make
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from mycel.sequence import apply, serve_context_parallel

DOCUMENTS = ([28], [14, 3, 11])


def summed(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of all ranks together; of one that took no part zeros."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(gradient)
        found[name] = gradient
    return found


def by_accelerate(model: nn.Module, batch: dict[str, Tensor], count: int, mesh: Any) -> dict[str, Tensor]:
    """A step as accelerate and ``Trainer`` have it, losses divided by the labels of the whole batch."""
    hooks = import_module("accelerate.big_modeling")._attach_context_parallel_hooks
    hooks(model)
    ids, labels = batch["input_ids"].clone(), batch["labels"].clone()
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    positions = batch.get("position_ids", torch.arange(ids.shape[1])[None]).clone()
    buffers = [ids, labels, shifted, positions]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 4, no_restore_buffers=set(buffers)):
        loss = model(
            input_ids=ids,
            labels=labels,
            shift_labels=shifted,
            position_ids=positions,
            num_items_in_batch=torch.tensor(float(count)),
            use_cache=False,
        ).loss
        loss.backward()
    return summed(model)


def by_us(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    with apply(model) as handle:
        model(**handle.shard(batch)).loss.backward()
    return {name: gradient / dist.get_world_size() for name, gradient in summed(model).items()}


def families(rank: int, world_size: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """Of each family how far gradients are from one process: by accelerate, or what it says, and by ours."""
    mesh = init_device_mesh("cpu", (world_size,))
    ulysses = import_module("accelerate.big_modeling")._refuse_recurrent_layers_under_sequence_parallelism
    found: dict[str, dict[str, Any]] = {}
    with serve_context_parallel():
        for name in names:
            model = make(name, attn="eager" if name in ("gpt_oss", "mamba2") else "sdpa")
            of_family: dict[str, Any] = {"ulysses": said(lambda model=model: ulysses(model))}
            for kind, lengths in zip(("one", "packed"), DOCUMENTS, strict=True):
                batch = batch_of(lengths)
                _, wanted = alone(copy.deepcopy(model).double(), batch, lengths)
                count = sum(int((part[:, 1:] != -100).sum()) for part in batch["labels"].split(lengths, 1))
                own = copy.deepcopy(model)
                of_family[kind] = said(
                    lambda own=own, batch=batch, count=count, wanted=wanted: apart(
                        by_accelerate(own, batch, count, mesh), wanted
                    )
                )
                of_family[f"our {kind}"] = apart(by_us(copy.deepcopy(model), batch), wanted)
            found[name] = of_family
    return found


def said(call: Any) -> Any:
    """What a call gives, or the first sentence of what it says; all ranks fail alike here, or none."""
    try:
        return call()
    except (ValueError, RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"

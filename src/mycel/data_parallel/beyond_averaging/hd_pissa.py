"""HD-PiSSA: every rank trains other directions of the same weights, and all of them move the weights together.

Ranks of data-parallel LoRA or PiSSA have the same adapter, so K ranks change a matrix within r directions, as one
would. Here the strongest ``K r`` directions of a matrix are divided over the ranks. A rank's optimizer works with
the gradients of its own batch along its own directions; the ranks then exchange their steps, and each adds all of
them to the whole matrix::

    W <- W + sum_i (dB_i A_i + B_i dA_i + dB_i dA_i)

The directions ``A_i``, ``B_i`` themselves stay where they were, known to all, so that steps alone travel: of a
matrix ``[outputs, inputs]`` ``(K-1) r (inputs + outputs)`` numbers a rank. Nothing is divided by K.

References:
    Y. Wang, F. Meng, X. Zhang, F. Jiang, P. Tang, M. Zhang, "HD-PiSSA: High-Rank Distributed Orthogonal Adaptation",
    EMNLP 2025, arXiv 2505.18777; F. Meng, Z. Wang, M. Zhang, "PiSSA: Principal Singular Values and Singular Vectors
    Adaptation of Large Language Models", NeurIPS 2024, arXiv 2404.02948.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mycel.comm.handle import Handle
from mycel.comm.start import agree, group_or_all
from mycel.data_parallel.beyond_averaging.directions import gather_rows, principal_directions, rows_of_ranks
from mycel.data_parallel.beyond_averaging.layers import Layer, choose
from mycel.data_parallel.local.outer import MakeOuter
from mycel.data_parallel.local.state import load_tensors, read_optimizer, write_optimizer
from mycel.data_parallel.stats import CommStats
from mycel.errors import UsageError

__all__ = ["HDPiSSA", "hd_pissa"]

_VERSION = 1


def hd_pissa(
    model: nn.Module,
    optimizer: MakeOuter,
    *,
    rank: int = 16,
    layers: str | Sequence[str] = "*",
    skip: str | Sequence[str] = (),
    freeze_others: bool = True,
    group: dist.ProcessGroup | None = None,
) -> HDPiSSA:
    """Have the ranks train a model's linear layers along different directions. Every rank calls it, once.

    The model stays what it is: the same modules, the same names, no weights beside its own. Chosen weights no longer
    require gradients; they move when the optimizer steps, by the same numbers on all ranks.

    Args:
        model: its parameters become the first rank's everywhere. Neither wrapped by DDP nor sharded.
        optimizer: makes an optimizer of this rank's steps, for example ``partial(torch.optim.AdamW, lr=2e-5)``.
            Weight decay has no effect: the numbers that it sees are zero before each step.
        rank: directions that each rank trains of a matrix; fewer where it has not as many.
        layers: patterns as in file names, of the names of ``nn.Linear`` modules; a weight that requires no gradient
            stays frozen.
        skip: patterns of those left out.
        freeze_others: all other parameters require gradients no longer. Otherwise they are left to you; DDP, wrapped
            around the model afterwards, averages their gradients.
        group: the ranks, all by default.

    Returns:
        A handle with the optimizer and ``close()``.

    Raises:
        UsageError: no layer is chosen, one cannot be trained alone, or the model is wrapped.

    Examples:
        >>> from functools import partial
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> model = nn.Sequential(nn.Linear(4, 4, bias=False))
        >>> _ = model[0].weight.data.copy_(torch.tensor([4.0, 3.0, 2.0, 1.0]).diag())
        >>> with hd_pissa(model, partial(torch.optim.SGD, lr=0.01), rank=2) as trained:
        ...     model(torch.eye(4)).square().sum().backward()
        ...     trained.optimizer.step()
        >>> [round(number, 2) for number in model[0].weight.diagonal().tolist()]  # the two strongest have moved
        [3.39, 2.65, 2.0, 1.0]
        >>> dist.destroy_process_group()
    """
    if rank < 1:
        raise UsageError(f"hd_pissa: {rank} directions a rank; at least one")
    if isinstance(model, DistributedDataParallel):
        raise UsageError("hd_pissa takes the model itself: call it before DistributedDataParallel wraps the model")
    found = group_or_all(group, "hd_pissa")
    chosen = choose(model, layers, skip)
    agree(model.parameters(), found)
    return HDPiSSA(model, chosen, optimizer, rank, found, freeze_others=freeze_others)


class HDPiSSA(Handle):
    """HD-PiSSA at work; made by ``hd_pissa``.

    Attributes:
        optimizer: for ``step``, ``zero_grad`` and learning-rate schedulers.
        stats: bytes; those of averaging the weights' own gradients are ``exact_bytes``.

    Examples:
        >>> from functools import partial
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> model = nn.Sequential(nn.Linear(8, 4, bias=False))
        >>> with hd_pissa(model, partial(torch.optim.SGD, lr=0.1), rank=2) as trained:
        ...     [tuple(change.shape) for change in trained.parameters()], model[0].weight.requires_grad
        ([(2, 12)], False)
        >>> model[0].weight.requires_grad
        True
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        model: nn.Module,
        chosen: Mapping[str, list[nn.Linear]],
        optimizer: MakeOuter,
        rank: int,
        group: dist.ProcessGroup,
        *,
        freeze_others: bool,
    ) -> None:
        self._group = group
        self.stats = CommStats()
        self._layers = self._decompose(chosen, rank)
        self._flags = [(p, p.requires_grad) for p in model.parameters()]
        trained = {id(layer.weight) for layer in self._layers}
        for parameter, _ in self._flags:
            if freeze_others or id(parameter) in trained:
                parameter.requires_grad_(False)
        self.optimizer = optimizer([layer.change for layer in self._layers])
        names = {id(layer.change): layer.name for layer in self._layers}
        self._changes = [p for entry in self.optimizer.param_groups for p in entry["params"]]
        self._names = [names[id(p)] for p in self._changes]
        self._hooks = [
            self.optimizer.register_step_pre_hook(lambda *_: self._fill_gradients()),
            self.optimizer.register_step_post_hook(lambda *_: self._exchange_steps()),
        ]
        self._hooks += [m.register_forward_hook(x.watch, with_kwargs=True) for x in self._layers for m in x.modules]

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the optimizer steps, for example to clip gradients: of each layer ``[dA, dB^T]``."""
        return (layer.change for layer in self._layers)

    def close(self) -> None:
        """Stop. Parameters require gradients as they did before; the model keeps what it has learned."""
        for hook in self._hooks:
            hook.remove()
        for parameter, flag in self._flags:
            parameter.requires_grad_(flag)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs beside the model, by weights' names. Every rank calls it, between steps.

        Directions of all ranks and the optimizer's state along them: the same on all ranks, for any number of ranks.

        Returns:
            Tensors, numbers and names; ``torch.load`` reads it with ``weights_only=True``.

        Raises:
            UsageError: the optimizer keeps tensors of other shapes than its parameters'.
        """
        found = read_optimizer(self.optimizer, self._names, self._changes)
        places, parts = [], []
        for name, change in zip(self._names, self._changes, strict=True):
            for key, value in found["state"].get(name, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    if value.shape != change.shape:
                        raise UsageError(
                            f"{type(self.optimizer).__name__} keeps {key} of shape {tuple(value.shape)} for steps of "
                            f"shape {tuple(change.shape)}: other ranks could not divide it; take Adam or SGD"
                        )
                    places.append((name, key))
                    parts.append(value)
        counts = {layer.name: len(layer.directions) for layer in self._layers}
        wholes = gather_rows(parts, [counts[name] for name, _ in places], self._group, CommStats())
        for (name, key), whole in zip(places, wholes, strict=True):
            found["state"][name][key] = whole
        return {
            "version": _VERSION,
            "directions": {layer.name: layer.directions.clone() for layer in self._layers},
            "residual": {layer.name: layer.residual.clone() for layer in self._layers if layer.residual is not None},
            "optimizer": found,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was made; the model is loaded on its own, before or after.

        The directions are those of the state, whatever ``rank`` was given. Another number of ranks divides them anew,
        each with its state of the optimizer: none is lost, none comes in. A rank then has more or fewer of them, and
        sees them with its own part of the data.

        Raises:
            UsageError: the state is of another model, or of other layers.
        """
        if state.get("version") != _VERSION:
            raise UsageError(f"not a state of HD-PiSSA, or of another version: {state.get('version')!r}")
        for layer in self._layers:
            found, width = state["directions"].get(layer.name), sum(layer.weight.shape)
            if found is None or found.shape[1] != width:
                have = "is missing" if found is None else f"has directions of {found.shape[1]} numbers"
                raise UsageError(f"the state is of other layers: {layer.name} {have} there, {width} numbers here")
        rounded = {layer.name: layer.residual for layer in self._layers if layer.residual is not None}
        load_tensors("rounding errors", state["residual"], list(rounded), list(rounded.values()))
        own = {}
        for layer in self._layers:
            layer.directions = state["directions"][layer.name].to(layer.directions, copy=True)
            own[layer.name] = layer.own = self._own(len(layer.directions))
            layer.change.data, layer.change.grad = torch.zeros_like(layer.directions[layer.own]), None
        saved = {
            name: {key: v[own[name]] if isinstance(v, Tensor) and v.dim() else v for key, v in entry.items()}
            for name, entry in state["optimizer"]["state"].items()
        }
        write_optimizer(self.optimizer, self._names, {**state["optimizer"], "state": saved})

    # -- steps ------------------------------------------------------------------------------------------------

    def _decompose(self, chosen: Mapping[str, list[nn.Linear]], rank: int) -> list[Layer]:
        """Each rank decomposes some of the weights, for all."""
        layers = []
        for place, (name, modules) in enumerate(chosen.items()):
            weight = modules[0].weight
            exact = torch.promote_types(weight.dtype, torch.float32)
            count = min(rank * self._group.size(), *weight.shape)
            directions = torch.empty(count, sum(weight.shape), dtype=exact, device=weight.device)
            made_by = place % self._group.size()
            if self._group.rank() == made_by:
                directions.copy_(principal_directions(weight, count))
            agree([directions], self._group, rank=made_by)
            own = self._own(count)
            layers.append(
                Layer(
                    name=name,
                    modules=modules,
                    directions=directions,
                    own=own,
                    change=nn.Parameter(torch.zeros_like(directions[own])),
                    residual=None if weight.dtype == exact else torch.zeros_like(weight, dtype=exact),
                )
            )
        return layers

    def _own(self, count: int) -> slice:
        rows = rows_of_ranks(count, self._group.size())
        first = sum(rows[: self._group.rank()])
        return slice(first, first + rows[self._group.rank()])

    def _fill_gradients(self) -> None:
        """Layers that this rank's batch has not used count as zero, as in DDP: all ranks' optimizers keep step."""
        for layer in self._layers:
            if layer.change.grad is None:
                layer.change.grad = torch.zeros_like(layer.change)

    @torch.no_grad()
    def _exchange_steps(self) -> None:
        counts = [len(layer.directions) for layer in self._layers]
        wholes = gather_rows([layer.change for layer in self._layers], counts, self._group, self.stats)
        for layer, changes in zip(self._layers, wholes, strict=True):
            layer.move(changes)
            layer.change.zero_()
            size = self._group.size()
            self.stats.exact_bytes += 2 * (size - 1) / size * layer.weight.numel() * layer.weight.element_size()
        self.stats.steps += 1

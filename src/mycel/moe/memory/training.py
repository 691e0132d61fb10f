"""Training with experts in far memory: each layer's come before it computes, forward and backward, and go after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mycel.comm.pending import Pending
from mycel.errors import UsageError
from mycel.memory.tiers import Link
from mycel.moe.divided import stacks_of
from mycel.moe.experts import Experts
from mycel.moe.recompute import recomputing
from mycel.moe.sharded import is_sharded

__all__ = ["TrainingOffload"]


class _Layer:
    """One layer's stacks: far for good, near while they are needed.

    Near numbers have one storage for good, which is filled and emptied: graphs hold it meanwhile.
    """

    def __init__(self, path: str, module: nn.Module, link: Link) -> None:
        self.path, self.module, self.link = path, module, link
        self.stacks = {name: module.get_parameter(name) for name in stacks_of(module)}
        self.near = {name: p.data for name, p in self.stacks.items()}
        self.far = {n: nn.Parameter(link.far(p.detach()), p.requires_grad) for n, p in self.stacks.items()}
        if any(far.data_ptr() == self.near[name].data_ptr() for name, far in self.far.items()):
            self.far = {n: nn.Parameter(far.detach().clone(), far.requires_grad) for n, far in self.far.items()}
        self.num_bytes = sum(t.nbytes for t in self.near.values())
        self.coming: Pending[None] | None = None
        self.here = True
        #: How often far numbers had been written when they were brought, and when the latest pass used them.
        self.brought = self.used = self.written
        self.waiting_for: set[str] = set()
        self.release()

    @property
    def written(self) -> tuple[int, ...]:
        """How often each far stack has been written, by torch's count."""
        return tuple(far._version for far in self.far.values())

    def start(self) -> None:
        """Bring them; does not wait."""
        if self.here or self.coming is not None:
            return
        for near in self.near.values():
            near.untyped_storage().resize_(near.numel() * near.element_size())
        self.brought = self.written
        self.coming = self.link.fetch([(far.detach(), self.near[name]) for name, far in self.far.items()])

    def bring(self) -> None:
        """Bring them and wait."""
        if self.brought != self.written:  # an optimizer has stepped since
            self._arrive()
            self.release()
        self.start()
        self._arrive()

    def _arrive(self) -> None:
        if self.coming is not None:
            self.coming.wait()
            self.coming = None
            for name, parameter in self.stacks.items():
                parameter.data = self.near[name]
            self.here = True

    def release(self) -> None:
        """Give near memory back. Whoever reads parameters now reads NaN."""
        if not self.here:
            return
        for name, parameter in self.stacks.items():
            nothing = self.near[name].new_full((1,) * self.near[name].dim(), float("nan"))
            parameter.data = nothing.expand(self.near[name].shape)
            self.near[name].untyped_storage().resize_(0)
        self.here = False


class TrainingOffload:
    """Keeps a model's experts in far memory while it is trained: near are those of two layers.

    While a layer computes, the next one's experts come, in the backward pass those of the one before; gradients go to
    far memory as soon as a layer's are complete. Together with FSDP2 for the rest, whose shards of the next block are
    gathered ahead (``set_modules_to_forward_prefetch``), this is prefetching in two dimensions: between ranks, and
    between memories. The optimizer gets ``parameters()``: far ones in place of the experts', so that its state is far
    as well, and on a disk where ``TiledOptimizer(state_like=on_disk(folder))`` makes it.

    ``mycel.moe.clip_grad_norm`` and ``grad_norm``, ``state_dict`` and ``load_state_dict`` of the model see the far
    numbers. Activation checkpointing may be on. Under autocast graphs hold copies in the narrow type, which stay.

    Args:
        model: with experts, of ``MoE`` or of Hugging Face after ``mycel.moe.apply``, in the order in which they run.
            With DDP: divided over all its ranks, and after DDP was made.
        link: from far to near memory.
        prefetch: bring experts before their layer asks; else computation waits for them.

    Attributes:
        peak_bytes: of experts' weights that were near at once, at most.

    Raises:
        UsageError: no experts, parameters that are DTensors or have an offload already, or experts that DDP averages.

    References:
        Shen et al., "SE-MoE: A Scalable and Efficient Mixture-of-Experts Distributed Training and Inference System",
        2022 (arXiv 2205.10034; 2D prefetch scheduling).

    Examples:
        >>> from mycel.moe import MoE
        >>> from mycel.moe.memory import EmulatedLink
        >>> model = nn.Sequential(*(MoE(dim=8, hidden=16, num_experts=4) for _ in range(3)))
        >>> offload = TrainingOffload(model, EmulatedLink(bandwidth_gbps=10))
        >>> optimizer = torch.optim.AdamW(offload.parameters())
        >>> model(torch.randn(5, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> offload.close()  # experts are in the model again
    """

    def __init__(self, model: nn.Module, link: Link, *, prefetch: bool = True) -> None:
        found = {path: module for path, module in model.named_modules() if _has_experts(module)}
        if not found:
            raise UsageError(f"{type(model).__name__}: no experts in it to keep far")
        averaged = any(isinstance(module, DistributedDataParallel) for module in model.modules())
        for path, module in found.items():
            _check(path, module, averaged=averaged)
        self.model, self.prefetch, self.peak_bytes = model, prefetch, 0
        self._undo: list[Callable[[], None]] = []
        self._layers = [_Layer(path, module, link) for path, module in found.items()]
        for place, layer in enumerate(self._layers):
            self._attach(place, layer)

    # -- what an optimizer gets -----------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of the model, experts' far ones in place of those near, which have no gradients."""
        for name, parameter in self.model.named_parameters():
            yield name, getattr(parameter, "mycel_far", parameter)

    def parameters(self) -> Iterator[nn.Parameter]:
        """See ``named_parameters``."""
        return (parameter for _, parameter in self.named_parameters())

    # -- when experts come and go ---------------------------------------------------------------------------------

    def _attach(self, place: int, layer: _Layer) -> None:
        module = layer.module
        handles: list[Any] = [
            module.register_forward_pre_hook(lambda *_: self._forward(place)),
            module.register_forward_hook(lambda _, __, output: self._leave(place, output)),
            module.register_state_dict_post_hook(partial(_far_state, layer)),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(lambda *_: layer.bring()),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(lambda *_: _loaded(layer)),  # type: ignore[no-untyped-call]
        ]
        for name, parameter in layer.stacks.items():
            parameter.mycel_far = layer.far[name]  # type: ignore[attr-defined]
            if parameter.requires_grad:
                hook = partial(self._accumulated, layer, name)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._undo += [handle.remove for handle in handles]

    def _forward(self, place: int) -> None:
        layer = self._layers[place]
        if not recomputing():
            layer.used = layer.written
        self._enter(place, place - 1 if recomputing() else place + 1)

    def _enter(self, place: int, following: int) -> None:
        """A layer computes now; then, as things go, another one."""
        self._layers[place].bring()
        if self.prefetch and 0 <= following < len(self._layers):
            self._layers[following].start()
        near = sum(layer.num_bytes for layer in self._layers if layer.here or layer.coming is not None)
        self.peak_bytes = max(self.peak_bytes, near)

    def _leave(self, place: int, output: Any) -> None:
        layer = self._layers[place]
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: self._backward(place))  # type: ignore[no-untyped-call]
        elif not recomputing():
            layer.release()
            return
        if not recomputing() and place + 1 < len(self._layers):
            layer.release()  # the last one is needed first

    def _backward(self, place: int) -> None:
        for later in self._layers[place + 1 :]:  # those without trained parameters hear of no gradients
            if not later.waiting_for:
                later.release()
        layer = self._layers[place]
        if layer.used != layer.written:
            raise UsageError(f"{layer.path}: its experts changed between a forward pass and its backward pass")
        layer.waiting_for = {name for name, p in layer.stacks.items() if p.requires_grad}
        self._enter(place, place - 1)

    def _accumulated(self, layer: _Layer, name: str, parameter: Tensor) -> None:
        """A gradient is complete: it goes far, and with the last one the layer's experts go."""
        far, grad = layer.far[name], parameter.grad
        if grad is not None:
            there = grad.to(far.device)
            far.grad = there if far.grad is None else far.grad.add_(there)
            parameter.grad = None
        layer.waiting_for.discard(name)
        if not layer.waiting_for:
            layer.release()

    def close(self) -> None:
        """Experts near again, with the values that they have now, and their gradients. The link stays open."""
        for undo in self._undo:
            undo()
        self._undo = []
        for layer in self._layers:
            layer.bring()
            for name, parameter in layer.stacks.items():
                grad = layer.far[name].grad
                parameter.grad = None if grad is None else grad.to(parameter.device)
                del parameter.mycel_far  # type: ignore[attr-defined]
        self._layers = []

    def __enter__(self) -> TrainingOffload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _has_experts(module: nn.Module) -> bool:
    return isinstance(module, Experts) or hasattr(module, "mycel_experts")


def _check(path: str, module: nn.Module, *, averaged: bool) -> None:
    for name in stacks_of(module):
        parameter = module.get_parameter(name)
        if is_sharded(parameter):
            raise UsageError(
                f"{path}.{name} is sharded by FSDP2; shard the other modules, and divide experts instead"
            )
        if hasattr(parameter, "mycel_far"):
            raise UsageError(f"{path}.{name} is in far memory already; close that first")
        if not parameter.is_contiguous():
            raise UsageError(f"{path}.{name} is not contiguous in memory")
        if averaged and not getattr(parameter, "_ddp_ignored", False):
            raise UsageError(
                f"{path}.{name} is averaged by DDP, which would have to see it near; divide experts over DDP's "
                "ranks, and make DDP first"
            )


def _far_state(layer: _Layer, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, far in layer.far.items():
        state[prefix + name] = far.detach()


@torch.no_grad()
def _loaded(layer: _Layer) -> None:
    for name, far in layer.far.items():
        far.copy_(layer.near[name])
    layer.release()

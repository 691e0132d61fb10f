"""Experts of any width from one set of weights: neurons sorted by importance, narrower experts are prefixes."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mycel.arguments import whole_number
from mycel.comm.handle import Handle
from mycel.errors import UsageError
from mycel.moe.elastic.importance import Activity
from mycel.moe.elastic.neurons import Neurons, neurons_of
from mycel.moe.expert_mlp import ExpertWeights
from mycel.moe.memory.layers import Layer, layers_of
from mycel.moe.slices import Cut, WeightUse

__all__ = ["ElasticExperts", "elastic_experts"]


class _Layer:
    """One layer's experts, their neurons, and how many of these are used.

    Args:
        layer: whose experts.
        path: for messages.
    """

    def __init__(self, layer: Layer, path: str) -> None:
        self.path, self.layer = path, layer
        self.experts: Any = layer.experts
        experts = self.experts
        self.holder: Any = getattr(experts, "mycel_experts", experts)
        if self.holder.narrow is not None:
            raise UsageError(f"{path}: these experts are elastic already; close that first")
        self.neurons: Neurons = neurons_of(experts, path)
        self.width = self.neurons.count
        self.activity: Activity | None = None
        self.mean_EF: Tensor | None = None
        self.kept: dict[str, nn.Parameter | None] | None = None

    def narrow(self, whole: ExpertWeights, use: WeightUse) -> ExpertWeights:
        """What a call computes with: a prefix, and the mean of the rest as a constant."""
        if self.width == self.neurons.count or self.kept is not None:
            return whole
        if use.gather is not None:
            raise UsageError(
                f"{self.path}: weights of other ranks cannot be put together with elastic ones; give r=1"
            )
        narrowed = self.neurons.narrowed(whole, self.width)
        return narrowed if self.mean_EF is None else self.folded(narrowed, whole, self.width)

    def folded(self, narrowed: ExpertWeights, whole: ExpertWeights, width: int) -> ExpertWeights:
        """With biases that add what the neurons that are cut off add on average."""
        assert self.mean_EF is not None
        mean_EF1 = self.mean_EF[:, width:].to(whole.down).unsqueeze(2)
        constant_ED = (whole.down[:, :, width:] @ mean_EF1).squeeze(2)
        first, second = narrowed.gate_up_bias, narrowed.down_bias
        return narrowed._replace(
            gate_up_bias=whole.gate_up.new_zeros(narrowed.gate_up.shape[:2]) if first is None else first,
            down_bias=constant_ED if second is None else second + constant_ED,
        )

    @property
    def is_far(self) -> bool:
        """Whether something else computes in their place, with weights from far memory."""
        owner = getattr(self.layer, "layer", None)
        return getattr(self.holder, "far", None) is not None or (
            owner is not None and owner.experts is not self.experts
        )

    def down(self) -> Tensor:
        """The second map, ``[E, D, F]``."""
        stacked: Tensor = self.experts.get_parameter(self.neurons.names[1]).detach()
        return stacked if self.neurons.cuts[1].dim == 2 else stacked.transpose(1, 2)

    def watch(self, activity: Activity | None) -> None:
        """Be told what neurons do, or no longer."""
        told = None if activity is None else activity.add
        if self.holder is self.experts:
            self.experts.kind = self.experts.kind._replace(watch=told)
        else:
            self.holder.watch = told


class ElasticExperts(Handle):
    """A model's experts at a width that can be chosen for every call; made by ``elastic_experts``.

    Args:
        model: see ``elastic_experts``.

    Attributes:
        num_neurons: inside the experts of each layer, at full width.

    Examples:
        >>> from mycel.moe import MoE
        >>> model, x = MoE(dim=4, hidden=8, num_experts=2), torch.randn(64, 4)
        >>> with ElasticExperts(model) as elastic:
        ...     with elastic.observe():
        ...         before = model(x)
        ...     elastic.sort()
        ...     same = torch.allclose(model(x), before, atol=1e-5)
        ...     elastic.use(2)
        ...     narrower = model(x)
        >>> same, elastic.num_neurons, torch.allclose(narrower, before, atol=1e-5)
        (True, (8,), False)
    """

    def __init__(self, model: nn.Module) -> None:
        names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        self._layers = [_Layer(one, names[id(one.experts)]) for one in layers_of(model)]
        self.num_neurons = tuple(layer.neurons.count for layer in self._layers)
        for layer in self._layers:
            layer.holder.narrow = layer.narrow

    # -- which neurons matter -------------------------------------------------------------------------------------

    @contextmanager
    def observe(self) -> Iterator[None]:
        """While it is open, what neurons do is counted; run the model on calibration data. Replaces earlier counts.

        Each rank counts the rows of the experts that it has, whoever sent them. At full width only.

        Raises:
            UsageError: a layer is narrower now.
        """
        if any(layer.width != layer.neurons.count for layer in self._layers):
            raise UsageError("observe() counts what all neurons do: use() full width first")
        for layer in self._layers:
            down = layer.down()
            layer.activity = Activity(down.shape[0], layer.neurons.count, down.device)
            layer.watch(layer.activity)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.watch(None)
                if layer.activity is not None and bool(layer.activity.rows.any()):
                    layer.mean_EF = layer.activity.mean

    @torch.no_grad()
    def sort(self, by: str = "spread") -> None:
        """Put each expert's most important neurons first, in place. The model computes what it did, but for rounding.

        Optimizers must not have state yet. Where experts are divided, each rank sorts its own.

        Args:
            by: ``spread``, the standard deviation of what a neuron adds; or ``magnitude``, which is there to be
                compared with.

        Raises:
            UsageError: nothing was observed, or an unknown importance.
        """
        if any(layer.activity is None for layer in self._layers):
            raise UsageError("sort() needs to know what neurons do: run the model inside observe() first")
        for layer in self._layers:
            assert layer.activity is not None
            order = layer.activity.importance(layer.down(), by).argsort(dim=1, descending=True, stable=True)
            layer.neurons.reorder(layer.experts, order)
            layer.mean_EF = layer.activity.mean.gather(1, order)
            layer.activity = None  # its places are no longer those of the weights

    def forget_means(self) -> None:
        """Cut off neurons add nothing from now on, as while they are trained: means are of weights that change."""
        for layer in self._layers:
            layer.mean_EF = None

    # -- widths ---------------------------------------------------------------------------------------------------

    def use(self, widths: int | Sequence[int] | None) -> None:
        """Compute with so many neurons from now on.

        Args:
            widths: of all layers, or of each; ``None``: full.

        Raises:
            UsageError: a width that does not exist, as many as there are no layers, experts that were cut, or experts
                in far memory, which come whole.
        """
        if far := [layer.path for layer in self._layers if layer.is_far]:
            raise UsageError(f"{far[0]}: in far memory; keep() a prefix first, and Offload what is left of experts")
        if any(layer.kept is not None for layer in self._layers):
            raise UsageError("these experts were cut to a prefix by keep(); close() brings the rest back")
        for layer, width in zip(self._layers, self._each(widths), strict=True):
            layer.width = width

    def _each(self, widths: int | Sequence[int] | None) -> list[int]:
        if widths is None:
            return list(self.num_neurons)
        given = [widths] * len(self._layers) if isinstance(widths, int) else list(widths)
        if len(given) != len(self._layers):
            raise UsageError(
                f"{len(given)} widths for {len(self._layers)} layers of experts; give one, or one a layer"
            )
        return [
            whole_number(width, f"width of {layer.path}, in neurons", least=1, most=layer.neurons.count)
            for layer, width in zip(self._layers, given, strict=True)
        ]

    def random_widths(self, widths: Sequence[int], step: int, *, seed: int = 0) -> list[int]:
        """A width for each layer, the same on all ranks, without a word between them: for training at all widths.

        Args:
            widths: to draw from.
            step: of the training.
            seed: of the run.

        Returns:
            For ``use``.

        Raises:
            UsageError: a width that does not exist.
        """
        choices = [self._each(width)[0] for width in widths]
        made = torch.Generator().manual_seed(seed * 1_000_003 + step)
        return [choices[int(torch.randint(len(choices), (), generator=made))] for _ in self._layers]

    @contextmanager
    def timed(self, begin: Callable[[int], None], end: Callable[[int], None]) -> Iterator[None]:
        """While it is open, be told when each layer's experts begin and end.

        Args:
            begin: is given the layer's number.
            end: likewise.
        """
        hooks = []
        for place, layer in enumerate(self._layers):
            hooks.append(layer.experts.register_forward_pre_hook(lambda *_, place=place: begin(place)))
            hooks.append(layer.experts.register_forward_hook(lambda *_, place=place: end(place)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def expert_bytes(self, widths: int | Sequence[int] | None = None) -> list[int]:
        """Bytes of one expert of each layer at a width, with the bias that stands for what is cut off.

        Args:
            widths: as of ``use``.
        """
        found = []
        for layer, width in zip(self._layers, self._each(widths), strict=True):
            down = layer.down()
            per_neuron = (layer.neurons.blocks + 1) * down.shape[1]
            folded = layer.mean_EF is not None and width < layer.neurons.count
            extra = width * layer.neurons.blocks + down.shape[1] if folded else 0
            found.append((per_neuron * width + extra) * down.element_size())
        return found

    # -- prefixes for good ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def keep(self, widths: int | Sequence[int]) -> None:
        """Keep only a prefix of each expert, in place: less memory, and fewer bytes for whoever fetches experts.

        Parameters become narrower ones under the same names; where means are known, biases stand for the rest. The
        whole ones go to host memory until ``close``. Make optimizers and ``Offload`` afterwards, and close those
        first.

        Args:
            widths: as of ``use``.

        Raises:
            UsageError: a width that does not exist, or experts that were cut already.
        """
        self.use(widths)
        for layer in self._layers:
            _keep(layer)

    @torch.no_grad()
    def close(self) -> None:
        """Full width, all neurons, in the order that ``sort`` gave them."""
        for layer in self._layers:
            _bring_back(layer)
            layer.watch(None)
            layer.holder.narrow = None
        self._layers = []


def elastic_experts(model: nn.Module) -> ElasticExperts:
    """Let a model's experts compute at any width, as Flextron does with all of a model's layers.

    Observe what neurons do on some data, sort them, then ``use`` any width: the first neurons of every expert, and
    the mean of the others as a constant. Some training at random widths brings narrow ones close to the whole.

    Args:
        model: with ``MoE`` layers; or of Hugging Face, after ``mycel.moe.apply``. Experts may be divided over ranks,
            whole ones; FSDP2 comes afterwards.

    Returns:
        A handle with ``observe``, ``sort``, ``use``, ``keep`` and ``close``.

    Raises:
        UsageError: no experts, slices of experts, or experts whose neurons are not understood.

    References:
        R. Cai et al., "Flextron: Many-in-One Flexible Large Language Model", ICML 2024, arXiv 2406.10260, sections 3
        (elastic networks, sorting) and 4 (routers and their surrogate).

    Examples:
        >>> from mycel.moe import MoE
        >>> model = nn.Sequential(MoE(dim=4, hidden=8, num_experts=2), MoE(dim=4, hidden=8, num_experts=2))
        >>> elastic = elastic_experts(model)
        >>> elastic.use([8, 4])
        >>> elastic.expert_bytes([8, 4])
        [384, 192]
        >>> elastic.close()
    """
    return ElasticExperts(model)


def _keep(layer: _Layer) -> None:
    experts, neurons, width = layer.experts, layer.neurons, layer.width
    whole: dict[str, nn.Parameter | None] = {name: experts.get_parameter(name) for name in neurons.names}
    if width == neurons.count:
        layer.kept = {}
        return
    constant_ED: Tensor | None = None
    if layer.mean_EF is not None:
        mean_EF1 = layer.mean_EF[:, width:].unsqueeze(2)
        constant_ED = (layer.down()[:, :, width:].double() @ mean_EF1).squeeze(2)
    for name, cut in zip(neurons.names, neurons.cuts, strict=True):
        parameter = experts.get_parameter(name)
        blocks = parameter.shape[cut.dim] // neurons.count
        prefix = neurons.prefix(parameter.data, width, dim=cut.dim, blocks=blocks)
        _replace(experts, name, nn.Parameter(prefix.contiguous().clone(), parameter.requires_grad))
    if constant_ED is not None:
        whole |= _with_constant(layer, constant_ED)
    layer.kept = whole


def _with_constant(layer: _Layer, constant_ED: Tensor) -> dict[str, nn.Parameter | None]:
    """Add it to the last bias; where experts have none, give them some, of which the first is zero."""
    experts, holder = layer.experts, layer.holder
    first, second = layer.neurons.names[:2]
    like = experts.get_parameter(first)
    names = ["gate_up_bias", "down_bias"] if holder is experts else [f"{first}_bias", f"{second}_bias"]
    before: dict[str, nn.Parameter | None] = {name: getattr(experts, name, None) for name in names}
    bias = before[names[1]]
    if bias is not None:
        _replace(experts, names[1], nn.Parameter(bias.data + constant_ED.to(bias), bias.requires_grad))
        return {names[1]: bias}
    rows = layer.width * layer.neurons.blocks
    zero = like.new_zeros(len(constant_ED), rows)
    _replace(experts, names[0], nn.Parameter(zero, like.requires_grad))
    _replace(experts, names[1], nn.Parameter(constant_ED.to(like), like.requires_grad))
    if holder is not experts:
        holder.biased, holder.names = True, [*holder.names, *names]
        holder.cuts |= {names[0]: Cut(dim=1, blocks=holder.cuts[first].blocks), names[1]: Cut(dim=1)}
    return before


def _bring_back(layer: _Layer) -> None:
    if layer.kept is None:
        return
    for name, parameter in layer.kept.items():
        if parameter is not None:
            _replace(layer.experts, name, parameter)
            continue
        delattr(layer.experts, name)
        if layer.holder is layer.experts:
            setattr(layer.experts, name, None)
        else:
            layer.holder.biased = False
            layer.holder.names = [known for known in layer.holder.names if known != name]
            layer.holder.cuts.pop(name)
    layer.kept = None


def _replace(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    setattr(module, name, parameter)

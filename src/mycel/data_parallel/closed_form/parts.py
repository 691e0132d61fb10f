"""What a part of the data says about a ridge layer: two arrays that add up, or merge, to those of all data.

A layer ``f(W' x)`` is fitted to targets ``d`` where it is linear: the squared difference ``f^-1(d) - W' x`` counts
with the square of the slope ``f'(f^-1(d))`` there. With ``F`` the diagonal matrix of one output's slopes and
``H = X F``, the weights of that output are ``(H H' + ridge I)^-1 M``, ``M = X F F f^-1(d)``. Both ``H H'`` and ``M``
are sums over examples. ``H H'`` is ``d x d``; where a part has fewer examples than ``d``, its *factors* ``U S`` of
``H = U S V'``, ``d x r``, say the same in fewer numbers, and those of several parts merge exactly:
``svd([U_1 S_1 | U_2 S_2 | ...])``. A linear layer has one ``F = I`` for all outputs, another one an ``F`` an output.

References:
    O. Fontenla-Romero, B. Guijarro-Berdiñas, B. Pérez-Sánchez, "Regularized One-Layer Neural Networks for Distributed
    and Incremental Environments" (ROLANN), IWANN 2021, section 2.
    D. Novoa-Paradela, O. Fontenla-Romero, B. Guijarro-Berdiñas, "Fast Deep Autoencoder for Federated Learning"
    (DAEF), 2022, arXiv 2206.05136.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mycel.brief import brief
from mycel.data_parallel.closed_form.activations import invertible
from mycel.errors import UsageError
from mycel.names import spelled

__all__ = ["FORMS", "RidgeParts", "check_alike", "merge_parts", "ridge_parts"]

#: How second moments are kept.
FORMS = ("auto", "factors", "sums")
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RidgeParts:
    """What some examples say about a layer; made by ``ridge_parts`` and merged by ``merge_parts``.

    Attributes:
        second: ``float64``, one matrix for a linear layer, else one an output: sums ``H H'``, shape ``[k, d, d]``, or
            factors ``U S``, shape ``[k, d, r]`` with ``r`` at most ``d`` and the number of examples.
        moment: ``M``, ``float64``, shape ``[d, outputs]``.
        form: ``sums`` or ``factors``.
        activation: of the layer.
        bias: whether the last of the ``d`` inputs is a constant 1.
        num_examples: that went in.

    Raises:
        UsageError: shapes or types that do not belong together.

    Examples:
        >>> parts = ridge_parts(torch.eye(3), torch.ones(3, 1))
        >>> parts.form, tuple(parts.second.shape), tuple(parts.moment.shape), parts.num_examples
        ('sums', (1, 4, 4), (4, 1), 3)
    """

    second: Tensor
    moment: Tensor
    form: str
    activation: str
    bias: bool
    num_examples: int

    __repr__ = brief

    def __post_init__(self) -> None:
        width, outputs = self.moment.shape if self.moment.dim() == 2 else (0, 0)
        matrices = 1 if self.activation == "linear" else outputs
        fits = self.second.dim() == 3 and self.second.shape[:2] == (matrices, width)
        if self.form not in FORMS[1:] or not fits or (self.form == "sums" and self.second.shape[2] != width):
            raise UsageError(
                f"parts of a ridge layer: {self.form} of shape {list(self.second.shape)} beside a moment "
                f"{list(self.moment.shape)}; expected sums [{matrices}, d, d] or factors [{matrices}, d, r] beside "
                "[d, outputs]"
            )
        if self.second.dtype != torch.float64 or self.moment.dtype != torch.float64:
            raise UsageError(
                f"parts of a ridge layer are float64, got {self.second.dtype} and {self.moment.dtype}: squares of "
                "float32 numbers lose what they are added for"
            )

    @property
    def width(self) -> int:
        """Inputs ``d``, the constant one included."""
        return int(self.moment.shape[0])

    @property
    def num_outputs(self) -> int:
        """Outputs of the layer."""
        return int(self.moment.shape[1])

    @property
    def num_matrices(self) -> int:
        """1 for a linear layer, else one an output."""
        return int(self.second.shape[0])

    def as_sums(self) -> RidgeParts:
        """The same with ``H H'`` in place of factors; exact but for rounding."""
        if self.form == "sums":
            return self
        return replace(self, second=self.second @ self.second.transpose(1, 2), form="sums")

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, for ``torch.save`` and ``torch.load(..., weights_only=True)``: data that come
        later are merged with it.
        """
        return {
            "format": "mycel.ridge_parts",
            "version": _VERSION,
            **{name: getattr(self, name) for name in RidgeParts.__slots__},
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> RidgeParts:
        """What ``state_dict`` gave.

        Args:
            state: as it was loaded.

        Raises:
            UsageError: it is another thing, or of another version.
        """
        if state.get("format") != "mycel.ridge_parts" or state.get("version") != _VERSION:
            raise UsageError(
                f"not parts of a ridge layer: format {state.get('format')!r} version {state.get('version')!r}, "
                f"expected 'mycel.ridge_parts' version {_VERSION}"
            )
        if missing := [name for name in RidgeParts.__slots__ if name not in state]:
            raise UsageError(f"parts of a ridge layer without {missing[0]!r}; save state_dict() of RidgeParts")
        return RidgeParts(**{name: state[name] for name in RidgeParts.__slots__})


@torch.no_grad()
def ridge_parts(
    x: Tensor, targets: Tensor | None, *, activation: str = "linear", bias: bool = True, form: str = "auto"
) -> RidgeParts:
    """What some examples say about the layer that maps ``x`` to ``targets``.

    Args:
        x: inputs, shape ``[n, d]``; ``n`` may be 0, which ``solve_ridge`` and exchanges refuse.
        targets: of the layer's outputs after the activation, shape ``[n, outputs]``; ``None``: only second moments
            are wanted, as for ``principal_directions``.
        activation: ``linear``, ``logistic`` or ``tanh``.
        bias: whether a constant 1 is added to the inputs.
        form: ``factors`` or ``sums``; ``auto``: whichever is fewer numbers.

    Returns:
        In float64.

    Raises:
        UsageError: shapes that do not belong together, numbers that are not finite, or targets that the activation
            never reaches.

    Examples:
        >>> x = torch.tensor([[0.0], [1.0], [2.0]])
        >>> parts = ridge_parts(x, 2 * x + 1)
        >>> parts.second[0].tolist(), parts.moment.tolist()
        ([[5.0, 3.0], [3.0, 3.0]], [[13.0], [9.0]])
    """
    form = spelled(form, FORMS, "form of second moments")
    function = invertible(activation)
    if x.dim() != 2 or x.shape[1] < 1:
        raise UsageError(f"inputs of a ridge layer have shape [examples, inputs], got {list(x.shape)}")
    wanted = x.new_empty(len(x), 0) if targets is None else targets
    if wanted.dim() != 2 or len(wanted) != len(x):
        raise UsageError(f"targets {list(wanted.shape)} of inputs {list(x.shape)}: expected [{len(x)}, outputs]")
    x64, d64 = x.double(), wanted.double()
    for name, value in (("input", x64), ("output", d64)):
        if not bool(value.isfinite().all()):
            row = int((~value.isfinite()).nonzero()[0][0])
            raise UsageError(f"example {row} has an {name} that is not finite; leave such examples out")
    function.check(d64, activation)
    if bias:
        x64 = torch.cat([x64, x64.new_ones(len(x64), 1)], dim=1)
    z, slopes = function.inverse(d64), function.slope(d64)
    moment = x64.T @ (slopes.square() * z)
    width = x64.shape[1]
    weighted = x64.T.unsqueeze(0) if activation == "linear" else x64.T * slopes.T.unsqueeze(1)  # [k, d, n]
    if form == "sums" or (form == "auto" and 2 * min(width, len(x64)) > width):
        second, form = weighted @ weighted.transpose(1, 2), "sums"
    else:
        second, form = _factors(weighted), "factors"
    return RidgeParts(
        second=second, moment=moment, form=form, activation=activation, bias=bias, num_examples=len(x64)
    )


def _factors(columns: Tensor) -> Tensor:
    """``U S`` of matrices ``[k, d, n]``, ``[k, d, min(d, n)]``: all that their squares need."""
    u, s, _ = torch.linalg.svd(columns, full_matrices=False)
    scaled: Tensor = u * s.unsqueeze(1)
    return scaled


def check_alike(parts: Sequence[RidgeParts], name: str) -> None:
    """Refuse parts of different layers, and parts without examples.

    Args:
        parts: to be merged.
        name: of what has them, such as ``part`` or ``rank``.

    Raises:
        UsageError: names the first that differs.
    """
    if not parts:
        raise UsageError("nothing to merge: give at least one part")

    def layer(part: RidgeParts) -> str:
        constant = " and a constant" if part.bias else ""
        return f"{part.activation}, {part.width - part.bias} inputs{constant}, {part.num_outputs} outputs"

    for number, part in enumerate(parts):
        if part.num_examples == 0:
            raise UsageError(f"{name} {number} of {len(parts)} has no examples; leave it out")
        if layer(part) != layer(parts[0]):
            raise UsageError(f"{name} {number} is of another layer: {layer(part)}; {name} 0: {layer(parts[0])}")


@torch.no_grad()
def merge_parts(parts: Sequence[RidgeParts]) -> RidgeParts:
    """Several parts as one, that of all their examples: in any order, at once or one by one, with the same result.

    Args:
        parts: of one layer.

    Returns:
        Factors where all have factors, else sums.

    Raises:
        UsageError: none, one without examples, or parts of different layers.

    Examples:
        >>> x, d = torch.randn(9, 4), torch.randn(9, 2)
        >>> old, new = ridge_parts(x[:2], d[:2]), ridge_parts(x[2:], d[2:])
        >>> merged, whole = merge_parts([new, old]), ridge_parts(x, d)
        >>> merged.num_examples, torch.allclose(merged.as_sums().second, whole.as_sums().second)
        (9, True)
    """
    check_alike(parts, "part")
    moment = torch.stack([part.moment for part in parts]).sum(0)
    num_examples = sum(part.num_examples for part in parts)
    if all(part.form == "factors" for part in parts):
        joined = torch.cat([part.second for part in parts], dim=2)
        second = joined if len(parts) == 1 else _factors(joined)
        return replace(parts[0], second=second, moment=moment, num_examples=num_examples)
    second = torch.stack([part.as_sums().second for part in parts]).sum(0)
    return replace(parts[0], second=second, moment=moment, num_examples=num_examples, form="sums")

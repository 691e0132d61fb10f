"""Experts kept and fetched in 4 bits: the link carries codes, and they are multiplied as such."""

# ruff: noqa: N803  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.memory.tiers import Link
from mycel.moe.expert_mlp import ExpertKind, OneExpert
from mycel.moe.memory.coded_products import CodedProducts, measure_coded_products
from mycel.moe.memory.lookup import CodedMatrix, code_matrix
from mycel.moe.memory.offload import Offload
from mycel.moe.memory.policies import FetchPolicy
from mycel.moe.memory.store import ExpertStore, stacked

__all__ = ["CodedOffload"]


class _CodedExpert:
    """One expert whose matrices are codes.

    Args:
        matrices: codes and scales of the first map and the second.
        biases: of both, or none.
        products: says which way is the fastest.
    """

    def __init__(self, matrices: Sequence[Tensor], biases: Sequence[Tensor], products: CodedProducts) -> None:
        self.first, self.second = CodedMatrix(*matrices[:2]), CodedMatrix(*matrices[2:])
        self.biases, self.products = biases, products

    def through(self, rows_RD: Tensor, kind: ExpertKind) -> Tensor:
        """See ``OneExpert``; in float32."""
        z = self._map(self.first, rows_RD.float(), 0)
        y = self._map(self.second, kind.activate(z), 1)
        return (y if kind.after is None else kind.after(y)).to(rows_RD.dtype)

    def _map(self, matrix: CodedMatrix, rows: Tensor, place: int) -> Tensor:
        product = matrix.product(rows, self.products.choose(matrix.shape, len(rows)))
        return product + self.biases[place].float() if self.biases else product


class _CodedWeights:
    """``ApartWeights`` of a store of codes.

    Args:
        store: of all layers' experts.
        place: of the layer in the store.
        policy: when they come and go.
        products: says which way of a product is the fastest.
    """

    def __init__(self, store: ExpertStore, place: int, policy: FetchPolicy, products: CodedProducts) -> None:
        self.store, self.place, self.policy, self.products = store, place, policy, products

    @contextmanager
    def near(self, experts: Sequence[int]) -> Iterator[Sequence[OneExpert]]:
        brought = self.store.take(self.place, experts)
        yield [_CodedExpert(one[:4], one[4:], self.products) for one in brought]
        self.policy.left(self.store, self.place)

    def split(self, parts: Sequence[range]) -> list[object]:
        raise UsageError("experts in far memory cannot be taken in parts; partition by tokens")


class CodedOffload(Offload):
    """``Offload`` whose experts are far in 4 bits, come in 4 bits, and are multiplied in 4 bits, on the CPU.

    A scale for 64 columns makes 4.5 bits a weight. Results differ from the model's own by what 4 bits lose, which
    depends on the model: measure its loss. The experts as they were stay in host memory until it is closed.

    Args:
        model: as of ``Offload``.
        link: from far to near memory.
        policy: as of ``Offload``.
        products: which way of a product is the fastest; by default measured now, for this model's shapes.

    Raises:
        UsageError: as of ``Offload``; or experts with an odd width.

    References:
        S. Maleki, "msGeMM: Look-Up-Table GeMM", 2023, arXiv 2310.06178.

    Examples:
        >>> from mycel.moe import MoE
        >>> from mycel.moe.memory import EmulatedLink
        >>> model, x = nn.Sequential(MoE(8, 16, 4, 1)), torch.randn(3, 8)
        >>> with torch.inference_mode(), CodedOffload(model, EmulatedLink(bandwidth_gbps=10), "on_demand") as offload:
        ...     model(x).shape, offload.store.expert_bytes
        (torch.Size([3, 8]), 352)
    """

    def __init__(
        self, model: nn.Module, link: Link, policy: str | FetchPolicy, *, products: CodedProducts | None = None
    ) -> None:
        self.products = products
        super().__init__(model, link, policy)

    def _make_store(self, link: Link, device: torch.device | str) -> ExpertStore:
        coded = [_codes_of(experts) for experts in self.kept]
        if self.products is None:
            shapes = [(c.shape[1], 2 * c.shape[2]) for one in coded for c in (one.first, one.second)]
            self.products = measure_coded_products(dict.fromkeys(shapes))
        return ExpertStore(coded, link, device)

    def _far_weights(  # type: ignore[override]
        self, store: ExpertStore, place: int, policy: FetchPolicy, transposed: bool, dtype: torch.dtype
    ) -> _CodedWeights:
        assert self.products is not None
        return _CodedWeights(store, place, policy, self.products)


class _Codes(nn.Module):
    """A layer's experts as stacks of codes, in the order in which a store has them."""

    first: Tensor
    second: Tensor


@torch.no_grad()
def _codes_of(experts: nn.Module) -> _Codes:
    first, second, *biases = [parameter.detach() for parameter in stacked(experts)]
    if getattr(experts, "is_transposed", False):
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    made = _Codes()
    for name, stack in (("first", first), ("second", second)):
        each = [code_matrix(matrix) for matrix in stack.unbind(0)]
        columns = stack.shape[2] // 2
        codes = torch.stack([one.codes for one in each]) if each else stack.new_zeros(0, stack.shape[1], columns)
        scales = torch.stack([one.scales for one in each]) if each else stack.new_zeros(0, stack.shape[1], 1)
        made.register_parameter(name, nn.Parameter(codes, requires_grad=False))
        made.register_parameter(f"{name}_scales", nn.Parameter(scales, requires_grad=False))
    for name, bias in zip(("first_bias", "second_bias"), biases, strict=False):
        made.register_parameter(name, nn.Parameter(bias, requires_grad=False))
    return made

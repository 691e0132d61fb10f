"""Causal convolutions over a layout, and YUAN 2.0's localized filtering made of two of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycel.arguments import whole_number
from mycel.errors import UsageError
from mycel.sequence.context import SequenceContext
from mycel.sequence.halo import lengthened
from mycel.sequence.scan.graph import attached

__all__ = ["LocalizedFiltering", "causal_conv1d"]


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    context: SequenceContext,
    *,
    groups: int = 1,
    dilation: int = 1,
) -> Tensor:
    """``F.conv1d`` with zeros before each document, on documents that are cut anywhere.

    Args:
        x: of shape (batch, channels, tokens here).
        weight: of shape (channels out, channels / groups, kernel); (channels, kernel) is one filter a channel.
        bias: of shape (channels out,), or none.
        context: whose tokens.
        groups: of channels, as for ``F.conv1d``.
        dilation: tokens between those that a filter sees, as for ``F.conv1d``.

    Returns:
        Of shape (batch, channels out, tokens here).

    Raises:
        UsageError: shapes that do not fit.

    Examples:
        >>> from mycel.planning.sequence import contiguous
        >>> context = SequenceContext(contiguous([3, 2], 1))
        >>> x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]])
        >>> causal_conv1d(x, torch.tensor([[10.0, 1.0]]), None, context).tolist()
        [[[1.0, 12.0, 23.0, 4.0, 45.0]]]
    """
    if weight.dim() == 2:
        weight, groups = weight[:, None], len(weight)
    apart = whole_number(dilation, "dilation", least=1)
    if x.dim() != 3 or weight.dim() != 3 or weight.shape[1] * groups != x.shape[1]:
        raise UsageError(
            f"a convolution of {tuple(x.shape)} with weights {tuple(weight.shape)} in {groups} groups: (batch, "
            f"channels, tokens) and (channels out, channels / groups, kernel)"
        )
    longer = lengthened(x, context, (weight.shape[2] - 1) * apart, dim=2)
    if not len(longer.own):
        nothing = x.new_zeros(x.shape[0], len(weight), 0)
        return attached(nothing, x, longer.came, weight, *([] if bias is None else [bias]))
    padded = _at_a_common_length(longer.rows.movedim(0, 2))
    found = functional.conv1d(padded, weight, bias, dilation=apart, groups=groups)
    # What was convolved across the border of two segments is left out.
    kept = found.index_select(2, longer.own - (weight.shape[2] - 1) * apart)
    return attached(kept, longer.came)


class LocalizedFiltering(nn.Module):
    """Two causal convolutions that give each token a look at its neighbours, then the token added and the norm taken.

    In localized filtering attention queries and keys are made from the result, and values from the input. Over ranks
    it needs the two tokens before a segment, in one exchange.

    Args:
        dim: width of tokens.
        kernel: tokens that each convolution sees.
        eps: of the norm.

    Examples:
        >>> filtering = LocalizedFiltering(8)
        >>> filtering(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5, 8])

    References:
        Wu et al., "YUAN 2.0: A Large Language Model with Localized Filtering-based Attention", arXiv 2311.15786,
        section 2.1.
    """

    def __init__(self, dim: int, *, kernel: int = 2, eps: float = 1e-6) -> None:
        super().__init__()
        if whole_number(dim, "dim", least=2) % 2:
            raise UsageError(f"localized filtering of width {dim}: an even one, of which the middle has half")
        size = whole_number(kernel, "kernel", least=1)
        self.conv1 = nn.Conv1d(dim, dim // 2, size)
        self.conv2 = nn.Conv1d(dim // 2, dim, size)
        self.norm = nn.RMSNorm(dim, eps=eps)

    def forward(self, x: Tensor, context: SequenceContext | None = None) -> Tensor:
        """Filtered tokens.

        Args:
            x: of shape (batch, tokens here, dim).
            context: whose tokens; without one, each row of the batch is a document.

        Returns:
            Of the shape of ``x``.
        """
        back = self.conv1.kernel_size[0] - 1
        if context is None:
            middle = self.conv1(functional.pad(x.mT, (back, 0)))
            return self._added(x, self.conv2(functional.pad(middle, (back, 0))).mT)
        longer = lengthened(x, context, 2 * back)
        if not len(longer.own):
            return attached(self.norm(x), longer.came, *self.conv1.parameters(), *self.conv2.parameters())
        num_rows = len(longer.rows) - back
        middle = self.conv1(_at_a_common_length(longer.rows.movedim(0, 2)))[..., :num_rows]
        # Before a document the second convolution sees zeros, not what the first one's bias makes of zeros.
        middle = torch.where(longer.is_token[back:], middle, 0.0)
        found = self.conv2(_at_a_common_length(middle)).index_select(2, longer.own - 2 * back)
        return attached(self._added(x, found.mT), longer.came)

    def _added(self, x: Tensor, filtered: Tensor) -> Tensor:
        result: Tensor = self.norm(x + filtered)
        return result


def _at_a_common_length(x: Tensor) -> Tensor:
    """Tokens, the last dimension of ``x``, with zeros behind them up to one of sixteen lengths an octave.

    Batches of documents have another number of tokens each, and on CPUs torch's convolutions keep a compiled kernel
    for each that they have met, up to 1,024 of them: some 40 KB each, so that a training's memory would grow for
    hundreds of steps.
    """
    length = x.shape[-1]
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return x
    step = 1 << max(0, (length - 1).bit_length() - 5)
    return functional.pad(x, (0, -length % step))

"""From what all examples say to a layer's weights, and to the directions in which inputs vary most."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mycel.arguments import real_number, whole_number
from mycel.data_parallel.closed_form.parts import RidgeParts, check_alike
from mycel.errors import UsageError

__all__ = ["oriented", "principal_directions", "ridge_linear", "solve_ridge"]


@torch.no_grad()
def solve_ridge(parts: RidgeParts, ridge: float) -> Tensor:
    """Weights of the layer, those that any division of the same examples gives.

    ``(H H' + ridge I)^-1 M`` from sums, ``U (S^2 + ridge)^-1 U' M`` from factors.

    Args:
        parts: of all examples.
        ridge: added to the diagonal, above 0; in units of summed squares, so it means less the more examples there
            are.

    Returns:
        ``float64``, shape ``[d, outputs]``; the last row is the bias where the parts have one.

    Raises:
        UsageError: parts without examples or targets, or a ridge that is not above 0.

    Examples:
        >>> from mycel.data_parallel.closed_form.parts import ridge_parts
        >>> x = torch.arange(5.0).unsqueeze(1)
        >>> solve_ridge(ridge_parts(x, 2 * x + 1), ridge=1e-9).round(decimals=6).tolist()
        [[2.0], [1.0]]
    """
    ridge = real_number(ridge, "ridge", above=0)
    check_alike([parts], "part")
    if parts.num_outputs == 0:
        raise UsageError("the parts were made without targets: they give principal_directions, and no weights")
    one = parts.num_matrices == 1
    moment = parts.moment.unsqueeze(0) if one else parts.moment.T.unsqueeze(2)  # [k, d, outputs / k]
    if parts.form == "sums":
        eye = torch.eye(parts.width, dtype=torch.float64, device=parts.second.device)
        solved = torch.cholesky_solve(moment, torch.linalg.cholesky(parts.second + ridge * eye))
    else:
        u, s, _ = torch.linalg.svd(parts.second, full_matrices=False)
        solved = u @ ((u.transpose(1, 2) @ moment) / (s.square() + ridge).unsqueeze(2))
    return solved[0] if one else solved.squeeze(2).T.contiguous()


def ridge_linear(parts: RidgeParts, ridge: float, *, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """The solved layer as a module, without its activation.

    Args:
        parts: of all examples.
        ridge: see ``solve_ridge``.
        dtype: of the parameters.

    Raises:
        UsageError: see ``solve_ridge``.

    Examples:
        >>> from mycel.data_parallel.closed_form.parts import ridge_parts
        >>> x = torch.randn(50, 3)
        >>> layer = ridge_linear(ridge_parts(x, x.sum(1, keepdim=True)), ridge=1e-6)
        >>> torch.allclose(layer(x), x.sum(1, keepdim=True), atol=1e-4)
        True
    """
    weights = solve_ridge(parts, ridge)
    inputs = parts.width - parts.bias
    layer = nn.Linear(inputs, parts.num_outputs, bias=parts.bias, dtype=dtype, device=weights.device)
    with torch.no_grad():
        layer.weight.copy_(weights[:inputs].T)
        if parts.bias:
            layer.bias.copy_(weights[inputs])
    return layer


@torch.no_grad()
def principal_directions(parts: RidgeParts, count: int) -> Tensor:
    """The first left singular vectors of all inputs, each with a sign of its own choice.

    Singular vectors have no sign: parts merged in another order may give ``-v`` in place of ``v``, and what follows
    is another model wherever an activation is not odd. ``oriented`` settles it. Vectors of equal singular values
    have no order either; real data have none such.

    Args:
        parts: of all examples, linear, without a bias.
        count: of directions, at most the number of inputs.

    Returns:
        ``float64``, shape ``[d, count]``, orthonormal columns, those of the largest variation first.

    Raises:
        UsageError: another layer's parts, none of whose examples, or more directions than there are.

    Examples:
        >>> from mycel.data_parallel.closed_form.parts import ridge_parts
        >>> x = torch.tensor([[0.0, -3.0], [1.0, 0.0]])
        >>> principal_directions(ridge_parts(x, None, bias=False), 2).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """
    check_alike([parts], "part")
    if parts.num_matrices != 1 or parts.bias or parts.activation != "linear":
        raise UsageError("principal_directions needs ridge_parts(x, None, bias=False)")
    known = parts.second.shape[2]
    count = whole_number(count, "principal directions", least=1, most=known)
    if parts.form == "factors":
        directions = torch.linalg.svd(parts.second[0], full_matrices=False)[0]
    else:
        directions = torch.linalg.eigh(parts.second[0])[1].flip(1)
    return oriented(directions[:, :count])


def oriented(vectors: Tensor) -> Tensor:
    """Each column with that sign which makes its largest entry positive.

    Entries that differ in size by less than a millionth count as equal, and the first of them decides: rounding does
    not.

    Args:
        vectors: columns, shape ``[d, count]``.

    Returns:
        Shape as given.

    Examples:
        >>> oriented(torch.tensor([[0.6, 0.8], [-0.8, 0.6]])).tolist()
        [[-0.6000000238418579, 0.800000011920929], [0.800000011920929, 0.6000000238418579]]
    """
    sizes = vectors.abs()
    first = (sizes >= sizes.amax(0) * (1 - 1e-6)).int().argmax(0)
    return vectors * vectors.gather(0, first.unsqueeze(0)).sign()

"""Parts of ranks as one, on all of them: one exchange of sums or of factors, whichever is fewer bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.messages import all_gather_single
from mycel.comm.meter import ByteMeter
from mycel.comm.start import group_or_all
from mycel.data_parallel.closed_form.parts import FORMS, RidgeParts, merge_parts
from mycel.errors import MycelError, UsageError
from mycel.names import spelled

__all__ = ["exchange_numbers", "merge_over_ranks"]

#: Bytes of what ranks say about their parts before they exchange them.
_HEADER = 512


def exchange_numbers(width: int, outputs: int, matrices: int, columns: int, world_size: int) -> dict[str, float]:
    """Numbers that a rank sends, beside a header, where parts of ``world_size`` ranks are merged.

    Sums travel as triangles in an all_reduce, ``2 (W-1)/W`` times ``k d (d+1)/2``; factors in an all_gather,
    ``(W-1) k d r``. Moments are added up either way.

    Args:
        width: ``d``, the constant input included.
        outputs: of the layer.
        matrices: ``k``, 1 for a linear layer.
        columns: ``r``, the most that a rank's factors have.
        world_size: ``W``.

    Returns:
        For ``factors`` and ``sums``.

    Examples:
        >>> exchange_numbers(31, 15, 1, 31, 4)  # everybody has many examples
        {'factors': 3580.5, 'sums': 1441.5}
        >>> exchange_numbers(513, 10, 1, 20, 2)  # 20 examples a rank
        {'factors': 15390.0, 'sums': 136971.0}
    """
    share = 2 * (world_size - 1) / world_size
    moment = share * width * outputs
    return {
        "factors": (world_size - 1) * matrices * width * columns + moment,
        "sums": share * matrices * width * (width + 1) / 2 + moment,
    }


@torch.no_grad()
def merge_over_ranks(
    parts: RidgeParts | Callable[[], RidgeParts],
    *,
    form: str = "auto",
    group: dist.ProcessGroup | None = None,
    meter: ByteMeter | None = None,
) -> RidgeParts:
    """What the examples of all ranks say together; all ranks get the same bits.

    Ranks first tell each other in 512 bytes what they have. So whatever one of them has to complain about is raised
    on all, and nobody waits.

    Args:
        parts: of this rank; or what makes them, whose errors are then told to all ranks.
        form: what travels; ``auto``: the fewer bytes.
        group: the ranks, all by default.
        meter: counts bytes, as ``closed_form.header``, ``closed_form.sums`` and ``closed_form.factors``.

    Returns:
        In the form that travelled.

    Raises:
        UsageError: on every rank, where one has no examples, another layer than rank 0, or raised it in ``parts``.

    Examples:
        >>> from mycel.data_parallel.closed_form.parts import ridge_parts
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> x = torch.randn(20, 3)
        >>> merge_over_ranks(lambda: ridge_parts(x, x[:, :1])).num_examples
        20
        >>> dist.destroy_process_group()
    """
    form = spelled(form, FORMS, "form of second moments")
    members = group_or_all(group, "merge_over_ranks")
    counted = ByteMeter() if meter is None else meter
    own, problem = _made(parts)
    headers = _headers(own, problem, members, counted)
    _check(headers)
    assert own is not None  # else the header had said so
    size = len(headers)
    columns = max(header["columns"] for header in headers)
    if form == "auto":
        found = exchange_numbers(own.width, own.num_outputs, own.num_matrices, columns, size)
        all_factors = all(header["form"] == "factors" for header in headers)
        form = "factors" if all_factors and found["factors"] < found["sums"] else "sums"
    elif form == "factors" and (other := [r for r, header in enumerate(headers) if header["form"] != "factors"]):
        raise UsageError(
            f"rank {other[0]} has sums, of which no factors are made again: ridge_parts(..., form='factors') there, "
            "or merge_over_ranks(form='auto')"
        )
    num_examples = sum(header["examples"] for header in headers)
    if form == "sums":
        return replace(_summed(own.as_sums(), members, counted), num_examples=num_examples)
    return replace(_gathered(own, columns, members, counted), num_examples=num_examples)


def _made(parts: RidgeParts | Callable[[], RidgeParts]) -> tuple[RidgeParts | None, str]:
    if isinstance(parts, RidgeParts):
        return parts, ""
    try:
        return parts(), ""
    except MycelError as error:
        return None, str(error)


def _headers(
    own: RidgeParts | None, problem: str, group: dist.ProcessGroup, meter: ByteMeter
) -> list[dict[str, Any]]:
    said: dict[str, Any] = {"problem": problem[:300].encode("ascii", "replace").decode()}
    if own is not None:
        said |= {
            "layer": [own.activation, own.width, own.num_outputs, own.bias],
            "form": own.form,
            "columns": own.second.shape[2],
            "examples": own.num_examples,
        }
    line = json.dumps(said).encode()
    if len(line) > _HEADER:
        line = json.dumps({"problem": said["problem"][:100]}).encode()
    device = own.second.device if own is not None and dist.get_backend(group) != "nccl" else _device(group)
    mine = torch.tensor(list(line.ljust(_HEADER)), dtype=torch.uint8, device=device)
    everyone = mine.new_empty(_HEADER * dist.get_world_size(group))
    all_gather_single(everyone, mine, group=group)
    meter.add_even("closed_form.header", _HEADER, group)
    return [json.loads(bytes(one.tolist())) for one in torch.split(everyone.cpu(), _HEADER)]


def _device(group: dist.ProcessGroup) -> torch.device:
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _check(headers: list[dict[str, Any]]) -> None:
    for rank, header in enumerate(headers):
        if header["problem"]:
            raise UsageError(f"rank {rank}: {header['problem']}")
        if header["examples"] == 0:
            raise UsageError(
                f"rank {rank} of {len(headers)} has no examples; give it some, or leave it out of the group"
            )
        if header["layer"] != headers[0]["layer"]:
            raise UsageError(
                f"rank {rank} has a layer of (activation, inputs, outputs, bias) {header['layer']}, rank 0 one of "
                f"{headers[0]['layer']}; all ranks solve for the same layer"
            )


def _summed(own: RidgeParts, group: dist.ProcessGroup, meter: ByteMeter) -> RidgeParts:
    """By one all_reduce of the triangles and the moments."""
    width = own.width
    rows, columns = torch.triu_indices(width, width, device=own.second.device)
    triangles = own.second[:, rows, columns]
    flat = _added(torch.cat([triangles.reshape(-1), own.moment.reshape(-1)]), group, meter, "closed_form.sums")
    second = torch.empty_like(own.second)
    triangles = flat[: triangles.numel()].view_as(triangles)
    second[:, rows, columns] = triangles
    second[:, columns, rows] = triangles
    return replace(own, second=second, moment=flat[triangles.numel() :].view_as(own.moment))


def _gathered(own: RidgeParts, columns: int, group: dist.ProcessGroup, meter: ByteMeter) -> RidgeParts:
    """By one all_gather of the factors, with columns of zeros where a rank has fewer, and one sum of moments."""
    k, width, here = own.second.shape
    padded = own.second.new_zeros(k, width, columns)
    padded[:, :, :here] = own.second
    everyone = padded.new_empty(dist.get_world_size(group) * k, width, columns)
    all_gather_single(everyone, padded, group=group)
    meter.add_even("closed_form.factors", padded.numel() * padded.element_size(), group)
    none = torch.zeros_like(own.moment)
    merged = merge_parts([replace(own, second=one.contiguous(), moment=none) for one in torch.split(everyone, k)])
    moment = _added(own.moment.reshape(-1).clone(), group, meter, "closed_form.factors")
    return replace(merged, moment=moment.view_as(own.moment))


def _added(flat: Tensor, group: dist.ProcessGroup, meter: ByteMeter, name: str) -> Tensor:
    dist.all_reduce(flat, group=group)
    meter.add_even(name, 2 * flat.numel() * flat.element_size() // dist.get_world_size(group), group)
    return flat

"""Tensor parallelism by a plan's layouts: which matrices are shared by columns, which by rows."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from mycel.errors import UsageError

__all__ = ["layout_of", "share_matrices"]


def layout_of(name: str, layouts: Sequence[tuple[str, str]]) -> str:
    """What a plan says of a module, ``replicate`` where it says nothing.

    Args:
        name: of the module.
        layouts: patterns, in which ``*`` is a number, and layouts; the last that fits counts.

    Examples:
        >>> layout_of("layers.3.up", [("layers.*.up", "colwise"), ("layers.*.down", "rowwise")])
        'colwise'
    """
    found = "replicate"
    for pattern, layout in layouts:
        bare = pattern.removesuffix(".weight")
        if re.fullmatch(re.escape(bare).replace(r"\*", r"\d+"), name):
            found = layout
    return found


def share_matrices(
    model: nn.Module, names: Sequence[str], layouts: Sequence[tuple[str, str]], mesh: DeviceMesh
) -> int:
    """Share the matrices of a stage's modules over ranks, in place.

    By columns: every rank has some columns of the result, and needs the whole input. By rows: every rank has some
    rows of the input, and results are summed. Tables of embeddings are shared by rows, and a module that is itself a
    matrix by columns gives its result whole again: what comes after a module of the plan is whole.

    Args:
        model: the whole, or a part.
        names: of the stage's modules.
        layouts: of the plan.
        mesh: of the ranks that share.

    Returns:
        How many were shared.

    Raises:
        UsageError: a layout that is not known, or a matrix that does not divide.
    """
    inside = tuple(f"{name}." for name in names)
    chosen: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if name not in names and not name.startswith(inside):
            continue
        layout = layout_of(name, layouts)
        if layout != "replicate":
            _check_size(name, module, layout, mesh.size())
            chosen[name] = _style(layout, module, is_whole=name in names, name=name)
    if chosen:
        parallelize_module(model, mesh, chosen)
    return len(chosen)


def _check_size(name: str, module: nn.Module, layout: str, ranks: int) -> None:
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise UsageError(
            f"layouts: {name} is a {type(module).__name__}, and only Linear and Embedding can be shared {layout}; "
            "write 'replicate' for it"
        )
    rows, columns = module.weight.shape
    size = columns if isinstance(module, nn.Linear) and layout == "rowwise" else rows
    if size % ranks:
        raise UsageError(f"layouts: {name} has {size} to share over tp={ranks}, which does not divide; replicate it")


def _style(layout: str, module: nn.Module, *, is_whole: bool, name: str) -> ParallelStyle:
    if layout == "colwise":
        return ColwiseParallel(output_layouts=Replicate()) if is_whole else ColwiseParallel()
    if layout == "rowwise":
        if isinstance(module, nn.Embedding) or is_whole:
            return RowwiseParallel(input_layouts=Replicate())
        return RowwiseParallel()
    raise UsageError(f"layouts: {name} is {layout!r}; known are colwise, rowwise and replicate")

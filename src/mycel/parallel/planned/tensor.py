"""Tensor parallelism by a plan's layouts: which matrices are shared by columns, which by rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from mycel.errors import UsageError
from mycel.parallel.chain import first_tensor, watch

__all__ = ["layout_of", "on_shares", "share_matrices"]


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


def on_shares(model: nn.Module, layouts: Sequence[tuple[str, str]], args: tuple[Any, ...]) -> frozenset[str]:
    """Parameters that every rank has whole and uses on its share only, such as those of norms of heads.

    A rank's gradient of such a parameter is a part of it. They are found by following each module's input back, on
    tensors without numbers: if it comes from a matrix that is shared by columns, and through none that is shared by
    rows, it is a share.

    Args:
        model: the whole, before anything is shared.
        layouts: of the plan.
        args: of a forward.
    """
    found: set[str] = set()
    watch(model, args, around=lambda modules: _following(modules, layouts, found))
    return frozenset(found)


@contextmanager
def _following(
    modules: Mapping[str, nn.Module], layouts: Sequence[tuple[str, str]], found: set[str]
) -> Iterator[None]:
    columns: set[Any] = set()
    rows: set[Any] = set()

    def noting(into: set[Any]) -> Callable[..., None]:
        def note(_: nn.Module, __: Any, result: Any) -> None:
            tensor = first_tensor(result)
            if tensor is not None:
                into.add(tensor.grad_fn)

        return note

    def looking(name: str, own: Sequence[str]) -> Callable[..., None]:
        def look(_: nn.Module, args: Any, kwargs: Any) -> None:
            tensor = first_tensor((args, list(kwargs.values())))
            if tensor is not None and _comes_from(tensor, columns, rows):
                found.update(f"{name}.{one}" for one in own)

        return look

    handles: list[Any] = []
    try:
        for name, module in modules.items():
            layout = layout_of(name, layouts)
            own = [one for one, _ in module.named_parameters(recurse=False)]
            if layout in ("colwise", "rowwise"):
                handles.append(module.register_forward_hook(noting(columns if layout == "colwise" else rows)))
            elif own:
                handles.append(module.register_forward_pre_hook(looking(name, own), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _comes_from(tensor: Tensor, columns: set[Any], rows: set[Any]) -> bool:
    """Whether a walk back along the graph meets a result shared by columns before one shared by rows."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node in rows:
            continue
        if node in columns:
            return True
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return False

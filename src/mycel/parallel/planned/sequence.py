"""Sequence parallelism: what tensor parallelism does not share inside a layer is shared along the sequence.

Between the matrices of a layer every rank has some positions of the residual stream, so that norms and sums are done
once and held once. A norm's result is gathered for the matrices behind it, and the sum behind a matrix that is shared
by rows leaves every rank its own positions: the bytes of one all_reduce, in two halves. A layer takes and gives whole
tensors, since what stands between layers is the model's own.

References:
    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel, parallelize_module

from mycel.errors import UsageError
from mycel.parallel.chain import module_of
from mycel.parallel.planned.tensor import layout_of, share_matrices

__all__ = ["share_sequences"]

#: Of a residual stream ``[batch, positions, width]``.
_POSITIONS = 1


def share_sequences(
    model: nn.Module, layers: Sequence[str], layouts: Sequence[tuple[str, str]], mesh: DeviceMesh
) -> None:
    """Share layers' matrices, and between them positions, in place.

    Args:
        model: a part, none of whose layers is shared yet.
        layers: names of its layers.
        layouts: of the plan.
        mesh: of the ranks that share.

    Raises:
        UsageError: a layer in which nothing is shared by rows.
    """
    for name in layers:
        layer = module_of(model, name)
        inside = {f"{name}.{child}": module for child, module in layer.named_modules() if child}
        rows = [path for path in inside if layout_of(path, layouts) == "rowwise"]
        if not rows:
            raise UsageError(f"{name}: no matrix is shared by rows, so that positions cannot be shared between them")
        norms = [c for c, module in layer.named_children() if any(True for _ in module.parameters(recurse=False))]
        norms = [child for child in norms if layout_of(f"{name}.{child}", layouts) == "replicate"]
        share_matrices(model, [name], [pair for pair in layouts if pair[1] != "rowwise"], mesh)
        back = RowwiseParallel(output_layouts=Shard(_POSITIONS), use_local_output=False)
        parallelize_module(model, mesh, dict.fromkeys(rows, back))
        parallelize_module(layer, mesh, {child: SequenceParallel(sequence_dim=_POSITIONS) for child in norms})
        for child in norms:
            module_of(layer, child).register_forward_hook(_gathered)
        for child, module in layer.named_children():
            path = f"{name}.{child}"
            if child not in norms and not any(p == path or p.startswith(f"{path}.") for p in rows):
                _as_whole(module, path, layouts, mesh)
        layer.register_forward_pre_hook(_split(mesh), with_kwargs=True)
        layer.register_forward_hook(_joined)


def _gathered(_: nn.Module, __: Any, result: Any) -> Any:
    return result.redistribute(placements=[Replicate()]) if isinstance(result, DTensor) else result


def _joined(_: nn.Module, __: Any, result: Any) -> Any:
    if isinstance(result, tuple):
        return (_joined(_, __, result[0]), *result[1:])
    return result.redistribute(placements=[Replicate()]).to_local() if isinstance(result, DTensor) else result


def _split(mesh: DeviceMesh) -> Callable[..., tuple[Any, Any]]:
    def split(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        x, *rest = args
        if x.dim() <= _POSITIONS or x.shape[_POSITIONS] % mesh.size():
            raise UsageError(
                f"{x.shape[_POSITIONS] if x.dim() > _POSITIONS else 'no'} positions do not divide over "
                f"tp={mesh.size()} ranks: give sequences of a multiple of {mesh.size()}"
            )
        return (_placed(x, mesh).redistribute(placements=[Shard(_POSITIONS)]), *rest), kwargs

    return split


def _placed(x: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def _as_whole(module: nn.Module, path: str, layouts: Sequence[tuple[str, str]], mesh: DeviceMesh) -> None:
    """A module between norms that nothing shares, such as experts: it gets plain tensors and gives positions back."""
    inside = [f"{path}.{child}" if child else path for child, _ in module.named_modules()]
    if any(layout_of(name, layouts) != "replicate" for name in inside):
        return

    def before(_: nn.Module, args: Any) -> Any:
        return tuple(a.to_local() if isinstance(a, DTensor) else a for a in args)

    def after(_: nn.Module, __: Any, result: Any) -> Any:
        if not isinstance(result, Tensor) or result.dim() <= _POSITIONS:
            return result
        return _placed(result, mesh).redistribute(placements=[Shard(_POSITIONS)])

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)

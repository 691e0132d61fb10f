"""Whether a mesh, a model and a batch can be divided as an order asks."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from mycel.errors import UsageError
from mycel.pipeline.order import Order

__all__ = ["check_mesh"]


def check_mesh(
    order: Order,
    *,
    ranks: int | None = None,
    micro_batches: int | None = None,
    mesh: Mapping[str, int] | None = None,
    world_size: int | None = None,
    batch: int | None = None,
    layers: int | None = None,
    heads: int | None = None,
) -> None:
    """Everything that is given goes together; nothing is asked of what is not.

    Args:
        order: that is to be run.
        ranks: of the group that is to run it.
        micro_batches: that the job cuts its batch into.
        mesh: length of each axis; ``pp`` is the pipeline's, ``dp`` divides the batch, ``tp`` the heads.
        world_size: of the whole job.
        batch: samples a step, over all of ``dp``.
        layers: of the model.
        heads: of its attention.

    Raises:
        UsageError: a number that is not the order's, or does not divide; the message names the nearest that does.

    Examples:
        >>> order = Order.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n")
        >>> check_mesh(order, mesh={"pp": 2, "dp": 3}, world_size=6, batch=24)
        >>> check_mesh(order, batch=25)
        Traceback (most recent call last):
        mycel.errors.UsageError: batch of 25 does not divide into 2 micro-batches; 24 or 26 would
    """
    axes = dict(mesh or {})
    given = {"ranks": ranks, "micro-batches": micro_batches, "world size": world_size, "batch": batch}
    given |= {"layers": layers, "heads": heads} | {f"axis {name}": length for name, length in axes.items()}
    for what, number in given.items():
        if number is not None and number < 1:
            raise UsageError(f"{what} of {number}: expected at least 1")
    if ranks is not None and ranks != order.ranks:
        raise UsageError(f"the order has {order.ranks} ranks and the group {ranks}: {_rows(order.ranks, ranks)}")
    if micro_batches is not None and micro_batches != order.num_micro_batches:
        raise UsageError(
            f"the order treats {order.num_micro_batches} micro-batches and the job cuts {micro_batches}: make "
            f"the order for {micro_batches}, or cut {order.num_micro_batches}"
        )
    if axes.get("pp", order.ranks) != order.ranks:
        raise UsageError(
            f"axis pp of the mesh is {axes['pp']} and the order has {order.ranks} ranks; both must be equal"
        )
    if world_size is not None and axes:
        size = prod({"pp": order.ranks, **axes}.values())
        if size != world_size:
            told = " x ".join(f"{name} {length}" for name, length in {"pp": order.ranks, **axes}.items())
            raise UsageError(
                f"the mesh {told} has {size} ranks and the job {world_size}; their product must be equal"
            )
    pieces = order.num_micro_batches * axes.get("dp", 1)
    _divide(batch, pieces, "batch", f"{order.num_micro_batches} micro-batches" + _beside(axes, "dp"))
    _divide(layers, order.num_stages, "layers", f"{order.num_stages} stages")
    _divide(heads, axes.get("tp", 1), "heads", f"axis tp of {axes.get('tp', 1)}")


def _rows(has: int, wants: int) -> str:
    if has < wants:
        return f"it lacks rows ({wants - has}), or was made for fewer ranks"
    return f"start {has} ranks, or make the order for {wants}"


def _beside(axes: Mapping[str, int], name: str) -> str:
    return f" on each of {axes[name]} replicas" if name in axes else ""


def _divide(number: int | None, parts: int, what: str, told: str) -> None:
    if number is not None and number % parts:
        below = number - number % parts
        nearest = f"{below} or {below + parts}" if below else f"{parts}"
        raise UsageError(f"{what} of {number} does not divide into {told}; {nearest} would")

"""``reduce_scatter_update_all_gather``: each rank updates a slice of the parameters, tile by tile.

Gradients are summed in slices while the backward pass goes on, each rank updates its slices while others arrive, and
parameters are gathered while the next slice is updated. Optimizer state exists for slices only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.hooks import RemovableHandle

from mycel.comm.meter import ByteMeter
from mycel.comm.pending import Pending
from mycel.comm.sharded import is_sharded
from mycel.comm.start import agree, group_or_all
from mycel.errors import UsageError
from mycel.overlap.exchanges import Across
from mycel.overlap.flat import Flat, Tile
from mycel.overlap.lamb import Lamb, direction, squares, trust_ratio
from mycel.overlap.sliced_state import gathered_state, with_state
from mycel.overlap.tiling import Tiling, plan_tiles

__all__ = ["SlicedOptimizer", "reduce_scatter_update_all_gather"]

#: Their updates look at one element; Lamb's at a layer too.
_KNOWN = (SGD, Adam, AdamW, Lamb)
#: Bytes of a tile at most, so that the first can set out early in the backward pass: those of DDP's buckets.
_TILE_BYTES = 25 << 20


def reduce_scatter_update_all_gather(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    tiles: int | None = None,
    meter: ByteMeter | None = None,
) -> SlicedOptimizer:
    """An optimizer's update between the two halves of its gradients' all_reduce, on this rank's slices alone.

    Takes the place of ``DistributedDataParallel`` and the optimizer together: the model stays as it is, its gradients
    become means over ranks. All ranks call it; parameters become those of the first rank.

    Args:
        optimizer: ``SGD``, ``Adam`` or ``AdamW`` of torch, or ``Lamb``, which has made no step; not used afterwards.
        named_parameters: of the model, for checkpoints by name; not needed if the optimizer was given names.
        group: the ranks; all if not given.
        tiles: in how many parts; if not given, as the model of cost says, none longer than 25 MB.
        meter: counts bytes, as ``update``.

    Returns:
        What is stepped instead; schedulers of learning rates take it.

    Raises:
        UsageError: another optimizer, one that has made steps, or parameters without names.

    Examples:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> model = nn.Linear(4, 2)
        >>> optimizer = reduce_scatter_update_all_gather(AdamW(model.parameters(), lr=0.1), model.named_parameters())
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state_dict()["state"])
        ['bias', 'weight']
        >>> dist.destroy_process_group()

    References:
        A. Jangda et al., ASPLOS 2022, section 2.2 (CoCoNet's fused all_reduce and optimizer); S. Rajbhandari et al.,
        "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5 (sliced state).
    """
    return SlicedOptimizer(optimizer, named_parameters, group=group, tiles=tiles, meter=meter)


class SlicedOptimizer(Optimizer):
    """Made by ``reduce_scatter_update_all_gather``, and used as any optimizer.

    Attributes:
        tiling: in how many tiles, and why.
        state_bytes: of the optimizer's state on this rank.

    Examples:
        Several backward passes for one step, and a limit on gradients::

            with optimizer.no_sync():
                loss(first).backward()
            loss(second).backward()
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        tiles: int | None = None,
        meter: ByteMeter | None = None,
    ) -> None:
        group = group_or_all(group, "reduce_scatter_update_all_gather")
        if type(optimizer) not in _KNOWN:
            known = ", ".join(kind.__name__ for kind in _KNOWN)
            raise UsageError(f"{type(optimizer).__name__} cannot be sliced; these can: {known}")
        if optimizer.state:
            raise UsageError("the optimizer has made steps: slice it before, and load its state by name")
        names = _names(optimizer, named_parameters)
        super().__init__([dict(g) for g in optimizer.param_groups], dict(optimizer.defaults))
        self._kind: type[Optimizer] = type(optimizer)
        self._across = Across.of(group, "update", meter)
        trained = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        if not trained:
            raise UsageError("no parameter of the optimizer is trained")
        agree(trained, group)
        elements = sum(p.numel() for p in trained)
        self.tiling: Tiling = plan_tiles(
            "update", elements, 0, 1, dtype=trained[0].dtype, group=group, device=trained[0].device, tiles=tiles
        )
        count = tiles or max(self.tiling.tiles, -(-sum(p.nbytes for p in trained) // _TILE_BYTES))
        self._flats = [
            Flat(named, options, max(1, round(count * share)), self._across.rank, self._across.size)
            for named, options, share in self._alike(names, elements)
        ]
        self._order = [(flat, tile) for flat in self._flats for tile in flat.tiles]
        self._inner = [self._kind([tile.own]) for _, tile in self._order]  # type: ignore[call-arg]
        self._is_syncing = True
        self._restart()
        self._hooks: list[RemovableHandle] = [
            piece.parameter.register_post_accumulate_grad_hook(self._hook(flat, place))  # type: ignore[no-untyped-call]
            for flat in self._flats
            for place, piece in enumerate(flat.pieces)
        ]

    def _alike(
        self, names: dict[int, str], elements: int
    ) -> Iterator[tuple[list[tuple[str, nn.Parameter]], dict[str, Any], float]]:
        """Parameters of one group, type and device, the last ones first, since their gradients come first."""
        for options in self.param_groups[::-1]:
            kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
            for parameter in options["params"][::-1]:
                if parameter.requires_grad:
                    kinds.setdefault((parameter.dtype, parameter.device), []).append(
                        (names[id(parameter)], parameter)
                    )
            for named in kinds.values():
                yield named, options, sum(p.numel() for _, p in named) / max(1, elements)

    def _restart(self) -> None:
        """No gradient of the next step is there yet."""
        self._taken: set[tuple[int, int]] = set()
        self._missing = [len(tile.reached) for _, tile in self._order]
        self._summing: list[Pending[Tensor]] = []

    def _hook(self, flat: Flat, place: int) -> Callable[[Tensor], None]:
        key = (id(flat), place)

        def arrived(parameter: Tensor) -> None:
            if not self._is_syncing:
                return
            if key in self._taken:
                raise UsageError(
                    f"a second gradient of {flat.pieces[place].name!r} before step(): run all backward passes of a "
                    "step but the last under no_sync()"
                )
            self._take(flat, place)
            self._launch()

        return arrived

    @torch.no_grad()
    def _take(self, flat: Flat, place: int) -> None:
        self._taken.add((id(flat), place))
        flat.take(flat.pieces[place], 1 / self._across.size)
        for number, (of, tile) in enumerate(self._order):
            if of is flat and place in tile.reached:
                self._missing[number] -= 1

    def _launch(self) -> None:
        """Start to sum the tiles that are complete, in their order, which is the same on all ranks."""
        while len(self._summing) < len(self._order) and not self._missing[len(self._summing)]:
            self._summing.append(self._across.scatter(self._order[len(self._summing)][1].gradients))

    def _sums(self) -> list[Pending[Tensor]]:
        """Of all tiles; parameters without a gradient here give zeros."""
        for flat in self._flats:
            for place in range(len(flat.pieces)):
                if (id(flat), place) not in self._taken:
                    self._take(flat, place)
        self._launch()
        return self._summing

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes whose gradients only add up on this rank, until one outside of it."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters on all ranks. All of them call it.

        Args:
            closure: computes the loss and gradients anew, if given.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for (flat, _), inner in zip(self._order, self._inner, strict=True):
            inner.param_groups[0].update(_plain(flat.options))
        sums = self._sums()
        whole = self._step_by_layer(sums) if self._kind is Lamb else self._step_by_element(sums)
        for (_, tile), pending in zip(self._order, whole, strict=True):
            if (arrived := pending.wait()).data_ptr() != tile.values.data_ptr():
                tile.values.copy_(arrived)
        self._restart()
        return loss

    def _step_by_element(self, sums: list[Pending[Tensor]]) -> list[Pending[Tensor]]:
        whole = []
        for (_, tile), inner, pending in zip(self._order, self._inner, sums, strict=True):
            tile.own.grad = pending.wait()
            inner.step()
            tile.own.grad = None
            whole.append(self._gather(tile))
        return whole

    def _step_by_layer(self, sums: list[Pending[Tensor]]) -> list[Pending[Tensor]]:
        """Layers lie in slices of several ranks: one small sum of squares over ranks between two passes."""
        first = dict(zip(map(id, self._flats), _running(len(f.pieces) for f in self._flats), strict=True))
        totals = torch.zeros(2, sum(len(f.pieces) for f in self._flats), dtype=torch.float64)
        totals = totals.to(self._order[0][1].own.device)
        steps = []
        for (flat, tile), inner, pending in zip(self._order, self._inner, sums, strict=True):
            values, options = tile.own.detach(), inner.param_groups[0]
            steps.append(direction(values, pending.wait(), inner.state[tile.own], options))
            for place, begin, stop in flat.segments(tile):
                totals[0, first[id(flat)] + place] += squares(values[begin:stop])
                totals[1, first[id(flat)] + place] += squares(steps[-1][begin:stop])
        ratios = trust_ratio(*self._across.total(totals).wait())
        whole = []
        for (flat, tile), step in zip(self._order, steps, strict=True):
            values = tile.own.detach()
            for place, begin, stop in flat.segments(tile):
                length = ratios[first[id(flat)] + place] * flat.options["lr"]
                values[begin:stop].sub_(step[begin:stop] * length.to(step.dtype))
            whole.append(self._gather(tile))
        return whole

    def _gather(self, tile: Tile) -> Pending[Tensor]:
        # Into other memory: some backends write what a rank gave to its own place while they still read it.
        return self._across.gather(tile.own.detach().clone(), tile.values)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Make the mean gradients of all parameters together no longer than so much. All ranks call it before step.

        Args:
            max_norm: the greatest Euclidean norm.

        Returns:
            The norm before.
        """
        sums = [pending.wait() for pending in self._sums()]
        total = torch.stack([squares(slice_) for slice_ in sums]).sum()
        norm = self._across.total(total).wait().sqrt()
        share = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for slice_ in sums:
            slice_.mul_(share.to(slice_.dtype))
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, and those of a step that is not made."""
        for pending in self._summing:
            pending.wait()
        self._restart()
        super().zero_grad(set_to_none)

    @property
    def state_bytes(self) -> int:
        """Of the optimizer's state on this rank."""
        return sum(
            t.nbytes for inner in self._inner for s in inner.state.values() for t in s.values() if _is_tensor(t)
        )

    def state_dict(self) -> dict[str, Any]:
        """The whole state by names of parameters. All ranks call it, and get it.

        It fits any number of ranks and tiles.
        """
        states = [dict(inner.state[tile.own]) for (_, tile), inner in zip(self._order, self._inner, strict=True)]
        return {
            "version": 1,
            "optimizer": self._kind.__name__,
            "groups": [_plain(group) for group in self.param_groups],
            "state": gathered_state(self._order, states, self._across),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that ``state_dict`` gave, on as many ranks as may be.

        Args:
            state_dict: of the same optimizer over parameters of the same names.

        Raises:
            UsageError: it is of another optimizer, or lacks a parameter; nothing is changed then.
        """
        if state_dict.get("version") != 1 or state_dict.get("optimizer") != self._kind.__name__:
            raise UsageError(
                f"a state of {state_dict.get('optimizer')!r}, version {state_dict.get('version')}; expected one of "
                f"{self._kind.__name__!r}, version 1"
            )
        if len(state_dict["groups"]) != len(self.param_groups):
            raise UsageError(
                f"a state of {len(state_dict['groups'])} groups, the optimizer has {len(self.param_groups)}"
            )
        states = with_state(self._order, state_dict["state"])
        for group, saved in zip(self.param_groups, state_dict["groups"], strict=True):
            group.update(saved)
        for (_, tile), inner, state in zip(self._order, self._inner, states, strict=True):
            inner.state[tile.own] = state

    def close(self) -> None:
        """Take the hooks off the parameters; the optimizer does not step afterwards."""
        for hook in self._hooks:
            hook.remove()


def _names(optimizer: Optimizer, named: Iterable[tuple[str, nn.Parameter]] | None) -> dict[int, str]:
    names = {id(p): name for name, p in named or ()}
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            if named is None and "param_names" in group:
                names[id(parameter)] = group["param_names"][number]
            if is_sharded(parameter):
                raise UsageError(
                    "a parameter is sharded already; slices are of parameters that every rank has in whole"
                )
            if id(parameter) not in names:
                raise UsageError(
                    "a parameter of the optimizer has no name: give the model's named_parameters() as well"
                )
    return names


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options, without parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _running(counts: Iterable[int]) -> Iterator[int]:
    total = 0
    for count in counts:
        yield total
        total += count

"""An optimizer's step in tiles: float32 copies and temporaries of one tile at a time, whatever the model's size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mycel.errors import UsageError
from mycel.moe.sharded import is_sharded

__all__ = ["TiledOptimizer"]

#: Pieces of a parameter begin at multiples of this: vector instructions then meet the same numbers as untiled.
_ALIGNED = 64
_MASTER = "master"


class _Piece(NamedTuple):
    """Consecutive numbers of a parameter of this rank."""

    parameter: nn.Parameter
    start: int
    stop: int


class TiledOptimizer(Optimizer):
    """Steps another optimizer tile by tile, with master weights in float32 for parameters in half precision.

    Mixed precision up-casts gradients before a step, and optimizers make temporaries as large as what they are given:
    4 bytes and more for every parameter of the rank at once. Experts make many parameters that few ranks share, so
    this is where memory peaks. Here both are as large as a tile. Small parameters share a tile, large ones have
    several; the result is that of one step for all, bit for bit. State is whole: state dictionaries, checkpoints
    (``mycel.moe.experts_apart``) and moves of experts know nothing of tiles; another ``tile`` may go on with them.

    A parameter that somebody changed between two steps, as ``load_state_dict`` does, is taken over into its master.
    With ``torch.amp.GradScaler``, gradients are unscaled in float32, tile by tile; do not call ``unscale_``, which
    refuses gradients in float16.

    Args:
        params: parameters, or groups of them.
        inner: the optimizer's class, or a function that makes one; every number's update has to depend on that
            number's own gradient and state alone, as with ``AdamW`` or ``SGD``.
        tile: numbers of a tile, at least 64.
        state_like: makes zeros in the shape of a tensor, of a type, for state with a number for each of the
            parameter's: ``mycel.moe.memory.on_disk(folder)`` maps files, of which a step touches a tile at a time.
        options: of ``inner``.

    Raises:
        UsageError: a tile that is too small, complex parameters, or an optimizer whose steps in tiles differ; when
            stepping: gradients that are sparse.

    References:
        Singh et al., "A Hybrid Tensor-Expert-Data Parallelism Approach to Optimize Mixture-of-Experts Training", ICS
        2023 (arXiv 2303.06318), section 4 (tiled optimizer, tiles of 1.8 million).

    Examples:
        >>> from mycel.moe import MoE
        >>> layer = MoE(dim=16, hidden=32, num_experts=4, dtype=torch.bfloat16)
        >>> optimizer = TiledOptimizer(layer.parameters(), torch.optim.AdamW, lr=1e-3)
        >>> layer(torch.randn(8, 16, dtype=torch.bfloat16)).square().mean().backward()
        >>> _ = optimizer.step()
        >>> sorted(optimizer.state[layer.experts.down_proj])
        ['exp_avg', 'exp_avg_sq', 'master', 'step']
    """

    #: Torch's scaler then gives ``grad_scale`` and ``found_inf`` in place of unscaling.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        inner: Callable[..., Optimizer] = torch.optim.AdamW,
        *,
        tile: int = 1_800_000,
        state_like: Callable[[Tensor, torch.dtype], Tensor] | None = None,
        **options: Any,
    ) -> None:
        if tile < _ALIGNED:
            raise UsageError(f"TiledOptimizer: a tile of {tile} numbers; expected at least {_ALIGNED}")
        self.tile, self._state_like = tile, state_like or _zeros_like
        self._inner = inner([torch.zeros(1)], **options)
        self._make, self._options = inner, options
        #: Names of state with a number for each of the parameter's.
        self._elementwise: set[str] = set()
        super().__init__(params, dict(self._inner.defaults))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of torch's optimizers.

        Raises:
            UsageError: see the class.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            if not p.is_floating_point() or not _as_stored(_local(p.detach()), p).is_contiguous():
                raise UsageError(
                    f"TiledOptimizer: a parameter of {p.dtype}, strides {p.stride()}; expected floating point "
                    "without gaps in memory"
                )
            if is_sharded(p) and self._state_like is not _zeros_like:
                raise UsageError("TiledOptimizer: state_like cannot make state of parameters that FSDP2 shards")
        own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        self._elementwise |= _elementwise_state(self._make, self._options, own)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of all parameters that have gradients.

        Args:
            closure: computes the loss, and gradients, again.

        Returns:
            The closure's loss.

        Raises:
            UsageError: gradients are sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and found_inf.item():
            return loss
        for group in self.param_groups:
            fresh = {p for p in group["params"] if not self.state.get(p, {}).keys() - {_MASTER}}
            alike: dict[nn.Parameter, dict[str, Any]] = {}  # what one step gives all pieces of a parameter
            for pieces in _tiles(group["params"], self.tile):
                self._step_tile(group, pieces, scale, fresh, alike)
            for parameter, values in alike.items():
                self.state[parameter].update(values)
        return loss

    def _step_tile(
        self,
        group: dict[str, Any],
        pieces: list[_Piece],
        scale: Tensor | None,
        fresh: set[nn.Parameter],
        alike: dict[nn.Parameter, dict[str, Any]],
    ) -> None:
        stepped: list[Tensor] = []
        states: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for piece in pieces:
            numbers = self._master(piece)
            numbers.grad = _cut(piece.parameter.grad, piece).to(numbers.dtype)
            if scale is not None:
                numbers.grad = numbers.grad * scale.double().reciprocal().to(numbers.dtype)
            stepped.append(numbers)
            if piece.parameter not in fresh:
                state = self.state[piece.parameter].items()
                states[numbers] = {n: self._of(piece, n, value) for n, value in state if n != _MASTER}
        self._inner.param_groups = [{**group, "params": stepped}]
        self._inner.state = states
        self._inner.step()
        for piece, numbers in zip(pieces, stepped, strict=True):
            for name, value in states[numbers].items():
                if isinstance(value, Tensor) and (name in self._elementwise or value.shape == numbers.shape):
                    self._elementwise.add(name)
                    self._put(piece, name, value)
                else:
                    alike.setdefault(piece.parameter, {})[name] = value
            numbers.grad = None
            if _MASTER in self.state[piece.parameter]:
                self._put(piece, _MASTER, numbers)
                _cut(piece.parameter, piece).copy_(numbers)

    def _master(self, piece: _Piece) -> Tensor:
        """The numbers that are stepped: a view of the parameter, or of its float32 copy."""
        parameter, here = piece.parameter, _cut(piece.parameter, piece)
        if parameter.dtype in (torch.float32, torch.float64):
            return here
        state = self.state[parameter]
        if _MASTER not in state:
            state[_MASTER] = self._state_like(parameter.detach(), torch.float32).copy_(parameter)
        master = _cut(state[_MASTER], piece).to(here.device)
        changed = master.to(here.dtype) != here
        return master.copy_(torch.where(changed, here.to(master.dtype), master))

    def _of(self, piece: _Piece, name: str, value: Any) -> Any:
        """State of one piece; what all pieces share is copied, because each steps it."""
        if name in self._elementwise and isinstance(value, Tensor):
            return _cut(value, piece).to(piece.parameter.device)
        return value.clone() if isinstance(value, Tensor) else value

    def _put(self, piece: _Piece, name: str, value: Tensor) -> None:
        state = self.state[piece.parameter]
        if name not in state:
            state[name] = self._state_like(piece.parameter.detach(), value.dtype)
        whole = _cut(state[name], piece)
        if whole.data_ptr() != value.data_ptr():
            whole.copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of torch's optimizers, but that state keeps its type: masters are not rounded to their parameters'."""
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor) and (name == _MASTER or name in self._elementwise):
                    self.state[parameter][name] = self._state_like(parameter.detach(), value.dtype).copy_(value)


def _zeros_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(tensor, dtype=dtype)


def _tiles(parameters: Iterable[nn.Parameter], tile: int) -> Iterator[list[_Piece]]:
    """Parameters with gradients in pieces, as many together as fit into a tile."""
    pieces: list[_Piece] = []
    room = tile
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            raise UsageError("TiledOptimizer: a gradient is sparse; give those parameters another optimizer")
        start, size = 0, _local(parameter).numel()
        if size == 0:  # a rank without a share of it has its part of the state all the same
            pieces.append(_Piece(parameter, 0, 0))
        while start < size:
            taken = min(size - start, room)
            if taken < size - start:
                taken -= taken % _ALIGNED
            if taken:
                pieces.append(_Piece(parameter, start, start + taken))
                start, room = start + taken, room - taken
            if start < size:
                yield pieces
                pieces, room = [], tile
    if pieces:
        yield pieces


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor


def _as_stored(local: Tensor, parameter: Tensor) -> Tensor:
    """Dimensions in the order of the parameter's memory."""
    like = _local(parameter)
    strides = like.stride()
    return local.permute(sorted(range(like.dim()), key=lambda dim: -strides[dim]))


def _cut(tensor: Tensor | None, piece: _Piece) -> Tensor:
    """The piece's numbers, in the order in which its parameter lies in memory; a view where the tensor lies alike."""
    assert tensor is not None
    local = _local(tensor.detach())
    local = local if _local(piece.parameter).is_contiguous() else _as_stored(local, piece.parameter)
    return local.reshape(-1)[piece.start : piece.stop]


@torch.no_grad()
def _elementwise_state(make: Callable[..., Optimizer], options: dict[str, Any], group: dict[str, Any]) -> set[str]:
    """Names of state that has a number for each of the parameter's; asked of the optimizer by some steps.

    Raises:
        UsageError: steps of parts are not parts of a step.
    """
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 2 * _ALIGNED, generator=generator)
    sizes = [_ALIGNED, 3 * _ALIGNED, 8 * _ALIGNED]
    parts = [part.clone() for part in torch.split(whole.view(-1), sizes)]
    together = make([{**group, "params": [whole]}], **options)
    apart = [make([{**group, "params": [part]}], **options) for part in parts]
    for _ in range(3):
        whole.grad = torch.randn(whole.shape, generator=generator)
        grads = torch.split(whole.grad.view(-1), sizes)
        try:
            together.step()
            for optimizer, part, grad in zip(apart, parts, grads, strict=True):
                part.grad = grad.clone()
                optimizer.step()
        except Exception as error:  # whatever a foreign optimizer may raise
            raise UsageError(f"TiledOptimizer: {type(together).__name__} cannot step tiles: {error}") from error
    if not torch.equal(whole.view(-1), torch.cat(parts)):
        raise UsageError(
            f"TiledOptimizer: a step of {type(together).__name__} in parts is not the step of the whole, because "
            "what it does to a number depends on others; give such parameters that optimizer itself"
        )
    return {n for n, v in together.state[whole].items() if isinstance(v, Tensor) and v.shape == whole.shape}

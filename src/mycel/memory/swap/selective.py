"""Offload policies of torch's selective checkpoint, which do in eager what their names say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext

from mycel.comm.pending import Pending
from mycel.errors import UsageError
from mycel.memory.swap.saved import moves
from mycel.memory.tiers.far import FarMemory, in_host, pinned
from mycel.memory.tiers.link import CudaLink, Link
from mycel.memory.tiers.near import flat

__all__ = ["offload_contexts"]

_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_FAR = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
PolicyFn = Callable[..., CheckpointPolicy | bool]


def offload_contexts(
    policy_fn: PolicyFn, *, link: Link, far: FarMemory | None = None
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """For ``torch.utils.checkpoint``: results of operators are saved, computed again, or moved to far memory.

    As torch's ``create_selective_checkpoint_contexts``, with ``MUST_CPU_OFFLOAD`` and ``PREFER_CPU_OFFLOAD``. One
    result is on its way out at a time: the next waits for it, so that near memory has two at most. In the backward
    pass each begins to come when the one before it is used.

    Args:
        policy_fn: of a context, an operator and its arguments, gives a ``CheckpointPolicy``.
        link: carries results.
        far: memory for them; of the host if not given.

    Returns:
        What surrounds the forward pass, and what surrounds its recomputation, as ``context_fn`` has to give.

    Examples:
        ::

            contexts = functools.partial(offload_contexts, policy, link=link)
            y = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    """
    tape = _Tape(link, far or FarMemory(pinned if isinstance(link, CudaLink) else in_host))
    return _Writes(policy_fn, tape), _Reads(tape)


class _Result:
    """What an operator gave: tensors near, or far, or on their way; and all else."""

    def __init__(self, out: Any, tape: _Tape, *, away: bool) -> None:
        leaves, self.spec = tree_flatten(out)
        self.link, self.far = tape.link, tape.far
        self.leaves = [_alias(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in self.leaves]
        self.copies: dict[int, Tensor] = {}
        self.shapes: dict[int, tuple[Any, ...]] = {}
        self.near: dict[int, Tensor] = {}
        self.coming: Pending[None] | None = None
        self.going: Pending[None] | None = None
        if away:
            moved = [place for place, leaf in enumerate(self.leaves) if moves(leaf)]
            for place in moved:
                self.copies[place] = self.far.take(self.leaves[place].untyped_storage().nbytes())
            self.going = self.link.store([(self.copies[place], flat(self.leaves[place])) for place in moved])

    def gone(self) -> None:
        """Wait until it is far, and let it go."""
        if self.going is None:
            return
        self.going.wait()
        self.going = None
        for place in self.copies:
            x = self.leaves[place]
            self._unchanged(place)
            self.shapes[place] = (x.dtype, x.size(), x.stride(), x.storage_offset(), x.device)
            self.leaves[place] = None

    def start(self) -> None:
        """Begin to bring it."""
        self.gone()
        if not self.copies or self.near:
            return
        self.near = {
            place: torch.empty(copy.numel(), dtype=torch.uint8, device=self.shapes[place][4])
            for place, copy in self.copies.items()
        }
        self.coming = self.link.fetch([(self.copies[place], near) for place, near in self.near.items()])

    def take(self) -> Any:
        """It again."""
        self.start()
        if self.coming is not None:
            self.coming.wait()
            self.coming = None
        leaves = list(self.leaves)
        for place in range(len(leaves)):
            if place in self.near:
                dtype, size, stride, offset, device = self.shapes[place]
                storage = self.near[place].untyped_storage()
                leaves[place] = torch.empty(0, dtype=dtype, device=device).set_(storage, offset, size, stride)
            else:
                self._unchanged(place)
        self.near = {}
        return tree_unflatten(leaves, self.spec)

    def _unchanged(self, place: int) -> None:
        x = self.leaves[place]
        if isinstance(x, Tensor) and x._version != self.versions[place]:
            raise UsageError(
                f"a result of shape {list(x.shape)} that a checkpoint saved was modified in place afterwards"
            )

    def __del__(self) -> None:
        if self.going is None and self.coming is None:
            for copy in self.copies.values():
                self.far.give(copy)


def _alias(x: Tensor) -> Tensor:
    """The same numbers without a graph; below autograd, where this runs, counts of writings are shared only so."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


class _Tape:
    """Results of one forward pass, by operator and call."""

    def __init__(self, link: Link, far: FarMemory) -> None:
        self.link, self.far = link, far
        self.results: dict[tuple[Any, int], _Result | None] = {}
        self.away: list[_Result] = []


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Surrounds the forward pass."""

    def __init__(self, policy_fn: PolicyFn, tape: _Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy_fn, self.tape = policy_fn, tape
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in SAC_IGNORED_OPS:
            return out
        policy = self.policy_fn(SelectiveCheckpointContext(is_recompute=False, op_output=out), func, *args, **kwargs)
        if isinstance(policy, bool):
            policy = CheckpointPolicy.MUST_SAVE if policy else CheckpointPolicy.PREFER_RECOMPUTE
        result = None
        if policy in _FAR:
            if self.tape.away:
                self.tape.away[-1].gone()
            result = _Result(out, self.tape, away=True)
            self.tape.away.append(result)
        elif policy in _SAVED:
            result = _Result(out, self.tape, away=False)
        self.tape.results[func, self.calls[func]] = result
        self.calls[func] += 1
        return out


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Surrounds the recomputation."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.calls: Counter[Any] = Counter()

    def __enter__(self) -> _Reads:
        self.calls.clear()
        if self.tape.away:
            self.tape.away[0].start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SAC_IGNORED_OPS:
            return func(*args, **(kwargs or {}))
        call = func, self.calls[func]
        self.calls[func] += 1
        if call not in self.tape.results:
            raise UsageError(
                f"a checkpoint's recomputation calls {func} for the {call[1] + 1}. time, its forward pass did not: "
                "what it computes has to be the same"
            )
        result = self.tape.results[call]
        if result is None:
            return func(*args, **(kwargs or {}))
        if result in self.tape.away:
            following = self.tape.away.index(result) + 1
            if following < len(self.tape.away):
                self.tape.away[following].start()
        return result.take()

"""Torch's own ``context_parallel`` on CPU tensors: its calls as they are, answered where torch has no answer.

Torch hands attention of divided sequences to a table of operators that it keeps for the time of the context. The
operator that computes on the CPU is not in it, so every causal call fails there. ``serve_context_parallel`` puts this
operator and its gradient into that table; nothing that torch can do itself is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.handle import Handle
from mycel.errors import UsageError
from mycel.planning.sequence import CAUSAL, FULL, contiguous, zigzag
from mycel.sequence.context import SequenceContext
from mycel.sequence.softmax.attended import Carrier
from mycel.sequence.softmax.ways import Way, carrier

__all__ = ["ServedContextParallel", "serve_context_parallel"]

#: Where torch has the table and the options of its context parallelism.
_TORCH = "torch.distributed.tensor.experimental._context_parallel._attention"
_aten = torch.ops.aten
#: The dimension of the tokens in what attention is given.
_TOKENS = 2
#: What the two values of ``set_rotate_method`` are here.
_WAYS = {"ALL_GATHER": Way(between="gathered"), "ALL_TO_ALL": Way(between="ring")}
#: Lengths of sequences whose division is kept.
_MOST_CONTEXTS = 64
#: Those that are not closed, in the order in which they were asked for; the last one answers.
_SERVING: list[ServedContextParallel] = []


class ServedContextParallel(Handle):
    """Torch's context parallelism answered on the CPU; ``close()``, or the end of a ``with`` block, ends it.

    Attributes:
        contexts: the ranks and the tokens of each, by group, tokens of a rank, and whether torch balances.
    """

    def __init__(self) -> None:
        try:
            module: Any = import_module(_TORCH)
            self._table, self._options = module.custom_ops, module._cp_options
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"torch {torch.__version__} keeps its context parallelism elsewhere ({error}): divide a model with "
                "mycel.sequence.apply"
            ) from error
        tensor: Any = import_module("torch.distributed.tensor")
        self._dtensor, self._divided = tensor.DTensor, (tensor.Shard(_TOKENS),)
        self.contexts: dict[tuple[dist.ProcessGroup, int, bool], SequenceContext] = {}
        answers: dict[Any, Callable[..., Any]] = {
            _aten._scaled_dot_product_flash_attention_for_cpu.default: self._forward,
            _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: self._backward,
        }
        known = set(_SERVING[-1]._answers) if _SERVING else set()
        # What a later torch answers itself stays its own.
        mine = {op: _called(answer) for op, answer in answers.items() if op in known or op not in self._table}
        self._answers: dict[Any, Callable[..., Any]] = mine
        self._table.update(mine)
        _SERVING.append(self)

    def __repr__(self) -> str:
        return f"ServedContextParallel({len(self.contexts)} lengths)"

    def close(self) -> None:
        """Take the answers out of torch's table, outside of its contexts. May be called again."""
        if self not in _SERVING:
            return
        _SERVING.remove(self)
        if _SERVING:  # called for elsewhere too: those answers stay, or take the place of these
            self._table.update(_SERVING[-1]._answers)
        else:
            for op in self._answers:
                self._table.pop(op, None)
        self.contexts.clear()

    # -- answers --------------------------------------------------------------------------------------------------

    def _forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Any = None,
        scale: float | None = None,
    ) -> tuple[Any, Any]:
        q, k, v = self._parts(query, key, value)
        _check(q, k, dropout_p, attn_mask)
        out, lse = self._carrier(query, q, k, is_causal, scale).forward(q, k, v)
        return self._whole(out.to(q.dtype), query), self._whole(lse, query)

    def _backward(
        self,
        grad_out: Any,
        query: Any,
        key: Any,
        value: Any,
        out: Any,
        logsumexp: Any,
        dropout_p: float,
        is_causal: bool,
        *,
        attn_mask: Any = None,
        scale: float | None = None,
    ) -> tuple[Any, Any, Any]:
        q, k, v = self._parts(query, key, value)
        grad, seen, lse = self._parts(grad_out, out, logsumexp)
        _check(q, k, dropout_p, attn_mask)
        gradients = self._carrier(query, q, k, is_causal, scale).backward(grad.contiguous(), q, k, v, seen, lse)
        of_q, of_k, of_v = (self._whole(gradient, query) for gradient in gradients)
        return of_q, of_k, of_v

    # -- underneath -----------------------------------------------------------------------------------------------

    def _carrier(self, query: Any, q: Tensor, k: Tensor, is_causal: bool, scale: float | None) -> Carrier:
        """How torch's options want keys to come to queries."""
        way = _WAYS[self._options.rotate_method.name]
        mask = CAUSAL if is_causal else FULL
        of_scores = q.shape[-1] ** -0.5 if scale is None else scale
        return carrier(
            way, k.shape[1], self._context(query.device_mesh.get_group(), q.shape[_TOKENS]), mask, of_scores
        )

    def _context(self, group: dist.ProcessGroup, tokens: int) -> SequenceContext:
        is_balanced = bool(self._options.enable_load_balance)
        if is_balanced and tokens % 2:
            raise UsageError(
                f"attention of {tokens} tokens a rank inside context_parallel, whose balancing has two pieces of one "
                "length: have it divide the tokens, or switch its balancing off"
            )
        key = (group, tokens, is_balanced)
        if key not in self.contexts:
            if len(self.contexts) >= _MOST_CONTEXTS:
                self.contexts.pop(next(iter(self.contexts)))
            size = group.size()
            # Torch divides evenly; balanced, a rank has one piece from the front and one from the end.
            layout = (zigzag if is_balanced else contiguous)([tokens * size], size)
            self.contexts[key] = SequenceContext(layout, group)
        return self.contexts[key]

    def _parts(self, *tensors: Any) -> tuple[Tensor, ...]:
        """What of divided tensors is here."""
        for tensor in tensors:
            placements = getattr(tensor, "placements", None)
            if placements != self._divided:
                raise UsageError(
                    f"attention inside context_parallel of tensors placed {_shown(placements)}: [batch, heads, "
                    f"tokens, width] over a mesh of one dimension, divided by tokens, {_shown(self._divided)}, is "
                    "understood"
                )
        return tuple(tensor.to_local() for tensor in tensors)

    def _whole(self, part: Tensor, like: Any) -> Any:
        return self._dtensor.from_local(part, like.device_mesh, self._divided, run_check=False)


def _called(answer: Callable[..., Any]) -> Callable[..., Any]:
    """An answer as torch's table has them."""

    @torch.no_grad()
    def called(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return answer(*args, **kwargs)

    return called


def _check(q: Tensor, k: Tensor, dropout: float, mask: Any) -> None:
    if q.shape[_TOKENS] != k.shape[_TOKENS]:
        raise UsageError(
            f"attention of {q.shape[_TOKENS]} queries to {k.shape[_TOKENS]} keys inside context_parallel: only of a "
            "whole sequence to itself"
        )
    if dropout:
        raise UsageError(
            f"dropout of attention weights ({dropout}) inside context_parallel: ranks would draw weights of their "
            "own for the same heads; set it to 0"
        )
    if mask is not None:
        raise UsageError(
            "an attention mask inside context_parallel is of the tokens of one rank, while queries see keys of "
            "others; use is_causal=True, or mycel.sequence.apply with documents"
        )


def _shown(placements: Any) -> str:
    return "nowhere" if placements is None else ", ".join(map(str, placements))


def serve_context_parallel() -> ServedContextParallel:
    """Have torch's ``context_parallel`` work on CPU tensors, over any backend. Its calls stay as they are.

    Call it once, before the first of them. ``context_parallel``, ``context_parallel_unshard``, ``set_rotate_method``
    (``allgather``: keys come at once; ``alltoall``: they go round) and torch's balancing of causal attention have the
    results that they have on a GPU, also for causal attention, which torch refuses on the CPU, for full attention
    under balancing, and in float64. Gradients are to be asked for inside the context, as on a GPU.

    Torch's limits remain: one mesh at a time; tokens divide by twice the number of ranks; no documents, windows or
    masks; attention that torch computes by plain products instead (dropout, values of another width than queries,
    ``sdpa_kernel(MATH)``). ``mycel.sequence.apply`` has none of these.

    Returns:
        A handle; ``close()`` takes the answers out again.

    Raises:
        UsageError: this release of torch keeps its context parallelism elsewhere.

    Examples:
        Torch's own call, with one line before it::

            mycel.sequence.serve_context_parallel()
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            with context_parallel(mesh, buffers=[tokens, targets], buffer_seq_dims=[1, 1]):
                loss(model(tokens), targets).backward()

    References:
        https://docs.pytorch.org/tutorials/unstable/context_parallel.html
    """
    return ServedContextParallel()

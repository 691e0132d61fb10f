"""MASHA: compressed exchange for games and saddle points, which descent over compressed gradients does not solve.

A game's operator ``F`` stacks the gradients of all players; extragradient steps need it at two points. A rank's part
of it is not zero at the solution, so compressing the parts leaves noise that never fades: the iterates stall at a
distance. MASHA compresses differences from a reference point ``w`` at which all ranks know the whole operator. These
fade as the iterates come closer, and the noise with them::

    half = (1 - p) z + p w - lr F(w)
    z    = half - mean_m C(lr (F_m(half) - F_m(w)))

With probability ``p`` the reference then becomes the new ``z``, and ``F(w)`` is exchanged as it is.

References:
    A. Beznosikov, P. Richtárik, M. Diskin, M. Ryabinin, A. Gasnikov, "Distributed Methods with Compressed
    Communication for Solving Variational Inequalities, with Theoretical Guarantees", NeurIPS 2022, arXiv 2110.03313,
    algorithms 1 (unbiased compressors) and 2 (contractive ones, with error feedback).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from mycel.comm.bundle import Packed
from mycel.comm.start import agree, group_or_all
from mycel.data_parallel.combine.mean import Mean
from mycel.data_parallel.compress.base import Compressor
from mycel.data_parallel.compress.cast import Cast
from mycel.data_parallel.compress.context import Context
from mycel.data_parallel.compress.rounds import Item
from mycel.data_parallel.exchange import exchange
from mycel.data_parallel.feedback import ErrorFeedback
from mycel.data_parallel.local.state import load_tensors
from mycel.data_parallel.open_step import OpenStep
from mycel.data_parallel.policy import CompressionPolicy
from mycel.data_parallel.state import mean_residuals, pack_state, unpack_state
from mycel.data_parallel.stats import CommStats
from mycel.errors import UsageError

__all__ = ["MASHA"]


class MASHA(torch.optim.Optimizer):
    """An optimizer for games over ranks that have a part of the data each. Every rank makes it, with one model.

    A compressor that is unbiased, such as ``RandomK(0.1, unbiased=True)`` or ``Quantised(4)``, makes it MASHA1; one
    that contracts, such as ``TopK(0.1)``, makes it MASHA2, with error feedback. Do not wrap the model in DDP, which
    would average gradients before.

    ``step`` needs a closure, which it calls once, or twice where the reference moves: compute this rank's loss and
    call ``backward``; gradients are cleared before. All calls must mean the same function, such as the loss over all
    of the rank's data: over other data in each call differences do not fade.

    Args:
        params: with names: ``model.named_parameters()``, or groups of such. A group with ``maximize=True`` belongs
            to a player who wants the loss large.
        method: a compressor, which is copied, for every tensor that becomes smaller by it; or a policy.
        lr: learning rate; groups may have their own.
        probability: of a new reference; by default such that exchanges as they are make half of all bytes.
        feedback: whether to remember what compression loses; by default as the compressor wants it.
        seed: of everything random, the same on all ranks.
        group: the ranks, all by default. The first one's parameters become everybody's.

    Raises:
        UsageError: options that make no sense, or parameters without names of their own.

    Attributes:
        steps: so far.
        probability: see above.
        stats: bytes and seconds; what exact exchanges of the same operators would send is ``exact_bytes``.

    Examples:
        >>> from mycel.data_parallel.compress import Quantised
        >>> x, y = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
        >>> players = [{"params": [("x", x)]}, {"params": [("y", y)], "maximize": True}]
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> game = MASHA(players, Quantised(8), lr=0.5)
        >>> for _ in range(40):
        ...     game.step(lambda: (x * y).sum().backward())
        >>> bool(x.abs() < 0.1 and y.abs() < 0.1)  # descent would circle away from the solution
        True
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        params: ParamsT,
        method: Compressor | CompressionPolicy,
        *,
        lr: float,
        probability: float | None = None,
        feedback: bool | None = None,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not lr > 0 or (probability is not None and not 0 < probability <= 1):
            raise UsageError(f"MASHA: lr {lr} must be positive and probability {probability} in (0, 1]")
        super().__init__(params, {"lr": lr, "maximize": False})
        names = [name for entry in self.param_groups for name in entry.get("param_names", ())]
        self._trained = [p for entry in self.param_groups for p in entry["params"]]
        if len(set(names)) < len(self._trained):
            raise UsageError(
                "MASHA: every parameter needs a name of its own; pass named_parameters(), of two models with "
                "named_parameters(prefix=...)"
            )
        self._names: list[str] = names
        self._shapes = {n: p.shape for n, p in zip(names, self._trained, strict=True)}
        self._group = group_or_all(group, "MASHA")
        self._rank, self._size = self._group.rank(), self._group.size()
        if isinstance(method, Compressor):
            method = CompressionPolicy(None, rules={"*": copy.deepcopy(method)})
        self._policy, self._exact = method, Cast(torch.float32)
        self._wants_feedback, self._seed = feedback, seed
        self.feedback = ErrorFeedback()
        self._open = OpenStep(self._policy, self.feedback)
        self.stats = CommStats()
        self.steps = 0
        self.probability = self._even_probability() if probability is None else probability
        agree(self._trained, self._group)
        self._reference, self._own, self._whole = (Packed(self._trained) for _ in range(3))
        self._reference.copy_from(self._trained)
        self._is_known = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, which all ranks make together. Returns what the closure returned at the half-way point.

        Raises:
            UsageError: there is no closure.
            CommunicationError: a collective of mycel's backend failed; other backends raise their own errors.
        """
        if closure is None:
            raise UsageError("MASHA.step needs a closure: the operator is evaluated at points of its own choice")
        if not self._is_known:
            self._learn_reference(closure)
        rates = [entry["lr"] for entry in self.param_groups for _ in entry["params"]]
        for z, w, whole, rate in zip(self._trained, self._reference.parts, self._whole.parts, rates, strict=True):
            z.copy_(torch.lerp(z.to(w.dtype), w, self.probability).sub_(whole, alpha=rate))
        loss, operator = self._evaluate(closure)
        differences = [
            (here - there) * rate for here, there, rate in zip(operator, self._own.parts, rates, strict=True)
        ]
        for z, mean in zip(self._trained, self._exchange(differences), strict=True):
            z.sub_(mean.to(z.dtype))
        if self._moves_reference():
            self._reference.copy_from(self._trained)
            self._learn_reference(closure)
        self.steps += 1
        self.stats.steps += 1
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are given at the beginning.

        Raises:
            UsageError: the optimizer is made already.
        """
        if hasattr(self, "_names"):
            raise UsageError("MASHA: all parameters are given at the beginning; make another one")
        super().add_param_group(param_group)

    def state_dict(self, *, own: bool = False) -> dict[str, Any]:
        """What a later run needs beside the parameters, by their names. Every rank calls it, between steps.

        The operator at the reference is not part of it: the first step of the later run evaluates and exchanges it
        again, so that ranks may have other parts of the data there.

        Args:
            own: for the same ranks, to go on bit for bit: each saves a state with its own residuals. Without it,
                residuals are averaged; all ranks get one state, which any number of ranks can load.

        Returns:
            Names, numbers and tensors, for ``torch.load(..., weights_only=True)``.
        """
        residuals = self.feedback.memory if own else mean_residuals(self.feedback, self._shapes, self._group)
        state = pack_state(
            self.steps, residuals, self._policy.compressors(), (self._rank, self._size) if own else None
        )
        state["reference"] = {
            name: part.clone() for name, part in zip(self._names, self._reference.parts, strict=True)
        }
        state["rates"] = [entry["lr"] for entry in self.param_groups]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was made.

        Raises:
            UsageError: the state is of another model, or another rank's own.
        """
        if len(state_dict.get("rates", ())) != len(self.param_groups):
            raise UsageError("not a state of MASHA, or one of other groups of parameters")
        owner = (self._rank, self._size)
        self.steps = unpack_state(state_dict, self._shapes, self._policy.compressors(), self.feedback, owner)
        load_tensors("reference point", state_dict["reference"], self._names, self._reference.parts)
        for entry, rate in zip(self.param_groups, state_dict["rates"], strict=True):
            entry["lr"] = rate
        self._is_known = False

    # -- the operator -----------------------------------------------------------------------------------------

    def _evaluate(self, closure: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
        """This rank's part of the operator where the parameters are, and what the closure returned."""
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        signs = [-1 if entry["maximize"] else 1 for entry in self.param_groups for _ in entry["params"]]
        return loss, [
            torch.zeros_like(part) if p.grad is None else p.grad.to(part.dtype) * sign
            for p, part, sign in zip(self._trained, self._own.parts, signs, strict=True)
        ]

    def _learn_reference(self, closure: Callable[[], Any]) -> None:
        """Evaluate the operator at the reference, so that all ranks know the whole of it."""
        here = [p.clone() for p in self._trained]
        self._reference.copy_to(self._trained)
        self._own.copy_from(self._evaluate(closure)[1])
        torch._foreach_copy_(self._trained, here)
        self._whole.copy_from(self._own.parts)
        for bundle in self._whole.bundles:
            Mean().start(bundle, self._group).wait()
            self._count_exact(bundle.flat)
            self.stats.sent(self._all_reduced(bundle.flat), collectives=int(self._size > 1))
        self._is_known = True

    def _moves_reference(self) -> bool:
        """The same answer on all ranks: no bit of it travels."""
        drawn = Context(name="MASHA", step=self.steps, seed=self._seed).random_seed(shared=True)
        return drawn < self.probability * 2**63

    # -- compressed exchange ----------------------------------------------------------------------------------

    def _exchange(self, differences: list[Tensor]) -> list[Tensor]:
        """The means of what all ranks' compressors make of their differences."""
        together: dict[Compressor, list[Item]] = {}
        for name, difference in zip(self._names, differences, strict=True):
            context = Context(name=name, step=self.steps, rank=self._rank, world_size=self._size, seed=self._seed)
            tensor = self.feedback.compensate(name, difference)
            compressor = self._compressor(name, difference, self.steps)
            together.setdefault(compressor, []).append(Item(tensor=tensor.contiguous(), context=context))
            self._count_exact(difference)
        conversations = [c.converse(items, keep_residual=self._keeps(c)) for c, items in together.items()]
        means: dict[str, Tensor] = {}
        outcomes = exchange(conversations, self._group, self.stats)
        for items, found in zip(together.values(), outcomes, strict=True):
            for item, outcome in zip(items, found, strict=True):
                means[item.context.name] = outcome.mean
                if outcome.residual is None:  # all came through, whatever was before
                    self.feedback.release(item.context.name)
                else:
                    self.feedback.remember(item.context.name, outcome.residual)
        for name, mean in means.items():
            self._open.add(mean, {name: mean}, self.steps)
        self._open.settle(keep=self._open.is_finite())
        return [means[name] for name in self._names]

    def _compressor(self, name: str, tensor: Tensor, step: int) -> Compressor:
        return self._policy.choose(name, tensor.shape, step) or self._exact

    def _keeps(self, compressor: Compressor) -> bool:
        if compressor is self._exact:
            return False
        return compressor.wants_feedback if self._wants_feedback is None else self._wants_feedback

    def _even_probability(self) -> float:
        """Bytes of a compressed exchange over those of an exact one, as two ranks or more would send them."""
        together: dict[Compressor, list[torch.Size]] = {}
        for name, parameter in zip(self._names, self._trained, strict=True):
            compressor = self._compressor(name, parameter, self._policy.start_step)
            together.setdefault(compressor, []).append(parameter.shape)
        size = max(2, self._size)
        ranks = range(size)  # shares may be uneven: the mean counts
        sent = sum(c.sent_bytes(s, rank=r, world_size=size) / size for c, s in together.items() for r in ranks)
        exact = sum(2 * (size - 1) / size * p.numel() * p.element_size() for p in self._trained)
        return float(min(1.0, sent / exact))

    def _all_reduced(self, tensor: Tensor) -> float:
        return 2 * (self._size - 1) / self._size * tensor.numel() * tensor.element_size()

    def _count_exact(self, tensor: Tensor) -> None:
        self.stats.exact_bytes += self._all_reduced(tensor)

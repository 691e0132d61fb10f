"""Keeping experts evenly loaded: auxiliary losses, a bias that needs none, and the sparsity of ReLU routing.

A policy is a module with two methods: ``loss`` looks at the routing of one batch, ``update`` at the counts of
everything since the last optimizer step, on all ranks. Both see what routers asked for, before capacities cut it.
"""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mycel.arguments import the
from mycel.errors import UsageError
from mycel.moe.recompute import recomputing
from mycel.moe.slots import RoutingResult, count_tokens
from mycel.moe.totals import num_sequences, over_sequences, over_tokens, without_stand_ins

__all__ = [
    "AdaptiveL1",
    "Balanced",
    "BiLevelLoss",
    "ExpertBias",
    "GShardLoss",
    "LoadBalancing",
    "LoadImportanceLoss",
    "SequenceLoss",
    "SwitchLoss",
    "ZLoss",
    "attach",
    "losses_of",
    "policies_of",
]


class LoadBalancing(nn.Module, ABC):
    """A policy; what a kind does not need does nothing.

    Attributes:
        selection_bias: what routers add to scores where they choose, shape ``[E]``; ``None``: nothing.
        by_sequence: its loss looks at ``RoutingResult.sequence``, which else is not made.

    Examples:
        >>> class SmallScores(LoadBalancing):
        ...     def loss(self, routing):
        ...         return 0.1 * routing.scores.square().sum()
        >>> scores = torch.tensor([[1.0, 2.0]])
        >>> routing = RoutingResult(torch.tensor([[1]]), scores[:, 1:], scores, scores, torch.tensor([0, 1]), True)
        >>> SmallScores().loss(routing)
        tensor(0.5000)
    """

    by_sequence = False

    def loss(self, routing: RoutingResult) -> Tensor:
        """A scalar to add to the training loss; its gradient reaches the router.

        Where ranks share sequences, sums over tokens go through ``mycel.moe.over_tokens``, and the loss is of all.

        Args:
            routing: of the tokens of this rank's call.
        """
        return routing.router_logits.new_zeros(())

    def update(self, tokens_per_expert: Tensor, num_tokens: Tensor) -> None:
        """Learn from an optimizer step's counts over all ranks.

        Args:
            tokens_per_expert: shape ``[E]``.
            num_tokens: how many tokens these are; a scalar.
        """

    @property
    def selection_bias(self) -> Tensor | None:
        """What routers add to scores where they choose, shape ``[E]``."""
        return None


def _shares(routing: RoutingResult) -> Tensor:
    """Scores that add up to 1 a token, shape ``[T, E]``."""
    return routing.scores / routing.scores.sum(dim=1, keepdim=True).clamp_min(1e-20)


def _means_and_counts(routing: RoutingResult) -> tuple[Tensor, Tensor]:
    """Mean over tokens of their shares, zeros where there is no token, and slots used; both of shape ``[E]``."""
    (shares_E, counts_E), num_tokens = over_tokens(routing, _shares(routing).sum(dim=0), routing.tokens_per_expert)
    return shares_E / num_tokens, counts_E


class GShardLoss(LoadBalancing):
    """``E * sum_e mean(p_e) * f_e`` with ``f_e`` the share of tokens whose first choice is ``e``; 1 when even.

    Args:
        weight: factor of the loss.

    References:
        Lepikhin et al., "GShard", ICLR 2021, algorithm 1.

    Examples:
        >>> from mycel.moe import LinearProjection, TopKRouter
        >>> router = TopKRouter(LinearProjection(4, 4), top_k=1)
        >>> _ = nn.init.eye_(router.projection.weight)  # the numbers of a token are its logits
        >>> even = 9 * torch.eye(4)  # each token prefers another expert, or all the first one
        >>> [round(GShardLoss(weight=1.0).loss(router(x)).item(), 1) for x in (even, even[[0, 0, 0, 0]])]
        [1.0, 4.0]
    """

    def __init__(self, weight: float = 1e-2) -> None:
        super().__init__()
        self.weight = weight

    def loss(self, routing: RoutingResult) -> Tensor:
        """See ``LoadBalancing``."""
        here_E = count_tokens(routing.top_k_index[:, :1], routing.num_experts)
        (shares_E, first_E), num_tokens = over_tokens(routing, _shares(routing).sum(dim=0), here_E)
        return (shares_E / num_tokens * (first_E / num_tokens)).sum() * (routing.num_experts * self.weight)


class SwitchLoss(LoadBalancing):
    """``E * sum_e mean(p_e) * f_e`` with ``f_e`` the share of all choices that fall on ``e``; 1 when even.

    Args:
        weight: factor of the loss.

    References:
        Fedus et al., "Switch Transformers", JMLR 2022, equations 4 to 6 (for one choice a token).

    Examples:
        >>> from mycel.moe import LinearProjection, TopKRouter
        >>> router = TopKRouter(LinearProjection(4, 4), top_k=2)
        >>> _ = nn.init.eye_(router.projection.weight)  # the numbers of a token are its logits
        >>> x = torch.tensor([[9.0, 9.0, 0.0, 0.0]])  # two of four experts are chosen, again and again
        >>> [round(SwitchLoss(weight=1.0).loss(router(x.repeat(times, 1))).item(), 1) for times in (1, 5)]
        [2.0, 2.0]
    """

    def __init__(self, weight: float = 1e-2) -> None:
        super().__init__()
        self.weight = weight

    def loss(self, routing: RoutingResult) -> Tensor:
        """See ``LoadBalancing``."""
        mean_E, counts_E = _means_and_counts(routing)
        share_E = counts_E / counts_E.sum().clamp_min(1)
        return (mean_E * share_E).sum() * (routing.num_experts * self.weight)


class SequenceLoss(LoadBalancing):
    """The loss of ``SwitchLoss`` within each sequence, on average: experts are even in every single text.

    ``sum_e f_e P_e`` with ``f_e = E / (K T) * count_e`` over the T tokens of a sequence and ``P_e`` the mean of their
    normalised scores. It is meant to be small, beside a balance over whole batches such as ``ExpertBias``. Sequences
    are those of the input's shape ``[..., tokens, width]``; in Hugging Face models those of the attention mask or the
    input, without padding. A step waits for the device once, for how many there are.

    Args:
        weight: factor of the loss.

    References:
        DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (arXiv 2412.19437), equations 17 to 20.

    Examples:
        >>> from mycel.moe import LinearProjection, TopKRouter
        >>> router = TopKRouter(LinearProjection(4, 4), top_k=1)
        >>> _ = nn.init.eye_(router.projection.weight)  # the numbers of a token are its logits
        >>> routing = router(9 * torch.eye(4))  # even over the batch; but each expert has a text of its own
        >>> apart = routing._replace(sequence=torch.arange(4))
        >>> [round(SequenceLoss(weight=1.0).loss(one).item(), 1) for one in (routing, apart)]
        [1.0, 4.0]
    """

    by_sequence = True

    def __init__(self, weight: float = 1e-4) -> None:
        super().__init__()
        self.weight = weight

    def loss(self, routing: RoutingResult) -> Tensor:
        """See ``LoadBalancing``."""
        T, E = routing.top_k_index.shape[0], routing.num_experts
        of_T = routing.top_k_index.new_zeros(T) if routing.sequence is None else routing.sequence
        S = num_sequences(routing.sequence, of_T)
        if S == 0:
            return routing.scores.sum() * 0.0
        place_TK = of_T.unsqueeze(1) * (E + 1) + routing.top_k_index  # empty slots have a column of their own
        counts_SE = count_tokens(place_TK, S * (E + 1)).view(S, E + 1)[:, :E]
        shares_TE = _shares(routing)
        shares_SE = shares_TE.new_zeros(S, E).index_add(0, of_T, shares_TE)
        (shares_SE, counts_SE, length_S), weight = over_sequences(shares_SE, counts_SE, count_tokens(of_T, S))
        mean_SE = shares_SE / length_S.clamp_min(1).unsqueeze(1)
        share_SE = counts_SE / counts_SE.sum(dim=1, keepdim=True).clamp_min(1)
        return (mean_SE * share_SE).sum() * (E * self.weight * weight)


class LoadImportanceLoss(LoadBalancing):
    """Half the sum of two squared coefficients of variation: of mean scores, and of the smooth load.

    The smooth load of an expert is the sum over tokens of the chance that fresh noise would lift its logit over the
    smallest one chosen. Logits are compared with logits.

    Args:
        weight: factor of the loss.
        noise: the router's ``noise``; positive.

    Raises:
        UsageError: without noise the load is no smooth function.

    References:
        Shazeer et al., "Outrageously Large Neural Networks", ICLR 2017, section 4 and appendix A;
        Riquelme et al., "Scaling Vision with Sparse Mixture of Experts", NeurIPS 2021, appendix A.

    Examples:
        >>> from mycel.moe import LinearProjection, TopKRouter
        >>> router = TopKRouter(LinearProjection(4, 4), top_k=1)
        >>> _ = nn.init.eye_(router.projection.weight)  # the numbers of a token are its logits
        >>> even = 9 * torch.eye(4)  # each token prefers another expert, or all the first one
        >>> policy = LoadImportanceLoss(weight=1.0, noise=1.0)
        >>> [round(policy.loss(router(x)).item(), 1) for x in (even, even[[0, 0, 0, 0]])]
        [0.0, 3.0]
    """

    def __init__(self, weight: float = 1e-2, *, noise: float = 1.0) -> None:
        super().__init__()
        if noise <= 0:
            raise UsageError(f"LoadImportanceLoss: noise {noise}; expected more than 0")
        self.weight = weight
        self.noise = noise

    def loss(self, routing: RoutingResult) -> Tensor:
        """See ``LoadBalancing``."""
        E = routing.num_experts
        empty_TK = routing.top_k_index == E
        chosen_TK = routing.router_logits.gather(1, routing.top_k_index.clamp_max(E - 1))
        threshold_T1 = chosen_TK.masked_fill(empty_TK, math.inf).amin(dim=1, keepdim=True)
        distance_TE = (routing.router_logits - threshold_T1) * (E / (self.noise * math.sqrt(2.0)))
        load_E = (0.5 * (1.0 + torch.erf(distance_TE))).sum(dim=0)
        (scores_E, load_E), _ = over_tokens(routing, routing.scores.sum(dim=0), load_E)
        return (_squared_variation(scores_E) + _squared_variation(load_E)) * (0.5 * self.weight)


def _squared_variation(x_E: Tensor) -> Tensor:
    return x_E.var(correction=0) / (x_E.mean().square() + 1e-20)


class ZLoss(LoadBalancing):
    """Mean squared log-sum-exp of the logits: keeps them small.

    Args:
        weight: factor of the loss.

    References:
        Zoph et al., "ST-MoE", 2022, equation 5.

    Examples:
        >>> from mycel.moe import LinearProjection, TopKRouter
        >>> router = TopKRouter(LinearProjection(4, 4), top_k=1)
        >>> _ = nn.init.eye_(router.projection.weight)  # the numbers of a token are its logits
        >>> x = torch.tensor([[0.0, 0.0, 0.0, 0.0]])  # the log of the sum of 4 ones, squared
        >>> round(ZLoss(weight=1.0).loss(router(x)).item(), 4), round(math.log(4) ** 2, 4)
        (1.9218, 1.9218)
    """

    def __init__(self, weight: float = 1e-3) -> None:
        super().__init__()
        self.weight = weight

    def loss(self, routing: RoutingResult) -> Tensor:
        """See ``LoadBalancing``."""
        (squares,), num_tokens = over_tokens(routing, routing.router_logits.logsumexp(dim=1).square().sum())
        return squares / num_tokens * self.weight


class BiLevelLoss(LoadBalancing):
    """``alpha n sum_i f_i P_i + beta m sum_j g_j Q_j``: balance between nodes, and between experts of nodes.

    Args:
        num_nodes: of the router; experts of a node are neighbours.
        node_weight: alpha.
        local_weight: beta.

    References:
        He et al., "SMILE", 2022, section 3.

    Examples:
        >>> from mycel.moe import BiLevelRouter, LinearProjection
        >>> router = BiLevelRouter(LinearProjection(4, 2), LinearProjection(4, 2), top_k=1)
        >>> _ = nn.init.zeros_(router.node.weight), nn.init.zeros_(router.local.weight)  # all probabilities alike
        >>> policy = BiLevelLoss(num_nodes=2, node_weight=0.5, local_weight=0.25)
        >>> round(policy.loss(router(torch.randn(6, 4))).item(), 4)
        0.75
    """

    def __init__(self, num_nodes: int, *, node_weight: float = 5e-3, local_weight: float = 5e-3) -> None:
        super().__init__()
        self.num_nodes = num_nodes
        self.node_weight = node_weight
        self.local_weight = local_weight

    def loss(self, routing: RoutingResult) -> Tensor:
        """See ``LoadBalancing``."""
        mean_E, counts_E = _means_and_counts(routing)
        counts_NM, mean_NM = counts_E.view(self.num_nodes, -1), mean_E.view(self.num_nodes, -1)
        share_NM = counts_NM / counts_NM.sum().clamp_min(1)
        of_nodes = (share_NM.sum(dim=1) * mean_NM.sum(dim=1)).sum() * (self.node_weight * mean_NM.shape[0])
        of_locals = (share_NM.sum(dim=0) * mean_NM.sum(dim=0)).sum() * (self.local_weight * mean_NM.shape[1])
        return of_nodes + of_locals


class ExpertBias(LoadBalancing):
    """No loss: experts that got too little are chosen a little more easily after every step.

    ``bias += rate * sign(mean(count) - count)``; the bias changes which experts are chosen, never their weights.

    Args:
        num_experts: of the layer.
        rate: step of the bias.

    References:
        Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024, algorithm 1.

    Examples:
        >>> policy = ExpertBias(num_experts=4, rate=0.5)
        >>> policy.update(tokens_per_expert=torch.tensor([6, 1, 3, 2]), num_tokens=torch.tensor(12))
        >>> policy.selection_bias  # the mean is 3
        tensor([-0.5000,  0.5000,  0.0000,  0.5000])
    """

    bias: Tensor

    def __init__(self, num_experts: int, *, rate: float = 1e-3) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("bias", torch.zeros(num_experts))

    def reset_parameters(self) -> None:
        """No bias, as in the beginning; for layers made on the meta device."""
        self.bias.zero_()

    def update(self, tokens_per_expert: Tensor, num_tokens: Tensor) -> None:
        """See ``LoadBalancing``."""
        counts = tokens_per_expert.to(self.bias)
        self.bias.add_((counts.mean() - counts).sign(), alpha=self.rate)

    @property
    def selection_bias(self) -> Tensor | None:
        """See ``LoadBalancing``."""
        return self.bias


class AdaptiveL1(LoadBalancing):
    """For ReLU routing: an L1 penalty on scores, heavier for busy experts, whose factor finds the wanted sparsity.

    The factor grows after a step with more than ``top_k`` experts a token and shrinks otherwise.

    Args:
        num_experts: of the layer.
        top_k: experts a token to arrive at.
        initial: factor at the beginning.
        growth: what it is multiplied with, or divided by.

    Attributes:
        factor: of the penalty now; a scalar that a checkpoint keeps.

    References:
        Wang et al., "ReMoE", ICLR 2025, section 3.3.

    Examples:
        >>> policy = AdaptiveL1(num_experts=4, top_k=1, initial=1.0, growth=2.0)
        >>> policy.update(tokens_per_expert=torch.tensor([3, 1, 2, 2]), num_tokens=torch.tensor(4))  # 2 a token
        >>> policy.factor
        tensor(2.)
    """

    factor: Tensor

    def __init__(self, num_experts: int, top_k: int, *, initial: float = 1e-8, growth: float = 1.2) -> None:
        super().__init__()
        self.top_k = top_k
        self.growth = growth
        self.initial = initial
        self.register_buffer("factor", torch.tensor(initial))

    def reset_parameters(self) -> None:
        """The first factor; for layers made on the meta device."""
        self.factor.fill_(self.initial)

    def loss(self, routing: RoutingResult) -> Tensor:
        """See ``LoadBalancing``."""
        (scores_E, counts_E), tokens = over_tokens(routing, routing.scores.sum(dim=0), routing.tokens_per_expert)
        load_E = counts_E * routing.num_experts / (self.top_k * tokens)
        return (load_E * scores_E / tokens).sum() * self.factor

    def update(self, tokens_per_expert: Tensor, num_tokens: Tensor) -> None:
        """See ``LoadBalancing``."""
        too_many = tokens_per_expert.sum() > self.top_k * num_tokens
        self.factor.mul_(torch.where(too_many, self.growth, 1.0 / self.growth).to(self.factor))


class Balanced(ABC):
    """Mixed into a module that routes tokens, so that policies can watch it.

    ``moe_loss`` and ``update_balancing`` look for it.

    Attributes:
        loss: what the policies add to the training loss, of the last call; a scalar.
    """

    training: bool
    loss: Tensor
    _counts: Tensor
    _tokens: Tensor
    #: The latest pass had no graph: its losses reach routers when, and if, it is computed again.
    _blind: bool
    #: Factor of the losses in the backward pass that runs; ``None``: nobody added them.
    _factor: Tensor | None

    def start_counting(self, num_experts: int) -> None:
        """Begin with no tokens seen. Counts are no buffers: DDP would overwrite each rank's with those of rank 0."""
        self._counts = torch.zeros(num_experts, dtype=torch.int64, device="cpu")
        self._tokens = torch.zeros((), dtype=torch.int64, device="cpu")
        self.loss = torch.zeros((), device="cpu")
        self._blind, self._factor = False, None

    @abstractmethod
    def policies(self) -> Sequence[LoadBalancing]:
        """In the order in which their losses add up."""

    def observe(self, routing: RoutingResult) -> Tensor | None:
        """Let the policies see a batch.

        Reentrant activation checkpointing computes a pass without a graph, and in the backward pass again with one,
        that nothing leads to but the layer's output.

        Returns:
            In that case what is to be attached to the weights of slots, else ``None``.
        """
        policies, again, graph = self.policies(), recomputing(), torch.is_grad_enabled()
        routing = without_stand_ins(routing)
        losses = [policy.loss(routing) for policy in policies]
        loss = torch.stack(losses).sum() if losses else routing.router_logits.new_zeros(())
        if not again:
            self.loss, self._factor, self._blind = loss, None, self.training and not graph
        if self.training and graph and policies and (self._blind or not again):  # every pass once
            with torch.no_grad():
                self._counts = self._counts.to(routing.tokens_per_expert.device) + routing.tokens_per_expert
                self._tokens = self._tokens + routing.top_k_index.shape[0]
        if not (again and graph and self._blind and self._factor is not None and loss.requires_grad):
            return None
        return loss * self._factor.to(loss)

    def deferred(self, factor: Tensor) -> None:
        """The backward pass begins, in which losses without a graph count by this factor."""
        self._factor = factor

    def take_counts(self) -> Tensor:
        """Slots of each expert and, last, tokens, of this rank since the last call; shape ``[E + 1]``."""
        taken = torch.cat([self._counts, self._tokens.to(self._counts.device).view(1)])
        self._counts = torch.zeros_like(self._counts)
        self._tokens = torch.zeros_like(self._tokens)
        return taken

    def without_graph(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state as copies and pickles take it: the loss is no part of a graph. For ``__getstate__`` of the class.

        (Not defined here: ``nn.Module`` has one of its own, and comes first among the bases.)
        """
        return {**state, "loss": self.loss.detach(), "_factor": None}


def losses_of(layers: Sequence[Balanced]) -> Tensor:
    """The sum of the layers' losses. Where a layer's pass had no graph, the backward pass tells it the factor."""
    losses = [layer.loss for layer in layers]
    if not losses:
        return torch.zeros(())
    total = torch.stack([loss.to(losses[0].device) for loss in losses]).sum()
    blind = [layer for layer in layers if layer._blind and layer.policies()]
    if not blind or not torch.is_grad_enabled():
        return total
    # Made after all layers' nodes, it goes backward before them.
    anchor = torch.zeros_like(total, requires_grad=True)
    nothing: Tensor = _Tell.apply(blind, anchor)  # type: ignore[no-untyped-call]
    return total + nothing


def attach(x: Tensor, loss: Tensor) -> Tensor:
    """``x``, whose backward pass is that of ``loss`` as well.

    References:
        Megatron-Core, ``MoEAuxLossAutoScaler`` (auxiliary losses that reach routers through the output).
    """
    attached: Tensor = _Attach.apply(x, loss)  # type: ignore[no-untyped-call]
    return attached


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.loss_like = inputs[1].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], torch.ones_like(ctx.loss_like)


class _Tell(torch.autograd.Function):
    """Zero, whose backward pass tells layers by which factor their losses count."""

    @staticmethod
    def forward(layers: Sequence[Balanced], anchor: Tensor) -> Tensor:
        return anchor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.layers = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        for layer in ctx.layers:
            layer.deferred(grads[0])
        return None, None


def policies_of(balancing: LoadBalancing | Sequence[LoadBalancing]) -> list[LoadBalancing]:
    """The policies that a user gave, one or several.

    Raises:
        UsageError: something is no policy: a class, a text.
    """
    several = not isinstance(balancing, str | type | nn.Module) and isinstance(balancing, Sequence)
    given = list(balancing) if several else [balancing]  # type: ignore[arg-type]
    return [the(LoadBalancing, policy, "a balancing policy", hint="such as SwitchLoss()") for policy in given]

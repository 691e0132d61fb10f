"""Finds experts and routers in a model by what they have and what they answer, not by the names of their classes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.moe.dispatch import TokenDispatcher
from mycel.moe.divided import stacks_of
from mycel.moe.sharded import is_sharded

__all__ = ["Block", "RouterKind", "find_blocks", "router_of"]

#: Stacked parameters that the backend multiplies with, or adds.
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
_KNOWN = {*_WEIGHTS, *(f"{name}_bias" for name in _WEIGHTS)}
#: Tokens of the questions that routers are asked.
_ASKED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterKind:
    """What a router does, as its answers show.

    Attributes:
        top_k: slots a token.
        score: which scores of logits its weights are proportional to; ``None``: neither.
        biased: it has a buffer ``e_score_correction_bias``, which is added to scores where experts are chosen.
    """

    top_k: int
    score: Literal["softmax", "sigmoid"] | None
    biased: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Experts with their router.

    Attributes:
        path: of the block in the model; the experts are its child ``experts_name``, or within what adapts them there.
        experts_name, router_name: of the children.
        experts: stacked parameters.
        router: answers a token with logits, weights and experts; ``None``: nobody asked which child does.
        kind: of the router; ``None``: as above.

    Raises:
        UsageError: of ``dispatcher``, after ``restore``.
    """

    path: str
    experts_name: str
    experts: nn.Module
    router_name: str | None = None
    router: nn.Module | None = None
    kind: RouterKind | None = None

    __repr__ = brief

    @property
    def experts_path(self) -> str:
        """In the model."""
        return f"{self.path}.{self.experts_name}" if self.path else self.experts_name

    @property
    def adapted(self) -> bool:
        """Something else than the experts' own parameters decides what they are."""
        return "." in self.experts_name or any("." in name for name in stacks_of(self.experts))

    @property
    def num_experts(self) -> int:
        """Of the layer."""
        return int(getattr(self.experts, "num_experts", 0))

    @property
    def dispatcher(self) -> TokenDispatcher:
        """What brings tokens to the experts, while ``apply`` is in force."""
        foreign = getattr(self.experts, "mycel_experts", None)
        if foreign is None:
            raise UsageError(f"{self.experts_path}: mycel.moe.apply is not in force")
        dispatcher: TokenDispatcher = foreign.routed.dispatcher
        return dispatcher


def find_blocks(model: nn.Module, *, routers: bool = True) -> tuple[Block, ...]:
    """All mixture-of-experts blocks of a model.

    Args:
        model: of ``transformers``.
        routers: find each block's router, and ask it what it does.

    Raises:
        UsageError: there are none, or one is not understood; says which module, and what was looked for.
    """
    modules = dict(model.named_modules())
    found, doubtful = [], []
    for path, module in modules.items():
        if "down_proj" in (n for n, p in _stacked(module).items() if p.dim() == 3):
            _check_experts(path, module)
            parent, _, name = path.rpartition(".")
            while name.startswith("base_layer"):  # adapters stand in the place of what they adapt
                parent, _, outer = parent.rpartition(".")
                name = f"{outer}.{name}"
            found.append(Block(path=parent, experts_name=name, experts=module))
            if routers:
                router_name, kind = _find_router(parent, modules[parent], name, found[-1].num_experts)
                router = modules[f"{parent}.{router_name}" if parent else router_name]
                found[-1] = replace(found[-1], router_name=router_name, router=router, kind=kind)
        elif path.rpartition(".")[2] == "experts" and not isinstance(getattr(module, "base_layer", None), nn.Module):
            doubtful.append(f"{path} ({type(module).__name__})")
    if doubtful:
        raise UsageError(
            f"{doubtful[0]}: experts without stacked parameters; looked for down_proj [experts, ., .] beside "
            "gate_up_proj or up_proj, as transformers' use_experts_implementation classes have them"
        )
    if not found:
        raise UsageError(
            f"{type(model).__name__}: no mixture of experts in it; looked for modules with stacked parameters "
            "down_proj [experts, ., .] beside gate_up_proj or up_proj"
        )
    return tuple(found)


def router_of(model: nn.Module, block: Block, num_experts: int) -> nn.Module:
    """The router of a block that nobody asked for yet.

    Raises:
        UsageError: none is understood.
    """
    parent = model.get_submodule(block.path)
    name, _ = _find_router(block.path, parent, block.experts_name, num_experts)
    return parent.get_submodule(name)


def _stacked(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's own parameters, also where they are parametrized."""
    return {stack: module.get_parameter(name) for name, stack in stacks_of(module).items()}


def _check_experts(path: str, module: nn.Module) -> None:
    where = f"{path} ({type(module).__name__})"
    lacking = [n for n in ("config", "num_experts", "is_transposed") if not hasattr(module, n)]
    if lacking:
        raise UsageError(
            f"{where}: stacked experts without {', '.join(lacking)}; looked for what transformers' "
            "use_experts_implementation gives its classes"
        )
    parameters = _stacked(module)
    unknown = sorted((set(parameters) | set(dict(module.named_buffers(recurse=False)))) - _KNOWN)
    if unknown:
        raise UsageError(
            f"{where}: tensors {', '.join(unknown)} beside the weights, which mycel does not know how to use (a "
            f"quantised model?); looked for {', '.join(sorted(_KNOWN))} alone"
        )
    num_experts = module.num_experts
    for name, parameter in parameters.items():
        if is_sharded(parameter):
            raise UsageError(
                f"{where}: {name} is a DTensor; apply before fully_shard, or give a model that is loaded with a "
                "distributed_config an ep_implementation of mycel.moe.hugging_face.register_expert_parallel"
            )
        if not parameter.is_floating_point() or parameter.shape[0] != num_experts:
            raise UsageError(
                f"{where}: {name} is {parameter.dtype} of shape {list(parameter.shape)}; expected floating point of "
                f"{num_experts} experts"
            )


def _find_router(path: str, block: nn.Module, experts_name: str, num_experts: int) -> tuple[str, RouterKind]:
    answers = []
    for name, child in block.named_children():
        if name == experts_name.partition(".")[0] or not any(
            p.shape[:1] == (num_experts,) for p in child.parameters()
        ):
            continue
        answer = _ask(child, num_experts)
        if isinstance(answer, RouterKind):
            return name, answer
        answers.append(f"{name} ({type(child).__name__}): {answer}")
    raise UsageError(
        f"{path} ({type(block).__name__}): no router beside {experts_name!r} is understood; looked for a child with "
        f"a parameter of {num_experts} rows that answers tokens [T, D] with (logits [T, {num_experts}], weights "
        f"[T, K], experts [T, K]), which policies of balance need; "
        f"{'; '.join(answers) or 'no child has such a parameter'}"
    )


@torch.no_grad()
def _ask(router: nn.Module, num_experts: int) -> RouterKind | str:
    """Ask a copy of the router with random parameters; the reason if it does not answer as routers do."""
    generator = torch.Generator().manual_seed(0)
    probe = copy.deepcopy(router).to_empty(device="cpu").float().eval()
    widths = {p.shape[1] for p in probe.parameters() if p.dim() == 2 and p.shape[0] == num_experts}
    if len(widths) != 1:
        return "no matrix from tokens to experts"
    for tensor in (*probe.parameters(), *probe.buffers()):
        if tensor.is_floating_point():
            tensor.normal_(std=0.3, generator=generator)
    try:
        answer: Any = probe.forward(torch.randn(_ASKED, *widths, generator=generator))
    except Exception as error:  # whatever a foreign module may raise is the answer
        return f"raises {type(error).__name__}: {error}"
    if not (isinstance(answer, Sequence) and len(answer) == 3 and all(isinstance(part, Tensor) for part in answer)):
        return f"answers {type(answer).__name__}, not three tensors"
    logits, weights, index = answer
    shaped = logits.shape == (_ASKED, num_experts) and weights.shape == index.shape and weights.dim() == 2
    if not shaped or index.is_floating_point() or not 0 <= int(index.min()) <= int(index.max()) < num_experts:
        return f"answers {', '.join(str(list(part.shape)) for part in answer)}"
    bias = getattr(router, "e_score_correction_bias", None)
    biased = isinstance(bias, Tensor) and bias.shape == (num_experts,)
    return RouterKind(top_k=index.shape[1], score=_score_of(logits, weights, index, biased), biased=biased)


def _score_of(logits: Tensor, weights: Tensor, index: Tensor, biased: bool) -> Literal["softmax", "sigmoid"] | None:
    ratios = {
        "softmax": weights / logits.softmax(dim=1).gather(1, index),
        "sigmoid": weights / logits.sigmoid().gather(1, index),
    }
    for dim in (None, 1):  # one factor for all tokens, or, renormalised, one for each
        if dim == 1 and index.shape[1] == 1:
            return "sigmoid" if biased else "softmax"
        for score, ratio in ratios.items():
            low, high = (ratio.min(), ratio.max()) if dim is None else (ratio.amin(dim), ratio.amax(dim))
            if bool((high - low <= 1e-3 * high).all()):
                return "softmax" if score == "softmax" else "sigmoid"
    return None

"""A mixture of experts written token by token in float64, from the papers' formulas: what ``mycel.moe`` must equal.

Nothing here is shared with the layer. Choices are made by Python's ``sorted``, capacities by counting, experts by
one small product after the other; gradients come from autograd over these loops.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Params = dict[str, Tensor]
#: A token's experts in order of choice, with their weights.
Choices = list[list[tuple[int, Tensor]]]


def best(values: list[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def softmax(values: Tensor) -> Tensor:
    powers = torch.exp(values - values.max())
    return powers / powers.sum()


def angle_logits(params: Params, x: Tensor) -> Tensor:
    projected = params["router.projection.weight"] @ x
    directions = params["router.projection.directions"]
    scale = torch.exp(torch.minimum(params["router.projection.log_scale"][0], torch.tensor(math.log(100.0))))
    lengths = directions.norm(dim=1) * projected.norm()
    return scale * (directions @ projected) / lengths


def route(params: Params, tokens: Tensor, case: dict[str, Any]) -> tuple[Choices, list[float]]:
    """Choices of each token, and its best score."""
    name, k = case["router"], case["top_k"]
    linear = params.get("router.projection.weight")
    choices: Choices = []
    tops: list[float] = []
    if name == "expert_choice":
        scores = [softmax(linear @ x) for x in tokens]
        choices = [[] for _ in tokens]
        taken = math.ceil(len(tokens) * k / case["num_experts"])
        for expert in range(case["num_experts"]):
            for token in best([s[expert].item() for s in scores], taken):
                choices[token].append((expert, scores[token][expert]))
        # A token's first choice is the expert that weighs most.
        return [sorted(c, key=lambda pair: -pair[1].item()) for c in choices], [s.max().item() for s in scores]
    for position, x in enumerate(tokens):
        if name == "bi_level":
            p = softmax(params["router.node.weight"] @ x)
            q = softmax(params["router.local.weight"] @ x)
            node = best(p.tolist(), 1)[0]
            choices.append([(node * len(q) + j, p[node] * q[j]) for j in best(q.tolist(), k)])
            tops.append((p.max() * q.max()).item())
        elif name == "relu":
            r = torch.relu(linear @ x)
            choices.append([(e, r[e]) for e in best(r.tolist(), len(r)) if r[e] > 0])
            tops.append(r.max().item())
        elif name == "custom":
            experts = [(position + j) % case["num_experts"] for j in range(k)]
            choices.append([(e, params["router.gain"][e] * (position + 1) / (j + 1)) for j, e in enumerate(experts)])
            tops.append(1.0)
        else:
            logits = angle_logits(params, x) if name == "cosine" else linear @ x
            if name == "top_k" or name == "cosine":
                s = softmax(logits)
                chosen = best(s.tolist(), k)
                weights = [s[e] for e in chosen]
            else:  # sigmoid, experts from the best half of the groups, weights that add up to the scale
                s = 1 / (1 + torch.exp(-logits))
                groups = case["groups"]
                size = len(s) // groups
                biased = (s + params["bias"]).tolist()
                of_group = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
                allowed = set(best(of_group, groups // 2))
                chosen = best([v if e // size in allowed else -math.inf for e, v in enumerate(biased)], k)
                total = sum(s[e] for e in chosen)
                weights = [2.5 * s[e] / total for e in chosen]
            choices.append(list(zip(chosen, weights, strict=True)))
            tops.append(s.max().item())
    return choices, tops


def within_capacity(choices: Choices, tops: list[float], case: dict[str, Any]) -> Choices:
    factor = case["factor"]
    if factor == 0 or not choices:
        return choices
    num_experts = case["num_experts"]
    limit = case["top_k"] * max(1, int(abs(factor) * math.ceil(len(choices) / num_experts)))
    turns = best(tops, len(tops)) if case["drop"] == "priority" else list(range(len(choices)))
    load = [0] * num_experts
    kept: Choices = [[] for _ in choices]
    for k in range(max(len(c) for c in choices)):
        for token in turns:
            if k < len(choices[token]):
                expert, weight = choices[token][k]
                load[expert] += 1
                if load[expert] <= limit:
                    kept[token].append((expert, weight))
    return kept


def activate(z: Tensor, activation: str) -> Tensor:
    if activation == "swiglu":
        half = len(z) // 2
        return z[:half] / (1 + torch.exp(-z[:half])) * z[half:]
    return 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))


def network(params: Params, expert: int, x: Tensor, activation: str) -> Tensor:
    z = params["experts.gate_up_proj"][expert] @ x
    if "experts.gate_up_bias" in params:
        z = z + params["experts.gate_up_bias"][expert]
    y = params["experts.down_proj"][expert] @ activate(z, activation)
    return y + params["experts.down_bias"][expert] if "experts.down_bias" in params else y


def forward(params: Params, tokens: Tensor, case: dict[str, Any]) -> Tensor:
    """What the layer returns for the tokens of one rank."""
    choices, tops = route(params, tokens, case)
    outputs = []
    for x, chosen in zip(tokens, within_capacity(choices, tops, case), strict=True):
        y = torch.zeros_like(x) + 0 * x
        for expert, weight in chosen:
            y = y + weight * network(params, expert, x, case["activation"])
        if "shared.gate_up_proj.weight" in params:
            z = params["shared.gate_up_proj.weight"] @ x + params.get("shared.gate_up_proj.bias", 0.0)
            a = activate(z, case["activation"])
            y = y + params["shared.down_proj.weight"] @ a + params.get("shared.down_proj.bias", 0.0)
        outputs.append(y)
    return torch.stack(outputs) if outputs else tokens * 1.0

"""Plans of memory on a Hugging Face model, unedited."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mycel.memory import EmulatedLink, attach, measure
from mycel.planning.residency import check_plan, listed_plan
from mycel.planning.residency.plan import POLICIES

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_llama_trains_as_without_a_plan(*, checkpointing: bool) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.0,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    tokens = torch.randint(64, (2, 48), generator=torch.Generator().manual_seed(1))
    layers = [f"model.layers.{k}" for k in range(4)]

    def loss() -> Tensor:
        value: Tensor = model(input_ids=tokens, labels=tokens).loss
        return value

    def train() -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return [p.grad.clone() for p in model.parameters()]

    wanted = train()
    link = EmulatedLink(bandwidth_gbps=1)
    found = measure(model, layers, loss, link=link, budget=1 << 28, runs=1)
    activation = tokens.numel() * 32 * 4
    assert [block.input for block in found.blocks] == [activation] * 4
    tight = replace(found, capacity=int(2.3 * max(block.saved for block in found.blocks)))
    ran = 0
    for policy in ([one] * 4 for one in POLICIES):
        plan = listed_plan(tight, policy)
        if plan is None:
            continue
        ran += 1
        assert check_plan(tight, plan) <= tight.capacity
        with attach(model, layers, tight, plan, link=link) as swapping:
            for _ in range(2):
                assert all(torch.equal(a, b) for a, b in zip(train(), wanted, strict=True)), policy
            assert 0 < swapping.near.peak <= tight.capacity
            with torch.no_grad():
                loss()
    assert ran >= 2  # everything kept does not fit
    link.close()

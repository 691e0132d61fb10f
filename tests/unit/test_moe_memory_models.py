"""Hugging Face models with experts in far memory, and with their gates one block ahead."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from mycel.errors import UsageError
from mycel.moe import SequenceLoss, SwitchLoss, apply, restore
from mycel.moe.memory import EmulatedLink, Offload, TrainingOffload, pre_gate

_spec = importlib.util.spec_from_file_location(
    "hugging_face_models",
    Path(__file__).resolve().parents[1] / "distributed" / "checks" / "hugging_face_models.py",
)
assert _spec is not None and _spec.loader is not None
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

TOKENS = torch.arange(3, 19).view(2, 8)


def routers_of(model: nn.Module) -> list[nn.Module]:
    return [layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate for layer in model.model.layers]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])  # gpt_oss: transposed matrices, biases in another order
def test_far_experts_and_gates_ahead(family: str) -> None:
    model, plain = models.make(family).eval(), models.make(family).eval()
    names = list(model.state_dict())
    apply(model)
    with torch.inference_mode():
        wanted = plain(TOKENS).logits
        link = EmulatedLink(bandwidth_gbps=100)
        with Offload(model, link, "on_demand") as offload:
            assert torch.allclose(model(TOKENS).logits, wanted, atol=1e-5)
            assert 0 < offload.store.peak <= models.EXPERTS
            with pytest.raises(UsageError, match="in far memory already"):
                Offload(model, link, "on_demand")
    seen: list[Tensor] = []
    hooks = [r.register_forward_pre_hook(lambda m, a: seen.append(a[0].detach())) for r in routers_of(model)]
    gated = pre_gate(model)
    with pytest.raises(UsageError, match="pre-gated already"):
        pre_gate(model)
    with torch.inference_mode():
        early = model(TOKENS).logits
        for layer, (router, gate) in enumerate(zip(routers_of(plain), gated.gates, strict=True)):
            before = seen[max(0, layer - 1)]
            _, weights, index = router(before.reshape(-1, before.shape[-1]))
            routing = gate.routes.of[layer]
            assert routing is not None and torch.equal(routing.top_k_index, index)
            assert torch.allclose(routing.top_k_weights, weights, atol=1e-6)
        assert not torch.allclose(early, wanted, atol=1e-3)
        with Offload(model, link, "pre_gated") as offload:
            assert torch.allclose(model(TOKENS).logits, early, atol=1e-5)
    for hook in hooks:
        hook.remove()
    assert list(model.state_dict()) == names
    gated.close()
    with torch.inference_mode():
        assert torch.allclose(model(TOKENS).logits, wanted, atol=1e-5)
    restore(model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    link.close()


def test_gates_ahead_are_trained_and_watched() -> None:
    model = models.make("mixtral").train()
    apply(model, balancing=SwitchLoss(0.1))
    gated = pre_gate(model)
    loss: Any = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    assert all(r.weight.grad.abs().sum() > 0 for r in routers_of(model))
    assert all(r.loss > 0 for r in routers_of(model))
    gated.close()
    restore(model)


def test_sequences_are_those_of_the_batch_without_padding() -> None:
    model = models.make("mixtral").train()
    apply(model, balancing=SequenceLoss(0.5))
    logits: list[Tensor] = []
    for router in routers_of(model):
        router.register_forward_hook(lambda module, args, answer: logits.append(answer[0].detach()))
    mask = torch.ones_like(TOKENS)
    mask[1, 5:] = 0
    total = model(TOKENS, attention_mask=mask, labels=TOKENS).loss
    model.eval()
    task = model(TOKENS, attention_mask=mask, labels=TOKENS).loss
    wanted = torch.zeros((), dtype=torch.float64)
    for of_layer in logits[:2]:
        for place, length in ((0, 8), (1, 5)):
            scores = of_layer.view(2, 8, -1)[place, :length].double().softmax(dim=1)
            chosen = scores.topk(2, dim=1).indices
            for e in range(models.EXPERTS):
                wanted += 0.5 / 2 * models.EXPERTS / (2 * length) * int((chosen == e).sum()) * scores[:, e].mean()
    assert torch.allclose((total - task).double(), wanted, atol=1e-5)
    with pytest.raises(UsageError, match="a policy of balance looks at sequences"):
        model.train()(position_ids=torch.arange(8))


def test_models_train_with_far_experts() -> None:
    model, plain = models.make("gpt_oss").train(), models.make("gpt_oss").train()
    apply(model)
    apply(plain)
    link = EmulatedLink(bandwidth_gbps=100)
    offload = TrainingOffload(model, link)
    for some, parameters in ((model, offload.parameters()), (plain, plain.parameters())):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for _ in range(2):
            some(TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    offload.close()
    link.close()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_models_that_were_not_applied_are_named() -> None:
    with pytest.raises(UsageError, match=r"call mycel\.moe\.apply"):
        pre_gate(models.make("mixtral"))

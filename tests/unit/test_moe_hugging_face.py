"""Loaded Hugging Face models with mycel's experts: the same results as before, and the model back as it was."""

from __future__ import annotations

import copy
import functools
import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")

from mycel.errors import UsageError
from mycel.moe import (
    ExpertBias,
    ExpertParallel,
    GShardLoss,
    SwitchLoss,
    ZLoss,
    apply,
    expert_mlp,
    full_state_dict,
    moe_loss,
    restore,
    update_balancing,
)
from mycel.moe.hugging_face import applied_to, trainer_callback
from mycel.moe.hugging_face.blocks import find_blocks

#: Of float32 results, relative to those of the library's eager experts.
TOLERANCE = 1e-6


def _models() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "distributed" / "checks" / "hugging_face_models.py"
    spec = importlib.util.spec_from_file_location("hugging_face_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


models = _models()
families = pytest.mark.parametrize("family", models.FAMILIES)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that ``restore`` has to bring back, beside values."""
    return {
        path: (type(module), sorted(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks))
        for path, module in model.named_modules()
    } | {"backend": model.config._experts_implementation, "coefficient": getattr(model, "router_aux_loss_coef", None)}


@families
def test_results_are_those_of_eager_experts_and_restore_brings_the_model_back(family: str) -> None:
    model = models.make(family)
    tokens = models.tokens(2, 12)
    recorded = {"output_router_logits": True} if family != "deepseek_v3" else {}
    model(tokens, **recorded)  # recorders of router logits are installed on the routers of now
    wanted = models.results(model, tokens)
    identities = {path: id(module) for path, module in model.named_modules()}
    parameters = {name: id(p) for name, p in model.named_parameters()}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    before = snapshot(model)

    kinds = [block.kind for block in find_blocks(model)]
    assert all(kind is not None and kind.score == models.SCORES[family] for kind in kinds)
    applied = apply(model)
    assert model.config._experts_implementation == "mycel"
    assert len(applied.blocks) == (1 if family == "deepseek_v3" else 2)
    got = models.results(model, tokens)
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        assert models.error(value, wanted[name]) <= TOLERANCE, name
    if recorded:
        logits = model(tokens, **recorded).router_logits
        assert len(logits) == 2 and all(part.shape == (24, models.EXPERTS) for part in logits)
    assert list(model.state_dict()) == list(values)

    restore(model)
    model.zero_grad()
    assert snapshot(model) == before
    assert {path: id(module) for path, module in model.named_modules()} == identities
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert list(model.state_dict()) == list(values)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, wanted[name]) for name, value in models.results(model, tokens).items())


@families
def test_generated_tokens_are_those_of_eager_experts(family: str) -> None:
    model = models.make(family).eval()
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones(2, 5, dtype=torch.int64)}
    wanted = model.generate(models.tokens(2, 5), **options)
    apply(model)
    assert torch.equal(model.generate(models.tokens(2, 5), **options), wanted)


def test_half_precision_and_autocast_are_as_near_as_eager() -> None:
    model = models.make("gpt_oss").eval()
    tokens = models.tokens(2, 12)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(tokens).logits
        half = copy.deepcopy(model).bfloat16()
        eager = {"half": half(tokens).logits}
        with torch.autocast("cpu", torch.bfloat16):
            eager["autocast"] = model(tokens).logits
        apply(half)
        apply(model)
        assert models.error(half(tokens).logits, exact) <= 2 * models.error(eager["half"], exact)
        with torch.autocast("cpu", torch.bfloat16):
            assert models.error(model(tokens).logits, exact) <= 2 * models.error(eager["autocast"], exact)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_the_fused_node_computes_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.make(family)
    wanted = models.results(model, models.tokens(2, 12))
    calls: list[str] = []

    def counted(*arguments: Any) -> Tensor:
        calls.append(arguments[-1])
        return experts_of_rows(*arguments)

    experts_of_rows = expert_mlp.fused.experts_of_rows
    monkeypatch.setattr(expert_mlp, "triton_takes", lambda weight: True)  # its reference computes, for want of a GPU
    monkeypatch.setattr(expert_mlp.fused, "experts_of_rows", counted)
    apply(model)
    got = models.results(model, models.tokens(2, 12))
    assert len(calls) == (2 if family == "mixtral" else 0)  # biases and interleaved gates it does not know
    assert all(models.error(value, wanted[name]) <= TOLERANCE for name, value in got.items())


def test_slots_without_an_expert_add_nothing() -> None:
    model = models.make("gpt_oss")
    (block, _) = apply(model).blocks
    hidden = torch.randn(5, 32, requires_grad=True)
    index = torch.tensor([[0, 3], [models.EXPERTS, 1], [models.EXPERTS, models.EXPERTS], [2, 2], [7, 0]])
    weights = torch.rand(5, 2).masked_fill(index == models.EXPERTS, 0.0)
    result = block.experts(hidden, index, weights)
    result.sum().backward()
    assert hidden.grad is not None
    assert result[2].eq(0).all() and hidden.grad[2].eq(0).all()
    alone = block.experts(hidden[1:2], index[1:2, 1:], weights[1:2, 1:])
    torch.testing.assert_close(result[1:2], alone)


def test_losses_of_softmax_routers_are_added_to_the_output() -> None:
    model = models.make("mixtral").train()
    tokens = models.tokens(2, 12)
    plain = model(tokens, labels=tokens).loss
    apply(model, balancing=[SwitchLoss(0.1), ZLoss(0.01)])
    output = model(tokens, labels=tokens, output_router_logits=True)
    wanted = torch.zeros(())
    for logits in output.router_logits:
        scores = logits.softmax(dim=1)
        load = torch.bincount(scores.topk(2, dim=1).indices.flatten(), minlength=models.EXPERTS) / (2 * 24)
        wanted = wanted + 0.1 * models.EXPERTS * (load * scores.mean(dim=0)).sum()
        wanted = wanted + 0.01 * logits.logsumexp(dim=1).square().mean()
    torch.testing.assert_close(output.aux_loss, wanted)
    torch.testing.assert_close(output.loss, plain + wanted)  # and the model's own term is off
    output.loss.backward()
    assert all(block.router.weight.grad.norm() > 0 for block in applied_to(model).blocks)
    torch.testing.assert_close(model.eval()(tokens, labels=tokens).loss, plain)
    restore(model)
    assert model.router_aux_loss_coef == model.config.router_aux_loss_coef > 0


def test_losses_of_sigmoid_routers_see_sigmoid_scores_and_what_was_chosen() -> None:
    model = models.make("deepseek_v3").train()
    tokens = models.tokens(2, 12)
    block = apply(model, balancing=[SwitchLoss(1.0), GShardLoss(1.0)]).blocks[0]
    seen: list[tuple[Tensor, ...]] = []
    handle = block.router.register_forward_hook(lambda *call: seen.append(call[2]))
    model(tokens, labels=tokens)
    handle.remove()
    (logits, weights, index) = seen[0]
    scores = logits.sigmoid()
    mean = (scores / scores.sum(dim=1, keepdim=True)).mean(dim=0)
    load = torch.bincount(index.flatten(), minlength=models.EXPERTS) / index.numel()
    best = index.gather(1, weights.argmax(dim=1, keepdim=True)).flatten()
    first = torch.bincount(best, minlength=models.EXPERTS) / best.numel()
    torch.testing.assert_close(moe_loss(model), models.EXPERTS * ((load * mean).sum() + (first * mean).sum()))
    softmax_load = torch.bincount(logits.topk(2, dim=1).indices.flatten(), minlength=models.EXPERTS)
    assert not torch.equal(softmax_load / index.numel(), load)  # what a loss made of logits would have counted


def test_padding_does_not_count() -> None:
    model = models.make("olmoe").train()
    apply(model, balancing=SwitchLoss(1.0))
    tokens = models.tokens(2, 12)
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    padded = model(tokens, attention_mask=mask, labels=labels).aux_loss
    other = tokens.masked_fill(mask == 0, 5)
    torch.testing.assert_close(model(other, attention_mask=mask, labels=labels).aux_loss, padded)
    assert not torch.isclose(model(other, labels=tokens).aux_loss, padded)


def test_losses_over_accumulated_calls_are_their_mean_by_tokens() -> None:
    model = models.make("qwen3_moe").train()
    apply(model, balancing=SwitchLoss(1.0))
    tokens = models.tokens(2, 12)
    labels = tokens.clone()
    labels[1, 4:] = -100
    items = int(labels[:, 1:].ne(-100).sum())
    total, parts = [], []
    for row in range(2):
        call = {"input_ids": tokens[row : row + 1], "labels": labels[row : row + 1]}
        with_items = model(**call, num_items_in_batch=items).loss.detach()
        task = (model(**call).loss - moe_loss(model)).detach()
        share = int(call["labels"][:, 1:].ne(-100).sum()) / items
        total.append(with_items - task * share)
        parts.append(share * moe_loss(model).detach())
    torch.testing.assert_close(torch.stack(total).sum(), torch.stack(parts).sum(), rtol=1e-5, atol=1e-5)


def test_losses_under_reentrant_checkpointing_are_those_without() -> None:
    """Two passes with masks of their own before the backward pass, and a scaler's factor."""
    tokens = models.tokens(2, 12)
    masks = [torch.ones_like(tokens), torch.ones_like(tokens)]
    masks[0][1, 4:], masks[1][0, 9:] = 0, 0
    found = []
    for kind in (None, True, False):
        model = models.make("qwen3_moe").double().train()
        apply(model, balancing=[SwitchLoss(1.0), ZLoss(0.1)])
        if kind is not None:
            model._set_gradient_checkpointing(
                gradient_checkpointing_func=functools.partial(checkpoint, use_reentrant=kind)
            )
            model.enable_input_require_grads()
        losses = [
            model(tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)).loss for mask in masks
        ]
        (1024 * torch.stack(losses).sum()).backward()
        found.append([torch.stack(losses).detach(), *(p.grad for p in model.parameters())])
    for other in found[1:]:
        for got, wanted in zip(other, found[0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)  # some sums are in float32


def test_applied_models_pickle_and_can_be_restored_then() -> None:
    model = models.make("mixtral").train()
    classes = {path: type(module) for path, module in model.named_modules()}
    backend, coefficient = model.config._experts_implementation, model.router_aux_loss_coef
    apply(model, balancing=SwitchLoss(0.5))
    model.enable_input_require_grads()
    tokens = models.tokens(2, 12)
    model(tokens, labels=tokens).loss.backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(model)):
        torch.testing.assert_close(other(tokens, labels=tokens).loss, model(tokens, labels=tokens).loss)
        other(tokens, labels=tokens).loss.backward()
        restore(other)
        assert {path: type(module) for path, module in other.named_modules()} == classes
        assert (other.config._experts_implementation, other.router_aux_loss_coef) == (backend, coefficient)
        assert not other._forward_hooks and not other._forward_pre_hooks


class TwoWants(nn.Module):
    """A router that wants more than tokens, as some families' do."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, hidden: Tensor, bias: Tensor) -> Any:
        return self.own(hidden + bias)


def test_routers_are_asked_only_where_a_policy_needs_them() -> None:
    model = models.make("mixtral")
    for layer in model.model.layers:
        layer.mlp.gate = TwoWants(layer.mlp.gate)
    with pytest.raises(UsageError, match=r"gate \(TwoWants\): raises TypeError.*forward"):
        apply(model, balancing=SwitchLoss())
    applied = apply(model)
    assert [block.router for block in applied.blocks] == [None, None]
    restore(model)


class Around(nn.Module):
    """In the place of experts, as PEFT's adapters of parameters are."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(*args, **kwargs)


def test_experts_within_adapters_are_found() -> None:
    model = models.make("mixtral")
    tokens = models.tokens(2, 12)
    wanted = model(tokens).logits
    for layer in model.model.layers:
        layer.mlp.experts = Around(Around(layer.mlp.experts))
    applied = apply(model, balancing=SwitchLoss())
    assert applied.blocks[0].experts_path == "model.layers.0.mlp.experts.base_layer.base_layer"
    assert applied.blocks[0].path == "model.layers.0.mlp" and applied.blocks[0].adapted
    torch.testing.assert_close(model(tokens).logits, wanted)
    restore(model)


def test_the_bias_of_a_router_follows_the_counts_of_a_step() -> None:
    model = models.make("deepseek_v3").train()
    router = apply(model, balancing=ExpertBias(models.EXPERTS, rate=0.01)).blocks[0].router
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_post_hook(lambda *_: update_balancing(model))
    before = router.e_score_correction_bias.clone()
    chosen: list[Tensor] = []
    handle = router.register_forward_hook(lambda *call: chosen.append(call[2][2]))
    for call in range(2):  # two calls, one step
        model(models.tokens(2, 12, seed=call), labels=models.tokens(2, 12, seed=call)).loss.backward()
    handle.remove()
    optimizer.step()
    counts = torch.bincount(torch.cat(chosen).flatten(), minlength=models.EXPERTS).float()
    after = before + 0.01 * (counts.mean() - counts).sign()
    torch.testing.assert_close(router.e_score_correction_bias, after)
    model.double()  # moves every buffer to another tensor
    with torch.no_grad():
        model(models.tokens(2, 12))
    model(models.tokens(2, 12)).logits.sum().backward()
    optimizer.step()
    assert not torch.equal(router.e_score_correction_bias, after.double())
    restore(model)
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in model.state_dict()


def test_the_trainer_trains(tmp_path: Path) -> None:
    model = models.make("deepseek_v3")
    start = next(iter(find_blocks(model))).router.e_score_correction_bias.clone()
    apply(model, balancing=[SwitchLoss(1e-2), ExpertBias(models.EXPERTS)])
    losses = models.train(model, tmp_path, callbacks=[trainer_callback(model)], steps=6)
    assert len(losses) == 6 and losses[-1] < losses[0]
    restore(model)
    moved = next(iter(find_blocks(model))).router.e_score_correction_bias - start
    assert 0 < moved.abs().max() <= 6.1e-3
    assert full_state(model).keys() == model.state_dict().keys()


def full_state(model: nn.Module) -> dict[str, Any]:
    apply(model)
    state = full_state_dict(model)
    restore(model)
    return state


class Stack(nn.Module):
    """Stacked experts as the library has them."""

    def __init__(self, **more: Tensor) -> None:
        super().__init__()
        self.num_experts, self.is_transposed = 4, False
        self.config = SimpleNamespace(_experts_implementation="eager")
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 6, 8))
        self.down_proj = nn.Parameter(torch.zeros(4, 8, 3))
        for name, tensor in more.items():
            self.register_buffer(name, tensor)


class Linear(nn.Linear):
    """A router that answers with logits only."""


def block_of(**children: nn.Module) -> nn.Module:
    return nn.ModuleDict({"mlp": nn.ModuleDict(children)})


def without_config() -> nn.Module:
    stack = Stack()
    del stack.config
    return stack


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "Linear: no mixture of experts in it; looked for modules with stacked parameters"),
        (
            block_of(experts=nn.ModuleList([nn.Linear(2, 2)])),
            r"mlp\.experts \(ModuleList\): experts without stacked parameters; looked for down_proj",
        ),
        (block_of(experts=without_config()), r"mlp\.experts \(Stack\): stacked experts without config; looked for"),
        (
            block_of(experts=Stack(gate_up_proj_scale=torch.ones(4))),
            r"mlp\.experts \(Stack\): tensors gate_up_proj_scale beside the weights",
        ),
        (block_of(experts=Stack(), norm=nn.LayerNorm(8)), r"no router beside 'experts'.*no child has such"),
        (
            block_of(experts=Stack(), gate=Linear(8, 4)),
            r"mlp \(ModuleDict\): no router.*looked for.*gate \(Linear\): answers Tensor, not three tensors",
        ),
    ],
)
def test_models_that_are_not_understood_are_named(model: nn.Module, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_blocks(model)


def test_calls_that_make_no_sense_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.make("mixtral")
    before = snapshot(model)
    with pytest.raises(UsageError, match=r"gate.*ExpertBias needs a router with a buffer e_score_correction_bias"):
        apply(model, balancing=ExpertBias(models.EXPERTS))
    with pytest.raises(UsageError, match="dispatcher 'all_to_all' wants a mesh"):
        apply(model, parallel=ExpertParallel(dispatcher="all_to_all"))
    with pytest.raises(UsageError, match="gradients 'max'"):
        apply(model, parallel=ExpertParallel(gradients="max"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Linear is no Hugging Face model.*set_experts_implementation"):
        apply(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"mycel\.moe\.apply has not been called"):
        restore(model)
    with pytest.raises(UsageError, match="ExpertBias of 3 experts for a router of 8"):
        apply(models.make("deepseek_v3"), balancing=ExpertBias(3))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers.integrations.moe", None)
        with pytest.raises(UsageError, match=r"pip install 'transformers>=5\.0'"):
            apply(model)
    assert snapshot(model) == before
    apply(model, balancing=SwitchLoss())
    with pytest.raises(UsageError, match="was called on it before; restore it first"):
        apply(model)
    with pytest.raises(UsageError, match=r"no output\.loss to add balancing losses to"):
        model.train()(models.tokens(1, 4), labels=models.tokens(1, 4), return_dict=False)

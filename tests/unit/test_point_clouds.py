"""examples/point_clouds: shapes are what they are called, adapters begin as nothing and are all that is trained."""

from __future__ import annotations

import copy

import adapters
import clouds
import numpy as np
import pytest
import torch
import tune_clouds
from clouds import GROUPS, NEAR, POINTS, SHAPES
from tune_clouds import Settings

from mycel.errors import UsageError

SMALL = Settings(width=32, rank=4, batch=16, pretrain=(16, 2), tune=(16, 2), held_out=8)


def test_points_lie_on_their_shapes() -> None:
    random = np.random.default_rng(0)
    made = {name: shape(random) for name, shape in SHAPES.items()}
    assert all(points.shape == (POINTS, 3) for points in made.values())
    x, y, z = np.moveaxis(np.stack(list(made.values())), -1, 0)
    at = dict(zip(made, range(len(made)), strict=True))
    radius = np.hypot(x, y)
    assert np.allclose((radius**2 + z**2)[at["sphere"]], 1)
    assert np.allclose(np.abs(made["cube"]).max(1), 1)
    assert np.allclose(radius[at["cylinder"]], 1)
    assert np.allclose(radius[at["cone"]], (1 - z[at["cone"]]) / 2)
    assert np.allclose((radius[at["torus"]] - 1) ** 2 + z[at["torus"]] ** 2, 0.35**2)
    assert np.allclose(z[at["saddle"]], (x**2 - y**2)[at["saddle"]])
    assert np.allclose(radius[at["hourglass"]], np.abs(z[at["hourglass"]]))
    assert np.allclose(radius[at["helix"]], 1) and set(clouds.PRETRAINED).isdisjoint(clouds.TUNED)


def test_groups_are_near_points_around_far_centres() -> None:
    made = clouds.make_clouds(("sphere", "helix"), 3, seed=1)
    assert made.groups.shape == (6, GROUPS, NEAR, 3) and made.kinds.tolist() == [0, 0, 0, 1, 1, 1]
    assert (made.groups.norm(dim=3).amin(2) == 0).all()  # a centre is in its own group
    apart = torch.cdist(made.centres, made.centres) + 9 * torch.eye(GROUPS)
    assert apart.amin() > 0.05
    other = clouds.make_clouds(("sphere", "helix"), 3, seed=2)
    assert torch.equal(made.groups, clouds.make_clouds(("sphere", "helix"), 3, seed=1).groups)
    assert not torch.equal(made.groups, other.groups)


def test_adapters_begin_as_nothing_but_a_prompt_of_zeros() -> None:
    torch.manual_seed(0)
    block = adapters.Block(32, 4)
    adapted, x = adapters.AdaptedBlock(block, 32, 4), torch.randn(2, 5, 32)
    made, wanted = adapted(x), block(x)
    assert made.shape == (2, 6, 32)
    assert torch.equal(made[:, 1], torch.zeros(2, 32))
    assert torch.allclose(torch.cat([made[:, :1], made[:, 2:]], 1), wanted, atol=1e-6)


def test_the_adapter_is_its_formula_and_the_prompt_its_mean() -> None:
    torch.manual_seed(0)
    adapted, x = adapters.AdaptedBlock(adapters.Block(32, 4), 32, 4), torch.randn(2, 5, 32)
    adapter = adapted.adapter
    torch.nn.init.normal_(adapter.up.weight)
    normed = torch.nn.functional.layer_norm(x, (32,))
    middle = torch.nn.functional.gelu(normed @ adapter.down.weight.T + adapter.down.bias)
    weight = (x @ adapter.weigh.weight.T + adapter.weigh.bias).clamp_min(0)
    assert torch.allclose(adapter(x), weight * (middle @ adapter.up.weight.T), atol=1e-5)
    seen = x + adapted.block.attend(adapted.block.attention_norm(x))
    prompt = torch.nn.functional.gelu(adapter(seen)).mean(1)
    assert torch.allclose(adapted(x)[:, 1], prompt, atol=1e-5)


def test_only_adapters_and_the_head_are_trained_and_the_rest_stays_bit_for_bit() -> None:
    before = adapters.CloudNet(6, width=32)
    kept = {name: value.clone() for name, value in before.state_dict().items()}
    found = {way: tune_clouds.tune(before, way, SMALL) for way in tune_clouds.WAYS}
    assert all(torch.equal(value, kept[name]) for name, value in before.state_dict().items())
    assert found["head alone"].trained == 64 * 6 + 6
    whole, few = found["all weights"], found["adapters"]
    assert found["head alone"].trained < few.trained < whole.trained / 5
    assert whole.trained == found["from scratch"].trained
    assert whole.gradient_bytes == 4 * whole.trained and len(few.losses) == few.steps == 12
    model = adapters.adapt(copy.deepcopy(before), 4)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert not any(".block." in name for name in trained) and "head.weight" in trained
    tune_clouds.fit(model, clouds.make_clouds(clouds.TUNED, 8, 3), 2, 1e-2, SMALL)
    for name, value in model.state_dict().items():
        inside = ".block." in name or name.startswith(("of_", "class_", "norm"))
        old = kept.get(name.replace(".block.", "."))
        assert not inside or torch.equal(value, old)
        assert not (name.startswith("head.") and torch.equal(value, kept[name]))


def test_at_full_size_adapters_are_a_twentieth() -> None:
    model = adapters.CloudNet(6)
    whole = sum(p.numel() for p in model.parameters())
    adapters.adapt(model, Settings().rank)
    assert 20 * sum(p.numel() for p in model.parameters() if p.requires_grad) < whole


def test_wrong_ways_and_batches_are_refused() -> None:
    model = adapters.CloudNet(6, width=32)
    with pytest.raises(UsageError, match="no way 'prompts'; there are from scratch"):
        tune_clouds.tune(model, "prompts", SMALL)
    with pytest.raises(UsageError, match="6 clouds make no batch of 16"):
        tune_clouds.fit(model, clouds.make_clouds(clouds.TUNED, 1, 0), 1, 1e-3, SMALL)

"""The demo's corpus, model and learning rate, on one process."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from mycel.demo.corpus import is_held_out, load_corpus, sample_batch
from mycel.demo.model import VOCABULARY, ByteGPT, ModelConfig
from mycel.demo.train import learning_rate, parse_arguments
from mycel.errors import UsageError

SMALL = ModelConfig(width=32, num_layers=2, num_heads=2, max_length=16)


def _write_files(folder: Path, count: int) -> list[str]:
    names = [f"module_{i:03}.py" for i in range(count)]
    for name in names:
        (folder / name).write_text(f"# {name}\n", encoding="utf-8")
    return names


def test_every_file_is_on_one_side_of_the_split(tmp_path: Path) -> None:
    names = _write_files(tmp_path, 60)
    corpus = load_corpus(tmp_path)
    train, held_out = bytes(corpus.train.tolist()), bytes(corpus.held_out.tolist())
    for name in names:
        assert (name.encode() in held_out) == is_held_out(name)
        assert (name.encode() in train) != is_held_out(name)
    assert sum(corpus.num_files) == 60


def test_corpus_does_not_depend_on_the_order_of_the_file_system(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder, step in ((first, 1), (second, -1)):
        folder.mkdir()
        for i in range(40)[::step]:
            (folder / f"m{i}.py").write_text(f"x = {i}\n", encoding="utf-8")
    assert torch.equal(load_corpus(first).train, load_corpus(second).train)


def test_tests_and_packages_are_left_out(tmp_path: Path) -> None:
    _write_files(tmp_path, 40)
    before = load_corpus(tmp_path)
    for name in ("test", "site-packages"):
        (tmp_path / name).mkdir()
        _write_files(tmp_path / name, 5)
    assert torch.equal(load_corpus(tmp_path).train, before.train)


def test_length_is_limited(tmp_path: Path) -> None:
    _write_files(tmp_path, 60)
    assert 100 <= len(load_corpus(tmp_path, max_bytes=100).train) < 200


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too few Python files"):
        load_corpus(tmp_path)


def test_standard_library_is_found() -> None:
    corpus = load_corpus(max_bytes=1 << 20)
    assert corpus.source == sysconfig.get_path("stdlib")
    assert len(corpus.train) >= 1 << 20
    assert min(corpus.num_files) > 0


def test_targets_are_the_inputs_one_byte_later() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    inputs, targets = sample_batch(text, 5, 16, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (5, 16)
    assert torch.equal(inputs + 1, targets)
    again, _ = sample_batch(text, 5, 16, torch.Generator().manual_seed(0))
    assert torch.equal(inputs, again)


def test_a_text_without_windows_is_refused() -> None:
    with pytest.raises(UsageError, match="no window"):
        sample_batch(torch.zeros(16, dtype=torch.uint8), 1, 16, torch.Generator())


def test_shapes_and_size() -> None:
    model = ByteGPT(SMALL)
    assert model(torch.zeros(3, 16, dtype=torch.int64)).shape == (3, 16, VOCABULARY)
    assert model.num_parameters() == sum(p.numel() for p in model.parameters())
    assert 1_500_000 < ByteGPT(ModelConfig()).num_parameters() < 3_000_000


def test_the_future_is_not_seen() -> None:
    torch.manual_seed(0)
    model = ByteGPT(SMALL)
    text = torch.randint(0, 256, (1, 16))
    changed = text.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.allclose(before[:, :10], after[:, :10], atol=1e-6)
    assert not torch.allclose(before[:, 10:], after[:, 10:], atol=1e-3)


def test_a_new_model_knows_nothing_and_learns() -> None:
    torch.manual_seed(0)
    model = ByteGPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.frombuffer(bytearray(b"for number in range(10):\n    print(number)\n" * 20), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(25):
        inputs, targets = sample_batch(text, 8, 16, generator)
        loss = functional.cross_entropy(model(inputs).view(-1, VOCABULARY), targets.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(VOCABULARY)) < 0.6
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"width": 30, "num_heads": 4}, "does not divide"), ({"num_layers": 0}, "must be positive")],
)
def test_impossible_models(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ModelConfig(**sizes)


def test_too_long_a_text_is_refused() -> None:
    with pytest.raises(UsageError, match="17 bytes; this model reads 16"):
        ByteGPT(SMALL)(torch.zeros(1, 17, dtype=torch.int64))


def test_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(s, peak=1.0, warm_up=5, steps=50) for s in range(50)]
    assert rates[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11


def test_both_backends_get_the_same_defaults() -> None:
    first, second = parse_arguments(["--backend", "gloo"]), parse_arguments(["--backend", "mycel"])
    assert {**vars(first), "backend": ""} == {**vars(second), "backend": ""}

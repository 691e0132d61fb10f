"""examples/tasks: losses are what they are called, weights combine gradients, and tables say what was seen."""

from __future__ import annotations

import numpy as np
import pytest
import shared_encoder
import torch
from shared_encoder import Equal, Learned, Settings, Tasks, Watched
from tests.distributed.checks.direct_feedback import alone

from mycel.data_parallel import MGDA, PCGrad
from mycel.errors import UsageError

SMALL = Settings(width=4, batch=16, steps=5, seed=2)


def test_parts_of_a_batch_have_its_mean() -> None:
    tasks = Tasks(SMALL)
    for task in range(2):
        whole = tasks.loss(task, tasks.encoders[0], 3)
        parts = [tasks.loss(task, tasks.encoders[0], 3, part, 4) for part in range(4)]
        assert torch.allclose(torch.stack(parts).mean(), whole, rtol=1e-12)
    assert not torch.equal(tasks.loss(0, tasks.encoders[0], 3), tasks.loss(0, tasks.encoders[0], 4))


def test_a_picture_of_the_mean_leaves_all_of_the_variance() -> None:
    tasks = Tasks(SMALL)
    torch.nn.init.zeros_(tasks.heads[1].weight)
    torch.nn.init.zeros_(tasks.heads[1].bias)
    assert tasks.error(1, tasks.encoders[0]) == pytest.approx(1.0)


def test_the_mean_of_two_tasks_is_the_gradient_of_their_mean_loss() -> None:
    with alone():
        found = shared_encoder.train("mean", SMALL)
    tasks = Tasks(SMALL)
    encoder = tasks.encoders[0]
    encoder_rate = torch.optim.Adam(encoder.parameters(), lr=SMALL.rate)
    heads_rate = torch.optim.Adam([p for head in tasks.heads for p in head.parameters()], lr=SMALL.rate)
    for step in range(SMALL.steps):
        both = [tasks.loss(task, encoder, step) for task in range(2)]
        for optimizer in (encoder_rate, heads_rate):
            optimizer.zero_grad()
        (torch.stack(both).mean()).backward()
        for head in tasks.heads:  # heads have their own task's whole gradient
            for parameter in head.parameters():
                parameter.grad.mul_(2)
        encoder_rate.step()
        heads_rate.step()
    assert found.errors == pytest.approx([tasks.error(task, encoder) for task in range(2)], rel=1e-9)


def test_encoders_of_their_own_learn_without_the_other_task() -> None:
    with alone():
        found = shared_encoder.train("an encoder each", SMALL)
    tasks = Tasks(SMALL)
    optimizer = torch.optim.Adam([*tasks.encoders[1].parameters(), *tasks.heads[1].parameters()], lr=SMALL.rate)
    for step in range(SMALL.steps):
        optimizer.zero_grad()
        tasks.loss(1, tasks.encoders[1], step).backward()
        optimizer.step()
    assert found.errors[1] == pytest.approx(tasks.error(1, tasks.encoders[1]), rel=1e-9) and found.against is None


def test_watching_changes_nothing_and_sees_conflicts() -> None:
    along, against = np.array([[1.0, 0.2], [0.2, 2.0]]), np.array([[1.0, -0.5], [-0.5, 1.0]])
    watched = Watched(PCGrad(), None)
    for gram in (along, against):
        assert np.array_equal(watched.weights(gram), PCGrad().weights(gram))
    assert watched.against == [False, True]
    assert Equal().weights(along).tolist() == [0.5, 0.5]
    assert not np.allclose(Watched(MGDA(normalised=True), None).weights(along), [0.5, 0.5])


def test_tables_say_what_was_seen_and_what_was_not() -> None:
    runs = [Learned(errors=(0.1, 0.5), against=0.25), Learned(errors=(0.2, 0.5), against=0.75)]
    made = shared_encoder.table({"mean": runs, "FAMO": [Learned(errors=(0.1, 0.5))]})
    assert "| mean | 15.0 ± 7.1 | 50.0 ± 0.0 | 50 |" in made and "| FAMO | 10.0 | 50.0 |  |" in made
    with alone(), pytest.raises(UsageError, match="no method 'sum'; there are an encoder each, mean"):
        shared_encoder.train("sum", SMALL)


def test_the_table_beside_the_script_has_every_method() -> None:
    text = shared_encoder.TABLE.read_text(encoding="utf-8")
    assert all(f"| {method} |" in text for method in shared_encoder.METHODS)

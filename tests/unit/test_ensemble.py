"""The choice of members is the best there is, ties break alike, and scores are what they are called."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mycel.data_parallel.ensemble.choice import MultipleChoice, choose, measures
from mycel.data_parallel.ensemble.scores import score
from mycel.errors import UsageError


def whole_loss(errors: Tensor, divergences: Tensor, chosen: tuple[int, ...], beta: float) -> float:
    """Of one example, from the definition."""
    return sum(float(errors[m]) if m in chosen else beta * float(divergences[m]) for m in range(len(errors)))


@pytest.mark.parametrize("overlap", [1, 2, 4, 5])
@pytest.mark.parametrize("beta", [0.0, 0.75, 3.0])
def test_no_other_choice_is_better(overlap: int, beta: float) -> None:
    logits = 3 * torch.randn(5, 40, 6, generator=torch.Generator().manual_seed(overlap), dtype=torch.float64)
    targets = torch.arange(40) % 6
    told = [measures(own, targets) for own in logits]
    errors, divergences = torch.stack([t[0] for t in told]), torch.stack([t[1] for t in told])
    found = choose(errors, divergences, MultipleChoice(overlap=overlap, beta=beta))
    assert found.sum(0).tolist() == [overlap] * 40
    for example in range(40):
        chosen = tuple(found[:, example].nonzero().flatten().tolist())
        ours = whole_loss(errors[:, example], divergences[:, example], chosen, beta)
        best = min(
            whole_loss(errors[:, example], divergences[:, example], other, beta)
            for other in combinations(range(5), overlap)
        )
        assert ours < best + 1e-5


def test_what_a_member_says_is_as_torch_computes_it() -> None:
    logits = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(7) % 4
    errors, divergences = measures(logits, targets)
    assert torch.allclose(errors, functional.cross_entropy(logits, targets, reduction="none"))
    uniform = torch.full((7, 4), 0.25)
    wanted = functional.kl_div(functional.log_softmax(logits, 1), uniform, reduction="none").sum(1)
    assert torch.allclose(divergences, wanted, atol=1e-6)


def test_equal_members_are_chosen_by_their_number() -> None:
    found = choose(torch.ones(4, 3), torch.zeros(4, 3), MultipleChoice(overlap=2))
    assert found[:, 0].tolist() == [True, True, False, False]
    assert bool((found == found[:, :1]).all())


def test_scores() -> None:
    """Two members, four examples: both right, one right and surer, one right and less sure, both wrong."""
    first = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
    second = torch.tensor([[0.8, 0.2], [0.4, 0.6], [0.1, 0.9], [0.3, 0.7]])
    found = score(torch.stack([first, second]), torch.tensor([0, 0, 0, 0]))
    assert (found.top1_error, found.oracle_error) == (0.5, 0.25)
    assert found.member_errors == (0.25, 0.75)
    # Each in a bin of its own: sure .85, .65, .65, .75; right 1, 1, 0, 0. The second and third share a bin.
    assert found.calibration_error == pytest.approx((0.15 + abs(0.35 - 0.65) + 0.75) / 4)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="overlap"):
        MultipleChoice(overlap=0)
    with pytest.raises(UsageError, match="beta"):
        MultipleChoice(beta=-1.0)
    with pytest.raises(UsageError, match="neither 'exact' nor"):
        MultipleChoice(labels="drawn")  # type: ignore[arg-type]

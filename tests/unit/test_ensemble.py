"""The choice of members is the best there is, ties break alike, and scores are what they are called."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from tests.rank_threads import on_ranks
from torch import Tensor
from torch.nn import functional

from mycel.data_parallel.ensemble import Ensemble, EnsembleScores
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


# -- several members a rank ---------------------------------------------------------------------------------------


def trained(rank: int, group: dist.ProcessGroup, choice: MultipleChoice | None, *, shares: bool) -> list[Tensor]:
    """Weights of this rank's members, of four over all ranks, after three steps, and scores."""
    here = 4 // group.size()
    members = []
    for number in range(rank * here, (rank + 1) * here):
        made = torch.Generator().manual_seed(number)
        members.append([torch.randn(5, 3, generator=made).requires_grad_(True) for _ in range(2)])
    ensemble = Ensemble(choice, group=group, per_rank=here, seed=3)
    x, y = torch.randn(8, 5, generator=torch.Generator().manual_seed(9)), torch.arange(8) % 3

    def logits(*, training: bool) -> list[Tensor]:
        hidden = [x @ first for first, _ in members]
        mixed = ensemble.share(hidden, training=training) if shares else hidden
        return [h @ last[:3] for h, (_, last) in zip(mixed, members, strict=True)]

    for _ in range(3):
        loss = ensemble.loss(logits(training=True), y)
        loss.backward()
        for weights in members:
            for own in weights:
                with torch.no_grad():
                    own -= 0.5 * own.grad
                own.grad = None
    scores: EnsembleScores = ensemble.evaluate(logits(training=False), y)
    told = torch.tensor([scores.top1_error, scores.oracle_error, scores.calibration_error, *scores.member_errors])
    return [*[own.detach() for weights in members for own in weights], told]


@pytest.mark.parametrize("labels", ["exact", "stochastic", None])
def test_members_learn_the_same_whatever_ranks_they_are_on(labels: str | None) -> None:
    choice = None if labels is None else MultipleChoice(overlap=2, labels=labels)
    apart = on_ranks(4, lambda rank, group: trained(rank, group, choice, shares=False))
    wanted = [own for found in apart for own in found[:-1]]
    assert not torch.equal(wanted[0], wanted[2])
    for size in (1, 2):
        ranks = on_ranks(size, lambda rank, group: trained(rank, group, choice, shares=False))
        together = [own for found in ranks for own in found[:-1]]
        assert all(torch.equal(a, b) for a, b in zip(together, wanted, strict=True))
        assert all(torch.equal(found[-1], apart[0][-1]) for found in ranks)


def test_shared_features_are_the_same_whatever_ranks_members_are_on() -> None:
    choice = MultipleChoice(overlap=3)
    apart = on_ranks(4, lambda rank, group: trained(rank, group, choice, shares=True))
    for size in (1, 2):
        ranks = on_ranks(size, lambda rank, group: trained(rank, group, choice, shares=True))
        for a, b in zip([o for f in ranks for o in f[:-1]], [o for f in apart for o in f[:-1]], strict=True):
            assert torch.allclose(a, b, atol=1e-5)


def test_ranks_with_other_numbers_of_members_are_told() -> None:
    def be(rank: int, group: dist.ProcessGroup) -> str:
        ensemble = Ensemble(MultipleChoice(), group=group, per_rank=1 + rank)
        with pytest.raises(UsageError) as told:
            ensemble.loss([torch.zeros(3, 2)] * (1 + rank), torch.zeros(3, dtype=torch.int64))
        return str(told.value)

    for rank, told in enumerate(on_ranks(2, be)):
        assert (
            told.startswith("ranks have [1, 2] members: all of them have as many")
            and f"rank {rank}, {1 + rank}" in told
        )
    with pytest.raises(UsageError, match=r"logits of 1 member\(s\), and this rank has 2"):
        on_ranks(1, lambda _, group: Ensemble(group=group, per_rank=2).loss(torch.zeros(3, 2), torch.zeros(3).long()))
    with pytest.raises(UsageError, match="overlap 5 of 4 members"):
        on_ranks(2, lambda _, group: Ensemble(MultipleChoice(overlap=5), group=group, per_rank=2))

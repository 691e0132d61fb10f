"""examples/ensemble: members are their numbers' own, nobody learns 8 and 9, and tables say what came out."""

from __future__ import annotations

import pytest
import torch
import unseen_digits
from tests.distributed.checks.direct_feedback import alone
from unseen_digits import Images, Judged, Settings

from mycel.data_parallel import EnsembleScores
from mycel.errors import UsageError

SMALL = Settings(images=200, steps=60)


def test_images_are_divided_and_digits_that_are_not_learned_are_apart() -> None:
    images = Images(SMALL)
    assert len(images.train[0]) == 200 and int(images.train[1].max()) == unseen_digits.LEARNED - 1
    assert len(images.train[0]) + len(images.test[0]) + len(images.unseen) == 1797
    assert not any(bool((row == images.test[0]).all(1).any()) for row in images.train[0][:20])
    assert images.train[0].mean() == pytest.approx(0, abs=1e-4) and images.train[0].std() == pytest.approx(
        1, abs=1e-4
    )


def test_a_member_is_its_number() -> None:
    first, again, other = (unseen_digits.member(number, SMALL)[0].weight for number in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_members_that_may_say_so_are_less_sure_of_everything_and_err_no_more() -> None:
    with alone():
        apart, confident = (unseen_digits.train(way, SMALL) for way in ("independent", "confident, K = 2"))
    assert apart.scores.num_examples == confident.scores.num_examples == len(Images(SMALL).test[0])
    # Two of four members are drawn to one in eight: two quarters, and as many of the others' eighths.
    assert confident.sure[0] < 0.5 + 0.5 / 8 + 0.02 < apart.sure[0]
    assert confident.sure[1] < confident.sure[0] and confident.told_apart > 0.8
    assert confident.scores.top1_error < apart.scores.top1_error + 0.03


def test_tables_have_percent_and_a_chance() -> None:
    scores = EnsembleScores(
        num_examples=8, top1_error=0.125, oracle_error=0.0, calibration_error=0.5, member_errors=(0.25,) * 4
    )
    made = unseen_digits.table({"independent": [Judged(scores=scores, sure=(0.9, 0.4), told_apart=0.75)]})
    assert "| independent | 12.5 | 0.0 | 50.0 | 90.0 | 40.0 | 0.750 |" in made
    with pytest.raises(UsageError, match="no way 'sure'; there are independent"):
        unseen_digits.train("sure", SMALL)


def test_the_table_beside_the_script_has_every_way() -> None:
    text = unseen_digits.TABLE.read_text(encoding="utf-8")
    assert all(f"| {way} |" in text for way in unseen_digits.WAYS)

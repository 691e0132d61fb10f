"""The page of a plan in a browser, in a wide window and in a narrow one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.pages.browser import Browser, NoBrowserError
from tests.plans_by_hand import FIVE, five_plans

from mycel.report.plan import render_plan

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    try:
        made = Browser(tmp_path_factory.mktemp("browser"))
    except NoBrowserError as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.mark.parametrize("name", FIVE)
def test_nothing_is_cut_off_or_unreadable(name: str, browser: Browser, tmp_path: Path) -> None:
    plan = five_plans()[name]
    file = tmp_path / "plan.html"
    said = ["What binds is computation: on ranks twice as fast, a step takes half as long.", "tp=8: 12 % behind."]
    file.write_text(render_plan(plan, run=plan.simulate(), sentences=said), encoding="utf-8")
    for width in (1280, 400):
        browser.resize(width)
        if width == 1280:
            browser.open(file)
        assert browser.look() == [], width
    assert browser.complaints() == []

"""Pages in a browser, in a wide window and in a narrow one: no complaint, nothing cut, unreadable or out of reach.

The browser is Chromium from the system's packages; without one these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.pages.browser import Browser, NoBrowserError
from tests.unit.test_flight_report import MS, call, connections, dump, late_job
from tests.unit.test_report import made_report

from mycel.report.flight.findings import examine
from mycel.report.flight.links import carried, suspect
from mycel.report.flight.page import render_page
from mycel.report.html import render_html

pytestmark = pytest.mark.browser

WIDTHS = (1280, 400)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    try:
        made = Browser(tmp_path_factory.mktemp("browser"))
    except NoBrowserError as error:
        pytest.skip(str(error))
    yield made
    made.close()


def wrong_with(browser: Browser, page: Path) -> list[str]:
    """What the page complains of, and what is wrong with it at both widths."""
    found = []
    for width in WIDTHS:
        browser.resize(width)
        if width == WIDTHS[0]:
            browser.open(page)
        found += [f"{page.name} at {width}: {text}" for text in browser.look()]
    return found + browser.complaints()


# -- reports ----------------------------------------------------------------------------------------------------


def emulated() -> str:
    """The demo's page, of a cluster."""
    return render_html(made_report())


def on_loopback() -> str:
    """The demo's page where there are no namespaces."""
    why = "Network namespaces need root, or a kernel that gives users namespaces of their own."
    measured = tuple(replace(m, fraction_of_bound=None) for m in made_report().measurements)
    return render_html(
        replace(made_report(), emulated=False, why_not_emulated=why, schedule=None, bounds={}, measurements=measured)
    )


def slow_link() -> str:
    """A page of flight records with a cable that is suspected."""
    found = carried(connections(frozenset({1})))
    return render_page(examine(connections(frozenset({1}))), found, suspect(found))


def late_rank() -> str:
    """A page of flight records with a timeline in which ranks wait."""
    return render_page(examine(late_job()), [], None)


def hang() -> str:
    """A page of flight records of a collective that never ended."""
    ended = call(1, 0, 0, 10 * MS)
    silent = [dump(r, [ended, call(2, 20 * MS, 20 * MS, None)], why="CollectiveTimeoutError") for r in range(2)]
    return render_page(examine([*silent, dump(2, [ended])]), [], None)


@pytest.mark.parametrize("render", [emulated, on_loopback, slow_link, late_rank, hang])
def test_reports(browser: Browser, tmp_path: Path, render: Callable[[], str]) -> None:
    page = tmp_path / f"{render.__name__}.html"
    page.write_text(render(), encoding="utf-8")
    assert not wrong_with(browser, page)


# -- the site ---------------------------------------------------------------------------------------------------


def test_the_site(browser: Browser, site: Path) -> None:
    """Every page but decisions, which are alike: of those the first and the last."""
    pages = sorted(site.glob("**/*.html"))
    decisions = [page for page in pages if page.parent.name == "decisions"]
    opened = [page for page in pages if page not in decisions[1:-1] and page.name != "404.html"]
    assert site / "index.html" in opened and len(opened) > 20
    found = {page.relative_to(site): wrong for page in opened if (wrong := wrong_with(browser, page))}
    assert not found


SEARCH = """
new Promise(found => {
  const words = document.querySelector("[data-md-component=search-query]");
  const look = () => {
    const first = document.querySelector(".md-search-result__item a");
    if (first) found(first.href);
    else setTimeout(look, 50);
  };
  words.focus();
  words.value = "PowerSGD";
  words.dispatchEvent(new Event("keyup", {bubbles: true}));
  words.dispatchEvent(new Event("input", {bubbles: true}));
  look();
})
"""


def test_the_site_is_searched_without_a_server(browser: Browser, site: Path) -> None:
    browser.open(site / "index.html")
    assert str(browser.value(SEARCH)).startswith(site.as_uri())
    assert not browser.complaints()


# -- the test itself --------------------------------------------------------------------------------------------

LONG = "a line of words that is as long as this one is " * 4
RIGHT = """
<p>Words that find their way into the next line when the window is narrow.</p>
<div style="overflow-x: auto">
<table><tr><td style="white-space: nowrap; padding: 0 600px 0 0">a cell</td></tr></table></div>
<div style="position: fixed; left: -300px; width: 200px">a drawer</div>
<svg viewBox="0 0 200 100" width="300"><text x="10" y="50">label</text><path d="M5 5H190"/></svg>
"""
DRAWING = '<svg viewBox="0 0 200 100" width="200">'
WRONG = {
    "the page scrolls sideways": '<div style="width: 1500px; height: 1em"></div>',
    "cut off": f'<p style="overflow: hidden; white-space: nowrap; text-overflow: ellipsis; width: 200px">{LONG}</p>',
    "cut off: ": f'<p style="overflow: hidden; height: 1.5em; width: 200px">{LONG}</p>',
    "runs out of its box": '<div style="width: 40px; border: 1px solid">Donaudampfschifffahrt</div>',
    "runs out of the window": '<p style="position: relative; left: -30px">a word</p>',
    "a line longer than the window": f'<div style="overflow-x: auto"><p style="width: 1400px">{LONG}</p></div>',
    "letters of 6.0 px": '<p style="font-size: 6px">small</p>',
    "letters of 5.0 px in a drawing": f'{DRAWING}<text font-size="5" y="50">x</text></svg>',
    "label outside": f'{DRAWING}<text x="190" y="50">label</text></svg>',
    "labels on each other": f'{DRAWING}<text y="50">one</text><text y="54">two</text></svg>',
    "shape outside": f'{DRAWING}<rect x="190" width="40" height="9"/></svg>',
    "picture that is not there": '<img src="nowhere.png" alt="">',
    "console: boo": "<script>console.error('boo')</script>",
    "exception: ReferenceError": "<script>nobody.there</script>",
    "ERR_FILE_NOT_FOUND": '<link rel="stylesheet" href="nowhere.css">',
    "fetches http://mycel.invalid/x.js": '<script src="http://mycel.invalid/x.js"></script>',
}


def test_a_right_page_is_right(browser: Browser, tmp_path: Path) -> None:
    assert not wrong_with(browser, written(tmp_path, RIGHT))


def test_a_page_without_words_or_that_is_not_there_is_found_out(browser: Browser, tmp_path: Path) -> None:
    assert any("nothing is to be read" in text for text in wrong_with(browser, written(tmp_path, "")))
    with pytest.raises(FileNotFoundError):
        browser.open(tmp_path / "nowhere.html")


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_page_is_found_out(browser: Browser, tmp_path: Path, kind: str) -> None:
    found = wrong_with(browser, written(tmp_path, RIGHT + WRONG[kind]))
    assert any(kind in text for text in found), found


def written(folder: Path, body: str) -> Path:
    page = folder / "page.html"
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>x</title></head>'
    page.write_text(f"{head}<body>{body}</body></html>", encoding="utf-8")
    return page

"""Settings from a file, beneath those of the environment, and variables with a slip."""

from __future__ import annotations

from pathlib import Path

import pytest

from mycel.errors import UsageError
from mycel.settings import misspelled_variables, read_settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mycel.conf"


def test_the_file_counts_where_the_environment_says_nothing(file: Path) -> None:
    file.write_text(
        "# of the cluster\nMYCEL_TIMEOUT = 30\n\nMYCEL_METHODS=ring,tree  # few bytes\n", encoding="utf-8"
    )
    found = read_settings({"MYCEL_CONF_FILE": str(file), "MYCEL_TIMEOUT": "7"})
    assert (found.timeout_s, found.methods) == (7.0, ("ring", "tree"))


def test_a_users_file_is_found_at_home_and_may_be_absent(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MYCEL_CONF_FILE", "MYCEL_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_settings().timeout_s is None
    (tmp_path / ".mycel.conf").write_text("MYCEL_TIMEOUT=12\n", encoding="utf-8")
    assert read_settings().timeout_s == 12.0
    assert read_settings({}).timeout_s is None  # who gives an environment means that one


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("MYCEL_TIMEOUT", r"mycel\.conf:1: expected NAME=value, got 'MYCEL_TIMEOUT'"),
        ("\nMYCEL_TIMOUT=3", r"mycel\.conf:2: no variable 'MYCEL_TIMOUT' \(did you mean 'MYCEL_TIMEOUT'\?\)"),
        ("PATH=/bin", "no variable 'PATH'"),
        ("MYCEL_PACE=1\nMYCEL_PACE=0", r"mycel\.conf:2: MYCEL_PACE is given twice"),
        ("MYCEL_TIMEOUT=soon", "MYCEL_TIMEOUT='soon' is not a number"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_with_its_line(file: Path, text: str, why: str) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=why):
        read_settings({"MYCEL_CONF_FILE": str(file)})


def test_a_file_that_is_named_must_be_there(file: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_settings({"MYCEL_CONF_FILE": str(file)})


def test_slips_are_found_and_other_names_are_somebodys_own() -> None:
    assert misspelled_variables({"MYCEL_TIMOUT": "1", "MYCEL_TOPOLGY": "a"}) == [
        "MYCEL_TIMOUT (MYCEL_TIMEOUT?)",
        "MYCEL_TOPOLGY (MYCEL_TOPOLOGY?)",
    ]
    assert misspelled_variables({"MYCEL_TESTS": "long", "MYCEL_PYTHON": "python", "MYCEL_TIMEOUT": "3"}) == []

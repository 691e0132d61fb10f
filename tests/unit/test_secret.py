"""A job's secret: where it is read from, and which files are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mycel.errors import UsageError
from mycel.runtime.transport.secret import PROOF_BYTES, Secret, job_secret
from mycel.settings import read_settings

TEXT = "a secret of many bytes"


def from_file(file: Path, mode: int = 0o600, text: str = TEXT) -> Secret | None:
    file.write_text(text)
    file.chmod(mode)
    return job_secret(read_settings({"MYCEL_SECRET_FILE": str(file), "MYCEL_SECRET": "not this"}))


def test_the_file_comes_first_and_ends_of_lines_do_not_count(tmp_path: Path) -> None:
    named = from_file(tmp_path / "a", text=f"{TEXT}\n")
    given = job_secret(read_settings({"MYCEL_SECRET": TEXT}))
    assert named is not None and given is not None
    proof = named.proof("purpose", b"part")
    assert len(proof) == PROOF_BYTES
    assert given.proves(proof, "purpose", b"part")
    assert job_secret(read_settings({})) is None


def test_parts_are_kept_apart() -> None:
    secret = Secret(TEXT.encode())
    proof = secret.proof("purpose", b"ab", b"c")
    assert secret.proves(proof, "purpose", b"ab", b"c")
    others = [("purpose", b"a", b"bc"), ("purpose", b"abc"), ("another", b"ab", b"c"), ("purpose", b"ab", b"c", b"")]
    for purpose, *parts in others:
        assert not secret.proves(proof, str(purpose), *(part for part in parts if isinstance(part, bytes)))


def test_who_may_write_the_file_chooses_the_secret(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="other users may write to it"):
        from_file(tmp_path / "a", 0o620)


def test_who_may_read_it_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert from_file(tmp_path / "a", 0o644) is not None
    assert "other users of this machine may read it" in caplog.text
    assert TEXT not in caplog.text


def test_a_short_one_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert from_file(tmp_path / "a", text="guess me") is not None
    assert "a secret of 8 bytes can be guessed" in caplog.text
    assert "guess me" not in caplog.text


def test_files_that_hold_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds 0 bytes"):
        from_file(tmp_path / "a", text="\n")
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        job_secret(read_settings({"MYCEL_SECRET_FILE": str(tmp_path / "b")}))
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        job_secret(read_settings({"MYCEL_SECRET_FILE": str(tmp_path)}))


def test_nothing_shows_it() -> None:
    settings = read_settings({"MYCEL_SECRET": TEXT})
    for shown in (settings, job_secret(settings)):
        assert TEXT not in repr(shown)

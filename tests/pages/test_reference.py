"""Every public name has an entry in the reference that the site is built with, where others' sites link to."""

from __future__ import annotations

import zlib
from importlib import import_module
from pathlib import Path

import pytest
from tests.unit.test_face import FACES

import mycel.errors


def entries(site: Path) -> dict[str, str]:
    """Names of the site's inventory, in the form that Sphinx reads, and the page and anchor of each."""
    head, packed = (site / "objects.inv").read_bytes().split(b"zlib.\n", 1)
    assert head.startswith(b"# Sphinx inventory version 2")
    lines = zlib.decompress(packed).decode("utf-8").splitlines()
    found = {}
    for line in lines:
        name, _, _, place, _ = line.split(" ", 4)
        found[name] = place.replace("$", name)
    return found


@pytest.mark.parametrize("face", [*FACES, mycel.errors.__name__])
def test_every_public_name_has_an_entry(site: Path, face: str) -> None:
    known = entries(site)
    names = {f"{face}.{name}" for name in import_module(face).__all__ if not name.startswith("__")}
    assert names and not names - set(known)
    for name in names:
        page, _, anchor = known[name].partition("#")
        assert f'id="{anchor}"' in (site / page).read_text(encoding="utf-8"), name

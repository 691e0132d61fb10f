"""Messages that the page on trouble quotes are messages that the code prints."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"


@cache
def templates() -> tuple[str, ...]:
    """Texts of what speaks on that page, with ``...`` for what is filled in."""
    found = set()
    package = ROOT / "src" / "mycel"
    speaking = (*package.glob("*.py"), *package.glob("runtime/**/*.py"), *package.glob("emulate/*.py"))
    for file in (*speaking, package / "topology" / "addresses.py"):
        source = file.read_text(encoding="utf-8")
        if not any(text in source for text in ("Error(", "Failure(", "warn", "message")):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"%[sdg]|%\.\d+f", "...", node.value))
    return tuple(found)


def quoted() -> list[str]:
    """First cells of the page's tables that are quotations, but for those of others, which say whose they are."""
    cells = re.findall(r"^\| `(.+?)`[ ,]", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [cell for cell in cells if cell != "what it says"]


def is_said(message: str, texts: tuple[str, ...]) -> bool:
    """Whether each part between dots stands in one text, in this order, or at least in some text by itself."""
    parts = [part for part in message.split("...") if part.strip(" :;,()'\"]")]
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    return any(pattern.search(text) for text in texts) or all(
        any(part.strip() in text for text in texts) for part in parts if len(part.strip()) > 5
    )


def test_quoted_messages_are_printed() -> None:
    assert len(quoted()) > 20
    assert [message for message in quoted() if not is_said(message, templates())] == []


def test_a_message_that_nobody_prints_is_found_out() -> None:
    assert not is_said("rank ... was lost while it had breakfast with ...", templates())
    assert not is_said("the process groop failed earlier: ...", templates())

"""What the site takes from docs/index.md: which pages there are, under which heading, in which order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

#: A page's line in the index: its title and file.
_ENTRY = re.compile(r"^- \[(.+?)\]\(([^)#]+\.md)\)")


def on_config(config: Any) -> Any:
    """The navigation, from the index: a page that is not listed there is found by no reader, and is an error."""
    sections: list[dict[str, Any]] = [{"Home": "index.md"}]
    pages: list[dict[str, str]] = []
    for line in (Path(config["docs_dir"]) / "index.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            pages = []
            sections.append({line[3:].strip(): pages})
        elif entry := _ENTRY.match(line):
            pages.append({entry[1].replace("`", ""): entry[2]})
    config["nav"] = sections
    return config

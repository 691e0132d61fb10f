"""What the site makes of the sources: its navigation from docs/index.md, the reference from what modules export."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import griffe

#: A page's line in the index: its title and file.
_ENTRY = re.compile(r"^- \[(.+?)\]\(([^)#]+\.md)\)")
#: A line of a page that stands for everything that a module exports.
_EXPORTS = re.compile(r"^<!-- exports of ([\w.]+) -->$", re.MULTILINE)
#: Code that follows, announced at the end of a line.
_ANNOUNCED = re.compile(r"(\w)?::$", re.MULTILINE)
_ONE = "\n\n::: {module}.{short}\n    options:\n      heading: {short}\n"


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


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Where a page asks for what a module exports, an entry for each name of its ``__all__``."""
    source = Path(config["docs_dir"]).parent / "src"
    return _EXPORTS.sub(lambda found: "".join(_entries(source, found[1])), markdown)


def _entries(source: Path, module: str) -> list[str]:
    path = source / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == ["__all__"]:
            names = [name for name in ast.literal_eval(node.value) if not name.startswith("__")]
            return [_ONE.format(module=module, short=name) for name in names]
    raise ValueError(f"{module} has no __all__ to make a reference of")


class Literals(griffe.Extension):
    """Docstrings announce code with two colons, as Python's own tools read them; pages need one."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object that is read."""
        if obj.docstring:
            obj.docstring.value = _ANNOUNCED.sub(lambda m: f"{m[1]}:" if m[1] else "", obj.docstring.value)

"""The house keeps what its documents promise: examples run, links lead somewhere, references match the code.

``python tests/unit/test_house.py`` rewrites the generated parts of ``docs/reference/cli.md``.
"""

from __future__ import annotations

import doctest
import inspect
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

import mycel.errors
import mycel.settings
from mycel.cli import COMMANDS, build_app

ROOT = Path(__file__).resolve().parents[2]
CLI_PAGE = ROOT / "docs" / "reference" / "cli.md"
#: Folders that hold no text of ours, for when the tests run outside a git checkout.
IGNORED = {".git", ".venv", ".venv-oldest", ".venv-newest", "build", "dist", "mycel-report", "__pycache__"}
#: Lines of a module; longer ones have a seam somewhere.
LONGEST_MODULE = 620


def committed_files() -> list[Path]:
    """Files that git tracks, or, in an unpacked source archive, all of them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        files = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        files = [f for f in ROOT.rglob("*") if not IGNORED & set(f.relative_to(ROOT).parts)]
    return sorted(f for f in files if f.is_file())


PAGES = [f for f in committed_files() if f.suffix == ".md"]
page_cases = pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Fenced blocks of a language: line before the first of each, and contents."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in found]


# -- documents --------------------------------------------------------------------------------------------------


def sessions(page: Path) -> list[tuple[int, str]]:
    """Blocks with a prompt, whichever of the two names their fence has."""
    return [(line, text) for line, text in blocks(page, "(?:pycon|python)") if text.startswith(">>>")]


@page_cases
def test_sessions_in_documents_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    for line, session in sessions(page):
        example = doctest.DocTestParser().get_doctest(session, names, page.name, str(page), line)
        report: list[str] = []
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.append, clear_globs=False)
        names.update(example.globs)
        assert not report, "".join(report)


def test_the_first_screen_has_a_session() -> None:
    first = sessions(ROOT / "README.md")[0][1]
    assert 5 <= first.count(">>>") <= 10


@page_cases
def test_links_in_documents_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    local = [t.partition("#")[0] for t in targets if not re.match(r"[a-z]+:", t) and not t.startswith("#")]
    missing = [t for t in local if not (page.parent / t).exists()]
    assert not missing, f"{page.relative_to(ROOT)} links to {missing}"


@page_cases
def test_commands_in_documents_exist(page: Path) -> None:
    lines = [line for _, shell in blocks(page, "(?:sh|bash|console)") for line in shell.splitlines()]
    named = {m.group(1) for line in lines if (m := re.match(r"(?:\$ )?mycel ([a-z]+)", line.strip()))}
    assert named <= set(COMMANDS)


@page_cases
def test_make_targets_in_documents_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    lines = [line for _, shell in blocks(page, "(?:sh|bash|console)") for line in shell.splitlines()]
    named = {m.group(1) for line in lines if (m := re.match(r"(?:\$ )?make ([a-z]+)", line.strip()))}
    assert named <= targets


# -- modules ----------------------------------------------------------------------------------------------------


def test_no_module_is_too_long() -> None:
    lengths = {f: len(f.read_text(encoding="utf-8").splitlines()) for f in committed_files() if f.suffix == ".py"}
    long = {str(f.relative_to(ROOT)): n for f, n in lengths.items() if n > LONGEST_MODULE and "src" in f.parts}
    assert lengths and not long


# -- references -------------------------------------------------------------------------------------------------


def test_every_variable_is_documented() -> None:
    source = inspect.getsource(mycel.settings)
    read = set(re.findall(r'"(MYCEL_[A-Z_]+)"', source))
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    assert read
    assert set(re.findall(r"^\| `(MYCEL_[A-Z_]+)`", page, re.MULTILINE)) == read
    assert set(re.findall(r"^``(MYCEL_[A-Z_]+)``", mycel.settings.__doc__ or "", re.MULTILINE)) == read


def click_command(name: str) -> Any:
    group: Any = typer.main.get_command(build_app())
    return group.commands[name]


def test_subcommands_are_those_of_the_contract() -> None:
    group: Any = typer.main.get_command(build_app())
    assert tuple(group.commands) == tuple(COMMANDS)


def test_the_list_of_subcommands_says_what_they_say_themselves() -> None:
    for name, says in COMMANDS.items():
        assert click_command(name).help.split("\n\n")[0].replace("\n", " ") == says


def leaf_commands() -> dict[str, Any]:
    """Every subcommand; instead of one that is a group, its own, as ``plan check``."""
    commands: dict[str, Any] = {}
    for name in COMMANDS:
        command = click_command(name)
        inner = getattr(command, "commands", None)
        commands |= {f"{name} {below}": inner[below] for below in inner} if inner else {name: command}
    return commands


def options_table(command: Any) -> str:
    """Markdown table of a subcommand's arguments and options, from the code."""
    rows = ["| | meaning | default |", "|---|---|---|"]
    for parameter in command.params:
        spelled = ", ".join(f"`{text}`" for text in parameter.opts if text.startswith("-"))
        spelled = spelled or f"`{parameter.metavar or parameter.name.upper()}`"
        default = "" if parameter.default in (None, False) or parameter.required else f"`{parameter.default}`"
        meaning = (parameter.help or "").replace("\\[", "[").replace("|", "\\|")  # rich escapes brackets
        rows.append(f"| {spelled} | {meaning}{' Required.' if parameter.required else ''} | {default} |")
    return "\n".join(rows)


def with_generated_tables(text: str) -> str:
    """The page with the table of every subcommand up to date."""
    for name, command in leaf_commands().items():
        marked = re.compile(rf"(<!-- options:{name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not marked.search(text):
            raise AssertionError(f"{CLI_PAGE.name} has no place for the options of {name!r}")
        table = options_table(command)
        text = marked.sub(lambda m, table=table: m.group(1) + table + "\n" + m.group(2), text)
    return text


def test_the_command_line_reference_is_up_to_date() -> None:
    page = CLI_PAGE.read_text(encoding="utf-8")
    assert page == with_generated_tables(page), "run: python tests/unit/test_house.py"


# -- the exception tree -----------------------------------------------------------------------------------------


def test_every_exception_is_exported() -> None:
    classes = [
        name
        for name, value in vars(mycel.errors).items()
        if inspect.isclass(value) and value.__module__ == mycel.errors.__name__
    ]
    assert sorted(mycel.errors.__all__) == sorted(classes)
    assert mycel.errors.__all__ == sorted(mycel.errors.__all__)


def drawn_tree() -> dict[str, tuple[str | None, str | None]]:
    """Parent and second base of each exception, as the docstring draws them."""
    drawing = (mycel.errors.__doc__ or "").split("::\n", 1)[1]
    above: list[tuple[int, str]] = []
    tree: dict[str, tuple[str | None, str | None]] = {}
    for line in drawing.splitlines():
        match = re.match(r"^[ |`-]*?([A-Z]\w+)(?: \((\w+)\))?(?:\s{2,}.*)?$", line)
        if not match or not line.startswith(" "):
            continue
        column, name = match.start(1), match.group(1)
        above = [(at, parent) for at, parent in above if at < column]
        tree[name] = (above[-1][1] if above else None, match.group(2))
        above.append((column, name))
    return tree


def test_the_drawn_exception_tree_is_the_real_one() -> None:
    tree = drawn_tree()
    assert set(tree) == set(mycel.errors.__all__)
    for name, (parent, second) in tree.items():
        kind = getattr(mycel.errors, name)
        assert kind.__bases__[0].__name__ == (parent or "Exception")
        assert kind.__bases__[1:] == ((getattr(__import__("builtins"), second),) if second else ())


def test_every_leaf_is_a_value_or_runtime_error() -> None:
    kinds = [getattr(mycel.errors, name) for name in mycel.errors.__all__]
    leaves = [kind for kind in kinds if not kind.__subclasses__()]
    assert leaves
    assert all(issubclass(kind, (ValueError, RuntimeError)) for kind in leaves)


if __name__ == "__main__":
    CLI_PAGE.write_text(with_generated_tables(CLI_PAGE.read_text(encoding="utf-8")), encoding="utf-8")

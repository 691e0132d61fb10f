"""The tutorial from an empty file to a registered all_reduce: each of its listings is run, in their order."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "write_a_collective.md"
COMMANDS = {"mycel": ["-m", "mycel"], "torchrun": ["-m", "torch.distributed.run"]}


def run(line: str, folder: Path) -> str:
    """Output and errors of a command of the guide."""
    program, *words = shlex.split(line)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *COMMANDS[program], *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200, check=False)
    return done.stdout + "".join(line for line in done.stderr.splitlines(True) if line.startswith("mycel: "))


def test_every_listing(tmp_path: Path) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    checker, output, seen = doctest.OutputChecker(), "", {"python": 0, "sh": 0, "text": 0}
    for language, content in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        seen[language] += 1
        if language == "python":
            named = re.match(r"# (\w+\.py)\n", content)
            assert named is not None, content
            (tmp_path / named[1]).write_text(content, encoding="utf-8")
        elif language == "sh":
            output = "".join(run(line, tmp_path) for line in content.splitlines())
        else:
            assert checker.check_output(content, output, doctest.ELLIPSIS), f"expected:\n{content}\ngot:\n{output}"
    assert seen == {"python": 5, "sh": 5, "text": 5}
    assert (tmp_path / "mine.json").stat().st_size

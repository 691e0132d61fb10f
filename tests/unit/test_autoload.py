"""Torch knows the backend by name after ``import torch`` alone, and nothing heavy comes with the name."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mycel import autoload

ROOT = Path(__file__).resolve().parents[2]
PLAIN = """
import sys
import torch
import torch.distributed as dist
heavy = [name for name in sys.modules if name.startswith(("mycel.runtime", "numba"))]
assert not heavy, heavy
dist.init_process_group(sys.argv[1], store=dist.HashStore(), rank=0, world_size=1)
array = torch.ones(3)
dist.all_reduce(array)
print(dist.get_backend(), array.tolist())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what an installation of this tree says to torch, whatever is installed."""
    folder = tmp_path_factory.mktemp("installed")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    info = folder / "mycel_of_this_tree-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mycel-of-this-tree\nVersion: 0\n", encoding="utf-8")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in points.items()]
    (info / "entry_points.txt").write_text("".join(lines), encoding="utf-8")
    return folder


def run(installed: Path, backend: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(installed)])
    env = {k: v for k, v in os.environ.items() if not k.startswith("MYCEL_")} | {"PYTHONPATH": path} | environment
    command = [sys.executable, "-c", PLAIN, backend]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)


def test_a_script_names_the_backend_and_imports_nothing(installed: Path) -> None:
    ended = run(installed, "mycel")
    assert (ended.returncode, ended.stdout) == (0, "mycel [1.0, 1.0, 1.0]\n"), ended.stderr


def test_another_backend_under_a_topology_is_warned_of(installed: Path) -> None:
    ended = run(installed, "gloo", MYCEL_TOPOLOGY="star:ranks=2")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("MYCEL_TOPOLOGY is set, but the default process group is gloo") == 1
    assert "<string>:7: RuntimeWarning" in ended.stderr  # the line of the script that made the group


def test_without_a_topology_nobody_is_warned(installed: Path) -> None:
    assert "MYCEL" not in run(installed, "gloo").stderr


def test_baselines_on_emulated_clusters_are_meant(installed: Path) -> None:
    assert "MYCEL" not in run(installed, "gloo", MYCEL_TOPOLOGY="star:ranks=2", MYCEL_WIRING="wiring.json").stderr


def test_what_goes_wrong_is_a_warning_since_torch_would_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    def refuse(*arguments: object, **options: object) -> None:
        raise TypeError("register_backend has another face")

    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    monkeypatch.setattr(dist.Backend, "backend_list", ["gloo"])
    with pytest.warns(RuntimeWarning, match="register_backend has another face"):
        autoload.register_name()

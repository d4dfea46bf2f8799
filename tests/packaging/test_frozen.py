"""The example program, frozen with PyInstaller from the installed wheel by the hook in it, runs a package.

It takes half a minute and needs rlx_ort installed from a wheel, so `nox --session frozen` runs it in an environment
of its own; elsewhere it is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_packages.packages import SIZE, make, reference

import rlx_ort

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("PyInstaller") is None, reason="PyInstaller is not installed"),
    pytest.mark.skipif(
        ROOT in Path(str(rlx_ort.__file__)).resolve().parents,
        reason="PyInstaller does not see the mapped folders of a checkout; nox --session frozen has the wheel",
    ),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Freeze the example with the small package beside it, and return the program's path."""
    base = tmp_path_factory.mktemp("frozen")
    package = make(base / "small.ortpackage")
    script = ROOT / "examples" / "frozen_app" / "build.py"
    command = [sys.executable, "-P", str(script), str(package), "--out", str(base / "dist")]
    done = subprocess.run(command, cwd=base, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


def run(program: Path, folder: Path) -> dict[str, Any]:
    """Run the program where no Python is found, and return what it prints."""
    kept = ("SYSTEMROOT", "TEMP", "TMP")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"RLX_CACHE_DIR": str(folder), "HOME": str(folder), "RLX_DEVICE": "cpu"}
    done = subprocess.run(
        [str(program)], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_wheel_names_its_hook() -> None:
    """PyInstaller finds the hook by the entry point."""
    (found,) = entry_points(group="pyinstaller40", name="hook-dirs").select(module="rlx_ort._pyinstaller")
    (folder,) = found.load()()
    assert (Path(folder) / "hook-rlx_ort.py").is_file()


def test_a_frozen_program_opens_a_package_and_runs_it(program: Path, tmp_path: Path) -> None:
    """The result is the float64 reference's, and the placement of its nodes is printed."""
    document = run(program, tmp_path)
    assert (document["frozen"], document["device"]) == (True, "cpu")
    assert document["placement"].keys() == {"CPUExecutionProvider"}
    wanted = float(reference(np.ones((1, SIZE), np.float32)).sum())
    assert document["sums"] == [pytest.approx(wanted, rel=1e-4)]


def test_a_frozen_program_brings_what_it_needs_and_not_the_command_line(program: Path) -> None:
    """The engine, its metadata and our data files are there; what only the command needs is not."""
    inside = program.parent / "_internal"
    assert list(inside.glob("onnxruntime-*.dist-info"))
    assert list(inside.glob("rlx_ort-*.dist-info"))
    assert list((inside / "rlx_ort" / "providers" / "kernel_lists").glob("*.txt"))
    assert list((inside / "rlx_ort" / "providers" / "cores").glob("*.toml"))
    assert not (inside / "matplotlib").exists()

"""A newcomer's walk in a fresh clone: the README's first command, then the quick start in the environment it made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout_copies import ROOT, copy_checkout, minutes_of
from doc_pages import run_page, steps

FRESH_CLONE = os.environ.get("RLX_FRESH_CLONE", "") not in ("", "0")  # read before the tests clear it

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not FRESH_CLONE, reason="installs from a package index; RLX_FRESH_CLONE=1 runs it, as .ci/run does"
    ),
]


def test_the_demo_and_the_quick_start_run_in_a_fresh_clone(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The second command of the README is how `.ci/run` starts these tests."""
    clone, page = copy_checkout(tmp_path / "clone"), "docs/quick-start.md"
    with minutes_of("newcomer", record_property):
        [command, _] = [step.text for step in steps(_two_commands()) if "start.py" in step.text]
        assert command == "python3 scripts/start.py demo"
        # The Python of the machine: that of the tests may be an environment without pip.
        python3 = getattr(sys, "_base_executable", sys.executable)
        demo = subprocess.run(
            [python3, *command.split()[1:]], cwd=clone, capture_output=True, encoding="utf-8", check=False
        )
        assert demo.returncode == 0, demo.stderr
        assert "probabilities" in demo.stdout
        assert (clone / "out" / "outputs.npz").is_file()
        wanted = [step for step in steps((ROOT / page).read_text(encoding="utf-8")) if "pip install" not in step.text]
        folder = tmp_path / "page"
        folder.mkdir()
        python = clone / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        run_page(page, wanted, folder, python=str(python))


def _two_commands() -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return readme.split("\n## Two commands\n", 1)[1].split("\n## ", 1)[0]

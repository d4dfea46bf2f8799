"""Wine differs from Windows where `tests/data/wine.toml` says so, and each of its reproductions shows how."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from device_facts import FOLDER, UNDER_WINE

GAPS: list[dict[str, Any]] = tomllib.loads((FOLDER.parent / "wine.toml").read_text(encoding="utf-8"))["gaps"]


def test_each_gap_is_bridged_or_its_consequence_is_stated() -> None:
    """A reproduction is a program, and what it means for the tests stands beside it."""
    for gap in GAPS:
        compile(gap["reproduction"], gap["what"], "exec")
        assert ("bridge" in gap) != ("unseen" in gap), gap["what"]


@pytest.mark.skipif(not UNDER_WINE, reason="it is about Wine")
@pytest.mark.parametrize("gap", GAPS, ids=[gap["what"] for gap in GAPS])
def test_a_gap_is_still_there(gap: dict[str, Any], tmp_path: Path) -> None:
    """Once a newer Wine passes the reproduction, the entry and its bridge can go."""
    if needed := gap.get("needs"):
        try:
            importlib.metadata.version(needed)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{needed} is not installed")
    command = [sys.executable, *gap.get("options", ()), "-c", gap["reproduction"]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=300)
    if done.returncode == 0 and "varies" in gap:
        pytest.skip(f"not on this machine; {gap['varies']}")
    assert done.returncode != 0
    said = f"{done.stderr}\nexit code {done.returncode:#x}"
    assert gap["fails"] in said, said

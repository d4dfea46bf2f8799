"""A process that dies while it writes a package leaves the old one or the new one. `RLX_KILL_COUNT=100` kills more."""

from __future__ import annotations

import os
from pathlib import Path

from sample_packages.killed_writers import kill_while_creating

TIMES = int(os.environ.get("RLX_KILL_COUNT", "3"))


def test_a_killed_writer_leaves_a_whole_package(tmp_path: Path) -> None:
    """After each kill the package opens, every byte is right, and it is one of the two that were written."""
    found = kill_while_creating(tmp_path, TIMES)
    assert found["package 1"] + found["package 2"] == TIMES

"""The types of builders, which are written from the class lines of ops."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "builder_stubs.py"


def test_the_stubs_are_those_of_the_builders() -> None:
    """Type checkers see the builders that graphs have."""
    subprocess.run([sys.executable, "-P", str(SCRIPT), "--check"], check=True)

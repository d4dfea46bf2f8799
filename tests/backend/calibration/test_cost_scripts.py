"""The scripts that judge the cost model run, and the kept runs are chosen for as well as when the model was merged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def script(name: str, *arguments: object, limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a script as a user would."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / "scripts")]))
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        timeout=limit_s,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )


def test_the_model_chooses_for_the_kept_runs_within_the_limits() -> None:
    """Regret and errors of five runs of up to 78 graphs on an H200; nothing is measured."""
    done = script("regret_replay.py", limit_s=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "within the limits" in done.stdout

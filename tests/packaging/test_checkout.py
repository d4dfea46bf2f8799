"""A checkout works without being installed: Python started in it imports the package and runs a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The editable installation of the tests would find the sibling folders, so its hooks are taken off first.
PROGRAM = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import numpy as np
import rlx_ort
g = rlx_ort.Graph("g")
g.outputs = [g.relu(g.input("x", [2]))]
[y] = rlx_ort.GraphDevices(g).run("cpu", {"x": np.array([-1, 1], np.float32)})
print(y.tolist(), rlx_ort.providers.__path__[0], rlx_ort.__version__)
"""


def test_python_in_a_checkout_imports_the_package_and_runs_a_graph() -> None:
    """The folders beside `rlx_ort/` are found without an installation."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[0.0,", "1.0]", str(ROOT / "providers"), "0.1.0"]

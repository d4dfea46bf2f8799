"""Killing a process while it writes a package, and looking at what it left."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from rlx_ort.deploy.package import Package

__all__ = ["kill_while_creating"]

_CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import numpy as np
from sample_packages.packages import make_graph
from rlx_ort.deploy.create import Recipe, create_package
from rlx_ort.ir.tensor import TensorData

target = Path(sys.argv[1])
graph = make_graph()
extra = graph.param("extra", [1 << 20])
graph.weights["extra"] = TensorData.from_array(np.arange(1 << 20, dtype=np.float32))
graph.outputs = [*graph.outputs, extra]
for serial in range(1, 3):
    print(serial, create_package(graph, target, Recipe(serial=serial), overwrite=True), flush=True)
print("ready", flush=True)
while True:
    for serial in range(1, 3):
        create_package(graph, target, Recipe(serial=serial), overwrite=True)
"""


def kill_while_creating(folder: Path, times: int, seed: int = 0) -> Counter[str]:
    """Kill a process that replaces one package by another over and over, at random moments; return what was found.

    Raises:
        IntegrityError: neither the one package nor the other was there, whole.
    """
    source = random.Random(seed)
    target = folder / "killed.ortpackage"
    found: Counter[str] = Counter()
    for _ in range(times):
        command = [sys.executable, "-c", _CHILD, str(target), str(Path(__file__).parents[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as child:
            assert child.stdout is not None
            known = dict(child.stdout.readline().split() for _ in range(2))
            assert child.stdout.readline() == "ready\n"
            time.sleep(source.uniform(0, 0.2))
            child.kill()
        with Package(target) as package:
            package.check_all()
            assert known[str(package.index.serial)] == package.sha256
            found[f"package {package.index.serial}"] += 1
        for left in folder.iterdir():
            if left != target:
                found["partial file beside it"] += 1
                assert left.name.startswith(f".{target.name}.")
                left.unlink()
    return found

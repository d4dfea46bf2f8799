"""A package of 3 GB: how long it takes to open, how fast it is hashed, and what that costs in memory."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from figures.record import Figure, python_json

__all__ = ["measure"]

LAYERS, WIDTH = 192, 2048  # 192 matrices of 16 MiB: 3 GiB
REPEATS = 3
MEBIBYTE = 2**20

MEMORY = """
import json, sys, time

def memory():
    found = {"Rss": 0, "Anonymous": 0}
    if sys.platform == "linux":
        for line in open("/proc/self/smaps_rollup", encoding="ascii"):
            name, _, rest = line.partition(":")
            if name in found:
                found[name] = int(rest.split()[0]) * 1024
    return found

import rlx_ort
from rlx_ort.deploy.open import open_package
from rlx_ort.deploy.package import Package
"""

OPEN = (
    MEMORY
    + """
before = memory()
start = time.perf_counter()
runner = open_package(sys.argv[1])
seconds = time.perf_counter() - start
after = memory()
print(json.dumps([seconds, after["Rss"] - before["Rss"], after["Anonymous"] - before["Anonymous"]]))
"""
)

HASH = (
    MEMORY
    + """
package = Package(sys.argv[1])
weights = package.graph().weights
before = memory()
start = time.perf_counter()
for data in weights.values():
    data.buffer  # the first use verifies; nothing touches the mapped pages
seconds = time.perf_counter() - start
after = memory()
total = sum(data.nbytes for data in weights.values())
print(json.dumps([seconds, total, after["Rss"] - before["Rss"], after["Anonymous"] - before["Anonymous"]]))
"""
)

VERIFY = (
    MEMORY
    + """
package = Package(sys.argv[1])
start = time.perf_counter()
package.check_all()
print(json.dumps(time.perf_counter() - start))
"""
)


def measure() -> Iterator[Figure]:
    """Yield the time to open, the time to hash over that of sha256sum, and the memory both take."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.ortpackage"
        _write(path)
        opened = [python_json(OPEN, str(path)) for _ in range(REPEATS)]
        seconds, resident, anonymous = (statistics.median(values) for values in zip(*opened, strict=True))
        detail = f"{path.stat().st_size / 1e9:.2f} GB in one file"
        yield Figure("3 GB package to a runner, before hashing", seconds, "s", 1, detail)
        if sys.platform == "linux":
            yield Figure("memory that opening it adds: RSS", resident / MEBIBYTE, "MiB", 100)
            yield Figure("memory that opening it adds: anonymous", anonymous / MEBIBYTE, "MiB", 100)
        yield from _hashing(path)


def _hashing(path: Path) -> Iterator[Figure]:
    """Yield how hashing compares with sha256sum on the same file, in turns, its pages in the system's cache."""
    _sha256sum(path)  # reads the file once, so that all that follows has it in memory
    ratios, rates, memory, whole = [], [], [], []
    for _ in range(REPEATS):
        theirs = path.stat().st_size / _sha256sum(path)
        seconds, total, resident, anonymous = python_json(HASH, str(path))
        ratios.append(theirs / (total / seconds))
        rates.append((total / seconds / 1e9, theirs / 1e9))
        memory.append((resident, anonymous))
        whole.append(python_json(VERIFY, str(path)))
    ours, theirs = (statistics.median(side) for side in zip(*rates, strict=True))
    detail = f"{ours:.2f} GB/s against {theirs:.2f} GB/s, one thread each"
    yield Figure(
        "time of hashing each weight at its first use over sha256sum", statistics.median(ratios), "times", 1.25, detail
    )
    if sys.platform == "linux":
        resident, anonymous = (statistics.median(side) for side in zip(*memory, strict=True))
        yield Figure("memory that hashing all weights adds: RSS", resident / MEBIBYTE, "MiB", 100)
        yield Figure("memory that hashing all weights adds: anonymous", anonymous / MEBIBYTE, "MiB", 100)
    yield Figure("every file and every tensor hashed, in two threads", statistics.median(whole), "s")


def _sha256sum(path: Path) -> float:
    """Return the seconds that sha256sum takes, or openssl where there is none."""
    start = time.perf_counter()
    try:
        subprocess.run(["sha256sum", str(path)], check=True, stdout=subprocess.DEVNULL)  # noqa: S607  # found by PATH
    except FileNotFoundError:
        start = time.perf_counter()
        subprocess.run(["openssl", "dgst", "-sha256", str(path)], check=True, stdout=subprocess.DEVNULL)  # noqa: S607
    return time.perf_counter() - start


def _write(path: Path) -> None:
    """Write a package whose weights are views of one random matrix, shifted, so that it costs little memory."""
    from rlx_ort.deploy.create import create_package
    from rlx_ort.ir.graph import Graph
    from rlx_ort.ir.tensor import TensorData

    numbers = np.random.default_rng(0).standard_normal(WIDTH * WIDTH + LAYERS).astype(np.float32)
    numbers.flags.writeable = False
    graph = Graph("chain")
    value = graph.input("x", ["rows", WIDTH])
    for layer in range(LAYERS):
        value = value @ graph.param(f"w{layer}", [WIDTH, WIDTH])
        graph.weights[f"w{layer}"] = TensorData.from_array(numbers[layer : layer + WIDTH * WIDTH].reshape(WIDTH, WIDTH))
    graph.outputs = [value]
    create_package(graph, path)

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

from figures.graphs import chain
from figures.record import MEBIBYTE, Figure, fresh, mapped_bytes, seconds_of
from rlx_ort.deploy.create import create_package
from rlx_ort.deploy.open import open_package
from rlx_ort.deploy.package import Package

LAYERS, WIDTH = 192, 2048  # 192 matrices of 16 MiB: 3 GiB
REPEATS = 3


def measure() -> Iterator[Figure]:
    """Yield the time to open, the time to hash over that of sha256sum, and the memory both take."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.ortpackage"
        numbers = np.random.default_rng(0).standard_normal(WIDTH * WIDTH + LAYERS).astype(np.float32)
        numbers.flags.writeable = False
        create_package(chain(LAYERS, WIDTH, numbers), path)
        seconds, *memory = _medians([fresh(opened, str(path)) for _ in range(REPEATS)])
        detail = f"{path.stat().st_size / 1e9:.2f} GB in one file"
        yield Figure("3 GB package to a runner, before hashing", seconds, "s", 1, detail)
        yield from _memory("opening it", memory)
        _sha256sum(path)  # reads the file once, so that all that follows has it in memory
        rows = []
        for _ in range(REPEATS):
            theirs = path.stat().st_size / _sha256sum(path)
            ours, *more = fresh(hashed, str(path))
            rows.append([theirs / ours, ours, theirs, fresh(verified, str(path)), *more])
        ratio, ours, theirs, whole, *memory = _medians(rows)
        detail = f"{ours / 1e9:.2f} GB/s against {theirs / 1e9:.2f} GB/s, one thread each"
        yield Figure("time of hashing each weight at its first use over sha256sum", ratio, "times", 1.25, detail)
        yield from _memory("hashing all weights", memory)
        yield Figure("every file and every tensor hashed, in two threads", whole, "s")


def opened(path: str) -> list[float]:
    """Return the seconds that opening a package takes, and what it adds to resident and anonymous memory."""
    before = mapped_bytes("Rss", "Anonymous")
    start = time.perf_counter()
    _runner = open_package(path)
    return [time.perf_counter() - start, *_added(before)]


def hashed(path: str) -> list[float]:
    """Return the bytes a second that are hashed as weights are used first, and the memory this adds."""
    weights = Package(path).graph().weights
    before = mapped_bytes("Rss", "Anonymous")
    seconds = seconds_of(lambda: [data.buffer for data in weights.values()])  # nothing touches the mapped pages
    return [sum(data.nbytes for data in weights.values()) / seconds, *_added(before)]


def verified(path: str) -> float:
    """Return the seconds that a check of the whole package takes."""
    return seconds_of(Package(path).check_all)


def _added(before: list[int]) -> list[int]:
    return [now - then for now, then in zip(mapped_bytes("Rss", "Anonymous"), before, strict=True)]


def _medians(rows: list[list[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _memory(action: str, added: list[float]) -> Iterator[Figure]:
    if sys.platform == "linux":
        for kind, nbytes in zip(("RSS", "anonymous"), added, strict=True):
            yield Figure(f"memory that {action} adds: {kind}", nbytes / MEBIBYTE, "MiB", 100)


def _sha256sum(path: Path) -> float:
    """Return the seconds that the system's sha256sum takes."""
    command = ["sha256sum", str(path)]
    return seconds_of(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))

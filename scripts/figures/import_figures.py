"""What importing the package and starting the command cost."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator

from figures.record import Figure, seconds_of

__all__ = ["measure"]

REPEATS = 15


def measure() -> Iterator[Figure]:
    """Yield the import time over numpy's own, and the time of `rlx-ort --help`."""
    numpy_only: list[float] = []
    package: list[float] = []
    command: list[float] = []
    for _ in range(REPEATS):
        numpy_only.append(seconds_of([sys.executable, "-c", "import numpy"]))
        package.append(seconds_of([sys.executable, "-c", "import numpy, rlx_ort"]))
        command.append(seconds_of([sys.executable, "-m", "rlx_ort.cli", "--help"]))
    over = statistics.median(after - before for before, after in zip(numpy_only, package, strict=True))
    detail = f"numpy alone {statistics.median(numpy_only) * 1e3:.0f} ms"
    yield Figure("import rlx_ort, over numpy", over * 1e3, "ms", 60, detail)
    yield Figure("rlx-ort --help", statistics.median(command), "s", 0.3)

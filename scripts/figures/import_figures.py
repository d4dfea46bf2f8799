"""The costs of importing the package and of starting the command."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

from figures.record import Figure, in_turns, process_seconds

REPEATS = 15
COMMANDS = (("-c", "import numpy"), ("-c", "import numpy, rlx_ort"), ("-m", "rlx_ort.cli", "--help"))


def measure() -> Iterator[Figure]:
    """Yield the import time over numpy's own, and the time of `rlx-ort --help`."""
    numpy, package, shown = in_turns(*(partial(process_seconds, *command) for command in COMMANDS), rounds=REPEATS)
    over = statistics.median(after - before for before, after in zip(numpy, package, strict=True))
    yield Figure(
        "import rlx_ort, over numpy", over * 1e3, "ms", 60, f"numpy alone {statistics.median(numpy) * 1e3:.0f} ms"
    )
    yield Figure("rlx-ort --help", statistics.median(shown), "s", 0.3)

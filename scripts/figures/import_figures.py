"""The costs of importing the package and of starting the command."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from figures.record import Figure, process_seconds

REPEATS = 15
COMMANDS = {
    "numpy": ("-c", "import numpy"),
    "package": ("-c", "import numpy, rlx_ort"),
    "help": ("-m", "rlx_ort.cli", "--help"),
}


def measure() -> Iterator[Figure]:
    """Yield the import time over numpy's own, and the time of `rlx-ort --help`."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(REPEATS):
        for name, arguments in COMMANDS.items():
            times[name].append(process_seconds(*arguments))
    over = statistics.median(after - before for before, after in zip(times["numpy"], times["package"], strict=True))
    detail = f"numpy alone {statistics.median(times['numpy']) * 1e3:.0f} ms"
    yield Figure("import rlx_ort, over numpy", over * 1e3, "ms", 60, detail)
    yield Figure("rlx-ort --help", statistics.median(times["help"]), "s", 0.3)

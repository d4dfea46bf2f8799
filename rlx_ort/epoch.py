"""The epoch of this process: a number that grows whenever something changes by which devices are chosen.

That is a calibration, a provider, a variable set from code, a device that refuses a graph, fails or comes back, and a
handle that ties a graph to its device. A decision that is kept carries the epoch from before it was made, and holds
until that is over.
"""

from __future__ import annotations

import threading

now = 0
"""The present epoch; read it as `epoch.now`."""

_lock = threading.Lock()


def advance() -> None:
    """End the present epoch."""
    global now
    with _lock:
        now += 1

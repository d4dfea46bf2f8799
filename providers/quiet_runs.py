"""`QuietRuns`: short runs of a session on a device that do not wait for the device a second time.

The copy of an output to a host array returns when it is done, so ONNX Runtime's wait behind it only costs time. But
some kernels copy tables from pinned host buffers, which ONNX Runtime frees at the end of a run that waits, and only
then. Destroying a session that still has such buffers ends the process: a callback of the driver's, which may call
nothing of CUDA, becomes the last owner of the pinned memory and tries to free it. So one run in some waits, and the
last one, which is ours if need be.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx_ort.providers.shutdown import ending

__all__ = ["QuietRuns", "keep_for_ever"]

RUNS_A_WAIT = 63
TIMED_RUNS = 3  # the first one is slow
SHORT_NS = 1_000_000  # the wait takes three or four microseconds, and the last run takes a run
MOST_BYTES = 1 << 20  # of inputs, which are kept for the last run


class QuietRuns:
    """Runs a session by names, without the wait where that is safe and worth it.

    The buffers belong to what ONNX Runtime calls a stream, one for each run that is in flight at the same time. A
    last run finds those of one stream only, so all runs wait from the moment on that two meet.

    Args:
        call: runs the session: `(names, feeds, options)`.
        shared: the RunOptions of runs that nobody stops by themselves; others wait.
        quiet: RunOptions that do not wait.
        last: makes the RunOptions of the last run.
        errors: the engine's exceptions.

    Attributes:
        over: whether all runs wait from now on, and nothing is left to be freed.
    """

    def __init__(
        self,
        call: Callable[..., list[Any]],
        shared: Any,
        quiet: Any,
        last: Callable[[], Any],
        errors: tuple[type[Exception], ...],
    ) -> None:
        self.over = False
        self._call = call
        self._shared = shared
        self._quiet = quiet
        self._last = last
        self._errors = errors
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._timed = 0
        self._least_ns = 1 << 62
        self._known: tuple[list[str], dict[str, Any]] | None = None
        self._owed = False
        self._turn = 0

    def run(self, names: Sequence[str], feeds: Mapping[str, Any], options: Any) -> list[Any]:
        """Run and return the outputs."""
        if self.over:
            return self._call(names, feeds, options)
        if not self._lock.acquire(blocking=False):
            self.end()
            return self._call(names, feeds, options)
        try:
            if self.over:
                return self._call(names, feeds, options)
            if self._known is None:
                return self._time(names, feeds, options)
            self._owed = True
            self._turn += 1
            if options is self._shared and self._turn <= RUNS_A_WAIT:
                return self._call(names, feeds, self._quiet)
            found = self._call(names, feeds, options)
            self._turn = 0
            self._owed = False
            return found
        finally:
            self._lock.release()

    def end(self) -> bool:
        """Let all runs wait from now on, and free what earlier ones have left; return whether that is done.

        It is not at the end of the process, where nothing is run any more, or in a forked child.
        """
        if os.getpid() != self._process:
            return False
        if self.over:
            return not self._owed
        with self._lock:  # another run must not take the stream that has the buffers
            if self._owed and self._known is not None and not ending():
                with contextlib.suppress(*self._errors):
                    self._call(*self._known, self._last())
                    self._owed = False
            self._known = None
            self.over = True
            return not self._owed

    def _time(self, names: Sequence[str], feeds: Mapping[str, Any], options: Any) -> list[Any]:
        """Run and wait; decide by the first few runs whether later ones need not."""
        start = time.perf_counter_ns()
        found = self._call(names, feeds, options)
        self._least_ns = min(self._least_ns, time.perf_counter_ns() - start)
        self._timed += 1
        if self._timed >= TIMED_RUNS:
            arrays = all(isinstance(array, np.ndarray) for array in feeds.values())
            small = arrays and sum(array.nbytes for array in feeds.values()) <= MOST_BYTES
            if small and self._least_ns <= SHORT_NS:
                self._known = list(names), {name: array.copy() for name, array in feeds.items()}
            else:
                self.over = True
        return found


def keep_for_ever(session: Any) -> None:
    """Let a session that cannot be destroyed safely live until the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))

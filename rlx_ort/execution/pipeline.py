"""`Pipeline`: runs that were committed without waiting, and lists of runs that overlap where that helps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from rlx_ort.execution.workers import Workers

__all__ = ["Pipeline", "snapshot"]

_OVERLAP_FROM_S = 0.0005  # below this, handing runs to threads costs more than it gains
_AT_A_TIME = 2


class Pipeline:
    """The runs in flight of one compiled graph."""

    def __init__(self) -> None:
        self._pending: list[Future[Any]] = []
        self._lock = threading.Lock()
        self._committer: Workers | None = None

    @property
    def busy(self) -> bool:
        """Whether committed runs have not been waited for."""
        return bool(self._pending)

    def commit(self, call: Callable[[], Any]) -> None:
        """Run a call after those committed before, without waiting; its error is kept, and its result unless empty."""
        with self._lock:
            if self._committer is None:
                self._committer = Workers(1, "rlx_ort-commit")
            self._pending = [run for run in self._pending if not _is_spent(run)]
            self._pending.append(self._committer.submit(call))

    def sync(self) -> list[list[Any]]:
        """Wait until every committed run has ended, and return the results that are not empty, in order.

        The first error among them is raised instead.
        """
        with self._lock:
            pending, self._pending = self._pending, []
        wait(pending)
        return [result for run in pending if (result := run.result())]

    def settle(self) -> None:
        """Wait until every committed run has ended; errors stay for `sync`."""
        with self._lock:
            pending = list(self._pending)
        wait(pending)

    def close(self) -> None:
        """Let the thread end."""
        with self._lock:
            committer, self._committer = self._committer, None
        if committer is not None:
            committer.close()


def _is_spent(run: Future[Any]) -> bool:
    """Return whether a run has ended and has neither an error nor a result to hand out."""
    return run.done() and run.exception() is None and not run.result()


def run_all(
    run: Callable[[Mapping[str, Any]], list[Any]], inputs: Sequence[Mapping[str, Any]], *, overlap: bool
) -> list[list[Any]]:
    """Return the outputs of each run in order; two at a time where that is allowed and a run takes long enough."""
    if not inputs:
        return []
    start = time.perf_counter()
    results = [run(inputs[0])]
    if not overlap or len(inputs) < _AT_A_TIME + 1 or time.perf_counter() - start < _OVERLAP_FROM_S:
        return results + [run(each) for each in inputs[1:]]
    workers = Workers(_AT_A_TIME, "rlx_ort-pipeline")
    futures = [workers.submit(lambda each=each: run(each)) for each in inputs[1:]]  # type: ignore[misc]  # bound now
    workers.close()
    wait(futures)
    return results + [future.result() for future in futures]


def snapshot(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with copies of the arrays, which their owner may write to before the run begins."""
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in inputs.items()}

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

    def commit(self, call: Callable[[], object]) -> None:
        """Run a call after those committed before, without waiting; its result is dropped, its error kept."""
        with self._lock:
            if self._committer is None:
                self._committer = Workers(1, "rlx_ort-commit")
            # Those that went well have nothing to tell any more.
            self._pending = [run for run in self._pending if not run.done() or run.exception() is not None]
            self._pending.append(self._committer.submit(call))

    def sync(self) -> None:
        """Wait until every committed run has ended, and raise the first error among them."""
        with self._lock:
            pending, self._pending = self._pending, []
        wait(pending)
        for run in pending:
            run.result()

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

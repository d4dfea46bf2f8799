"""Time limits and cancellation of a run.

The run is handed to a worker thread, because a thread that is inside an engine cannot return before the engine does.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeAlias

from rlx_ort.errors import CancelledRunError, EngineError, TimeLimitError
from rlx_ort.execution.background import Workers

Stoppable: TypeAlias = tuple[Callable[[], list[Any]], Callable[[], None] | None]
"""A run to be called once, and what stops it, None where nothing does."""

_IDLE_S = 5.0


class CancelToken:
    """Cancels the runs that it is given to. One token may be given to many runs, also of several threads.

    A token that was cancelled stays so: runs that are given it later do not begin.
    """

    def __init__(self) -> None:
        self._cancelled = False
        self._watchers: set[threading.Event] = set()
        self._lock = threading.Lock()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """End the runs at their next node; does not wait for them. May be called from any thread, and again."""
        with self._lock:
            self._cancelled = True
            for watcher in self._watchers:
                watcher.set()

    @contextlib.contextmanager
    def waking(self, event: threading.Event) -> Iterator[None]:
        """Set an event when the token is cancelled within the block, at once if it is already."""
        with self._lock:
            self._watchers.add(event)
            if self._cancelled:
                event.set()
        try:
            yield
        finally:
            with self._lock:
                self._watchers.discard(event)


class _Run:
    """A run that may be stopped before it has begun, while its session opens, and while it runs."""

    def __init__(self, start: Callable[[], Stoppable]) -> None:
        self._start = start
        self._stop: Callable[[], None] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def __call__(self) -> list[Any]:
        """Open the session if that is needed, and run."""
        if self._stopped:
            raise EngineError("the run was stopped before it began")
        call, stop = self._start()
        with self._lock:
            self._stop = stop
            if self._stopped:
                raise EngineError("the run was stopped before it began")
        return call()

    def stop(self) -> None:
        """End the run at its next node, or before its first."""
        with self._lock:
            self._stopped = True
            if self._stop is not None:
                self._stop()


def run_limited(
    start: Callable[[], Stoppable],
    timeout_s: float | None,
    grace_s: float,
    cancel: CancelToken | None,
    on_stuck: Callable[[Future[Any]], None],
) -> list[Any]:
    """Run in a worker thread and return the outputs; stop the run when its time is over or it is cancelled.

    An exception in the waiting thread, such as that of Ctrl-C, stops the run as well.

    Args:
        start: opens the session if that is needed, and returns the run and what stops it.
        timeout_s: the time limit in seconds, None for none.
        grace_s: seconds that the engine has to return after it was asked to stop.
        cancel: stops the run when it is cancelled.
        on_stuck: called with the run's future if the engine did not return in that time.

    Raises:
        TimeLimitError: the time limit is over.
        CancelledRunError: the token was cancelled.
    """
    if cancel is not None and cancel.cancelled:
        raise CancelledRunError("the run was cancelled before it began")
    run = _Run(start)
    future: Future[list[Any]] = in_background(run)
    changed = threading.Event()
    future.add_done_callback(lambda _: changed.set())
    try:
        with contextlib.nullcontext() if cancel is None else cancel.waking(changed):
            changed.wait(timeout_s)
    finally:
        back = future.done()
        if not back:
            run.stop()
            back = bool(wait([future], grace_s).done)
            if not back:
                on_stuck(future)
    cancelled = cancel is not None and cancel.cancelled
    error = future.exception() if back else None
    if back and error is None and not cancelled:
        return future.result()  # late by less than the grace time perhaps, but the answer is here
    if back and error is not None and not (run._stopped and isinstance(error, EngineError)):
        raise error
    ended = "" if back else f"; the engine did not return within {grace_s:g} s, and its session was given up"
    if cancelled:
        raise CancelledRunError(f"the run was cancelled{ended}")
    raise TimeLimitError(f"the run took longer than {timeout_s:g} s and was stopped{ended}") from error


def in_background(call: Callable[[], Any]) -> Future[Any]:
    """Run a call in a worker thread, which is there at once whatever the others are stuck in."""
    return _workers[0].submit(call)


def _new_workers() -> None:
    _workers[:] = [Workers(1 << 30, "rlx_ort-limit", _IDLE_S)]


_workers: list[Workers] = []
_new_workers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_workers)  # threads do not cross a fork

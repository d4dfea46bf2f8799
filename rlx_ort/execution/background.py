"""Runs that do not block the caller: committed runs, lists of runs that overlap, and runs awaited from asyncio.

They run on daemon threads. ONNX Runtime's own `run_async` ends the process with SIGABRT when the interpreter exits
during a run, needs two threads in the session, and is slow for small graphs (see `NOTES.md`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import numpy as np

from rlx_ort.errors import CancelledRunError
from rlx_ort.providers.engine.stopping import Stop, Stopped, check_stopped, held_stop, make_stoppable, stoppable
from rlx_ort.providers.workers import Workers

T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[], Any]]

_OVERLAP_FROM_S = 0.0005  # below this, handing runs to threads costs more than it gains
_AWAITED = 8
_LOOK_S = 0.02  # between two looks at the stop of a waiting thread


_all_runs: weakref.WeakSet[BackgroundRuns] = weakref.WeakSet()


class BackgroundRuns:
    """The committed runs of one compiled graph, which run one after another in a thread."""

    def __init__(self) -> None:
        self._pending: list[Future[Any]] = []
        self._lock = threading.Lock()
        self._worker: Workers | None = None
        _all_runs.add(self)

    def start_anew(self) -> None:
        """Leave the committed runs to the parent process; `sync` says so if there were any."""
        self._lock, self._worker = threading.Lock(), None
        if self._pending:
            lost: Future[Any] = Future()
            lost.set_exception(CancelledRunError("runs committed before a fork belong to the parent process"))
            self._pending = [lost]

    @property
    def busy(self) -> bool:
        """Whether committed runs have not been waited for."""
        return bool(self._pending)

    def commit(self, call: Callable[[], Any]) -> None:
        """Queue a call behind those committed before; its error is kept for `sync`, and so is a result not empty."""
        with self._lock:
            if self._worker is None:
                self._worker = Workers(1, "rlx_ort-commit")
                weakref.finalize(self, self._worker.close).atexit = False  # the thread of a dropped graph ends
            self._pending = [run for run in self._pending if not _is_spent(run)]
            self._pending.append(self._worker.submit(call))

    def sync(self) -> list[list[Any]]:
        """Wait for every committed run and return the results that are not empty, in order.

        The first error among them is raised instead.
        """
        with self._lock:
            pending, self._pending = self._pending, []
        try:
            _wait(pending)
        except Stopped:
            with self._lock:
                self._pending = pending + self._pending
            raise
        try:
            return list(filter(None, _results(pending)))
        except Stopped as err:
            check_stopped()
            raise CancelledRunError("a committed run was stopped before its end") from err

    def settle(self) -> None:
        """Wait for every committed run; errors stay for `sync`."""
        with self._lock:
            pending = list(self._pending)
        _wait(pending)

    def close(self) -> None:
        """Wait for the committed runs and end the thread."""
        self.settle()
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


def run_all(
    run: Callable[[Mapping[str, Any]], list[Any]], inputs: Sequence[Mapping[str, Any]], overlapping: int
) -> list[list[Any]]:
    """Return the outputs of each run in order; `overlapping` long runs are made at a time."""
    if not inputs:
        return []
    start = time.perf_counter()
    results = [run(inputs[0])]
    if overlapping == 1 or len(inputs) <= overlapping or time.perf_counter() - start < _OVERLAP_FROM_S:
        return results + [run(each) for each in inputs[1:]]
    workers = Workers(overlapping, "rlx_ort-pipeline")
    futures = [workers.submit(lambda each=each: run(each)) for each in inputs[1:]]  # type: ignore[misc]  # bound now
    workers.close()
    _wait(futures)
    return results + _results(futures)


async def run_in_background(call: Callable[[], T]) -> T:
    """Await a call in a worker thread; cancelling the task keeps it from beginning, or ends it at its next node."""
    import asyncio  # loads OpenSSL, 5 MB; a coroutine only runs where asyncio is loaded already

    make_stoppable()
    stop = Stop()
    with _awaited_lock:
        if not _awaited:
            _awaited.append(Workers(_AWAITED, "rlx_ort-async"))
    future = _awaited[0].submit(stop.holding(call))
    try:
        with stoppable(stop.stop):
            await returned(future)
            return future.result()
    except asyncio.CancelledError:
        if not future.cancel():
            stop.stop()
        raise
    finally:
        del future  # an error that it holds has this frame; see `_results`


async def returned(future: Future[Any]) -> None:
    """Wait until a future is done, in the event loop.

    The callbacks of `asyncio.wrap_future` form a cycle with the future, and with the error that it may hold.
    """
    import asyncio

    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def end_wait(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(end_wait)
    await done.wait()


_awaited: list[Workers] = []
_awaited_lock = threading.Lock()


def _start_anew() -> None:
    global _awaited_lock
    _awaited_lock = threading.Lock()
    for runs in _all_runs:
        runs.start_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


def copied_arrays(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with copies of the arrays, which their owner may then overwrite."""
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in inputs.items()}


def _wait(futures: Sequence[Future[Any]]) -> None:
    """Wait for calls; raises `Stopped` when the work of this thread is to end."""
    while wait(futures, None if held_stop() is None else _LOOK_S).not_done:
        check_stopped()


def _results(futures: list[Future[Any]]) -> list[Any]:
    """Return the results of calls that have ended, or raise the first error; the list is empty afterwards.

    An error has the frames that it came through. Futures in them would form a cycle with it, which keeps the memory of
    the runs until garbage is collected.
    """
    futures.reverse()
    results = []
    try:
        while futures:
            results.append(futures.pop().result())
    finally:
        futures.clear()
    return results


def _is_spent(run: Future[Any]) -> bool:
    """Return whether a run has ended with neither an error nor a result to return."""
    return run.done() and run.exception() is None and not run.result()

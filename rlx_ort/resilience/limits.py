"""Time limits and cancellation of runs, and of any other call.

A call is handed to a worker thread, because a thread that is inside an engine cannot return before the engine does.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rlx_ort.errors import CancelledRunError, TimeLimitError
from rlx_ort.execution.background import run_in_background
from rlx_ort.providers.engine.stopping import Stop, Stopped, check_stopped, held_stop
from rlx_ort.providers.workers import Workers
from rlx_ort.resilience.options import check_timeout

if TYPE_CHECKING:
    from rlx_ort.execution.compiled import CompiledGraph


T = TypeVar("T")
_IDLE_S = 5.0
_PIECE_S = 0.2


class CancelToken:
    """Cancels the runs that it is given to. One token may be given to many runs, also of several threads.

    A token that was cancelled stays so: runs that are given it later do not begin.
    """

    def __init__(self) -> None:
        self._cancelled = False
        self._watchers: set[threading.Event] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<CancelToken, {'cancelled' if self._cancelled else 'not cancelled'}>"

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


def limited(
    call: Callable[[], T],
    *,
    timeout_s: float | None = None,
    cancel: CancelToken | None = None,
    grace_s: float = 1.0,
    graph: CompiledGraph | None = None,
) -> T:
    """Return the result of any call of this package, made in a worker thread and ended at a limit.

    At the limit, at a cancellation, and at Ctrl-C, which is looked for every 0.2 s, the run in the engine
    ends at its next node, a session that opens ends at its next step, and later ones do not begin. Sessions stay
    usable, and handles keep their values. The first use lets every later run of the process look for a reason to stop,
    which costs up to 0.2 us.

    Args:
        call: the function to call, as `lambda: compiled.run_slots(arrays)`.
        timeout_s: the time limit in seconds, None for none.
        cancel: ends the call when it is cancelled.
        grace_s: seconds that the engine has to return. If it does not, the caller is answered, and the thread ends when
            the engine returns.
        graph: the compiled graph that the call runs; if the engine does not return, it gets another session and
            other locks.

    Raises:
        TimeLimitError: the time limit is over.
        CancelledRunError: the token was cancelled.
    """
    if timeout_s is not None:
        check_timeout(timeout_s)
    give_up = None if graph is None else graph.give_up_session
    return run_limited(call, timeout_s, grace_s, cancel, lambda _: give_up and give_up())


async def limited_async(
    call: Callable[[], T],
    *,
    timeout_s: float | None = None,
    cancel: CancelToken | None = None,
    grace_s: float = 1.0,
    graph: CompiledGraph | None = None,
) -> T:
    """Await a call within limits; cancelling the task ends it as well. See `limited`."""
    within = partial(limited, call, timeout_s=timeout_s, cancel=cancel, grace_s=grace_s, graph=graph)
    return await run_in_background(within)


def run_limited(
    call: Callable[[], T],
    timeout_s: float | None,
    grace_s: float,
    cancel: CancelToken | None,
    on_stuck: Callable[[Future[T]], object],
) -> T:
    """Make a call in a worker thread; `on_stuck` is called with its future if the engine does not return.

    See `limited`.
    """
    from rlx_ort.providers.engine.stopping import make_stoppable

    if cancel is not None and cancel.cancelled:
        raise CancelledRunError("the run was cancelled before it began")
    make_stoppable()
    stop = Stop()
    future = in_background(stop.holding(call))
    changed = threading.Event()
    future.add_done_callback(lambda _: changed.set())
    outer = held_stop()
    try:
        with contextlib.ExitStack() as watched:
            if cancel is not None:
                watched.enter_context(cancel.waking(changed))
            if outer is not None:
                watched.enter_context(outer.ends(changed.set))
            _wait(changed, timeout_s)
    finally:
        back = future.done()
        if not back:
            stop.stop()
            back = bool(wait([future], grace_s).done)
            if not back:
                on_stuck(future)
    check_stopped()  # by an outer limit
    cancelled = cancel is not None and cancel.cancelled
    error = future.exception() if back else None
    if back and error is None and not cancelled:
        return future.result()  # late by less than the grace time perhaps, but the answer is here
    if back and error is not None and not isinstance(error, Stopped):
        try:
            raise error
        finally:
            del error, future  # the error has this frame, and would keep the run's values until garbage is collected
    ended = "" if back else f"; the engine did not return within {grace_s:g} s, and its session was given up"
    if cancelled or timeout_s is None:  # None: the process ends
        raise CancelledRunError(f"the run was cancelled{ended}")
    raise TimeLimitError(f"the run took longer than {timeout_s:g} s and was stopped{ended}") from error


def _wait(event: threading.Event, timeout_s: float | None) -> None:
    """Wait in pieces: on Windows no signal ends a wait, and elsewhere one that comes as it begins may not."""
    until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while not event.wait(min(_PIECE_S, max(0.0, until_s - time.monotonic()))) and time.monotonic() < until_s:
        pass


def in_background(call: Callable[[], T]) -> Future[T]:
    """Run a call in a worker thread, which is there at once whatever the others are stuck in."""
    return _workers[0].submit(call)


def _new_workers() -> None:
    _workers[:] = [Workers(1 << 30, "rlx_ort-limit", _IDLE_S)]


_workers: list[Workers] = []
_new_workers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_workers)  # threads do not cross a fork

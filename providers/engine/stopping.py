"""`Stop`: ends the work of threads in the engine: their runs, the sessions that they open, and their wait for a device.

A run ends at its next node by ONNX Runtime's terminate flag, and a session that opens at its next step. What the
engine cannot interrupt (one long kernel, a compiler of a provider) ends by itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from rlx_ort.providers.engine.process import watch

P = ParamSpec("P")
T = TypeVar("T")
_TURN_S = 0.02  # between two looks at the stop while a thread waits for its turn


class Stopped(BaseException):
    """The work of the thread is to end.

    Like `KeyboardInterrupt`, it is no error that could be taken for a device's failure, recorded and kept.
    """


in_use = False
"""Whether a `Stop` may end runs; until then no run looks for one. Read it as `stopping.in_use`."""


class _Here(threading.local):
    stop: Stop | None = None


_here = _Here()


class Stop:
    """Ends the engine's work of the threads that hold it, now and later."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._stopped = False
        self._ends: list[Callable[[], None]] = []
        self._options: Any = None

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def stop(self) -> None:
        """End the work; does not wait for it. May be called from any thread, and again."""
        with self._lock:
            self._stopped = True
            for end in self._ends:
                end()

    def stop_runs(self) -> None:
        """End the work, for the end of the process."""
        self.stop()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let the calling thread hold the stop within the block; several may."""
        before, _here.stop = _here.stop, self
        try:
            yield
        finally:
            _here.stop = before

    def holding(self, call: Callable[P, T]) -> Callable[P, T]:
        """Return the call, for a thread that is to hold the stop meanwhile; it does not begin after the stop."""

        def held(*args: P.args, **kwargs: P.kwargs) -> T:
            self.check()
            with self.held():
                return call(*args, **kwargs)

        return held

    @contextlib.contextmanager
    def ends(self, end: Callable[[], None]) -> Iterator[None]:
        """Call `end` once if the stop comes within the block.

        Raises:
            Stopped: it came before.
        """
        with self._lock:
            self.check()
            self._ends.append(end)
        try:
            yield
        finally:
            with self._lock:
                self._ends.remove(end)

    def run_options(self, shared: Any) -> Any:
        """Return the RunOptions of the runs that the stop ends, of the class of those that other runs share."""
        with self._lock:
            if self._options is None:
                self._options = made = type(shared)()
                self._ends.append(lambda: setattr(made, "terminate", True))
                made.terminate = self._stopped
                watch(self)
            return self._options

    def check(self) -> None:
        """Return unless the stop has come.

        Raises:
            Stopped: it has.
        """
        if self._stopped:
            raise Stopped


def make_stoppable() -> None:
    """Let a `Stop` end runs from now on, in every session, which costs them up to 0.2 us."""
    global in_use
    in_use = True


def run_options(shared: Any) -> Any:
    """Return the RunOptions for a run of this thread: those of the stop that it holds, else the shared ones."""
    stop = _here.stop
    return shared if stop is None else stop.run_options(shared)


def held_stop() -> Stop | None:
    """Return the stop that the calling thread holds."""
    return _here.stop


def holding(call: Callable[P, T]) -> Callable[P, T]:
    """Return the call, for another thread that is to hold the same locks."""
    return call if _here.stop is None else _here.stop.holding(call)


def check_stopped() -> None:
    """Return unless the work of the calling thread is to end; for long work outside of the engine, and its errors.

    Raises:
        Stopped: it is.
    """
    if _here.stop is not None:
        _here.stop.check()


def stoppable(end: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Return a block in which `end` is called when the work of the calling thread is to end; see `Stop.ends`."""
    return contextlib.nullcontext() if _here.stop is None else _here.stop.ends(end)


class Turns:
    """A lock, reentrant, whose waiting threads can be stopped."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock, and return whether it was had, as `threading.RLock` does.

        Raises:
            Stopped: the work of the thread is to end.
        """
        stop = _here.stop
        if stop is None or not blocking:
            return self._lock.acquire(blocking)
        while not self._lock.acquire(timeout=_TURN_S):
            stop.check()
        return True

    def release(self) -> None:
        """Let another thread take the lock."""
        self._lock.release()

    __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        self._lock.release()

"""`Workers`: threads that run calls in the background and never keep the process from ending.

`concurrent.futures` joins its threads before anything can stop the run they are in; these are daemons, and at exit
the sessions are stopped first.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["Workers"]

T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[], Any]]


class Workers:
    """At most `most` daemon threads, started as they are needed.

    Args:
        most: how many calls may run at a time.
        name: the threads' name.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = 0
        self._threads = 0
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run a call in the background and return its future; with one worker, calls run in their order."""
        future: Future[T] = Future()
        with self._lock:
            self._jobs.put((future, call))
            if self._jobs.qsize() > self._idle and self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        """Let the threads end when the calls submitted so far have run."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)
            self._threads = 0

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = self._jobs.get()
            with self._lock:
                self._idle -= 1
            if job is None:
                return
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as err:  # whatever it is belongs to the caller, who waits for it
                future.set_exception(err)
            else:
                future.set_result(result)
            del job, future, call  # nothing may live on in a thread that waits

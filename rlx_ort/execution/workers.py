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
        idle_s: seconds that a thread waits for its next call before it ends; None to wait until `close`.
    """

    def __init__(self, most: int, name: str, idle_s: float | None = None) -> None:
        self._most = most
        self._name = name
        self._idle_s = idle_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = 0  # threads that wait and have not been promised a job
        self._backlog = 0  # jobs that wait for a thread to finish another one
        self._threads = 0
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run a call in the background and return its future; with one worker, calls run in their order."""
        future: Future[T] = Future()
        with self._lock:
            self._jobs.put((future, call))
            if self._idle:
                self._idle -= 1
            elif self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            else:
                self._backlog += 1
        return future

    def close(self) -> None:
        """Let the threads end when the calls submitted so far have run; nothing may be submitted any more."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._jobs.put(None)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._idle_s)
            except queue.Empty:
                with self._lock:
                    if self._idle and not self._closed:
                        self._idle -= 1
                        self._threads -= 1
                        return
                continue  # it was promised a job meanwhile
            if job is None:
                return
            future, call = job
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as err:  # whatever it is belongs to the caller, who waits for it
                    self._free()
                    future.set_exception(err)
                else:
                    self._free()
                    future.set_result(result)
                    del result
            else:
                self._free()
            del job, future, call  # nothing may live on in a thread that waits

    def _free(self) -> None:
        """Take the next job that waits, or be idle; before the caller goes on, so that it finds this thread."""
        with self._lock:
            if self._backlog:
                self._backlog -= 1
            else:
                self._idle += 1

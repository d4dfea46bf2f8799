"""`Workers`: daemon threads for calls in the background, and large copies that several of them make.

`concurrent.futures` would join its threads at exit before the sessions they are in can be stopped.
"""

from __future__ import annotations

import functools
import itertools
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy.typing as npt

from rlx_ort.providers.engine.stopping import holding
from rlx_ort.providers.hardware import core_share

T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[], Any]]

_COPYING = 4
_THREADED_BYTES = 4 << 20  # one thread copies about 9 GB/s, waking another takes 0.1 ms (docs/results, h200-2026-11-26)

_all_workers: weakref.WeakSet[Workers] = weakref.WeakSet()


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
        self.start_anew()
        _all_workers.add(self)

    def start_anew(self) -> None:
        """Forget the threads and their calls, which do not cross a fork."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._jobs_left = 0  # waiting or running
        self._threads = 0
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run a call in the background and return its future; one worker runs calls in their order.

        A stop of the calling thread stops the call as well.
        """
        future: Future[T] = Future()
        call = holding(call)
        with self._lock:
            self._jobs.put((future, call))
            self._jobs_left += 1
            if self._threads < min(self._jobs_left, self._most):
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        """End the threads after the calls submitted so far; nothing may be submitted any more."""
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
                    if self._threads > self._jobs_left and not self._closed:
                        self._threads -= 1
                        return
                continue  # a job has come meanwhile
            if job is None:
                return
            future, call = job
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as err:  # any exception belongs to the caller, who waits for it
                    self._finish_job()
                    future.set_exception(err)
                else:
                    self._finish_job()
                    future.set_result(result)
                    del result
            else:
                self._finish_job()
            del job, future, call  # an idle thread must keep no result alive

    def _finish_job(self) -> None:
        """Count a job as done, before the caller continues, so that its next one finds this thread idle."""
        with self._lock:
            self._jobs_left -= 1


_copiers = Workers(_COPYING - 1, "rlx_ort-copy", idle_s=10.0)


def fill(place: npt.NDArray[Any], array: npt.NDArray[Any]) -> None:
    """Copy an array into another one of its shape and dtype; several threads copy a large one."""
    parts = min(_COPYING, core_share().threads)
    if array.nbytes < _THREADED_BYTES or parts < 2 or not (array.flags.c_contiguous and place.flags.c_contiguous):
        place[...] = array
        return
    to, source = place.reshape(-1), array.reshape(-1)
    ends = [source.size * part // parts for part in range(parts + 1)]

    def copy(first: int, last: int) -> None:
        to[first:last] = source[first:last]

    others = [_copiers.submit(functools.partial(copy, *span)) for span in itertools.pairwise(ends[1:])]
    copy(0, ends[1])
    for each in others:
        each.result()


def _start_anew() -> None:
    for workers in _all_workers:
        workers.start_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)

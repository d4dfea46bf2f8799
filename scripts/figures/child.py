"""A process for calls that may end it, such as those into a driver."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

T = TypeVar("T")


class Child:
    """Calls functions in another process; after a call that ended it, in the next one.

    Args:
        most: calls a process, where it would keep memory or end after more; 0 for any number.
    """

    def __init__(self, most: int = 0) -> None:
        self._most = most
        self._pool = self._started()
        self._fresh = True

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Return what a function returns. A call that ends a process is repeated once, in one that made no call before.

        Raises:
            BrokenProcessPool: it ended that one, too.
        """
        while True:
            fresh, self._fresh = self._fresh, False
            try:
                return self._pool.submit(function, *arguments).result()
            except BrokenProcessPool:
                self.close()
                self._pool, self._fresh = self._started(), True
                if fresh:
                    raise

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown(cancel_futures=True)

    def _started(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=self._most or None)

"""One budget of worker threads for all sessions: together they use the cores this process may use, and no more.

A session on the CPU takes the rest of the budget when it is opened: the first gets all cores; if none are left, it runs
on its callers' threads, which is logged. Sessions of one model, as when a parameter changes, count once. Sessions on
other devices take no workers. A number that the caller asks for is granted beside the budget.

With `RLX_SHARED_POOL=1` all sessions share one pool of ONNX Runtime. That is better for several models on many cores,
but ONNX Runtime then refuses sessions with their own pools, including those of other libraries, so it is not the
default.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from rlx_ort import environment
from rlx_ort.providers.cores import core_share

if TYPE_CHECKING:
    import logging

    from rlx_ort.options.compile_options import CompileOptions

__all__ = ["ThreadBudget", "budget"]


class ThreadBudget:
    """Hands worker threads out to sessions.

    Args:
        total: the threads that the sessions together may run, the caller's own included; None takes `RLX_WORKERS`,
            else the process's share of the cores.

    Attributes:
        shared: whether sessions share ONNX Runtime's process-wide pool.
    """

    def __init__(self, total: int | None = None) -> None:
        self._total = total
        self.shared = False
        self._grants: dict[int, tuple[int, int]] = {}  # model -> workers, open sessions
        self._lock = threading.RLock()  # a finalizer may run in the middle of our own calls

    @property
    def total(self) -> int:
        """The threads that the sessions together may run."""
        if self._total is not None:
            return self._total
        workers = environment.parse_or("WORKERS", 0, int)
        return workers if workers > 0 else core_share().threads

    @property
    def granted(self) -> int:
        """The workers that open sessions hold, beyond their callers' threads."""
        with self._lock:
            return sum(workers for workers, _ in self._grants.values())

    def make_pool(self, bindings: Any, errors: tuple[type[Exception], ...]) -> None:
        """Make the shared pool; if it is too late for one, sessions keep pools of their own, with a warning."""
        try:
            bindings.set_global_thread_pool_sizes(self.total, 1)
        except errors as err:
            _log().warning("RLX_SHARED_POOL comes too late, ONNX Runtime was in use before: %s", err)
        else:
            self.shared = True

    def apply(self, made: Any, options: CompileOptions | None, model: object, *, on_cpu: bool) -> None:
        """Set the threads of a session to be opened; `hold` keeps the grant after that, `withdraw` returns it."""
        if self.shared:
            made.use_per_session_threads = False
            made.intra_op_num_threads = self.total
        elif options is not None and options.intra_op_threads is not None:
            made.intra_op_num_threads = options.intra_op_threads
        elif not on_cpu:
            made.intra_op_num_threads = 1
        else:
            made.intra_op_num_threads = 1 + self._grant(id(model))

    def hold(self, session: object, options: CompileOptions | None, model: object, *, on_cpu: bool) -> None:
        """Keep what `apply` gave for a model until its last session is gone."""
        if self.shared or (options is not None and options.intra_op_threads is not None) or not on_cpu:
            return
        key = id(model)
        with self._lock:
            workers, sessions = self._grants.get(key, (0, 0))
            self._grants[key] = (workers, sessions + 1)
        weakref.finalize(session, self._give_back, key, model).atexit = False

    def withdraw(self, model: object) -> None:
        """Take back what `apply` gave for a session that could not be opened."""
        with self._lock:
            if id(model) in self._grants and not self._grants[id(model)][1]:
                del self._grants[id(model)]

    def _grant(self, key: int) -> int:
        with self._lock:
            if key not in self._grants or not self._grants[key][1]:
                self._grants.pop(key, None)
                self._grants[key] = (max(0, self.total - 1 - self.granted), 0)
            workers = self._grants[key][0]
        if workers < self.total - 1:
            _log().info(
                "a session runs on %d of %d threads, because others hold the rest; RLX_SHARED_POOL=1 lets all sessions "
                "share one pool, and CompileOptions.intra_op_threads sets a number",
                1 + workers,
                self.total,
            )
        return workers

    def _give_back(self, key: int, model: object) -> None:
        """Count one session less; `model` is here to stay alive, so that nothing else gets its id."""
        with self._lock:
            workers, sessions = self._grants[key]
            if sessions > 1:
                self._grants[key] = (workers, sessions - 1)
            else:
                del self._grants[key]


_budget = ThreadBudget()


def budget() -> ThreadBudget:
    """Return the budget of this process."""
    return _budget


def _log() -> logging.Logger:
    import logging  # not needed by a start from the cache

    return logging.getLogger("rlx_ort.threads")

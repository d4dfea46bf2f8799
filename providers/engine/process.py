"""Shared by all sessions of a process: a budget of worker threads, and a clean end of the process.

A session on the CPU takes the rest of the budget when it is opened: the first gets all cores; if none are left, it runs
on its callers' threads, which is logged. Sessions of one model, as when a parameter changes, count once, and those on
other devices take no workers. A number that the caller asks for is granted beside the budget.

`RLX_SHARED_POOL=1` gives all sessions one pool, which is better for several models on many cores. ONNX Runtime then
refuses sessions with their own pools, including those of other libraries.

A forked child must not destroy its parent's sessions: threads and drivers do not cross a fork, so destroying a session
with workers, or one on WebGPU, never ends there. The child keeps every object of this folder until it is gone itself.
Nor may drivers end there as C libraries do at exit: NVIDIA's Vulkan driver crashes in the child.

ONNX Runtime aborts the process when the interpreter exits while a thread is inside a run. So at exit every open session
is stopped, new runs and sessions are refused, and the interpreter waits for the threads that are still inside.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from rlx_ort import environment
from rlx_ort.errors import EngineError
from rlx_ort.providers.hardware import core_share

if TYPE_CHECKING:
    import logging

    from rlx_ort.options.compile_options import CompileOptions

_LONGEST_WAIT_S = 30.0
_STEP_S = 0.002
_MOST_WORKERS = 256  # that `RLX_WORKERS` may name on a machine of fewer processors
_MOST_DIGITS = 9
_OWN_FOLDER = str(Path(__file__).parent)


class _Grant:
    """The workers that the sessions of one model have together; it keeps the model alive, and so its id."""

    def __init__(self, model: object, workers: int) -> None:
        self.model = model
        self.workers = workers


class ThreadBudget:
    """Hands worker threads out to sessions.

    The sessions together run `total` threads, their callers' included: by default `RLX_WORKERS`, else the process's
    share of the cores.
    """

    def __init__(self, total: int | None = None) -> None:
        self._total = total
        self.shared = False
        self._grants: weakref.WeakValueDictionary[int, _Grant] = weakref.WeakValueDictionary()  # by the model's id
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """The threads that the sessions together may run.

        Raises:
            EngineError: `RLX_WORKERS` is no number of threads, or more than the processors, where these are over 256.
        """
        if self._total is not None:
            return self._total
        text = (environment.get("WORKERS") or "").strip()
        if not text:
            return core_share().threads
        most = max(_MOST_WORKERS, os.cpu_count() or 1)
        if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and 1 <= int(text) <= most):
            raise EngineError(f"RLX_WORKERS is {text[:40]!r}; give a number of threads from 1 to {most}, or unset it")
        return int(text)

    @property
    def granted(self) -> int:
        """The workers that open sessions hold, beyond their callers' threads."""
        return sum(grant.workers for grant in list(self._grants.values()))

    def make_pool(self, bindings: Any, errors: tuple[type[Exception], ...]) -> None:
        """Make the shared pool; if it is too late for one, sessions keep pools of their own, with a warning."""
        try:
            bindings.set_global_thread_pool_sizes(self.total, 1)
        except errors as err:
            _log().warning("RLX_SHARED_POOL has no effect, since ONNX Runtime was already in use: %s", err)
        else:
            self.shared = True

    def opened(
        self, made: Any, options: CompileOptions | None, model: object, open_: Callable[[], Any], *, on_cpu: bool
    ) -> Any:
        """Set the threads in SessionOptions, and return the result of `open_`, which has them until it is gone.

        Sessions of one model have the same threads. A session that could not be opened keeps none.
        """
        grant = None
        if self.shared:
            made.use_per_session_threads = False
            made.intra_op_num_threads = self.total
        elif options is not None and options.intra_op_threads is not None:
            made.intra_op_num_threads = options.intra_op_threads
        elif not on_cpu:
            made.intra_op_num_threads = 1
        else:
            grant = self._grant(model)
            made.intra_op_num_threads = 1 + grant.workers
        try:
            session = open_()
            weakref.finalize(session, id, grant).atexit = False  # a finalizer holds its arguments
        finally:
            del grant  # or the traceback of an error would hold it
        return session

    def _grant(self, model: object) -> _Grant:
        with self._lock:
            grant = self._grants.get(id(model))
            if grant is None:
                grant = self._grants[id(model)] = _Grant(model, max(0, self.total - 1 - self.granted))
        if grant.workers < self.total - 1:
            _log().info(
                "a session runs on %d of %d threads, because others hold the rest; RLX_SHARED_POOL=1 lets all sessions "
                "share one pool, and CompileOptions.intra_op_threads sets a number",
                1 + grant.workers,
                self.total,
            )
        return grant


_budget = ThreadBudget()


def budget() -> ThreadBudget:
    """Return the budget of this process."""
    return _budget


def _log() -> logging.Logger:
    import logging  # not needed by a start from the cache

    return logging.getLogger("rlx_ort.threads")


_entries: Any = type.__dict__["__dict__"].__get__  # of a class, without code of its metaclass
_OWN_MODULES = __name__.rpartition(".")[0] + "."
_opened = False
_devices = False  # other than the CPU, whose drivers are loaded


def _keep_all() -> None:
    """Keep every object of this folder alive to the end of the process, sessions and device memory among them."""
    if not _opened:
        return
    if _devices:
        _skip_exit_of_libraries()
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()  # a server that freezes its objects before it forks; frozen ones are not listed
    for item in gc.get_objects():
        module = _entries(type(item)).get("__module__")  # a class may have something else there than a name
        if isinstance(module, str) and module.startswith(_OWN_MODULES):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))
    if frozen:
        gc.freeze()


def _skip_exit_of_libraries() -> None:
    """Let this process end, once Python has, without the exit functions that C libraries registered before."""
    libc: Any = ctypes.CDLL(None)
    # glibc alone; the last one registered runs first: https://man7.org/linux/man-pages/man3/on_exit.3.html
    if hasattr(libc, "on_exit"):
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
        libc.on_exit(ctypes.cast(libc.fcloseall, ctypes.c_void_p), None)  # output of C code is flushed


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_all)


class _Stoppable(Protocol):
    def stop_runs(self) -> None:
        """End the runs in flight and let no other begin."""


_ending = threading.Event()
_live: weakref.WeakSet[_Stoppable] = weakref.WeakSet()
_live_lock = threading.RLock()  # reentrant: garbage may be collected, and work watched, during any call


def watch(session: _Stoppable, *, device: bool = False) -> None:
    """Stop a session's runs when the process ends, or now if it already does; keep it in forked children.

    `device` is true if it loaded the driver of a device other than the CPU.
    """
    global _devices, _opened
    _opened = True
    _devices = _devices or device
    with _live_lock:
        _live.add(session)
    if _ending.is_set():
        session.stop_runs()


def watched_sessions() -> list[_Stoppable]:
    """Return the work to stop when the process ends."""
    with _live_lock:
        return list(_live)


def ending() -> bool:
    """Return whether the process ends, so that ONNX Runtime must not be called any more."""
    return _ending.is_set()


def refuse_at_the_end() -> None:
    """Let no session be opened once the process ends; to be called in this folder, which that end waits for.

    Raises:
        EngineError: the process ends.
    """
    if _ending.is_set():
        raise EngineError("the process is exiting; no session can be opened")


@atexit.register
def stop_all(inside: Callable[[], bool] | None = None, wait_s: float = _LONGEST_WAIT_S) -> bool:
    """Stop every session, wait for the threads that run one or open one, and return whether none is left."""
    _ending.set()
    for session in watched_sessions():
        session.stop_runs()
    deadline = time.monotonic() + wait_s
    busy = inside or _threads_inside
    while is_busy := busy():
        if time.monotonic() > deadline:
            break
        time.sleep(_STEP_S)
    return not is_busy


def _threads_inside() -> bool:
    """Return whether another thread is in this folder's code, and so perhaps inside ONNX Runtime."""
    own = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        current: FrameType | None = frame if thread != own else None
        while current is not None:
            if current.f_code.co_filename.startswith(_OWN_FOLDER):
                return True
            current = current.f_back
    return False

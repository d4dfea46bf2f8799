"""A clean end of the process with runs in flight.

ONNX Runtime aborts the process when the interpreter exits while a thread is inside a run. So at exit every open session
is stopped, new runs and sessions are refused, and the interpreter waits for the threads that are still inside.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Protocol

from rlx_ort.errors import EngineError

__all__ = ["ending", "refuse_at_the_end", "watch"]

_LONGEST_WAIT_S = 30.0
_STEP_S = 0.002
_OWN_FOLDER = str(Path(__file__).parent)


class _Stoppable(Protocol):
    def stop_runs(self) -> None:
        """End the runs in flight and let no other begin."""


_ending = threading.Event()
_live: dict[int, weakref.ref[_Stoppable]] = {}
_lock = threading.RLock()  # a weak reference may die, and call back, in the middle of our own calls


def watch(session: _Stoppable) -> None:
    """Stop a session's runs when the process ends, or now if it already does."""
    key = id(session)

    def forget(_: object) -> None:
        with _lock:
            _live.pop(key, None)

    with _lock:
        _live[key] = weakref.ref(session, forget)
    if _ending.is_set():
        session.stop_runs()


def ending() -> bool:
    """Return whether the process ends, so that ONNX Runtime must not be called any more."""
    return _ending.is_set()


def refuse_at_the_end() -> None:
    """Let no session be opened once the process ends.

    To be called within this folder, which the end of the process waits for: a thread in it is either waited for, or
    finds the process ending here.

    Raises:
        EngineError: the process ends.
    """
    if _ending.is_set():
        raise EngineError("the process ends, and no session is opened any more")


@atexit.register
def stop_all(inside: Callable[[], bool] | None = None) -> None:
    """Stop every session and wait, at most half a minute, for the threads that run one or open one."""
    _ending.set()
    with _lock:
        sessions = [found for found in (link() for link in _live.values()) if found is not None]
    for session in sessions:
        session.stop_runs()
    deadline = time.monotonic() + _LONGEST_WAIT_S
    busy = inside or _threads_inside
    while busy() and time.monotonic() < deadline:
        time.sleep(_STEP_S)


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

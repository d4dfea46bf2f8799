"""`Interrupts`: Ctrl-C and a request to terminate end every command, whatever it is doing.

Python handles a signal once the main thread returns to it, and a run in the engine may take minutes. So a thread reads
signals from a pipe and stops the engine's work, and the command ends as by `KeyboardInterrupt`. If the engine does not
return within the grace time, files that are not complete are removed and the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import sys
import threading
import weakref
from types import FrameType
from typing import Any

GRACE_S = 1.0
_LOSING = (weakref.__file__, "<frozen importlib._bootstrap>")
_BREAK = getattr(signal, "SIGBREAK", None)  # of Ctrl-Break on Windows, by which a program ends its children
_HANDLED: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_HANDLED |= {} if _BREAK is None else {_BREAK: signal.SIG_DFL}
"""Signals that end a command, if their handler is still Python's own."""


class Interrupts(contextlib.AbstractContextManager["Interrupts"]):
    """Ends the work of a block at a signal. Does nothing outside of the main thread.

    All sessions of the process are stopped for good, so the process is to end after the block.

    Attributes:
        exit_code: 128 and the number of the signal, as shells report it; 0 before one came.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self._returned = threading.Event()  # the main thread, to Python
        self._before: dict[int, Any] = {}
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        from rlx_ort.providers.engine.stopping import Stop

        stop = Stop()
        self._held.enter_context(stop.held())
        read, write = os.pipe()
        if hasattr(os, "set_blocking"):
            os.set_blocking(write, False)
        self._before = {
            number: signal.signal(number, self._interrupt)
            for number, own in _HANDLED.items()
            if signal.getsignal(number) == own
        }
        watcher = threading.Thread(target=self._watch, args=(read, stop), name="rlx_ort-signals", daemon=True)
        watcher.start()
        self._held.callback(watcher.join)
        self._held.callback(os.close, write)  # ends the watcher
        self._held.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(write, warn_on_full_buffer=False))
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._held.close()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise `KeyboardInterrupt`; where it would be lost, at the next line of the caller."""

        def interrupt(*event: object) -> None:
            sys.settrace(None)
            self._returned.set()
            raise _Interrupted

        self.exit_code = 128 + number
        caller = _caller(frame)
        if caller is None:
            interrupt()
        else:
            caller.f_trace = interrupt
            sys.settrace(lambda *_: None)

    def _watch(self, pipe: int, stop: Any) -> None:
        """Stop the engine's work at the first signal."""
        from rlx_ort.providers.engine import process

        with open(pipe, "rb", buffering=0) as signals:
            while (number := signals.read(1)) and number[0] not in self._before:
                pass
            if not number:
                return
            atexit.register(_end, number[0])  # after the block, for other threads that are in the engine
            stop.stop()
            process.stop_all(lambda: False)
            if not self._returned.wait(GRACE_S):
                _leave(number[0])


class _Interrupted(KeyboardInterrupt):
    """Unlike `KeyboardInterrupt` itself, it may pass through `eval` without changing the exit code of Python."""


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the caller of a finalizer or an import, in which exceptions may be lost; None if there is neither."""
    caller = None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code.co_filename in _LOSING:
            caller = frame.f_back
        frame = frame.f_back
    return caller


def _end(number: int) -> None:
    """Wait for threads in the engine, at most the grace time; the interpreter must not end while one is there."""
    from rlx_ort.providers.engine import process

    if not process.stop_all(wait_s=GRACE_S):
        _leave(number)


def _leave(number: int) -> None:
    """End the process now."""
    from rlx_ort import storage

    for path in [*storage.unfinished]:
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(128 + number)

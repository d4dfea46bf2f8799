"""`run_in_background`: one run awaited from asyncio, in a thread, stopped when the task is cancelled.

ONNX Runtime's own `run_async` was ten times slower than a call for small graphs (48 against 5 us), needs two threads
in a session, and ends the process with SIGABRT when the interpreter goes down meanwhile; so threads of our own it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rlx_ort.execution.workers import Workers

__all__ = ["run_in_background"]

_AT_A_TIME = 8
_workers: list[Workers] = []
_lock = threading.Lock()


async def run_in_background(call: Callable[[], list[Any]], stop: Callable[[], None]) -> list[Any]:
    """Await a call in a worker thread; when the task is cancelled, stop the call, or keep it from beginning."""
    import asyncio  # with it comes OpenSSL, 5 MB; a coroutine only runs where it is loaded already

    with _lock:
        if not _workers:
            _workers.append(Workers(_AT_A_TIME, "rlx_ort-async"))
    future = _workers[0].submit(call)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if not future.cancel():
            stop()
        raise

"""Calls that open models: each in a daemon thread of its own, with a time limit, so that one that hangs blocks none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rlx_ort.errors import TimeLimitError
from rlx_ort.execution.background import Workers, returned
from rlx_ort.providers.engine.stopping import Stop, Stopped

T = TypeVar("T")

_GRACE_S = 1.0  # what the engine has to return after it was asked to stop


class Opening:
    """One call in a thread that can be ended; the engine stops at its next node."""

    def __init__(self) -> None:
        self._stop = Stop()
        self._ended = asyncio.Event()

    def end(self) -> None:
        """Give up the call; `run` raises within a second. To be called in the event loop."""
        self._stop.stop()
        self._ended.set()

    async def run(self, call: Callable[[], T], limit_s: float, discard: Callable[[T], object]) -> T:
        """Return the call's result.

        Args:
            call: opens a model.
            limit_s: seconds that it may take.
            discard: called with a result that came too late, in the thread that made it.

        Raises:
            TimeLimitError: it took longer, or `end` was called.
        """
        worker = Workers(1, "rlx_ort-open")
        future: Future[T] = worker.submit(self._stop.holding(_stoppable(call)))
        worker.close()
        waits = [asyncio.ensure_future(returned(future)), asyncio.ensure_future(self._ended.wait())]
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if future.done():
                return future.result()
            text = "the opening was ended" if waits[1].done() else f"it took longer than {limit_s:g} s to open"
            self._stop.stop()
            await asyncio.wait(waits[:1], timeout=_GRACE_S)
            future.add_done_callback(lambda late: _discarded(late, discard))
        except Stopped as err:
            raise TimeLimitError("the opening was ended") from err
        finally:
            for each in waits:
                each.cancel()
            del future  # an error that it holds has this frame, and would keep files mapped until garbage is collected
        raise TimeLimitError(text)


def _stoppable(call: Callable[[], T]) -> Callable[[], T]:
    def stoppable() -> T:
        from rlx_ort.providers.engine.stopping import make_stoppable

        make_stoppable()
        return call()

    return stoppable


def _discarded(late: Future[T], discard: Callable[[T], object]) -> None:
    if late.exception() is None:
        with contextlib.suppress(Exception):  # nobody waits for the result any more
            discard(late.result())

"""Calls that open models: each in threads of its own, with a time limit, so that one that hangs blocks none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rlx_ort.errors import CancelledRunError, TimeLimitError
from rlx_ort.execution.background import returned
from rlx_ort.providers.engine.stopping import Stopped
from rlx_ort.resilience.limits import CancelToken, in_background, run_limited

T = TypeVar("T")

_GRACE_S = 1.0  # for the engine to return after it was asked to stop


async def opened_in_time(
    call: Callable[[], T], limit_s: float, cancel: CancelToken, discard: Callable[[T], object]
) -> T:
    """Return the result of a call that opens a model; a result that nobody waits for any more is discarded.

    Raises:
        TimeLimitError: it took longer than `limit_s` seconds, or the token was cancelled.
    """
    made: list[T] = []
    failed = False

    def keep() -> None:
        nonlocal failed
        try:
            made.append(call())
        except Stopped:
            raise
        except BaseException:  # also a limit of its own
            failed = True
            raise

    def discard_late(future: Future[None] | None = None) -> None:
        with contextlib.suppress(Exception):  # nobody waits for the result
            while made:
                discard(made.pop())

    def limited() -> T:
        try:
            run_limited(keep, limit_s, _GRACE_S, cancel, lambda future: future.add_done_callback(discard_late))
        except BaseException:
            discard_late()
            raise
        return made.pop()

    future = in_background(limited)
    try:
        await returned(future)
        return future.result()
    except (CancelledRunError, TimeLimitError) as err:
        if failed:
            raise
        ended = isinstance(err, CancelledRunError)
        raise TimeLimitError(
            "opening was cancelled" if ended else f"it took longer than {limit_s:g} s to open"
        ) from err
    finally:
        del future  # an error that it holds has this frame, and would keep files mapped until garbage is collected

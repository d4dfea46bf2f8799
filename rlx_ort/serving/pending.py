"""What a caller of a scheduler has of its request: a way to give it up, and its end; large ones run in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import numpy as np

from rlx_ort.serving.lanes import Answer, Array

Ended: TypeAlias = Callable[[Answer | BaseException], object]
"""Takes the answer or the error of a request. Nothing reads its inputs or writes its outputs any more."""


class Pending(Protocol):
    """A request that was accepted."""

    def cancel(self) -> object:
        """Give it up; it ends with `CancelledError`, at once or with the batch that it runs in."""


async def awaited(start: Callable[[Ended], Pending]) -> Answer:
    """Start a request and wait for its answer. A cancelled call gives it up."""
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def ended(result: Answer | BaseException) -> None:
        if future.done():
            return
        if isinstance(result, Answer):
            future.set_result(result)
        else:
            future.set_exception(result)

    request = start(ended)
    try:
        return await future
    except asyncio.CancelledError:
        request.cancel()
        raise


class Pieces:
    """A request with more rows than a batch may have; it runs as several, few at a time, so that others get their turn.

    Args:
        inputs: those of the request.
        rows: its rows.
        most: the most rows of a piece.
        at_a_time: how many pieces wait or run at a time.
        queue: queues a piece, which has so many rows.
        ended: called with the request's answer or error, once no piece runs any more.
    """

    def __init__(
        self,
        inputs: Mapping[str, Array],
        rows: int,
        most: int,
        at_a_time: int,
        queue: Callable[[Mapping[str, Array], int, Ended], Pending],
        ended: Ended,
    ) -> None:
        self._inputs, self._rows, self._most, self._queue, self._ended = inputs, rows, most, queue, ended
        self._starts = iter(range(0, rows, most))
        self._active: dict[int, Pending] = {}
        self._answers: dict[int, Answer] = {}
        self._error: BaseException | None = None
        for _ in range(at_a_time):
            self._begin()

    def cancel(self) -> None:
        """Give it up."""
        self._fail(asyncio.CancelledError())

    def _begin(self) -> None:
        at = next(self._starts, None)
        if at is not None:
            piece = {name: array[at : at + self._most] for name, array in self._inputs.items()}
            rows = min(self._most, self._rows - at)
            self._active[at] = self._queue(piece, rows, lambda result: self._piece_ended(at, result))

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error, self._starts = error, iter(range(0))
            for piece in list(self._active.values()):
                piece.cancel()

    def _piece_ended(self, at: int, result: Answer | BaseException) -> None:
        del self._active[at]
        if isinstance(result, Answer):
            self._answers[at] = result
            self._begin()
        else:
            self._fail(result)
        if not self._active and self._inputs:
            self._inputs = {}
            joining = asyncio.get_running_loop().run_in_executor(None, self._joined)
            joining.add_done_callback(lambda joined: self._ended(self._error or joined.result()))

    def _joined(self) -> Answer | BaseException:
        """Return the answer of all pieces, whose outputs are freed."""
        pieces = [answer for _, answer in sorted(self._answers.items())]
        self._answers.clear()
        try:
            outputs = {name: np.concatenate([piece.outputs[name] for piece in pieces]) for name in pieces[0].outputs}
        except Exception as err:  # such as too little memory
            return err
        return Answer(outputs, pieces[-1].device, pieces[-1].times)

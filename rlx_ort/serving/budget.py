"""`Budget`: the bytes that the requests of all clients may take at a time, over REST and gRPC together.

A request's bytes count as they arrive, then the arrays that they become, and its answer until the client has read it.
Where a request finds no room, it is refused, and the requests that have waited longest for their own clients, whose
bodies do not end or whose answers are not read, are given up: slow clients cannot keep others out. gRPC keeps an answer
in memory until its client reads it or goes away, whatever becomes of the call; so these have a part of the budget only.

The processes of a server share one budget: each writes its own row of a table that all of them read.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from rlx_ort.errors import ServingError

T = TypeVar("T")

DEFAULT_BYTES = 1 << 30
_PATIENCE_S = 5.0  # a client that has kept a request waiting for longer may lose it to others
_SMALL_BYTES = 64 << 10
_DECODED_AT_A_TIME = 1  # decoding holds the interpreter lock in turns with the event loop
_HELD, _PEAK, _REFUSED, _ENDED, _MISSING = range(5)  # columns of the table; the last one counts bytes
COLUMNS = 5
"""How many 64-bit numbers of the table belong to each process."""


class Budget:
    """Counts bytes, from any thread; gives each request a `Share`.

    Args:
        most_bytes: the most bytes of all shares, of all processes together.
        table: zeros at first, `COLUMNS` 64-bit integers for each process; None if there is only one.
        place: the row of this process.
    """

    def __init__(self, most_bytes: int = DEFAULT_BYTES, table: memoryview | None = None, place: int = 0) -> None:
        self.most_bytes = most_bytes
        self._table = memoryview(bytearray(8 * COLUMNS)).cast("q") if table is None else table
        self._at = place * COLUMNS
        self._sent_bytes = self._seen_missing = 0
        self._lock = threading.Lock()
        self._waiting: dict[Share, float] = {}  # since when, the oldest first
        self._decoding = asyncio.Semaphore(_DECODED_AT_A_TIME)

    @property
    def held_bytes(self) -> int:
        """The bytes of all shares now."""
        return sum(self._table[_HELD::COLUMNS])

    @property
    def peak_bytes(self) -> int:
        """The most that they have been."""
        return max(self._table[_PEAK::COLUMNS])

    @property
    def refused(self) -> int:
        """How many requests found no room."""
        return sum(self._table[_REFUSED::COLUMNS])

    @property
    def ended(self) -> int:
        """How many requests were given up for others, since they waited for their clients."""
        return sum(self._table[_ENDED::COLUMNS])

    def share_with(self, table: memoryview) -> None:
        """Go on counting in the first row of a table that other processes share."""
        with self._lock:
            table[:COLUMNS] = self._table[:COLUMNS]
            self._table, self._at = table, 0

    def forget(self, place: int) -> None:
        """Take back the bytes of a process that has ended."""
        self._table[place * COLUMNS + _HELD] = 0

    def give_way(self) -> None:
        """End requests that wait for slow clients, if requests of other processes found no room since the last call."""
        with self._lock:
            missing = sum(self._table[_MISSING::COLUMNS]) - self._table[self._at + _MISSING]
            self._end_slow(missing - self._seen_missing)
            self._seen_missing = missing

    def _change(self, share: Share, total: int) -> None:
        table, held = self._table, self._at + _HELD
        with self._lock:
            grown = total - share.bytes
            table[held] += grown  # before others are asked: two processes never take the same room
            after = self.held_bytes
            if grown <= 0 or after <= self.most_bytes:
                share.bytes = total
                if after > table[self._at + _PEAK]:
                    table[self._at + _PEAK] = after
                return
            table[held] -= grown
            table[self._at + _REFUSED] += 1
            table[self._at + _MISSING] += after - self.most_bytes
            self._end_slow(after - self.most_bytes, share)
        raise _refusal(
            f"the request takes {total} bytes, and those of all clients may take {self.most_bytes}; try again later"
        )

    def _end_slow(self, missing: int, but: Share | None = None) -> None:
        """End requests that have waited long for their clients, the oldest first, until so many bytes become free."""
        now_s = time.monotonic()
        for slow, since_s in list(self._waiting.items()):
            if missing <= 0 or now_s - since_s < _PATIENCE_S:
                break
            if slow is not but:
                del self._waiting[slow]
                self._table[self._at + _ENDED] += 1
                missing -= slow.bytes
                slow.end(_refusal("the client was too slow while others were waiting for memory; try again later"))

    def _send(self, share: Share) -> None:
        with self._lock:
            if self._sent_bytes + share.bytes > self.most_bytes // 2:
                self._table[self._at + _REFUSED] += 1
                raise _refusal("the answers that other clients have not read take too much memory; try again later")
            share.sent_bytes = share.bytes
            self._sent_bytes += share.bytes

    def _sent(self, share: Share) -> None:
        with self._lock:
            self._sent_bytes -= share.sent_bytes
            share.sent_bytes = 0

    async def decoded(self, decode: Callable[[], T]) -> T:
        """Return the result of a call in a thread; few run at a time, so that the event loop gets its turns."""
        async with self._decoding:
            return await asyncio.to_thread(decode)


class Share:
    """The share of one request in a budget. It belongs to the task that answers the request."""

    __slots__ = ("_budget", "_end", "bytes", "ended", "sent_bytes")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.bytes = 0
        self.ended: ServingError | None = None
        self._end: Callable[[ServingError], object] | None = None
        self.sent_bytes = 0

    def take(self, count: int) -> None:
        """Take more bytes.

        Raises:
            ServingError: there is no room for them; those taken before stay taken.
        """
        self._budget._change(self, self.bytes + count)

    def keep(self, total: int) -> None:
        """Hold so many bytes in all.

        Raises:
            ServingError: these are more than before, and there is no room for them.
        """
        self._budget._change(self, total)

    def close(self) -> None:
        """Give everything back."""
        self._goes_on()
        self._budget._sent(self)
        self._budget._change(self, 0)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark that the task waits for the request's client; others that find no room may end this wait.

        Raises:
            ServingError: the wait was ended.
        """
        task, loop = cast("asyncio.Task[Any]", asyncio.current_task()), asyncio.get_running_loop()
        self._end = lambda error: loop.call_soon_threadsafe(self._cancel, task, error)
        self._budget._waiting[self] = time.monotonic()
        try:
            yield
        except asyncio.CancelledError:
            if self.ended is None:
                raise
            task.uncancel()
            raise self.ended from None
        finally:
            self._goes_on()

    def sending(self) -> None:
        """Mark that the task's answer is being sent until `close` by a library that gives up no answer.

        Such answers take half of the budget at most, so that clients who read none do not keep all others out. Small
        ones are not counted for that.

        Raises:
            ServingError: there is no room for it.
        """
        if self.bytes > _SMALL_BYTES:
            self._budget._send(self)

    def end(self, error: ServingError) -> None:
        """End the wait for the client with an error; from any thread."""
        end = self._end
        if end is not None:
            end(error)

    def _goes_on(self) -> None:
        self._end = None
        self._budget._waiting.pop(self, None)

    def _cancel(self, task: asyncio.Task[Any], error: ServingError) -> None:
        if self._end is not None:  # else the client has come meanwhile
            self.ended = error
            task.cancel()


def _refusal(message: str) -> ServingError:
    return ServingError(message, 503, retry_after_s=1.0)

"""A request and its answer over HTTP, as ASGI servers exchange them: headers, refusals, clients that went away."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, TypeAlias, cast

from rlx_ort.errors import ServingError
from rlx_ort.serving.budget import Share

Scope: TypeAlias = MutableMapping[str, Any]
"""What an ASGI server says of a connection or a request."""
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application."""

READ_INTO = "rlx_ort.read_into"
"""The extension of a request's scope that reads its body into memory of that size, where the server has it.

It is called with the memory, and a function that gets the number of bytes as they arrive.
"""
ABORT = "rlx_ort.abort"
"""The extension of a request's scope that ends its connection, where the server has it.

Such a server takes parts of an answer that are no `bytes`, and holds none of them once it takes the next one.
"""
UNSENT = "rlx_ort.unsent"
"""The extension of a request's scope that returns how many bytes the server holds that are not sent."""
_SMALL_BYTES = 64 << 10
_SENT_BYTES = 1 << 20  # at a time; a client must read so much within the time that it may leave an answer unread
_WATCHED_FROM_S = 0.05  # a request that takes longer is given up when its client goes away
LINGER_S, LINGER_BYTES = 1.0, 16 << 20  # how long a refused body is still read, so that its client sees the answer


class ClientGoneError(Exception):
    """The client closed its connection."""


class Request:
    """A request as an ASGI server hands it over; of headers that are repeated, the last one counts.

    In a front, `held` has where its body lies in the front's shared memory, and `shared` where its answer lies in that
    of the server's process.
    """

    __slots__ = ("headers", "held", "is_read", "model", "receive", "scope", "share", "shared", "version")

    def __init__(self, scope: Scope, receive: Receive, share: Share) -> None:
        self.scope, self.receive, self.share = scope, receive, share
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.model = self.version = ""
        self.is_read = False
        self.held: list[int] = []
        self.shared: list[int] = []

    def header(self, name: bytes) -> str:
        """Return a header, named in lower case; empty if it is not there."""
        return self.headers.get(name, b"").decode("latin-1")

    def once(self, name: bytes) -> str | None:
        """Return a header that may be there once, or None.

        Raises:
            ServingError: it is there twice.
        """
        found = self.headers.get(name)
        if found is None:
            return None
        repeats = len(self.headers) != len(self.scope["headers"])
        if repeats and [key for key, _ in self.scope["headers"]].count(name) > 1:
            raise ServingError(f"the header {name.decode()} occurs twice", 400)
        return found.decode("latin-1")


class Reply:
    """An answer: its status, the parts of its body, and its headers."""

    __slots__ = ("headers", "parts", "status")

    def __init__(
        self,
        body: bytes | Sequence[bytes | memoryview],
        status: int = 200,
        media_type: bytes = b"application/json",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self.status = status
        self.parts = (body,) if isinstance(body, bytes) else body
        size = sum(map(len, self.parts))
        self.headers = [*headers, (b"content-length", b"%d" % size), (b"content-type", media_type)]

    async def send(self, request: Request, send: Send) -> None:
        """Send it, so that nothing holds a large part any more; a refusal overrides this."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        if sum(map(len, self.parts)) <= _SMALL_BYTES:
            for at, part in enumerate(self.parts, 1):
                await send({"type": "http.response.body", "body": part, "more_body": at < len(self.parts)})
            return
        extensions = request.scope.get("extensions", {})
        copied = memoryview if ABORT in extensions else bytes
        try:
            with request.share.waiting():
                for part in [memoryview(each) for each in self.parts]:
                    for start in range(0, len(part), _SENT_BYTES):
                        piece = copied(part[start : start + _SENT_BYTES])
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if ABORT in extensions and extensions[UNSENT]():  # whose memory others may write from now on
                extensions[ABORT]()


class Refusal(Reply):
    """An error in the protocol's form. If the body was not read, it is dropped and the connection closed."""

    def __init__(
        self, status: int, text: str, headers: Sequence[tuple[bytes, bytes]] = (), *, retry_after_s: int = 1
    ) -> None:
        extra = [(b"retry-after", b"%d" % retry_after_s)] if status in (429, 503) else []
        extra += [(b"www-authenticate", b"Bearer")] if status == 401 else []
        super().__init__(json.dumps({"error": text}).encode(), status, headers=[*extra, *headers])

    async def send(self, request: Request, send: Send) -> None:
        """Send the answer at once; then give the client a moment to see it before the connection is closed."""
        headers = request.headers
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        if request.is_read or not has_body:
            await super().send(request, send)
            return
        start = [*self.headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status, "headers": start})
        await send({"type": "http.response.body", "body": self.parts[0], "more_body": True})
        if b"expect" not in headers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    left, more = LINGER_BYTES, True
                    while more and left > 0:
                        message = await request.receive()
                        left -= len(message.get("body", b""))
                        more = message.get("more_body", False)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Watch:
    """Gives up the requests whose clients went away.

    A request is watched from the second tick on of one timer for all: a timer for each takes a tenth of the server's
    time.
    """

    def __init__(self) -> None:
        self._new: dict[asyncio.Task[Any], Request] = {}
        self._older: dict[asyncio.Task[Any], Request] = {}
        self._watchers: dict[asyncio.Task[Any], asyncio.Task[None]] = {}
        self._ticks = False

    async def unless_gone(self, request: Request, running: Awaitable[Any]) -> Any:
        """Return the result that a request waits for; when its client goes away, the call is cancelled."""
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._new[task] = request
        if not self._ticks:
            self._ticks = True
            asyncio.get_running_loop().call_later(_WATCHED_FROM_S, self._tick)
        try:
            return await running
        except asyncio.CancelledError:
            watcher = self._watchers.get(task)
            if watcher is None or not watcher.done():
                raise
            task.uncancel()
            raise ClientGoneError from None
        finally:
            if self._new.pop(task, None) is None and self._older.pop(task, None) is None:
                self._watchers.pop(task).cancel()

    def _tick(self) -> None:
        for task, request in self._older.items():
            self._watchers[task] = watcher = asyncio.ensure_future(_disconnected(request))
            watcher.add_done_callback(functools.partial(self._gone, task))
        self._older, self._new = self._new, {}
        self._ticks = bool(self._older)
        if self._ticks:
            asyncio.get_running_loop().call_later(_WATCHED_FROM_S, self._tick)

    def _gone(self, task: asyncio.Task[Any], watcher: asyncio.Task[None]) -> None:
        if self._watchers.get(task) is watcher:  # else the request has its answer meanwhile
            task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

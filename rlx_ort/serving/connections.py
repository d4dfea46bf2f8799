"""HTTP connections with limits that uvicorn lacks: slow clients, long heads, and more connections than are served."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rlx_ort.errors import ServingError
from rlx_ort.serving.exchange import ABORT, LINGER_BYTES, LINGER_S, READ_INTO, UNSENT, Application, ClientGoneError
from rlx_ort.serving.options import ConnectionLimits

_SWEEP_TICKS = 5  # uvicorn ticks ten times a second
_PATIENCE_S = 0.5  # a client that is waited for for longer may lose its connection to another one
_READ_BYTES = 64 << 10  # at a time, of anything but a body that is read into memory of its own
_MOST_PIPELINED = 16
_JOINED_BYTES = 64 << 10  # copying more takes longer than another call


class _HeadFirst:
    """A transport for one answer: its head is sent together with the first part of its body, in one call."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._head = b""
        self._is_held = False
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if not self._is_held:
            self._head, self._is_held = data, True
            return
        head, self._head = self._head, b""
        if head and len(data) <= _JOINED_BYTES:
            data = head + data
        elif head:
            self._transport.write(head)
        self._transport.write(data)

    def close(self) -> None:
        if self._head:
            self._transport.write(self._head)
        self._transport.close()


class LimitedProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):
    """A connection of uvicorn that counts the bytes that it receives; `LimitedServer` closes it when it is too slow.

    The system writes a body straight into the memory that the application has for it; the parser does not see it then.
    """

    limits = ConnectionLimits()
    passed_on: Callable[[Any, int], bool] | None = None
    arrived = memoryview(b"")
    """Where the connections of a server receive: each uses its bytes before the next one receives."""

    def connection_made(self, transport: Any) -> None:
        """Make room by closing the connection that has been idle longest, else the one with the slowest client.

        A connection that another process takes is none of this one.
        """
        if self.passed_on is not None and self.passed_on(transport, len(self.connections)):
            return
        super().connection_made(transport)
        if transport.get_extra_info("sslcontext") is None:  # TLS has copies of its own
            transport.set_write_buffer_limits(high=0)  # whoever waits for room waits until the transport holds nothing
        self._body_left: int | None = None  # bytes of the body that the parser does not see
        self._room: memoryview | None = None  # where they go; None if nobody reads them
        self._count: Callable[[int], object] = int
        self._whole: asyncio.Future[None] | None = None  # done with the body, or without its client
        self._since_s = self.loop.time()
        self._in_head = True
        self._begun = False
        self._body_bytes = self._other_bytes = 0
        self._stalled_since_s: float | None = None
        self._dropped_bytes: int | None = None  # that came after a refusal
        if len(self.connections) > self.limits.most:
            # Those that were aborted stay listed until the next turn of the loop, and are not ended again.
            live = [
                other
                for other in self.connections
                if isinstance(other, LimitedProtocol) and not other.transport.is_closing()
            ]
            if len(live) > self.limits.most:
                rates = {other: other._client_rate(self._since_s) for other in live if other is not self}
                others = [other for other, rate in rates.items() if rate is not None]
                min(others, key=lambda other: (rates[other], other._since_s), default=self).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait for the client."""
        if self.transport is not None:
            super().connection_lost(exc)
            self._end_read()

    @property
    def _is_waiting(self) -> bool:
        """Whether no request is being read or answered."""
        return self._in_head and (self.cycle is None or self.cycle.response_complete)

    def _client_rate(self, now_s: float) -> float | None:
        """Return the bytes a second of a client that is waited for, -1 without a request; None if it need not wait."""
        if self._dropped_bytes is not None or (self._is_waiting and not self._begun):
            return -1.0
        if self._stalled_since_s is not None:
            return 0.0 if now_s - self._stalled_since_s > _PATIENCE_S else None
        if self._is_read or now_s - self._since_s < _PATIENCE_S:
            return None
        return self._body_bytes / (now_s - self._since_s)

    @property
    def _is_read(self) -> bool:
        """Whether there is no request that has not arrived completely."""
        return self._in_head and not self._begun

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go; those behind a body are of another request."""
        return self.arrived[: self._body_left] if self._room is None else self._room

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes that have arrived."""
        if self._body_left is None:
            self.data_received(self.arrived[:nbytes])  # type: ignore[arg-type]  # the parser takes any buffer
            return
        self._body_bytes += nbytes
        self._body_left -= nbytes
        if self._room is not None:
            self._room = self._room[nbytes:]
            try:
                self._count(nbytes)
            except ServingError as err:
                self._end_read(err)
        if not self._body_left:
            self._body_left = self._room = None
            self.parser = httptools.HttpRequestParser(self)  # the old one waits for the body
            with contextlib.suppress(AttributeError):  # as in uvicorn
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.on_message_complete()
            self._end_read()

    async def _read_into(self, cycle: Any, room: memoryview, count: Callable[[int], object]) -> None:
        """Read the body of a request into memory of its size; once this returns or raises, nothing writes there.

        Args:
            cycle: the request.
            room: the memory.
            count: called with the number of bytes as they arrive; an error of it ends the call.

        Raises:
            ClientGoneError: the client is gone, or too slow.
        """
        if cycle.disconnected:
            raise ClientGoneError
        begun, cycle.body = cycle.body, bytearray()
        room[: len(begun)] = begun
        count(len(begun))
        cycle.message_event.clear()
        if not cycle.more_body:
            return
        self._room, self._body_left, self._count = room[len(begun) :], len(room) - len(begun), count
        self._whole = self.loop.create_future()
        self.flow.resume_reading()
        try:
            await self._whole
        finally:
            self._room = None
        if cycle.disconnected:
            raise ClientGoneError
        cycle.message_event.clear()

    def _end_read(self, error: ServingError | None = None) -> None:
        self._room = None
        if self._whole is not None and not self._whole.done():
            if error is None:
                self._whole.set_result(None)
            else:
                self._whole.set_exception(error)

    def data_received(self, data: bytes) -> None:
        """Count bytes that belong to no body; a head, chunk extensions or trailers without end are refused."""
        if self._dropped_bytes is not None:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > LINGER_BYTES:
                self.transport.close()
            return
        self._other_bytes += len(data)
        super().data_received(data)
        if self._other_bytes > self.limits.head_bytes and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large", "the headers are too large")

    def on_message_begin(self) -> None:
        """Start the time of the head."""
        super().on_message_begin()
        self._since_s = self.loop.time()
        self._in_head = self._begun = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; a trailer behind a body is none, as it was not there when the caller was checked."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the time of the body."""
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise ValueError("too many requests before an answer")  # the parser's error, answered with status 400
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.limits.head_bytes:
            raise ValueError("the headers are too large")
        self._other_bytes = self._body_bytes = 0
        self._since_s = self.loop.time()
        self._in_head = False
        super().on_headers_complete()
        extensions: dict[str, Any] = {ABORT: self.transport.abort, UNSENT: self.transport.get_write_buffer_size}
        if not (self.cycle.waiting_for_100_continue or self.parser.should_upgrade()):
            extensions[READ_INTO] = functools.partial(self._read_into, self.cycle)
        self.scope["extensions"] = extensions
        if not self.cycle.waiting_for_100_continue and self.scope["method"] != "HEAD":  # nothing else is before a body
            self.cycle.transport = _HeadFirst(self.transport)  # type: ignore[assignment]  # has the methods that uvicorn calls

    def on_body(self, body: bytes) -> None:
        """Count the body."""
        self._other_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Wait for the next request."""
        self._other_bytes = 0
        self._in_head, self._begun = True, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the time without a request."""
        if not self._begun:
            self._since_s = self.loop.time()
        self.server_state.total_requests += 1
        if not self.transport.is_closing():  # as in uvicorn, without its timer: `end_if_slow` ends idle connections
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())

    def pause_writing(self) -> None:
        """Start the time that the client leaves the answer unread."""
        self._stalled_since_s = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Go on."""
        self._stalled_since_s = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is no HTTP in the protocol's form."""
        self._refuse(b"400 Bad Request", "this is not a valid HTTP request")

    def end_if_slow(self, now_s: float) -> None:
        """Close the connection if its client takes too long."""
        limits, waited_s = self.limits, now_s - self._since_s
        if self._stalled_since_s is not None and now_s - self._stalled_since_s > limits.write_s:
            self.transport.abort()
        elif self.transport.is_closing() or self.flow.read_paused:
            return
        elif self._dropped_bytes is not None:
            if waited_s > LINGER_S:
                self.transport.close()
        elif not self._in_head:
            if waited_s > limits.body_s + self._body_bytes / limits.body_rate:
                self._refuse(b"408 Request Timeout", "the body came too slowly")
        elif self._begun:
            if waited_s > limits.head_s:
                self._refuse(b"408 Request Timeout", "the headers came too slowly")
        elif self._is_waiting and waited_s > limits.idle_s:
            self.transport.close()

    def end_if_incomplete(self) -> None:
        """Close the connection if a request is being read, since the server ends."""
        if not self.transport.is_closing() and not self._is_read:
            self._refuse(b"503 Service Unavailable", "the server is shutting down")

    def _refuse(self, status: bytes, text: str) -> None:
        """Send an error, and close the connection once the client has had a moment to read it.

        A client that is still sending would be answered with a reset if the connection closed at once, and Windows
        then drops the bytes that the client has not read yet.
        """
        if self._dropped_bytes is not None:
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = b'{"error": "%s"}' % text.encode()
            self.transport.write(
                b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
                % (status, len(body), body)
            )
        if self.pipeline:  # an earlier request is still being answered
            self.transport.close()
            return
        self._dropped_bytes, self._since_s = 0, self.loop.time()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._body_left = None
        self._end_read()
        if self.transport.can_write_eof():  # not by TLS
            self.transport.write_eof()
        self.flow.resume_reading()


class LimitedServer(uvicorn.Server):
    """A server of such connections that leaves signals to its host.

    Args:
        app: the application.
        limits: of each connection.
        drain_s: how long accepted requests may take once the server ends, in seconds.
        passed_on: asked with the transport of each new connection, and the number of those that are open, whether
            another process has taken it.
        on_tick: called ten times a second.
        place: settings of uvicorn that say where to listen.
    """

    def __init__(
        self,
        app: Application,
        limits: ConnectionLimits,
        drain_s: float,
        *,
        passed_on: Callable[[Any, int], bool] | None = None,
        on_tick: Callable[[], object] = lambda: None,
        **place: Any,
    ) -> None:
        settings = {
            "limits": limits,
            "passed_on": None if passed_on is None else staticmethod(passed_on),
            "arrived": memoryview(bytearray(_READ_BYTES)),
        }
        config = uvicorn.Config(
            app,
            http=type("LimitedProtocol", (LimitedProtocol,), settings),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # each malformed request would be a warning
            access_log=False,
            proxy_headers=False,
            timeout_graceful_shutdown=round(drain_s),
            server_header=False,
            **place,
        )
        super().__init__(config)
        self._on_tick = on_tick

    def protocol(self) -> asyncio.Protocol:
        """Return a connection of the server, which is to be given its transport."""
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn does
            config=self.config, server_state=self.server_state, app_state={}
        )
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests; those that are not complete soon are refused."""
        ending = asyncio.ensure_future(self._end_incomplete())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_incomplete(self) -> None:
        limited = [each for each in self.server_state.connections if isinstance(each, LimitedProtocol)]
        await asyncio.sleep(max((each.limits.ending_s for each in limited), default=0.0))
        for connection in limited:
            connection.end_if_incomplete()

    async def on_tick(self, counter: int) -> bool:
        """Close slow connections twice a second."""
        self._on_tick()
        if counter % _SWEEP_TICKS == 0:
            now_s = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, LimitedProtocol):
                    connection.end_if_slow(now_s)
        return await super().on_tick(counter)

"""`Fronts`: the front processes of a server, which read requests and write answers beside its own event loop.

One interpreter reads and answers a few thousand requests a second, fewer with large tensors. So on machines with enough
cores, connections beyond the first few are passed on to fronts (`front.py`), which send the tensors of requests here:
the models, their queues and batches, and the budget of memory are those of one server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import IO, Any, cast

from rlx_ort.serving.budget import COLUMNS
from rlx_ort.serving.channel import Answered, Channel, Tensors, shared_memory
from rlx_ort.serving.front import FrontSettings
from rlx_ort.serving.lanes import Answer, Place
from rlx_ort.serving.options import ConnectionLimits, HttpOptions
from rlx_ort.serving.pending import Pending
from rlx_ort.serving.protocol import Array, InferRequest, WantedOutput
from rlx_ort.serving.repository import Repository
from rlx_ort.serving.rest import create_app

_OWN = 2  # connections that the server keeps, so that requests of few clients need no other process
_MEMORY_BYTES = 128 << 20  # each way; tensors that find no room there are sent over the socket
_STARTING_S, _ENDING_S = 30.0, 5.0
_COMMAND = "import sys; sys.path[:] = {!r}; from rlx_ort.serving.front import main; main()"
_log = logging.getLogger(__name__)


class Fronts:
    """The front processes of a server.

    Args:
        repository: answers their requests.
        http: the clients' rights and limits.
        limits: of connections; the fronts share the number of open ones.
        drain_s: how long accepted requests may take once the server ends, in seconds.
        count: how many there are.
    """

    def __init__(
        self, repository: Repository, http: HttpOptions, limits: ConnectionLimits, drain_s: float, count: int
    ) -> None:
        self._repository, self._drain_s = repository, drain_s
        self._app = create_app(repository, replace(http, access_log=False, traces=False), load=False)
        self._fronts: list[_Front] = []
        self._starting: asyncio.Future[Any] | None = None
        size = 8 * COLUMNS * (count + 1)
        table, key = shared_memory(size)
        repository.budget.share_with(memoryview(table).cast("q"))
        limits = replace(limits, most=max((limits.most - _OWN) // count, 1))
        most_held = repository.budget.most_bytes
        self._settings = [
            FrontSettings(place, http, limits, drain_s, most_held, (size, key)) for place in range(1, count + 1)
        ]

    async def start(self) -> None:
        """Start the processes and wait until they serve; one that does not is left out."""
        self._starting = asyncio.gather(*map(self._start, self._settings))
        await self._starting

    async def _start(self, settings: FrontSettings) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_STARTING_S):
                front = await asyncio.to_thread(_Front, settings)

                async def answered(name: str, values: Sequence[Any], tensors: dict[str, Array]) -> tuple[Any, Tensors]:
                    return await self._answered(front, name, values, tensors)

                def lost() -> None:
                    front.lost.set()
                    self._repository.budget.forget(settings.place)
                    loop.run_in_executor(None, front.close)
                    if not front.ends:
                        _log.error("a front process has ended; its connections are lost, and it gets no others")

                front.channel = Channel(answered, front.written, front.read, lost, self._begin)
                self._fronts.append(front)
                await loop.connect_accepted_socket(lambda: front.channel, front.link)
                await front.ready.wait()
        except (OSError, TimeoutError) as err:
            _log.error("a front process cannot be started: %s", err or f"it takes longer than {_STARTING_S:g} s")

    async def _answered(
        self, front: _Front, name: str, values: Sequence[Any], tensors: dict[str, Array]
    ) -> tuple[Any, Tensors]:
        if name == "find":
            self._repository.find(*values)
        elif name == "answer":
            return await self._replied(*values), {}
        elif name == "connections":
            (front.connections,) = values
        elif name == "ready":
            front.ready.set()
        return None, {}

    def _begin(self, values: Sequence[Any], inputs: dict[str, Array], place: Place, answered: Answered) -> Pending:
        name, version, wanted, priority, timeout_s = values
        model = self._repository.find(name, version)
        outputs = None if wanted is None else tuple(map(WantedOutput, wanted))

        def ended(result: Answer | BaseException) -> None:
            if isinstance(result, BaseException):
                answered(result)
                return
            times = result.times
            spans = (times.queue_ns, times.input_ns, times.infer_ns, times.output_ns)
            answered(((model.version, result.device.label, spans), result.outputs))

        return model.start(InferRequest(inputs, outputs, priority=priority, timeout_s=timeout_s), ended, place)

    async def _replied(
        self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Return the status, the headers and the body that the application answers a request with."""
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        await self._app(scope, receive, send)
        start, *parts = sent
        return start["status"], start["headers"], b"".join([part["body"] for part in parts])

    def pass_on(self, transport: asyncio.Transport, kept: int) -> bool:
        """Give a new connection to the front that has the fewest; return whether it is not the server's any more.

        Args:
            transport: the connection, of which nothing was read.
            kept: how many connections the server itself has.
        """
        fronts = [front for front in self._fronts if front.ready.is_set() and not front.lost.is_set()]
        if kept < _OWN or not fronts or transport.get_extra_info("sslcontext") is not None:
            return False
        front = min(fronts, key=lambda front: front.connections)
        connection = transport.get_extra_info("socket")
        if not front.take(connection):
            return False
        front.connections += 1
        if sys.platform == "win32":
            connection._sock.close()  # or else the transport would shut it down, also for the front
        transport.abort()
        return True

    async def end(self) -> None:
        """Let the fronts answer the requests that they have accepted, and end."""
        if self._starting is not None:
            await asyncio.wait([self._starting])
        fronts = self._fronts
        for front in fronts:
            front.ends = True
            front.channel.tell("end")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s + _ENDING_S):
                await asyncio.gather(*(front.lost.wait() for front in fronts))
        await asyncio.gather(*(asyncio.to_thread(front.close) for front in fronts))


class _Front:
    """A front process, as the server sees it; making it takes as long as starting Python.

    Raises:
        OSError: it cannot be started.
    """

    channel: Channel

    def __init__(self, settings: FrontSettings) -> None:
        self.ready, self.lost = asyncio.Event(), asyncio.Event()
        self.connections, self.ends = 0, False
        (written, key), (read, other_key) = shared_memory(_MEMORY_BYTES), shared_memory(_MEMORY_BYTES)
        self.written, self.read = memoryview(written), memoryview(read).toreadonly()
        self.link, theirs = socket.socketpair()
        self.link.setblocking(False)
        inherited, given = [each for each in (settings.table[1], key, other_key) if isinstance(each, int)], [theirs]
        if sys.platform != "win32":
            self._passing, passed = socket.socketpair()
            self._passing.setblocking(False)
            given.append(passed)
            inherited += [each.fileno() for each in given]
            settings = replace(settings, channel=theirs.fileno(), connections=passed.fileno())
        self._process = subprocess.Popen(  # noqa: S603  # this Python, with a program of our own
            [sys.executable, "-c", _COMMAND.format(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=inherited,
            start_new_session=True,  # signals of a terminal are the server's
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),  # and a console that closes
        )
        stdin, self._stdout = cast("tuple[IO[bytes], IO[bytes]]", (self._process.stdin, self._process.stdout))
        if not (line := self._stdout.readline()):
            raise OSError(f"it ended with code {self._process.wait()}; its error is above")
        self._process_id = int(line)
        if sys.platform == "win32":
            settings = replace(settings, channel=theirs.share(self._process_id))
        with stdin:
            pickle.dump(replace(settings, written=(_MEMORY_BYTES, key), own=(_MEMORY_BYTES, other_key)), stdin)
        for each in given:
            each.close()
        for descriptor in (key, other_key):
            if isinstance(descriptor, int):
                os.close(descriptor)

    def take(self, connection: socket.socket) -> bool:
        """Give the process a connection; return whether it has it."""
        with contextlib.suppress(OSError):
            if sys.platform == "win32":
                with connection.dup() as copy:
                    self.channel.tell("connection", copy.share(self._process_id))
            else:
                socket.send_fds(self._passing, [b"0"], [connection.fileno()])
            return True
        return False

    def close(self) -> None:
        """Wait for the process, and end it if it takes long."""
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if sys.platform != "win32":
            self._passing.close()
        self._stdout.close()

"""A front process of a server: it reads requests and writes answers; the models run in the process that started it.

HTTP and the copies of large tensors, which take most of the interpreter's time, are done here, beside other fronts. A
request's tensors go to the server's process, which puts those of all fronts together; a request that is no inference is
answered there altogether.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlx_ort.serving import access, tracing
from rlx_ort.serving.budget import Budget
from rlx_ort.serving.channel import LABELS, Channel, shared_memory
from rlx_ort.serving.connections import LimitedServer
from rlx_ort.serving.exchange import Reply, Request
from rlx_ort.serving.lanes import Answer, Times
from rlx_ort.serving.options import ENDING, SWITCH_S, ConnectionLimits, HttpOptions
from rlx_ort.serving.rest import ALIGNMENT, Rest, seen

if TYPE_CHECKING:
    from rlx_ort.serving.protocol import Array, InferRequest

_MOST_SOCKETS = 64  # that are taken in one call
_MOST_ROOM = 4 << 20  # a body beyond it is copied to shared memory once it is complete; its client may be slow


@dataclass(frozen=True)
class FrontSettings:
    """What a front needs of the process that starts it.

    Attributes:
        place: its row of the budget's table.
        http: the clients' rights and limits.
        limits: of each connection, and how many this front may have.
        drain_s: how long accepted requests may take at the end, in seconds.
        most_held_bytes: the budget of all processes.
        table: the size in bytes and the key of the budget's table.
        written, own: those of the memory that the server writes, and of the one that the front writes.
        channel: the socket of the channel: a descriptor, or the bytes that `socket.fromshare` takes.
        connections: the descriptor of the socket that brings connections; None if the channel does.
    """

    place: int
    http: HttpOptions
    limits: ConnectionLimits
    drain_s: float
    most_held_bytes: int
    table: tuple[int, int | str]
    written: tuple[int, int | str] = (0, 0)
    own: tuple[int, int | str] = (0, 0)
    channel: int | bytes = 0
    connections: int | None = None


class _FrontRest(Rest):
    """The application of a front."""

    def __init__(self, channel: Channel, budget: Budget, options: HttpOptions) -> None:
        repository: Any = SimpleNamespace(budget=budget)  # its models are in the server's process
        super().__init__(repository, options, load=False, close=False)
        self._channel = channel
        self._known: set[tuple[str, str]] = set()
        for paths in (self._paths, self._of_models, self._of_repository):
            for path, (method, _) in paths.items():
                if path not in ("/", "/v2/health/live", "infer"):
                    paths[path] = (method, self._forwarded)

    async def _infer(self, request: Request) -> Reply:
        asked = (request.model, request.version)
        if asked not in self._known:  # one that is not there is refused before the body is read
            await self._channel.ask("find", *asked)
            self._known.add(asked)
        return await super()._infer(request)

    def _model(self, request: Request) -> Any:
        return None

    async def _run(self, request: Request, wanted: InferRequest) -> tuple[Any, Answer]:
        begun_ns = time.perf_counter_ns()
        outputs = None if wanted.outputs is None else tuple([output.name for output in wanted.outputs])
        inputs, wanted.inputs = wanted.inputs, {}
        held, request.held = request.held, []
        running = self._channel.ask(
            "infer",
            *(request.model, request.version, outputs, wanted.priority, wanted.timeout_s),
            tensors=inputs,
            held=held,
            shared=request.shared,
        )
        del inputs  # they are in shared memory once the call begins
        (version, label, times), tensors = await running
        device: Any = SimpleNamespace(label=label)  # its kind may be known to the server's process only
        answer = Answer(tensors, device, Times(*times))
        tracing.add_phases(request.model, version, answer, begun_ns)
        types = {name: LABELS[array.dtype] for name, array in tensors.items()}
        return SimpleNamespace(name=request.model, version=version, output_types=types), answer

    def _room(self, request: Request, size: int, header_bytes: int) -> memoryview:
        start, arena = -header_bytes % ALIGNMENT, self._channel.arena
        if size > _MOST_ROOM or (at := arena.take(start + size)) is None:
            return super()._room(request, size, header_bytes)
        request.held.append(at)
        return arena.memory[at + start : at + start + size]

    def _end(self, request: Request) -> None:
        for at in request.held:
            self._channel.arena.give_back(at)
        self._channel.give_back(request.shared)

    async def _forwarded(self, request: Request) -> Reply:
        """Let the server's process answer a whole request."""
        method, path = request.scope["method"], request.scope["path"]
        body = bytes(await self._body(request)) if method == "POST" else b""  # not compressed any more
        headers = [(name, value) for name, value in request.scope["headers"] if name != b"content-encoding"]
        (status, headers, sent), _ = await self._channel.ask("answer", method, path, headers, body)
        reply = Reply(sent, status)
        reply.headers = headers
        return reply


async def _served(settings: FrontSettings) -> None:
    """Serve the connections that the server's process passes on, until it says that the server ends, or has ended."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    taking = set[asyncio.Task[Any]]()

    def take(connection: socket.socket) -> None:
        connection.setblocking(False)
        task = asyncio.ensure_future(loop.connect_accepted_socket(server.protocol, connection))
        taking.add(task)
        task.add_done_callback(taking.discard)

    async def handle(name: str, values: Sequence[Any], tensors: dict[str, Array]) -> tuple[None, dict[str, Array]]:
        if name == "connection":
            take(_shared(values[0]))
        elif name == "end":
            ended.set()
        return None, {}

    table, written, own = (
        memoryview(shared_memory(*each)[0]) for each in (settings.table, settings.written, settings.own)
    )
    channel = Channel(handle, own, written.toreadonly(), on_lost=ended.set)
    budget = Budget(settings.most_held_bytes, table.cast("q"), settings.place)
    counted = 0

    def tick() -> None:
        nonlocal counted
        budget.give_way()
        if (count := len(server.server_state.connections)) != counted:
            channel.tell("connections", counted := count)

    app = seen(_FrontRest(channel, budget, settings.http), settings.http)
    server = LimitedServer(app, settings.limits, settings.drain_s, on_tick=tick)
    serving = asyncio.create_task(server.serve(sockets=[]))
    link = _shared(settings.channel) if isinstance(settings.channel, bytes) else socket.socket(fileno=settings.channel)
    link.setblocking(False)
    await loop.connect_accepted_socket(lambda: channel, link)
    if sys.platform != "win32" and settings.connections is not None:
        connections = socket.socket(fileno=settings.connections)
        connections.setblocking(False)

        def arrived() -> None:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                _, descriptors, *_ = socket.recv_fds(connections, _MOST_SOCKETS, _MOST_SOCKETS)
                for descriptor in descriptors:
                    take(socket.socket(fileno=descriptor))

        loop.add_reader(connections, arrived)
    channel.tell("ready")
    await ended.wait()
    if settings.connections is not None:
        loop.remove_reader(settings.connections)
    await asyncio.gather(*taking, return_exceptions=True)
    server.should_exit = True
    await serving
    channel.close()


def _shared(data: bytes) -> socket.socket:
    if sys.platform != "win32":
        raise OSError("sockets are shared as bytes on Windows only")
    return socket.fromshare(data)


def main() -> None:
    """Run a front; its settings come over the standard input, once it has written its process id."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)  # the server's process says when it ends
    sys.setswitchinterval(SWITCH_S)
    sys.stdout.write(f"{os.getpid()}\n")  # in Windows' environments, the process that was started is a launcher
    sys.stdout.flush()
    settings: FrontSettings = pickle.load(sys.stdin.buffer)  # noqa: S301  # of the process that started this one
    if settings.http.access_log:
        access.to_stderr()
    if settings.http.traces:
        tracing.export_spans()
    gc.freeze()
    asyncio.run(_served(settings))

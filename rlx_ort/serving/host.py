"""Hosts the REST application on uvicorn and the gRPC servicer on `grpc.aio` in one event loop; a signal drains both."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import logging
import signal
import ssl
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx_ort.errors import ServingError
from rlx_ort.serving.history import usable_cores
from rlx_ort.serving.options import ENDING, ConnectionLimits, HttpOptions
from rlx_ort.serving.repository import Repository
from rlx_ort.serving.rest import create_app
from rlx_ort.storage import read_regular

if TYPE_CHECKING:
    import grpc

    from rlx_ort.serving.connections import LimitedServer
    from rlx_ort.serving.fronts import Fronts
    from rlx_ort.serving.rpc import Servicer

_DRAIN_S = 30
_GRPC_WAITS_S = 0.5
_GRPC_ENDS_S = 0.2
_MOST_FRONTS, _CORES_A_FRONT = 4, 4
_SELDOM_S, _MOST_MESSAGES = 10.0, 100
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_GRPC_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 1000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.keepalive_time_ms", 60_000),  # a client that does not even answer pings keeps no answers in memory
)
_CLOSING = (2, 5, 6)  # CTRL_CLOSE_EVENT, CTRL_LOGOFF_EVENT, CTRL_SHUTDOWN_EVENT
_routines: list[Any] = []  # the system may still be in one after it was removed
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostOptions:
    """Where the server listens.

    Attributes:
        host: the address; loopback by default, since there is neither a token nor TLS unless they are given.
        http_port: the port for REST; 0 takes a free one, None leaves REST out.
        grpc_port: the port for gRPC; 0 takes a free one, None leaves gRPC out.
        certificate, private_key: PEM files for TLS on both.
        http: the rights of clients. On loopback, requests are answered only if they name this machine as their host.
        connections: limits of each HTTP connection.
        drain_s: how long accepted requests may take once the server ends, in seconds.
        fronts: how many processes read requests and write answers over HTTP beside this one; see `front_count`. Over
            TLS there are none.
    """

    host: str = "127.0.0.1"
    http_port: int | None = 8000
    grpc_port: int | None = 8001
    certificate: Path | None = None
    private_key: Path | None = None
    http: HttpOptions = field(default_factory=HttpOptions)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    drain_s: float = _DRAIN_S
    fronts: int = 0

    @property
    def guarded(self) -> HttpOptions:
        """The rights of clients, with the host names of a server that only this machine reaches."""
        if self.host not in _LOOPBACK:
            return self.http
        return replace(self.http, hosts=frozenset(_LOOPBACK) | (self.http.hosts or frozenset()))


def front_count() -> int:
    """Return how many fronts a server should have: one for four cores that it may use, none for fewer than eight.

    A frozen program has none, since it cannot start Python.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        return 0
    count = min(int(usable_cores()) // _CORES_A_FRONT, _MOST_FRONTS)
    return count if count > 1 else 0


class SeldomLogged:
    """An exception handler of an event loop that logs each message once in some seconds.

    Without descriptors, asyncio reports every connection that it cannot accept, thousands a second.
    """

    def __init__(self) -> None:
        self._logged_s: dict[str, float] = {}

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an event unless one of the same message was logged a moment ago."""
        message, now_s = str(context.get("message")), time.monotonic()
        if now_s - self._logged_s.get(message, -_SELDOM_S) >= _SELDOM_S:
            if len(self._logged_s) >= _MOST_MESSAGES:
                self._logged_s.clear()
            self._logged_s[message] = now_s
            loop.default_exception_handler(context)


async def serve(
    repository: Repository,
    options: HostOptions | None = None,
    *,
    on_listening: Callable[[str | None, str | None], object] = lambda *_: None,
    on_loaded: Callable[[], object] = lambda: None,
    stop: asyncio.Event | None = None,
) -> None:
    """Load the models and answer requests until SIGINT, SIGTERM or `stop`; then drain.

    On Windows, Ctrl-Break, closing the console, logging off and shutting down drain as well, the last three for as long
    as the system waits, which is 5 s for a console.

    Args:
        repository: the models; clients get 503 for those that are being loaded.
        options: where to listen.
        on_listening: called with the REST and the gRPC address, None for one that is left out.
        on_loaded: called once every model was loaded or failed to, and the fronts have started.
        stop: ends the server when it is set.

    Raises:
        ServingError: an address is taken, or the certificate cannot be read.
    """
    options = options or HostOptions()
    _check_certificate(options)
    stop = stop or asyncio.Event()
    handled = _on_signals(stop)
    loop = asyncio.get_running_loop()
    if loop.get_exception_handler() is None:
        loop.set_exception_handler(SeldomLogged())
    http_address = grpc_address = None
    rpc = servicer = http = http_task = fronts = None
    loading = asyncio.create_task(repository.load_all(complete=False))
    ready: asyncio.Future[Any] = loading
    try:
        await asyncio.sleep(0)  # the first model opens in its thread, while this one imports
        if options.http_port is not None:
            if options.fronts and options.certificate is None:
                from rlx_ort.serving.fronts import Fronts

                fronts = Fronts(repository, options.guarded, options.connections, options.drain_s, options.fronts)
                ready = asyncio.gather(loading, fronts.start())
            http, http_task = await _http_server(repository, options, fronts)
            http_address = _place(*http.servers[0].sockets[0].getsockname()[:2])
        if options.grpc_port is not None:
            await asyncio.wait([loading], timeout=_GRPC_WAITS_S)  # these imports would slow down the others
            await asyncio.to_thread(importlib.import_module, "rlx_ort.serving.rpc")  # REST answers meanwhile
            rpc, servicer, port = await _rpc_server(repository, options)
            grpc_address = _place(options.host, port)
        on_listening(http_address, grpc_address)
        ready.add_done_callback(lambda _: on_loaded())
        loading.add_done_callback(lambda _: repository.complete())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([stopping, *([http_task] if http_task else [])], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
    finally:
        repository.drain()
        ends: list[Awaitable[object]] = []
        if http is not None and http_task is not None:
            http.should_exit = True  # uvicorn ends idle connections and waits for the others
            ends.append(http_task)
        if fronts is not None:
            ends.append(fronts.end())
        if rpc is not None and servicer is not None:
            ends.append(_stopped(rpc, servicer, options))
        await asyncio.gather(*ends, return_exceptions=True)
        await ready
        try:
            await asyncio.wait_for(repository.close(), options.drain_s)
        except TimeoutError:
            _log.error("runs that did not end within %g s were given up", options.drain_s)
        handled.close()


async def _http_server(
    repository: Repository, options: HostOptions, fronts: Fronts | None
) -> tuple[LimitedServer, asyncio.Task[None]]:
    from rlx_ort.serving.connections import LimitedServer

    server = LimitedServer(
        create_app(repository, options.guarded, load=False),
        options.connections,
        options.drain_s,
        passed_on=None if fronts is None else fronts.pass_on,
        on_tick=repository.budget.give_way,
        host=options.host,
        port=options.http_port or 0,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.private_key,
    )
    task = asyncio.create_task(_listening(server))
    while not server.started and not task.done():
        await asyncio.sleep(0.001)
    if task.done():
        await task
        raise ServingError(f"HTTP cannot listen on {_place(options.host, options.http_port)}")
    return server, task


async def _listening(http: LimitedServer) -> None:
    try:
        await http.serve()
    except (SystemExit, OverflowError) as err:  # uvicorn's way to say that the port is taken; it has logged why
        place = _place(http.config.host, http.config.port)
        raise ServingError(f"HTTP cannot listen on {place}: the log has the reason") from err


def _check_certificate(options: HostOptions) -> None:
    if (options.certificate is None) != (options.private_key is None):
        raise ServingError("TLS needs both a certificate and its private key")
    if options.certificate is not None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(options.certificate, options.private_key, password="")  # never ask
        except (OSError, ssl.SSLError) as err:
            raise ServingError(
                f"{options.certificate} and {options.private_key} are not a certificate and its private key, "
                f"in PEM and without a password: {err}"
            ) from err


def _place(host: str, port: int | None) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _stopped(rpc: grpc.aio.Server, servicer: Servicer, options: HostOptions) -> None:
    """Stop a server; messages that are not complete soon are refused, and streams end."""
    stopping = asyncio.ensure_future(rpc.stop(options.drain_s))
    await asyncio.wait((stopping,), timeout=options.connections.ending_s)
    calls = asyncio.ensure_future(servicer.end_incomplete())
    await asyncio.wait((stopping, calls), return_when=asyncio.FIRST_COMPLETED)
    calls.cancel()
    await rpc.stop(_GRPC_ENDS_S)  # clients may keep connections open
    await stopping


async def _rpc_server(repository: Repository, options: HostOptions) -> tuple[grpc.aio.Server, Servicer, int]:
    import grpc

    from rlx_ort.serving.rpc import Servicer, generic_handlers

    rpc = grpc.aio.server(
        options=[("grpc.max_receive_message_length", options.http.most_bytes), *_GRPC_OPTIONS],
        maximum_concurrent_rpcs=options.connections.most,
    )
    servicer = Servicer(repository, options.http, options.connections)
    rpc.add_generic_rpc_handlers(generic_handlers(servicer.methods()))
    place = _place(options.host, options.grpc_port)
    try:
        if options.certificate is None or options.private_key is None:
            port = rpc.add_insecure_port(place)
        else:
            pair = (read_regular(options.private_key), read_regular(options.certificate))
            port = rpc.add_secure_port(place, grpc.ssl_server_credentials([pair]))
    except (RuntimeError, OSError) as err:
        raise ServingError(f"gRPC cannot listen on {place}: {err}") from err
    if port == 0:
        raise ServingError(f"gRPC cannot listen on {place}")
    await rpc.start()
    return rpc, servicer, int(port)


def _on_signals(stop: asyncio.Event, kernel: Any = None) -> contextlib.ExitStack:
    """Set `stop` at SIGINT, SIGTERM, Ctrl-Break and when the console closes, until the stack that it returns is closed.

    `kernel` is `kernel32.dll`, on Windows found by itself.
    """
    loop, handled = asyncio.get_running_loop(), contextlib.ExitStack()

    def end(*_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(stop.set)

    for number in ENDING:
        with contextlib.suppress(RuntimeError, ValueError):  # the loop is not in the main thread
            try:
                loop.add_signal_handler(number, end)
                handled.callback(loop.remove_signal_handler, number)
            except NotImplementedError:  # loops of Windows
                handled.callback(signal.signal, number, signal.signal(number, end))
    if sys.platform == "win32":
        kernel = kernel or ctypes.WinDLL("kernel32", use_last_error=True)
    if kernel is not None:
        drained = threading.Event()

        def closes(event: int) -> bool:
            """Keep the system from ending the process, in a thread that it made for this; it waits for 5 s or more."""
            if event not in _CLOSING:
                return False
            end()
            drained.wait()
            return True

        routine = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)(closes)
        _routines.append(routine)
        kernel.SetConsoleCtrlHandler(routine, True)
        handled.callback(kernel.SetConsoleCtrlHandler, routine, False)
        handled.callback(drained.set)
    return handled

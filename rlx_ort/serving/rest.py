"""The REST side of the protocol: an ASGI application on Starlette, with health, metadata, inference and statistics."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import math
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import rlx_ort
from rlx_ort.errors import InputError, MemoryBudgetError, NoViableDeviceError, RlxError, ServingError, TimeLimitError
from rlx_ort.serving import metrics
from rlx_ort.serving.access import Logged
from rlx_ort.serving.models import Repository, ServedModel, Statistics
from rlx_ort.serving.protocol import InferRequest, answer, parse_document, parse_request
from rlx_ort.serving.scheduler import Answer
from rlx_ort.serving.status import PAGE
from rlx_ort.serving.tracing import Traced

EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
INLINE_BYTES = 64 << 10
"""JSON, texts and compressed bodies beyond this are read in a thread."""
_HEADER = "Inference-Header-Content-Length"
_WATCHED_FROM_S = 0.05  # a request that takes longer is given up when its client goes away
_INFLATERS: Mapping[str, int] = {"gzip": 31, "deflate": 15}
_LONGEST_ERROR = 2000  # characters; gRPC sends the text as a header, and requests are quoted in it
_LINGER_S, _LINGER_BYTES = 1.0, 16 << 20  # how long a refused body is still read, so that its client sees the answer
_READ = "rlx_ort.body_read"
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_log = logging.getLogger(__name__)
_MOST_RETRY_AFTER_S = 60

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class HttpOptions:
    """What a client may do.

    Attributes:
        most_bytes: the largest body, before and after it is decompressed.
        token: what `Authorization: Bearer` must hold, in every request but those for health; None asks for none.
        repository_control: whether clients may load and unload models.
        most_json_bytes: the most JSON of a request, which takes up to 20 times its size in memory.
        most_held_bytes: the most bytes of all HTTP requests that are read or wait; beyond it they get status 503.
        hosts: the host names that `Host` and `Origin` may have, against web pages that reach into a private network;
            None allows every `Host`, and as `Origin` only the same.
        access_log: whether `rlx_ort.serving.access` logs a line of JSON for each request.
        traces: whether requests have spans of OpenTelemetry, see `rlx_ort.serving.tracing`; needs the extra `otel`.
    """

    most_bytes: int = 64 << 20
    token: str | None = None
    repository_control: bool = False
    most_json_bytes: int = 8 << 20
    most_held_bytes: int = 1 << 30
    hosts: frozenset[str] | None = None
    access_log: bool = False
    traces: bool = False

    def check_token(self, given: str | bytes) -> None:
        """Compare the value of an `Authorization` header in constant time.

        Raises:
            ServingError: it is not the token (401).
        """
        given = given.encode("utf-8", "replace") if isinstance(given, str) else given
        if self.token is not None and not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise ServingError("this server asks for a token: Authorization: Bearer TOKEN", 401)

    def check_change(self, parameters: Mapping[str, Any]) -> None:
        """Check that models may be loaded and unloaded, and with what.

        Raises:
            ServingError: clients may not (403), or the model itself is in the request (400).
        """
        if not self.repository_control:
            raise ServingError("clients may not load and unload models here; start with --repository-control", 403)
        if unknown := [key for key in parameters if key != "unload_dependents"]:
            raise ServingError(f"models come from the server's folders only; leave out {', '.join(unknown)!r}", 400)


def create_app(repository: Repository, options: HttpOptions | None = None, *, load: bool = True) -> Starlette:
    """Return the ASGI application that serves a repository; mount it or host it with any ASGI server.

    With `load`, its lifespan loads every model at the start and drains them at the end.
    """
    return _Rest(repository, options or HttpOptions()).app(load)


def described(error: Exception) -> tuple[int, str]:
    """Return the HTTP status of an error and its text for the client; what is no error of ours is logged."""
    if not isinstance(error, RlxError):
        _log.error("a request failed unexpectedly", exc_info=error)
        return (503, "out of memory") if isinstance(error, MemoryError) else (500, "internal error; see the log")
    text = str(error)
    text = text if len(text) <= _LONGEST_ERROR else text[:_LONGEST_ERROR] + "..."
    if isinstance(error, ServingError):
        return error.status, text
    if isinstance(error, InputError):
        return 400, text
    if isinstance(error, TimeLimitError):
        return 504, text
    return 503 if isinstance(error, NoViableDeviceError | MemoryBudgetError) else 500, text


def _retry_after_s(error: Exception) -> int:
    seconds = error.retry_after_s if isinstance(error, ServingError) else None
    return min(max(math.ceil(seconds or 1), 1), _MOST_RETRY_AFTER_S)


def statistics_of(model: ServedModel) -> dict[str, Any]:
    """Return the statistics of a model in the form of Triton's extension."""
    found: Statistics = model.statistics
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": found.last_ms,
        "inference_count": found.inferences,
        "execution_count": found.executions,
        "inference_stats": {name: {"count": each.count, "ns": each.ns} for name, each in found.spans.items()},
        "batch_stats": [
            {"batch_size": rows, **{name: {"count": each.count, "ns": each.ns} for name, each in spans.items()}}
            for rows, spans in sorted(found.batches.items())
        ],
    }


def server_metadata() -> dict[str, Any]:
    """Return the server's metadata in the protocol's form."""
    return {"name": "rlx_ort", "version": rlx_ort.__version__, "extensions": list(EXTENSIONS)}


class _Rest:
    def __init__(self, repository: Repository, options: HttpOptions) -> None:
        self._repository = repository
        self._options = options
        self._held_bytes = 0

    def app(self, load: bool) -> Starlette:
        one = "/v2/models/{model}"
        version = one + "/versions/{version}"
        both = [
            ("/ready", self.model_ready),
            ("/config", self.config),
            ("/stats", self.statistics),
            ("", self.metadata),
        ]
        routes = [
            *(Route(prefix + "/infer", self._guarded(self.infer), methods=["POST"]) for prefix in (one, version)),
            Route("/", self.page),
            Route("/metrics", self._guarded(self.metrics)),
            Route("/v2", self._guarded(self.server)),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            Route("/v2/models/stats", self._guarded(self.statistics)),
            Route("/v2/repository/index", self._guarded(self.index), methods=["POST"]),
            Route("/v2/repository/models/{model}/load", self._guarded(self.load), methods=["POST"]),
            Route("/v2/repository/models/{model}/unload", self._guarded(self.unload), methods=["POST"]),
            *(Route(prefix + tail, self._guarded(handler)) for prefix in (version, one) for tail, handler in both),
        ]

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            loading = asyncio.create_task(self._repository.load_all()) if load else None
            try:
                yield
            finally:
                if loading is not None:
                    await loading
                    await self._repository.close()

        traced = [Middleware(Traced)] if self._options.traces else []
        logged = [Middleware(Logged)] if self._options.access_log else []
        app = Starlette(
            routes=routes,
            lifespan=lifespan,
            exception_handlers={HTTPException: _unrouted},
            middleware=[*traced, *logged],
        )
        app.router.redirect_slashes = False  # a redirect would repeat what the client gave as Host
        return app

    def _guarded(self, handler: Handler) -> Handler:
        """Return a handler that asks for the token, and answers an error of ours in the protocol's form."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_caller(request)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as err:  # whatever it is, the answer has the protocol's form
                return _Refusal(*described(err), retry_after_s=_retry_after_s(err))

        return guarded

    def _check_caller(self, request: Request) -> None:
        headers, hosts = request.headers, self._options.hosts
        host, origin = headers.get("host", ""), headers.get("origin")
        if len(headers.getlist("host")) > 1:
            raise ServingError("the request names two hosts", 400)
        if hosts is not None and _name_of(host) not in hosts:
            raise ServingError(f"this server is not {host!r}; --allow-host adds a name", 421)
        if origin is not None:
            given = origin.partition("://")[2]
            if given != host and (hosts is None or _name_of(given) not in hosts):
                raise ServingError(f"pages of {origin!r} may not use this server; --allow-host adds a name", 403)
        self._options.check_token(headers.get("authorization", ""))

    def _model(self, request: Request) -> ServedModel:
        return self._repository.find(request.path_params["model"], request.path_params.get("version", ""))

    async def infer(self, request: Request) -> Response:
        self._model(request)  # one that is not there is refused before the body is read
        lengths = request.headers.getlist(_HEADER)
        if len(lengths) > 1 or not all(each.isascii() and each.isdigit() and len(each) < 19 for each in lengths):
            raise ServingError(f"{_HEADER} is {', '.join(lengths)!r}, not a number of bytes", 400)
        async with self._body(request) as body:
            wanted = await self._parsed(body, int(lengths[0]) if lengths else None)
            model, found = await _unless_gone(request, self._run(request, wanted))
        elements = sum(array.size for array in found.outputs.values())
        make = functools.partial(answer, wanted, model.name, model.version, found.outputs, model.output_types)
        head, parts = make() if elements * 8 <= INLINE_BYTES or wanted.is_binary else await asyncio.to_thread(make)
        if not parts:
            return Response(head, media_type="application/json")
        headers = {_HEADER: str(len(head))}
        return Response(b"".join([head, *parts]), headers=headers, media_type="application/octet-stream")

    async def _run(self, request: Request, wanted: InferRequest) -> tuple[ServedModel, Answer]:
        model = self._model(request)  # a reload since the request began has replaced it; nothing is awaited in between
        return model, await model.infer(wanted)

    async def _parsed(self, body: bytearray, header_bytes: int | None) -> InferRequest:
        json_bytes = len(body) if header_bytes is None else header_bytes
        if json_bytes > self._options.most_json_bytes:
            most = self._options.most_json_bytes
            raise ServingError(f"the request has {json_bytes} bytes of JSON; {most} are allowed; send binary data", 413)
        slow = json_bytes > INLINE_BYTES or (len(body) > INLINE_BYTES and body.find(b"BYTES", 0, json_bytes) >= 0)
        if slow:
            return await asyncio.to_thread(parse_request, memoryview(body), header_bytes)
        return parse_request(memoryview(body), header_bytes)

    @contextlib.asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytearray]:
        """Read the body; while the caller uses it, its bytes count against the limit of all requests."""
        most = self._options.most_bytes
        said = request.headers.get("content-length", "")
        if said.isdigit() and int(said) > most:
            raise ServingError(f"the body has {said} bytes; {most} are allowed", 413)
        coding = request.headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity", *_INFLATERS):
            raise ServingError(f"the body is encoded as {coding!r}; known: gzip, deflate", 415)
        body = bytearray()
        held = 0

        def hold(more: int) -> None:
            nonlocal held
            if self._held_bytes + more > self._options.most_held_bytes:
                raise ServingError("the requests of all clients take too much memory; try again later", 503)
            held += more
            self._held_bytes += more

        try:
            async for piece in request.stream():
                hold(len(piece))
                body += piece
                if len(body) > most:
                    raise ServingError(f"the body has more than the {most} bytes that are allowed", 413)
            request.scope[_READ] = True
            if coding in _INFLATERS:
                inflate = functools.partial(_inflated, body, _INFLATERS[coding], most)
                body = inflate() if len(body) <= INLINE_BYTES // 64 else await asyncio.to_thread(inflate)
                hold(len(body))
            yield body
        finally:
            self._held_bytes -= held

    async def _document(self, request: Request) -> dict[str, Any]:
        """Return the JSON of a request whose body may be empty."""
        async with self._body(request) as body:
            return parse_document(memoryview(body)) if body.strip() else {}

    async def live(self, request: Request) -> Response:
        return Response(b"{}", media_type="application/json")

    async def ready(self, request: Request) -> Response:
        return Response(b"{}", 200 if self._repository.ready else 503, media_type="application/json")

    async def model_ready(self, request: Request) -> Response:
        model = self._model(request)
        return JSONResponse({"name": model.name, "ready": True})

    async def server(self, request: Request) -> Response:
        return JSONResponse(server_metadata())

    async def metadata(self, request: Request) -> Response:
        model = self._model(request)
        return JSONResponse(model.metadata(list(self._repository.entries[model.name].loaded)))

    async def config(self, request: Request) -> Response:
        return JSONResponse(self._model(request).config())

    async def statistics(self, request: Request) -> Response:
        models = [self._model(request)] if "model" in request.path_params else list(self._repository.models())
        return JSONResponse({"model_stats": [statistics_of(model) for model in models]})

    async def index(self, request: Request) -> Response:
        ready = (await self._document(request)).get("ready", False)
        if not isinstance(ready, bool):
            raise ServingError(f"'ready' is {ready!r}, not true or false", 400)
        return JSONResponse(self._repository.index(ready_only=ready))

    async def load(self, request: Request) -> Response:
        return await self._change(self._repository.load, request)

    async def unload(self, request: Request) -> Response:
        return await self._change(self._repository.unload, request)

    async def _change(self, change: Callable[[str], Awaitable[None]], request: Request) -> Response:
        self._options.check_change({})
        parameters = (await self._document(request)).get("parameters") or {}
        if not isinstance(parameters, dict):
            raise ServingError("'parameters' is no object", 400)
        self._options.check_change(parameters)
        await change(request.path_params["model"])
        return Response(b"{}", media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        text, kind = metrics.rendered(self._repository)
        return Response(text, media_type=kind)

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE, headers=_PAGE_HEADERS)


class _Refusal(Response):
    """An error in the protocol's form. If the body was not read, it is dropped and the connection closed."""

    def __init__(
        self, status: int, text: str, headers: Mapping[str, str] | None = None, *, retry_after_s: int = 1
    ) -> None:
        extra = {"Retry-After": str(retry_after_s)} if status in (429, 503) else {}
        extra |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        super().__init__(json.dumps({"error": text}), status, {**extra, **(headers or {})}, "application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer at once; then give the client a moment to see it before the connection is closed."""
        headers = dict(scope["headers"])
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        if scope.get(_READ) or not has_body:
            await super().__call__(scope, receive, send)
            return
        start = [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": start})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        if b"expect" not in headers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    left, more = _LINGER_BYTES, True
                    while more and left > 0:
                        message = await receive()
                        left -= len(message.get("body", b""))
                        more = message.get("more_body", False)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _unrouted(request: Request, error: Exception) -> Response:
    """Answer requests that fit no route."""
    status, headers = getattr(error, "status_code", 404), getattr(error, "headers", None) or {}
    why = f"the method is not allowed; allowed: {headers.get('Allow')}" if status == 405 else "there is no such path"
    return _Refusal(status, f"{request.method} {request.url.path[:_LONGEST_ERROR]}: {why}", headers)


def _name_of(host: str) -> str:
    """Return the name of a host with a port behind it or not."""
    return host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0].lower()


async def _unless_gone(request: Request, running: Awaitable[Any]) -> Any:
    """Return what a request waits for; when its client goes away, that is cancelled."""
    waiting = asyncio.current_task()
    watcher: asyncio.Task[None] | None = None

    def watch() -> None:
        nonlocal watcher
        watcher = asyncio.ensure_future(_disconnected(request))
        watcher.add_done_callback(lambda found: None if found.cancelled() or waiting is None else waiting.cancel())

    timer = asyncio.get_running_loop().call_later(_WATCHED_FROM_S, watch)
    try:
        return await running
    except asyncio.CancelledError:
        if waiting is None or watcher is None or not watcher.done():
            raise
        waiting.uncancel()
        raise ClientDisconnect from None
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _inflated(body: bytearray, window: int, most: int) -> bytearray:
    try:
        inflater = zlib.decompressobj(window)
        found = bytearray(inflater.decompress(body, most + 1))
    except zlib.error as err:
        raise ServingError(f"the body cannot be decompressed: {err}", 400) from err
    if len(found) > most or inflater.unconsumed_tail:
        raise ServingError(f"the body decompresses to more than the {most} bytes that are allowed", 413)
    if not inflater.eof or inflater.unused_data:
        raise ServingError("the compressed body is cut short, or there is more behind it", 400)
    return found

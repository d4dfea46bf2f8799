"""The REST side of the protocol: an ASGI application on Starlette, with health, metadata, inference and statistics."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

import rlx_ort
from rlx_ort.errors import InputError, MemoryBudgetError, NoViableDeviceError, RlxError, ServingError, TimeLimitError
from rlx_ort.serving import metrics
from rlx_ort.serving.models import Repository, ServedModel, Statistics
from rlx_ort.serving.protocol import answer, parse_request
from rlx_ort.serving.status import PAGE

EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
_HEADER = "Inference-Header-Content-Length"
_WATCHED_FROM_S = 0.05  # a request that takes longer is given up when its client goes away
_INFLATERS: Mapping[str, int] = {"gzip": 31, "deflate": 15}
_MOST_RETRY_AFTER_S = 60

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class HttpOptions:
    """What a client may do.

    Attributes:
        most_bytes: the largest body, before and after it is decompressed.
        token: what `Authorization: Bearer` must hold, in every request but those for health; None asks for none.
        repository_control: whether clients may load and unload models.
    """

    most_bytes: int = 64 << 20
    token: str | None = None
    repository_control: bool = False


def create_app(repository: Repository, options: HttpOptions | None = None, *, load: bool = True) -> Starlette:
    """Return the ASGI application that serves a repository; mount it or host it with any ASGI server.

    With `load`, its lifespan loads every model at the start and drains them at the end.
    """
    return _Rest(repository, options or HttpOptions()).app(load)


def status_of(error: RlxError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, ServingError):
        return error.status
    if isinstance(error, InputError):
        return 400
    if isinstance(error, TimeLimitError):
        return 504
    return 503 if isinstance(error, NoViableDeviceError | MemoryBudgetError) else 500


def _retry_after_s(error: RlxError) -> int:
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

        return Starlette(routes=routes, lifespan=lifespan)

    def _guarded(self, handler: Handler) -> Handler:
        """Return a handler that asks for the token, and answers an error of ours in the protocol's form."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_token(request)
                return await handler(request)
            except RlxError as err:
                status = status_of(err)
                headers = {"Retry-After": str(_retry_after_s(err))} if status in (429, 503) else {}
                headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
                return JSONResponse({"error": str(err)}, status, headers)
            except ClientDisconnect:
                return Response(status_code=499)

        return guarded

    def _check_token(self, request: Request) -> None:
        token = self._options.token
        if token is not None:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {token}".encode()):
                raise ServingError("this server asks for a token: Authorization: Bearer TOKEN", 401)

    def _model(self, request: Request) -> ServedModel:
        return self._repository.find(request.path_params["model"], request.path_params.get("version", ""))

    async def infer(self, request: Request) -> Response:
        model = self._model(request)
        body = await self._body(request)
        length = request.headers.get(_HEADER)
        if length is not None and not (length.isascii() and length.isdigit() and len(length) < 19):
            raise ServingError(f"{_HEADER} is {length!r}, not a number of bytes", 400)
        wanted = parse_request(memoryview(body), None if length is None else int(length))
        found = await _unless_gone(request, model.infer(wanted))
        head, parts = answer(wanted, model.name, model.version, found.outputs, model.output_types)
        if not parts:
            return Response(head, media_type="application/json")
        headers = {_HEADER: str(len(head))}
        return Response(b"".join([head, *parts]), headers=headers, media_type="application/octet-stream")

    async def _body(self, request: Request) -> bytes:
        most = self._options.most_bytes
        said = request.headers.get("content-length", "")
        if said.isdigit() and int(said) > most:
            raise ServingError(f"the body has {said} bytes; {most} are allowed", 413)
        coding = request.headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity", *_INFLATERS):
            raise ServingError(f"the body is encoded as {coding!r}; known: gzip, deflate", 415)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                raise ServingError(f"the body has more than the {most} bytes that are allowed", 413)
        if coding in _INFLATERS:
            return _inflated(bytes(body), _INFLATERS[coding], most)
        return bytes(body)

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
        body = await self._body(request)
        return JSONResponse(self._repository.index(ready_only=b'"ready":true' in body.replace(b" ", b"")))

    async def load(self, request: Request) -> Response:
        return await self._change(self._repository.load, request)

    async def unload(self, request: Request) -> Response:
        return await self._change(self._repository.unload, request)

    async def _change(self, change: Callable[[str], Awaitable[None]], request: Request) -> Response:
        if not self._options.repository_control:
            raise ServingError("clients may not load and unload models here; start with --repository-control", 403)
        await self._body(request)
        await change(request.path_params["model"])
        return Response(b"{}", media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        text, kind = metrics.rendered(self._repository)
        return Response(text, media_type=kind)

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE, headers={"Content-Security-Policy": "default-src 'self' 'unsafe-inline'"})


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


def _inflated(body: bytes, window: int, most: int) -> bytes:
    try:
        inflater = zlib.decompressobj(window)
        found = inflater.decompress(body, most + 1)
    except zlib.error as err:
        raise ServingError(f"the body cannot be decompressed: {err}", 400) from err
    if len(found) > most or inflater.unconsumed_tail:
        raise ServingError(f"the body decompresses to more than the {most} bytes that are allowed", 413)
    if not inflater.eof:
        raise ServingError("the compressed body is cut short", 400)
    return found

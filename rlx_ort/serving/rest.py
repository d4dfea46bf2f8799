"""The REST side of the protocol: an ASGI application with health, metadata, inference and statistics.

It is written without a framework: importing one takes a tenth of the time that the server needs to be ready, and its
routes and requests take a fifth of the time of a small inference.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

import rlx_ort
from rlx_ort.errors import InputError, MemoryBudgetError, NoViableDeviceError, RlxError, ServingError, TimeLimitError
from rlx_ort.serving.access import Logged
from rlx_ort.serving.budget import Share
from rlx_ort.serving.exchange import (
    ABORT,
    READ_INTO,
    Application,
    ClientGoneError,
    Receive,
    Refusal,
    Reply,
    Request,
    Scope,
    Send,
    Watch,
)
from rlx_ort.serving.history import machine_facts
from rlx_ort.serving.lanes import Answer
from rlx_ort.serving.options import HttpOptions
from rlx_ort.serving.protocol import (
    InferRequest,
    answer,
    answer_bytes,
    bytes_of_array,
    parse_document,
    parse_request,
)
from rlx_ort.serving.status import page, status
from rlx_ort.serving.tracing import Traced

if TYPE_CHECKING:
    from rlx_ort.serving.models import ServedModel
    from rlx_ort.serving.repository import Repository

EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
ALIGNMENT = 64
"""Of tensors in a body, in bytes."""
INLINE_BYTES = 64 << 10
"""JSON, texts and compressed bodies beyond this are read in a thread."""
_OPEN = ("/", "/v2/health/live", "/v2/health/ready")  # every caller may ask for these
_HEADER = "Inference-Header-Content-Length"
_HEADER_KEY = _HEADER.lower().encode()
_INFLATERS: Mapping[str, int] = {"gzip": 31, "deflate": 15}
_LONGEST_ERROR = 2000  # characters; gRPC sends the text as a header, and requests are quoted in it
_INFLATED_BYTES = 1 << 20  # a piece of a body that is decompressed
_JOINED_BYTES = 64 << 10  # parts of an answer below this are sent as one
_log = logging.getLogger(__name__)
_MOST_RETRY_AFTER_S = 60


def create_app(
    repository: Repository, options: HttpOptions | None = None, *, load: bool = True, close: bool | None = None
) -> Application:
    """Return the ASGI application that serves a repository; mount it or host it with any ASGI server.

    With `load`, its lifespan loads every model at the start; with `close`, it drains them at the end (None: as `load`).
    """
    options = options or HttpOptions()
    return seen(Rest(repository, options, load, load if close is None else close), options)


def seen(app: Application, options: HttpOptions) -> Application:
    """Return an application whose requests are logged and have spans as the options say."""
    app = Logged(app) if options.access_log else app
    return Traced(app) if options.traces else app


def described(error: Exception) -> tuple[int, str]:
    """Return the HTTP status of an error and its text for the client; errors that are not ours are logged."""
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


def retry_after_s(error: Exception) -> int:
    """Return the seconds after which a request that was refused may be sent again."""
    seconds = error.retry_after_s if isinstance(error, ServingError) else None
    return min(max(math.ceil(seconds or 1), 1), _MOST_RETRY_AFTER_S)


def statistics_of(model: ServedModel) -> dict[str, Any]:
    """Return the statistics of a model in the form of Triton's extension."""
    kept = model.statistics
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": kept.last_ms,
        "inference_count": kept.inferences,
        "execution_count": kept.executions,
        "inference_stats": {name: {"count": each.count, "ns": each.ns} for name, each in kept.spans.items()},
        "batch_stats": [
            {"batch_size": rows, **{name: {"count": each.count, "ns": each.ns} for name, each in spans.items()}}
            for rows, spans in sorted(kept.batches.items())
        ],
    }


def server_metadata() -> dict[str, Any]:
    """Return the server's metadata in the protocol's form."""
    return {"name": "rlx_ort", "version": rlx_ort.__version__, "extensions": list(EXTENSIONS)}


Buffer: TypeAlias = bytes | bytearray | memoryview
Handler: TypeAlias = Callable[[Request], Awaitable[Reply]]


class Rest:
    """The ASGI application of `create_app`."""

    def __init__(self, repository: Repository, options: HttpOptions, load: bool, close: bool) -> None:
        self._repository = repository
        self._options = options
        self._load, self._close = load, close
        self._watch = Watch()
        self._paths: dict[str, tuple[str, Handler]] = {
            "/": ("GET", self._page),
            "/v2/health/live": ("GET", self._live),
            "/v2/health/ready": ("GET", self._ready),
            "/metrics": ("GET", self._metrics),
            "/status": ("GET", self._status),
            "/status/history": ("GET", self._history),
            "/v2": ("GET", self._server),
            "/v2/models/stats": ("GET", self._statistics),
            "/v2/repository/index": ("POST", self._index),
        }
        self._of_models: dict[str, tuple[str, Handler]] = {
            "infer": ("POST", self._infer),
            "ready": ("GET", self._model_ready),
            "config": ("GET", self._config),
            "stats": ("GET", self._statistics),
            "history": ("GET", self._history),
            "": ("GET", self._metadata),
        }
        self._of_repository: dict[str, tuple[str, Handler]] = {
            "load": ("POST", lambda request: self._change(self._repository.load, request)),
            "unload": ("POST", lambda request: self._change(self._repository.unload, request)),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or load and close the models at the start and the end."""
        if scope["type"] == "http":
            request = Request(scope, receive, Share(self._repository.budget))
            try:
                await (await self._replied(request)).send(request, send)
            except (ClientGoneError, ServingError):
                if (abort := request.scope.get("extensions", {}).get(ABORT)) is not None:
                    abort()
                    await asyncio.sleep(0.001)  # its server notices
            finally:
                self._end(request)
                request.share.close()
        elif scope["type"] == "lifespan":
            await self._live_through(receive, send)
        else:
            await send({"type": "websocket.close"})

    def _end(self, request: Request) -> None:
        """Give back the memory that a request holds beside its share; nothing of its answer is being sent any more."""

    async def _live_through(self, receive: Receive, send: Send) -> None:
        loading = None
        while True:
            event = (await receive())["type"]
            if event == "lifespan.startup" and self._load:
                loading = asyncio.ensure_future(self._repository.load_all())
            elif event == "lifespan.shutdown" and self._close:
                if loading is not None:
                    await loading
                await self._repository.close()
            await send({"type": f"{event}.complete"})
            if event == "lifespan.shutdown":
                return

    async def _replied(self, request: Request) -> Reply:
        path: str = request.scope["path"]
        root: str = request.scope.get("root_path", "")
        if root and path.startswith(root + "/"):  # it is mounted in another application
            path = path[len(root) :]
        method: str = request.scope["method"]
        try:
            wanted, handler = self._route(request, path)
            if method != wanted and not (method == "HEAD" and wanted == "GET"):
                allowed = "GET, HEAD" if wanted == "GET" else wanted
                text = f"{method} {path[:_LONGEST_ERROR]}: the method is not allowed; allowed: {allowed}"
                return Refusal(405, text, ((b"allow", allowed.encode()),))
            if self._options.traces:
                names = {"model": request.model, "version": request.version}
                request.scope["endpoint"] = handler
                request.scope["path_params"] = {key: name for key, name in names.items() if name}
            if path not in _OPEN:
                self._check_caller(request)
            return await handler(request)
        except ClientGoneError:
            raise
        except Exception as err:  # whatever it is, the answer has the protocol's form
            request.share.close()
            return Refusal(*described(err), retry_after_s=retry_after_s(err))

    def _route(self, request: Request, path: str) -> tuple[str, Handler]:
        """Return the method and the handler of a path, and note the model that it names."""
        route = self._paths.get(path)
        _, *parts = path.split("/")
        if route is None and parts[:2] == ["v2", "models"] and all(parts):
            request.model, *rest = parts[2:] or [""]
            if len(rest) > 1 and rest[0] == "versions":
                request.version, *rest = rest[1:]
            route = self._of_models.get("/".join(rest)) if request.model else None
        elif route is None and parts[:3] == ["v2", "repository", "models"] and len(parts) == 5 and parts[3]:
            request.model = parts[3]
            route = self._of_repository.get(parts[4])
        if route is None:
            method = request.scope["method"]
            raise ServingError(f"{method} {path[:_LONGEST_ERROR]}: there is no such path", 404)
        return route

    def _check_caller(self, request: Request) -> None:
        hosts, headers = self._options.hosts, request.headers
        host = request.once(b"host") or ""
        if hosts is not None and _name_of(host) not in hosts:
            raise ServingError(f"this server is not {host!r}; --allow-host adds a name", 421)
        if b"origin" in headers:
            origin = request.once(b"origin") or ""
            given = origin.partition("://")[2]
            if given != host and (hosts is None or _name_of(given) not in hosts):
                raise ServingError(f"pages of {origin!r} may not use this server; --allow-host adds a name", 403)
        self._options.check_token((request.once(b"authorization") or "").encode("latin-1"))

    def _model(self, request: Request) -> ServedModel:
        return self._repository.find(request.model, request.version)

    async def _infer(self, request: Request) -> Reply:
        self._model(request)  # one that is not there is refused before the body is read
        length = request.once(_HEADER_KEY)
        if length is not None and not (length.isascii() and length.isdigit() and len(length) < 19):
            raise ServingError(f"{_HEADER} is {length!r}, not a number of bytes", 400)
        header_bytes = None if length is None else int(length)
        wanted = await self._parsed(request, await self._body(request, header_bytes or 0), header_bytes)
        model, answered = await self._watch.unless_gone(request, self._run(request, wanted))
        outputs = sum(map(bytes_of_array, answered.outputs.values()))
        making = answer_bytes(wanted, answered.outputs)
        if large := making > INLINE_BYTES:
            request.share.keep(outputs + making)
        make = functools.partial(_made, wanted, model, answered)
        slow = large and not (wanted.is_binary and "BYTES" not in model.output_types.values())
        head, parts = await self._repository.budget.decoded(make) if slow else make()
        request.share.keep(len(head) + sum(map(len, parts)))
        if not parts:
            return Reply(head)
        parts.insert(0, head)
        sent = b"".join(parts) if sum(map(len, parts)) <= _JOINED_BYTES else parts
        return Reply(sent, 200, b"application/octet-stream", ((_HEADER_KEY, b"%d" % len(head)),))

    async def _run(self, request: Request, wanted: InferRequest) -> tuple[ServedModel, Answer]:
        model = self._model(request)  # a reload since the request began has replaced it; nothing is awaited in between
        return model, await model.infer(wanted)

    async def _parsed(self, request: Request, body: Buffer, header_bytes: int | None) -> InferRequest:
        json_bytes = len(body) if header_bytes is None else header_bytes
        if json_bytes > self._options.most_json_bytes:
            most = self._options.most_json_bytes
            raise ServingError(f"the request has {json_bytes} bytes of JSON; {most} are allowed; send binary data", 413)
        slow = json_bytes > INLINE_BYTES or (len(body) > INLINE_BYTES and b"BYTES" in bytes(body[:json_bytes]))
        if not slow:
            return parse_request(memoryview(body), header_bytes)
        share = request.share
        parse = functools.partial(parse_request, memoryview(body), header_bytes, share.take)
        parsed = await self._repository.budget.decoded(parse)
        share.keep(len(body) + sum(map(bytes_of_array, parsed.inputs.values())))
        return parsed

    async def _body(self, request: Request, header_bytes: int = 0) -> Buffer:
        """Read the body; until the request is answered, its bytes count against the limit of all requests.

        What is behind the first `header_bytes` is aligned where the server reads large bodies into our memory.
        """
        most = self._options.most_bytes
        said = request.header(b"content-length")
        if said.isdigit() and int(said) > most:
            raise ServingError(f"the body has {said} bytes; {most} are allowed", 413)
        coding = request.header(b"content-encoding").strip().lower()
        if coding not in ("", "identity", *_INFLATERS):
            raise ServingError(f"the body is encoded as {coding!r}; known: gzip, deflate", 415)
        read_into = request.scope.get("extensions", {}).get(READ_INTO)
        if read_into is not None and coding not in _INFLATERS and said.isdigit() and int(said) > INLINE_BYTES:
            room = self._room(request, int(said), min(header_bytes, int(said)))
            with request.share.waiting():
                await read_into(room, request.share.take)
            request.is_read = True
            return room
        body: Buffer
        body, more = await self._piece(request)
        if len(body) > most or more:
            body = await self._rest_of(request, bytearray(body), most, more)
        request.is_read = True
        if coding in _INFLATERS:
            inflate = functools.partial(_inflated, body, _INFLATERS[coding], most, request.share.take)
            slow = len(body) > INLINE_BYTES // 64
            body = await self._repository.budget.decoded(inflate) if slow else inflate()
            request.share.keep(len(body))
        return body

    def _room(self, request: Request, size: int, header_bytes: int) -> memoryview:
        """Return memory for a body, aligned behind its header."""
        start = -header_bytes % ALIGNMENT
        return np.empty(start + size, np.uint8).data[start:]

    async def _rest_of(self, request: Request, body: bytearray, most: int, more: bool) -> bytearray:
        """Add the bytes to a body that have not arrived yet; a client that is too slow may lose its place to others."""
        with request.share.waiting():
            while len(body) <= most and more:
                piece, more = await self._piece(request)
                body += piece
        if len(body) > most:
            raise ServingError(f"the body has more than the {most} bytes that are allowed", 413)
        return body

    async def _piece(self, request: Request) -> tuple[bytes, bool]:
        """Return the part of a body that has arrived, and whether there is more; its bytes count against the budget."""
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece = message.get("body", b"")
        request.share.take(len(piece))
        return piece, message.get("more_body", False)

    async def _document(self, request: Request) -> dict[str, Any]:
        """Return the JSON of a request whose body may be empty."""
        body = await self._body(request)
        return parse_document(text) if (text := bytes(body).strip()) else {}

    async def _live(self, request: Request) -> Reply:
        return Reply(b"{}")

    async def _ready(self, request: Request) -> Reply:
        return Reply(b"{}", 200 if self._repository.ready else 503)

    async def _model_ready(self, request: Request) -> Reply:
        return _json({"name": self._model(request).name, "ready": True})

    async def _server(self, request: Request) -> Reply:
        return _json(server_metadata())

    async def _metadata(self, request: Request) -> Reply:
        model = self._model(request)
        return _json(model.metadata(list(self._repository.entries[model.name].loaded)))

    async def _config(self, request: Request) -> Reply:
        return _json(await self._model(request).config())

    async def _statistics(self, request: Request) -> Reply:
        models = [self._model(request)] if request.model else list(self._repository.models())
        return _json({"model_stats": [statistics_of(model) for model in models]})

    async def _index(self, request: Request) -> Reply:
        ready = (await self._document(request)).get("ready", False)
        if not isinstance(ready, bool):
            raise ServingError(f"'ready' is {ready!r}, not true or false", 400)
        return _json(self._repository.index(ready_only=ready))

    async def _change(self, change: Callable[[str], Awaitable[None]], request: Request) -> Reply:
        self._options.check_change({})
        parameters = (await self._document(request)).get("parameters") or {}
        if not isinstance(parameters, dict):
            raise ServingError("'parameters' is not an object", 400)
        self._options.check_change(parameters)
        await change(request.model)
        return Reply(b"{}")

    async def _metrics(self, request: Request) -> Reply:
        from rlx_ort.serving import metrics

        await asyncio.to_thread(machine_facts)
        text, kind = await asyncio.to_thread(metrics.Metrics(self._repository).rendered)
        return Reply(text, 200, kind.encode())

    async def _status(self, request: Request) -> Reply:
        await asyncio.to_thread(machine_facts)
        return _json(status(self._repository))

    async def _history(self, request: Request) -> Reply:
        history = self._repository.history
        return _json(history.of_model(self._model(request).key) if request.model else history.of_server())

    async def _page(self, request: Request) -> Reply:
        """Answer with the status page, one document that reads the server's state every two seconds."""
        text, policy = page(self._options.token is not None)
        headers = ((b"content-security-policy", policy), (b"x-content-type-options", b"nosniff"))
        return Reply(text, 200, b"text/html; charset=utf-8", headers)


def _made(wanted: InferRequest, model: ServedModel, answered: Answer) -> tuple[bytes, list[bytes | memoryview]]:
    """Return an answer, and free its inputs and outputs; a million texts take a while, and this may be a thread."""
    wanted.inputs.clear()
    made = answer(wanted, model.name, model.version, answered.outputs, model.output_types)
    answered.outputs.clear()
    return made


def _json(document: object) -> Reply:
    return Reply(json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode())


def _name_of(host: str) -> str:
    """Return the name of a host with a port behind it or not."""
    return host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0].lower()


def _inflated(body: Buffer, window: int, most: int, take: Callable[[int], object]) -> bytearray:
    inflater, inflated = zlib.decompressobj(window), bytearray()
    for start in range(0, len(body), INLINE_BYTES):
        left, piece = bytes(body[start : start + INLINE_BYTES]), b""
        while left or len(piece) == _INFLATED_BYTES:
            try:
                piece = inflater.decompress(left, _INFLATED_BYTES)
            except zlib.error as err:
                raise ServingError(f"the body cannot be decompressed: {err}", 400) from err
            left = inflater.unconsumed_tail
            take(len(piece))
            inflated += piece
            if len(inflated) > most:
                raise ServingError(f"the body decompresses to more than the {most} bytes that are allowed", 413)
    if not inflater.eof or inflater.unused_data:
        raise ServingError("the compressed body is cut short, or has trailing bytes", 400)
    return inflated

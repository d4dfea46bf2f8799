"""The gRPC side of the protocol: a servicer for `grpc.aio` servers, with Triton's extensions and the health service."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # no types are shipped

from rlx_ort.errors import ServingError
from rlx_ort.serving import access, tracing
from rlx_ort.serving.budget import Share
from rlx_ort.serving.lanes import Answer
from rlx_ort.serving.messages import messages
from rlx_ort.serving.models import ServedModel
from rlx_ort.serving.options import ConnectionLimits, HttpOptions
from rlx_ort.serving.protocol import (
    PIECE,
    TEXT_BYTES,
    Array,
    InferRequest,
    array_from_bytes,
    array_of_flat,
    bytes_of,
    bytes_of_array,
    check_tensors,
    checked_input,
    request_of,
)
from rlx_ort.serving.repository import Repository
from rlx_ort.serving.rest import INLINE_BYTES, described, retry_after_s, server_metadata, statistics_of
from rlx_ort.serving.wire import DECODED_FACTOR, Encoded, check_inputs, nested, split_request, with_raw_outputs

SERVICE, HEALTH = "inference.GRPCInferenceService", "grpc.health.v1.Health"
_CODES: Mapping[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_TYPES = "INVALID BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 STRING BF16"
_TYPE_NUMBERS = {name: number for number, name in enumerate(_TYPES.split())}
_KINDS = {"KIND_AUTO": 0, "KIND_GPU": 1, "KIND_CPU": 2}
_SERVING, _NOT_SERVING = 1, 2
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "BYTES": "bytes_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
}

_OPEN = ("ServerLive", "ServerReady", "HealthCheck")  # every caller may ask for these
_AHEAD_BYTES = 64 << 10  # that gRPC receives of a call before its message is asked for
_STREAM_BYTES, _MOST_AHEAD = 16 << 20, 64  # answers of a stream that are not read, and requests that are read ahead
_LARGE_BYTES = 1 << 20  # from here on, numbers are copied and joined in a thread, without the interpreter lock
_STREAM_ANSWER = 2  # the field of ModelStreamInferResponse

Method: TypeAlias = Callable[[Any, Share], Awaitable[Any]]


class Servicer:
    """Answers the service's methods for a repository. A call without the token is refused before its message is read.

    Args:
        repository: the models.
        options: the clients' rights. The server limits the size of messages.
        limits: how long a message may take.
    """

    def __init__(
        self, repository: Repository, options: HttpOptions | None = None, limits: ConnectionLimits | None = None
    ) -> None:
        self._repository = repository
        self._options = options or HttpOptions()
        self._limits = limits or ConnectionLimits()
        self._unfinished: dict[object, Callable[[], object]] = {}
        self._calls = set[asyncio.Task[Any]]()

    async def end_incomplete(self) -> None:
        """Refuse calls whose message is not complete, end streams behind their last answer, and wait for all."""
        for end in list(self._unfinished.values()):
            end()
        if self._calls:
            await asyncio.wait(self._calls)

    def _on_sent(self, call: Callable[[object], object]) -> None:
        """Make a call when the task of the current call ends, which is when its answer was sent."""
        if (task := asyncio.current_task()) is not None:
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            task.add_done_callback(call)

    def methods(self) -> dict[str, grpc.RpcMethodHandler]:
        """Return the handler of each method, that of the health service as `Check`."""
        methods: dict[str, Method] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
            "ModelConfig": self._config,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }
        handlers = {name: self._handler(name, method) for name, method in methods.items()}
        handlers["Check"] = self._handler("HealthCheck", self._check)
        stream = grpc.stream_stream_rpc_method_handler(self._stream, response_serializer=_serialized)
        return {**handlers, "ModelStreamInfer": stream}

    def _check_caller(self, context: grpc.aio.ServicerContext) -> None:
        given = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
        self._options.check_token(given[0] if len(given) == 1 else "", "a token in the metadata: authorization")

    def _handler(self, name: str, method: Method) -> grpc.RpcMethodHandler:
        async def guarded(requests: bytes | AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            answer = await self._answered(name, method, requests, context)
            if isinstance(answer, tuple):
                await context.abort(*answer)  # gRPC keeps this frame: it must hold neither messages nor tensors
            return answer

        # As a stream of requests, of which there is one: the message is asked for once there is room for it.
        return grpc.stream_unary_rpc_method_handler(
            tracing.traced_call(f"{SERVICE}/{name}", guarded) if self._options.traces else guarded
        )

    async def _answered(
        self, name: str, method: Method, requests: bytes | AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> Any:
        """Return the answer of a call, or its refusal: a code, a text and metadata."""
        begun_s, code, size = time.perf_counter(), grpc.StatusCode.CANCELLED, 0
        share = Share(self._repository.budget)
        self._on_sent(lambda _: share.close())
        try:
            if self._options.token is not None and name not in _OPEN:
                self._check_caller(context)
            data = await self._received(requests, share)
            size = len(data)
            answer = await method(self._message(name, data), share)
            if not isinstance(requests, bytes):
                answer = await self._joined(answer)
                share.keep(2 * len(answer))  # gRPC makes a copy
                share.sending()
            code = grpc.StatusCode.OK
            return answer
        except Exception as err:  # whatever it is, no detail of the server leaves it
            share.close()
            refusal = _refusal(err)
            code = refusal[0]
            return refusal
        finally:
            if self._options.access_log:
                trace = dict(context.invocation_metadata() or ()).get("traceparent")
                sizes = {"client": context.peer(), "bytes": size, "traceparent": trace}
                access.write("grpc", "POST", name, code.name, begun_s, **sizes)

    async def _joined(self, answer: Any) -> bytes:
        if isinstance(answer, Encoded) and len(answer) > _LARGE_BYTES:
            return await self._repository.budget.decoded(answer.SerializeToString)
        return _serialized(answer)

    async def _received(self, requests: bytes | AsyncIterator[bytes], share: Share) -> bytes:
        """Return the message of a call, as other hosts pass it on or as it is asked for."""
        if isinstance(requests, bytes):
            share.take(len(requests))
            return requests
        share.take(_AHEAD_BYTES)
        limit_s = self._limits.message_s
        self._unfinished[share] = functools.partial(share.end, ServingError("the server is shutting down", 503))
        with share.waiting():
            try:
                async with asyncio.timeout(limit_s):
                    async for data in requests:
                        share.keep(len(data))
                        return data
            except TimeoutError:
                raise ServingError(f"the message did not arrive within {limit_s:g} s", 504) from None
            finally:
                del self._unfinished[share]
        raise ServingError("the call has no message", 400)

    def _message(self, name: str, data: bytes) -> Any:
        """Return a message; one for an inference as it arrived."""
        most = self._options.most_bytes  # our own server refuses larger ones before; other hosts may not
        if len(data) > most:
            raise ServingError(f"the message has {len(data)} bytes; {most} are allowed", 413)
        if name == "ModelInfer":
            return data
        if len(data) > INLINE_BYTES:
            raise ServingError(f"the {name}Request has {len(data)} bytes; {INLINE_BYTES} are allowed", 413)
        return _decoded(f"{name}Request", data)

    async def _live(self, request: Any, share: Share) -> Any:
        return messages.ServerLiveResponse(live=True)

    async def _ready(self, request: Any, share: Share) -> Any:
        return messages.ServerReadyResponse(ready=self._repository.ready)

    async def _model_ready(self, request: Any, share: Share) -> Any:
        try:
            self._repository.find(request.name, request.version)
        except ServingError as err:
            if err.status == 404:
                raise
            return messages.ModelReadyResponse(ready=False)
        return messages.ModelReadyResponse(ready=True)

    async def _server_metadata(self, request: Any, share: Share) -> Any:
        return messages.ServerMetadataResponse(**server_metadata())

    async def _model_metadata(self, request: Any, share: Share) -> Any:
        model = self._repository.find(request.name, request.version)
        return messages.ModelMetadataResponse(**model.metadata(list(self._repository.entries[model.name].loaded)))

    async def _config(self, request: Any, share: Share) -> Any:
        config = await self._repository.find(request.name, request.version).config()
        for side in ("input", "output"):
            for tensor in config[side]:
                tensor["data_type"] = _TYPE_NUMBERS[tensor["data_type"].removeprefix("TYPE_")]
        for group in config["instance_group"]:
            group["kind"] = _KINDS[group["kind"]]
        given = config.pop("parameters", {})
        config["parameters"] = {name: messages.ModelParameter(**value) for name, value in given.items()}
        return messages.ModelConfigResponse(config=messages.ModelConfig(**config))

    async def _statistics(self, request: Any, share: Share) -> Any:
        one = [self._repository.find(request.name, request.version)] if request.name else self._repository.models()
        return messages.ModelStatisticsResponse(model_stats=[statistics_of(model) for model in one])

    async def _index(self, request: Any, share: Share) -> Any:
        return messages.RepositoryIndexResponse(models=self._repository.index(ready_only=request.ready))

    async def _load(self, request: Any, share: Share) -> Any:
        self._options.check_change(request.parameters)
        await self._repository.load(request.model_name)
        return messages.RepositoryModelLoadResponse()

    async def _unload(self, request: Any, share: Share) -> Any:
        self._options.check_change(request.parameters)
        await self._repository.unload(request.model_name)
        return messages.RepositoryModelUnloadResponse()

    async def _check(self, request: Any, share: Share) -> Any:
        if request.service not in ("", SERVICE):
            raise ServingError(f"there is no service {request.service!r}", 404)
        return messages.HealthCheckResponse(status=_SERVING if self._repository.ready else _NOT_SERVING)

    async def _infer(self, data: bytes, share: Share) -> Encoded:
        budget, most = self._repository.budget, self._options.most_json_bytes
        rest, contents = (data, None) if len(data) <= INLINE_BYTES else split_request(data)
        if len(data) <= _LARGE_BYTES and len(rest) <= INLINE_BYTES and (contents is None or b"BYTES" not in rest):
            name, version, wanted, raw = _parsed(rest, contents, most, share.take)
        else:
            parse = functools.partial(_parsed, rest, contents, most, share.take)
            name, version, wanted, raw = await budget.decoded(parse)
            share.keep(len(data) + sum(map(bytes_of_array, wanted.inputs.values())))
        model = self._repository.find(name, version)
        answer = await model.infer(wanted)
        taken = 2 * sum(map(bytes_of_array, answer.outputs.values()))  # raw tensors are joined to a message
        if taken <= INLINE_BYTES:
            return _response(model, wanted, answer, raw)
        share.keep(taken)
        if raw and "BYTES" not in model.output_types.values():
            return _response(model, wanted, answer, raw)
        return await budget.decoded(functools.partial(_response, model, wanted, answer, raw))

    async def _stream(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Answer each request of a stream in order; an error answers its request and leaves the stream open."""
        try:
            self._check_caller(context)
        except ServingError as err:
            await context.abort(*_refusal(err))
        waiting: asyncio.Queue[tuple[asyncio.Task[Encoded], Share] | None] = asyncio.Queue()
        shares, room, largest = set[Share](), asyncio.Event(), 0

        async def infer(given: tuple[bytes, Share], context: Any) -> Encoded:
            nonlocal largest
            data, share = given
            share.take(len(data))
            answer = nested(_STREAM_ANSWER, await self._infer(self._message("ModelInfer", data), share))
            answer = Encoded([await self._joined(answer)])
            largest = max(largest, len(answer))
            room.set()
            return answer

        one = tracing.traced_call(f"{SERVICE}/ModelStreamInfer", infer) if self._options.traces else infer

        async def read() -> None:
            async for request in requests:
                shares.add(share := Share(self._repository.budget))
                waiting.put_nowait((asyncio.ensure_future(one((request, share), context)), share))
                # A client that reads no answers is not asked for more requests.
                while len(shares) >= (min(_STREAM_BYTES // largest + 1, _MOST_AHEAD) if largest else 1):
                    room.clear()
                    await room.wait()
            waiting.put_nowait(None)

        def finish() -> None:
            reader.cancel()
            waiting.put_nowait(None)

        def end(_: object) -> None:
            self._unfinished.pop(reader, None)
            reader.cancel()
            while not waiting.empty():
                if (left := waiting.get_nowait()) is not None:
                    left[0].cancel()
            for share in shares:
                share.close()

        reader = asyncio.create_task(read())
        self._unfinished[reader] = finish
        self._on_sent(end)
        try:
            while (entry := await waiting.get()) is not None:
                task, share = entry
                try:
                    found: Any = await task
                    share.keep(2 * len(found))  # gRPC makes a copy
                    share.sending()
                except Exception as err:
                    share.close()
                    found = messages.ModelStreamInferResponse(error_message=_refusal(err)[1])
                del entry, task
                yield found
                del found
                share.close()
                shares.discard(share)
                room.set()
        finally:
            end(None)


def generic_handlers(methods: Mapping[str, grpc.RpcMethodHandler]) -> tuple[grpc.GenericRpcHandler, ...]:
    """Return the handlers for `server.add_generic_rpc_handlers` of the methods of a `Servicer`."""
    inference = {name: method for name, method in methods.items() if name != "Check"}
    services = {SERVICE: inference, HEALTH: {"Check": methods["Check"]}}
    return tuple(grpc.method_handlers_generic_handler(service, found) for service, found in services.items())


def _refusal(error: Exception) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return the code, the text and the metadata of an error."""
    status, text = described(error)
    code = _CODES.get(status, grpc.StatusCode.INTERNAL)
    if not isinstance(error, ServingError) or error.retry_after_s is None:
        return code, text, ()
    wait_s = retry_after_s(error)
    metadata = (("retry-after", str(wait_s)), ("grpc-retry-pushback-ms", str(1000 * wait_s)))
    return grpc.StatusCode.RESOURCE_EXHAUSTED, text, metadata


def _serialized(message: Any) -> bytes:
    wire: bytes = message.SerializeToString()
    return wire


def _decoded(name: str, data: bytes) -> Any:
    try:
        return getattr(messages, name).FromString(data)
    except DecodeError as err:
        raise ServingError(f"the request is not a valid {name}: {err}", 400) from err


def _parsed(
    rest: bytes, contents: Sequence[memoryview] | None, most_numbers: int, take: Callable[[int], object]
) -> tuple[str, str, InferRequest, bool]:
    """Return the model, its version, the request, and whether its tensors are raw bytes, as then the answer's are.

    Args:
        rest: the message, without its raw contents if they are given.
        contents: its raw contents.
        most_numbers: the most bytes of whole numbers in other contents.
        take: called with the bytes that are about to be taken in memory; it may raise.
    """
    if len(rest) > INLINE_BYTES:
        check_inputs(rest, most_numbers)
        take(DECODED_FACTOR * len(rest))
    request = _decoded("ModelInferRequest", rest)
    check_tensors("inputs", len(request.inputs))
    check_tensors("outputs", len(request.outputs))
    raw = contents or list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise ServingError(f"there are {len(raw)} raw contents for {len(request.inputs)} inputs", 400)
    inputs: dict[str, Array] = {}
    for at, tensor in enumerate(request.inputs):
        head = tensor.name, tensor.shape, tensor.datatype
        name, shape, dtype = checked_input(*head, tensor.parameters, inputs)
        if raw:
            inputs[name] = array_from_bytes(name, shape, dtype, memoryview(raw[at]), take)
            continue
        place = _CONTENTS.get(tensor.datatype)
        if place is None:
            raise ServingError(f"input {name!r} is {tensor.datatype}, which is sent in raw_input_contents only", 400)
        data: Any = getattr(tensor.contents, place)
        if tensor.datatype == "BYTES":
            take(len(data) * TEXT_BYTES)
            try:
                data = [item.decode() for item in data]
            except UnicodeDecodeError as err:
                raise ServingError(f"input {name!r} holds an element that is not UTF-8", 400) from err
        inputs[name] = array_of_flat(name, shape, dtype, data)
    if not (request.parameters or request.outputs):
        wanted = InferRequest(inputs, id=request.id)
    else:
        outputs = [{"name": output.name, "parameters": _plain(output.parameters)} for output in request.outputs]
        document = {"id": request.id, "parameters": _plain(request.parameters), "outputs": outputs}
        wanted = request_of(inputs, document)
    return request.model_name, request.model_version, wanted, bool(raw)


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {key: getattr(value, value.WhichOneof("choice") or "string_param") for key, value in parameters.items()}


def _response(model: ServedModel, wanted: InferRequest, answer: Answer, raw: bool) -> Encoded:
    """Return an answer, and free its inputs and outputs, which may be in a thread."""
    wanted.inputs.clear()
    response = messages.ModelInferResponse(model_name=model.name, model_version=model.version, id=wanted.id)
    names = [output.name for output in wanted.outputs] if wanted.outputs else list(answer.outputs)
    raw = raw or any(model.output_types[name] not in _CONTENTS for name in names)
    contents = []
    for name in names:
        array, datatype = answer.outputs[name], model.output_types[name]
        tensor = response.outputs.add(name=name, datatype=datatype, shape=list(array.shape))
        if raw:
            contents.append(bytes_of(array))
            continue
        flat, elements = array.ravel(), getattr(tensor.contents, _CONTENTS[datatype])
        for at in range(0, flat.size, PIECE):
            piece = flat[at : at + PIECE].tolist()
            if datatype == "BYTES":
                piece = [item if isinstance(item, bytes) else str(item).encode() for item in piece]
            elements.extend(piece)
    answer.outputs.clear()
    return with_raw_outputs(response, contents)

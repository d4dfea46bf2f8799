"""The gRPC side of the protocol: a servicer for `grpc.aio` servers, with Triton's extensions and the health service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # no types are shipped

from rlx_ort.errors import ServingError
from rlx_ort.serving import access, tracing
from rlx_ort.serving.lanes import Answer
from rlx_ort.serving.messages import messages
from rlx_ort.serving.models import ServedModel
from rlx_ort.serving.protocol import (
    Array,
    InferRequest,
    array_from_bytes,
    array_of,
    bytes_of,
    check_tensors,
    checked_dtype,
    checked_shape,
    request_of,
)
from rlx_ort.serving.repository import Repository
from rlx_ort.serving.rest import INLINE_BYTES, HttpOptions, described, server_metadata, statistics_of

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

_OPEN = {f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady", f"/{HEALTH}/Check"}

Method: TypeAlias = Callable[[Any], Awaitable[Any]]


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    """Asks for the token before a message is received."""

    def __init__(self, options: HttpOptions) -> None:
        self._options = options

    async def intercept_service(self, continuation: Any, call: Any) -> Any:
        """Return the handler of a call, or one that refuses it."""
        if call.method not in _OPEN:
            try:
                given = [value for key, value in call.invocation_metadata or () if key == "authorization"]
                self._options.check_token(given[0] if len(given) == 1 else "")
            except ServingError:
                return grpc.stream_unary_rpc_method_handler(_refuse_caller)  # one that reads no message
        return await continuation(call)


async def _refuse_caller(requests: object, context: grpc.aio.ServicerContext) -> None:
    message = "this server asks for a token in the metadata: authorization: Bearer TOKEN"
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)


class Servicer:
    """Answers the service's methods for a repository; the server that hosts it should have a `Guard`.

    Args:
        repository: the models.
        options: what a client may do. The server limits the size of messages, and its `Guard` asks for the token.
    """

    def __init__(self, repository: Repository, options: HttpOptions | None = None) -> None:
        self._repository = repository
        self._options = options or HttpOptions()

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """Return what `server.add_generic_rpc_handlers` takes."""
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
        found = {name: self._handler(name, method) for name, method in methods.items()}
        found["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream, response_serializer=messages.ModelStreamInferResponse.SerializeToString
        )
        health = {"Check": self._handler("HealthCheck", self._check)}
        return (
            grpc.method_handlers_generic_handler(SERVICE, found),
            grpc.method_handlers_generic_handler(HEALTH, health),
        )

    def _handler(self, name: str, method: Method) -> grpc.RpcMethodHandler:
        async def guarded(data: bytes, context: grpc.aio.ServicerContext) -> Any:
            begun_s, code = time.perf_counter(), grpc.StatusCode.CANCELLED
            try:
                found = await method(self._message(f"{name}Request", data))
                code = grpc.StatusCode.OK
                return found
            except Exception as err:  # whatever it is, no detail of the server leaves it
                status, text = described(err)
                code = _CODES.get(status, grpc.StatusCode.INTERNAL)
                await context.abort(code, text)
            finally:
                if self._options.access_log:
                    trace = dict(context.invocation_metadata() or ()).get("traceparent")
                    sizes = {"client": context.peer(), "bytes": len(data), "traceparent": trace}
                    access.write("grpc", "POST", name, code.name, begun_s, **sizes)

        return grpc.unary_unary_rpc_method_handler(
            tracing.traced_call(f"{SERVICE}/{name}", guarded) if self._options.traces else guarded,
            response_serializer=getattr(messages, f"{name}Response").SerializeToString,
        )

    def _message(self, name: str, data: bytes) -> Any:
        most = self._options.most_bytes  # our own server refuses larger ones before; other hosts may not
        if len(data) > most:
            raise ServingError(f"the message has {len(data)} bytes; {most} are allowed", 413)
        try:
            return getattr(messages, name).FromString(data)
        except DecodeError as err:
            raise ServingError(f"the request is no {name}: {err}", 400) from err

    async def _live(self, request: Any) -> Any:
        return messages.ServerLiveResponse(live=True)

    async def _ready(self, request: Any) -> Any:
        return messages.ServerReadyResponse(ready=self._repository.ready)

    async def _model_ready(self, request: Any) -> Any:
        try:
            self._repository.find(request.name, request.version)
        except ServingError as err:
            if err.status == 404:
                raise
            return messages.ModelReadyResponse(ready=False)
        return messages.ModelReadyResponse(ready=True)

    async def _server_metadata(self, request: Any) -> Any:
        return messages.ServerMetadataResponse(**server_metadata())

    async def _model_metadata(self, request: Any) -> Any:
        model = self._repository.find(request.name, request.version)
        return messages.ModelMetadataResponse(**model.metadata(list(self._repository.entries[model.name].loaded)))

    async def _config(self, request: Any) -> Any:
        found = await self._repository.find(request.name, request.version).config()
        for side in ("input", "output"):
            for tensor in found[side]:
                tensor["data_type"] = _TYPE_NUMBERS[tensor["data_type"].removeprefix("TYPE_")]
        for group in found["instance_group"]:
            group["kind"] = _KINDS[group["kind"]]
        given = found.pop("parameters", {})
        found["parameters"] = {name: messages.ModelParameter(**value) for name, value in given.items()}
        return messages.ModelConfigResponse(config=messages.ModelConfig(**found))

    async def _statistics(self, request: Any) -> Any:
        one = [self._repository.find(request.name, request.version)] if request.name else self._repository.models()
        return messages.ModelStatisticsResponse(model_stats=[statistics_of(model) for model in one])

    async def _index(self, request: Any) -> Any:
        return messages.RepositoryIndexResponse(models=self._repository.index(ready_only=request.ready))

    async def _load(self, request: Any) -> Any:
        self._options.check_change(request.parameters)
        await self._repository.load(request.model_name)
        return messages.RepositoryModelLoadResponse()

    async def _unload(self, request: Any) -> Any:
        self._options.check_change(request.parameters)
        await self._repository.unload(request.model_name)
        return messages.RepositoryModelUnloadResponse()

    async def _check(self, request: Any) -> Any:
        if request.service not in ("", SERVICE):
            raise ServingError(f"there is no service {request.service!r}", 404)
        return messages.HealthCheckResponse(status=_SERVING if self._repository.ready else _NOT_SERVING)

    async def _infer(self, request: Any) -> Any:
        numbers = request.raw_input_contents and all(tensor.datatype != "BYTES" for tensor in request.inputs)
        if numbers or request.ByteSize() <= INLINE_BYTES:
            wanted, raw = _parsed(request)
        else:
            wanted, raw = await asyncio.to_thread(_parsed, request)
        model = self._repository.find(request.model_name, request.model_version)
        return _response(model, wanted, await model.infer(wanted), raw)

    async def _stream(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Answer each request of a stream in order; an error answers its request and leaves the stream open."""
        waiting: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue(maxsize=64)

        async def infer(data: bytes, context: Any) -> Any:
            return await self._infer(self._message("ModelInferRequest", data))

        one = tracing.traced_call(f"{SERVICE}/ModelStreamInfer", infer) if self._options.traces else infer

        async def read() -> None:
            async for request in requests:
                await waiting.put(asyncio.ensure_future(one(request, context)))
            await waiting.put(None)

        reader = asyncio.create_task(read())
        try:
            while (task := await waiting.get()) is not None:
                try:
                    yield messages.ModelStreamInferResponse(infer_response=await task)
                except Exception as err:
                    yield messages.ModelStreamInferResponse(error_message=described(err)[1])
        finally:
            reader.cancel()
            while not waiting.empty():
                left = waiting.get_nowait()
                if left is not None:
                    left.cancel()


def _parsed(request: Any) -> tuple[InferRequest, bool]:
    """Return the request, and whether its tensors are raw bytes, in which form the answer is then given."""
    check_tensors("inputs", len(request.inputs))
    check_tensors("outputs", len(request.outputs))
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise ServingError(f"there are {len(raw)} raw contents for {len(request.inputs)} inputs", 400)
    inputs: dict[str, Array] = {}
    for at, tensor in enumerate(request.inputs):
        name = tensor.name
        if name in inputs:
            raise ServingError(f"input {name!r} is given twice", 400)
        if any(key.startswith("shared_memory") for key in tensor.parameters):
            raise ServingError(f"{name!r} is in shared memory, which this server never reads; send the data", 400)
        shape, dtype = checked_shape(name, tensor.shape), checked_dtype(name, tensor.datatype)
        if raw:
            inputs[name] = array_from_bytes(name, shape, dtype, memoryview(raw[at]))
            continue
        place = _CONTENTS.get(tensor.datatype)
        if place is None:
            raise ServingError(f"input {name!r} is {tensor.datatype}, which is sent in raw_input_contents only", 400)
        data: list[Any] = list(getattr(tensor.contents, place))
        if tensor.datatype == "BYTES":
            try:
                data = [item.decode() for item in data]
            except UnicodeDecodeError as err:
                raise ServingError(f"input {name!r} holds an element that is no UTF-8", 400) from err
        inputs[name] = array_of(name, shape, dtype, data)
    if not request.parameters and not request.outputs:
        return InferRequest(inputs, id=request.id), bool(raw)
    document = {
        "id": request.id,
        "parameters": _plain(request.parameters),
        "outputs": [{"name": output.name, "parameters": _plain(output.parameters)} for output in request.outputs],
    }
    return request_of(inputs, document), bool(raw)


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {key: getattr(value, value.WhichOneof("choice") or "string_param") for key, value in parameters.items()}


def _response(model: ServedModel, wanted: InferRequest, found: Answer, raw: bool) -> Any:
    response = messages.ModelInferResponse(model_name=model.name, model_version=model.version, id=wanted.id)
    names = [output.name for output in wanted.outputs] if wanted.outputs else list(found.outputs)
    raw = raw or any(model.output_types[name] not in _CONTENTS for name in names)
    for name in names:
        array, datatype = found.outputs[name], model.output_types[name]
        tensor = response.outputs.add(name=name, datatype=datatype, shape=list(array.shape))
        if raw:
            response.raw_output_contents.append(bytes_of(array))
            continue
        flat = array.ravel().tolist()
        if datatype == "BYTES":
            flat = [item if isinstance(item, bytes) else str(item).encode() for item in flat]
        getattr(tensor.contents, _CONTENTS[datatype]).extend(flat)
    return response

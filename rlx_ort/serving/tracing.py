"""OpenTelemetry spans: one for each request, with children for queue, compute input, infer and output.

Nothing of OpenTelemetry is imported until spans are asked for. The spans go to the tracer provider of the process;
`export_spans` makes one that sends them by OTLP, to where the `OTEL_*` variables point.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from rlx_ort.errors import MissingExtraError, install_command

if TYPE_CHECKING:
    from rlx_ort.serving.exchange import Application, Message, Receive, Scope, Send
    from rlx_ort.serving.lanes import Answer

_PROBES = ("/v2/health/", "/metrics")
_GRPC_FAULTS = (2, 4, 12, 13, 14, 15)  # codes that the conventions of OpenTelemetry count as errors of the server
_FIRST_NAME = 3  # in a path, the segments before it are ours
_active: ContextVar[Any] = ContextVar("rlx_ort_request_span", default=None)


@functools.cache
def _api() -> Any:
    try:
        from opentelemetry import propagate, trace
    except ImportError as err:
        raise MissingExtraError(f"spans need OpenTelemetry: {err}\n  {install_command('otel')}") from err
    return trace, propagate


def export_spans(service: str = "rlx_ort") -> None:
    """Send the spans of this process by OTLP, in batches from a thread.

    The variables of OpenTelemetry apply, such as `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER` and
    `OTEL_SERVICE_NAME`. Where the process has a tracer provider already, it is kept.

    Raises:
        MissingExtraError: OpenTelemetry is not installed.
    """
    trace, _ = _api()
    if type(trace.get_tracer_provider()).__name__ != "ProxyTracerProvider":
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as err:
        raise MissingExtraError(f"sending spans needs OpenTelemetry: {err}\n  {install_command('otel')}") from err
    provider = TracerProvider(resource=Resource({SERVICE_NAME: service}).merge(Resource.create()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


@contextlib.contextmanager
def request_span(name: str, carrier: Mapping[str, str], attributes: Mapping[str, Any]) -> Iterator[Any]:
    """Make the span of a request current; the headers or metadata of `carrier` name its parent."""
    trace, propagate = _api()
    tracer = trace.get_tracer("rlx_ort.serving")
    parent = propagate.extract(carrier)
    with tracer.start_as_current_span(
        name, parent, trace.SpanKind.SERVER, dict(attributes), record_exception=False, set_status_on_exception=False
    ) as span:
        token = _active.set((tracer, span))
        try:
            yield span
        finally:
            _active.reset(token)


def add_phases(model: str, version: str, answer: Answer, begun_ns: int) -> None:
    """Add the phases of an inference to the request's span, if there is one.

    Args:
        model: the model's name.
        version: its version.
        answer: the outputs, with the times of the phases.
        begun_ns: when the request entered the queue, by `time.perf_counter_ns`.
    """
    active = _active.get()
    if active is None or not active[1].is_recording():
        return
    tracer, span = active
    span.set_attributes({"rlx_ort.model": model, "rlx_ort.version": version, "rlx_ort.device": answer.device.label})
    times, at = answer.times, time.time_ns() - (time.perf_counter_ns() - begun_ns)
    phases = {"queue": times.queue_ns, "compute input": times.input_ns, "infer": times.infer_ns}
    for name, took_ns in {**phases, "output": times.output_ns}.items():
        tracer.start_span(name, start_time=at).end(at + took_ns)
        at += took_ns


def trace_id() -> str | None:
    """Return the trace of the current request as 32 hexadecimal digits; None without a span."""
    active = _active.get()
    return None if active is None else f"{active[1].get_span_context().trace_id:032x}"


def traced_call(method: str, answer: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """Return a gRPC method, which takes a message and the call's context, that has a span."""

    async def traced(message: Any, context: Any) -> Any:
        carrier = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        with request_span(method, carrier, {"rpc.system": "grpc", "rpc.method": method}) as span:
            number = 0
            try:
                return await answer(message, context)
            except Exception:
                number = (getattr(context.code(), "value", None) or (2, ""))[0]
                raise
            finally:
                span.set_attribute("rpc.grpc.status_code", number)
                if number in _GRPC_FAULTS:
                    span.set_status(_api()[0].StatusCode.ERROR)

    return traced


class Traced:
    """An ASGI application whose requests have spans, except those of probes."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer within a span."""
        if scope["type"] != "http" or scope["path"].startswith(_PROBES):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"], "url.scheme": scope["scheme"]}
        with request_span(scope["method"], headers, attributes) as span:

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(_api()[0].StatusCode.ERROR)
                await send(message)

            await self._app(scope, receive, noted)
            if "endpoint" in scope:
                names = {value: f"{{{key}}}" for key, value in scope.get("path_params", {}).items()}
                parts = scope["path"].split("/")
                parts[_FIRST_NAME:] = [names.get(part, part) for part in parts[_FIRST_NAME:]]
                span.update_name(f"{scope['method']} {'/'.join(parts)}")

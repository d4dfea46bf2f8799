"""Spans of OpenTelemetry: one for each request, with its phases, in the client's trace."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from fault_provider import until
from served_models import Served, save_product, serving, started_command

from rlx_ort.serving import tracing
from rlx_ort.serving.options import HttpOptions

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("tritonclient.grpc")
from tritonclient import grpc as triton_grpc
from tritonclient import http as triton_http
from tritonclient.utils import InferenceServerException

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
PHASES = ["queue", "compute input", "infer", "output"]


@pytest.fixture(scope="module")
def recorded() -> Any:
    """Return an exporter in memory that gets every span of this process."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture(scope="module")
def traced(recorded: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server with spans and an access log."""
    folder = tmp_path_factory.mktemp("traced")
    save_product(folder / "product.onnx")
    with serving(folder, http=HttpOptions(traces=True, access_log=True)) as served:
        yield served


@pytest.fixture
def spans(recorded: Any) -> Any:
    """Return the exporter, empty."""
    recorded.clear()
    return recorded


def _input(client: Any) -> Any:
    given = client.InferInput("x", [2, 4], "FP32")
    given.set_data_from_numpy(np.ones((2, 4), np.float32))
    return given


def _requests(exporter: Any, count: int = 1) -> list[Any]:
    """Return the spans of requests, once each phase was found to be a child of one and to lie within it in order."""
    # a client has its answer before the span ends
    until(lambda: [span.kind.name for span in exporter.get_finished_spans()].count("SERVER") >= count)
    found = exporter.get_finished_spans()
    roots = {span.context.span_id: span for span in found if span.kind.name == "SERVER"}
    for root in roots.values():
        phases = [span for span in found if span.parent is not None and span.parent.span_id == root.context.span_id]
        if phases:
            assert [span.name for span in phases] == PHASES
            times = [root.start_time, *(time for span in phases for time in (span.start_time, span.end_time))]
            assert times == sorted(times)
            assert times[-1] <= root.end_time
    assert all(span.context.span_id in roots or span.parent.span_id in roots for span in found)
    return list(roots.values())


@pytest.mark.parametrize("side", ["http", "grpc"])
def test_a_request_has_one_span_in_the_trace_of_its_client(traced: Served, spans: Any, side: str) -> None:
    """The parent comes from `traceparent`; queue, compute input, infer and output are children."""
    module: Any = triton_http if side == "http" else triton_grpc
    client = module.InferenceServerClient(getattr(traced, side))
    client.infer("product", [_input(module)], headers=dict(HEADERS))
    client.close()
    (root,) = _requests(spans)
    assert len(spans.get_finished_spans()) == 1 + len(PHASES)
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT
    assert root.attributes["rlx_ort.model"] == "product"
    assert root.attributes["rlx_ort.device"] == "cpu"
    if side == "http":
        assert root.name == "POST /v2/models/{model}/infer"
        assert root.attributes["http.response.status_code"] == 200
    else:
        assert root.name == "inference.GRPCInferenceService/ModelInfer"
        assert root.attributes["rpc.grpc.status_code"] == 0


def test_each_request_of_a_stream_has_a_span(traced: Served, spans: Any) -> None:
    """The requests of a gRPC stream share the parent that the stream named."""
    client = triton_grpc.InferenceServerClient(traced.grpc)
    answers: list[Any] = []
    client.start_stream(lambda result, error: answers.append(error), headers=dict(HEADERS))
    for _ in range(3):
        client.async_stream_infer("product", [_input(triton_grpc)])
    client.stop_stream()
    client.close()
    assert answers == [None] * 3
    roots = _requests(spans, 3)
    assert [f"{root.context.trace_id:032x}" for root in roots] == [TRACE] * 3


def test_refusals_have_spans_and_probes_have_none(traced: Served, spans: Any) -> None:
    """A 404 is no error of the server; health and metrics are asked too often to be recorded."""
    for path in ("/v2/health/live", "/v2/health/ready", "/metrics"):
        urllib.request.urlopen(f"http://{traced.http}{path}").close()
    client = triton_grpc.InferenceServerClient(traced.grpc)
    with pytest.raises(InferenceServerException):
        client.get_model_metadata("nothing")
    client.close()
    (root,) = _requests(spans)
    assert root.attributes["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]
    assert root.status.is_unset


def test_the_access_log_names_the_trace(traced: Served, spans: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A request without a `traceparent` is logged with the trace that its span began."""
    with caplog.at_level("INFO", "rlx_ort.serving.access"):
        urllib.request.urlopen(f"http://{traced.http}/v2/models/product").close()
        (root,) = _requests(spans)
    (line,) = [json.loads(record.getMessage()) for record in caplog.records if record.name == "rlx_ort.serving.access"]
    assert line["trace_id"] == f"{root.context.trace_id:032x}"


def test_a_server_without_spans_records_none(recorded: Any, tmp_path: Path) -> None:
    """Spans are off unless they are asked for, in the same process too."""
    save_product(tmp_path / "product.onnx")
    with serving(tmp_path) as served:
        recorded.clear()
        client = triton_http.InferenceServerClient(served.http)
        client.infer("product", [_input(triton_http)], headers=dict(HEADERS))
        client.close()
    assert recorded.get_finished_spans() == ()


def test_a_tracer_provider_of_the_application_is_kept(recorded: Any) -> None:
    """`export_spans` replaces nothing that the application has set."""
    from opentelemetry import trace

    before = trace.get_tracer_provider()
    tracing.export_spans()
    assert trace.get_tracer_provider() is before


@pytest.mark.skipif(sys.platform == "win32", reason="terminate() is no signal there that a process can answer")
def test_the_command_sends_its_spans_to_a_collector(tmp_path: Path) -> None:
    """`--traces` exports by OTLP to where the variables point, at the latest when the server ends."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    bodies: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    save_product(tmp_path / "product.onnx")
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}"}
        arguments = [str(tmp_path), "--device", "cpu", "--traces"]
        process, address, _ = started_command(arguments, {**variables, "OTEL_EXPORTER_OTLP_COMPRESSION": "none"})
        client = triton_http.InferenceServerClient(address)
        client.infer("product", [_input(triton_http)], headers=dict(HEADERS))
        client.close()
        process.terminate()
        assert process.wait(30) == 0
        collector.shutdown()
    sent = b"".join(body for path, body in bodies if path == "/v1/traces")
    assert bytes.fromhex(TRACE) in sent
    assert all(phase.encode() in sent for phase in PHASES)
    assert b"rlx_ort" in sent

"""Clients that ask a server for much: large requests, answers that they do not read, and bodies that do not end."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import grpc
import numpy as np
from served_attacks import ask, request
from served_models import save_echo

from rlx_ort.converters.files import save_onnx
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.serving.messages import messages

INFER = "/inference.GRPCInferenceService/ModelInfer"
"""The path of the gRPC method for an inference."""
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_LARGE = 57 << 20
_WIDTH = 16384
_ROWS = _LARGE // _WIDTH // 4
_COLUMNS, _COPIES = 64, 256
_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def save_models(folder: Path) -> None:
    """Write models that echo numbers and texts, and `wide`, whose output has 256 times the size of its input."""
    graph = Graph("rows")
    x = graph.input("x", ["batch", _WIDTH])
    graph.outputs = [graph.neg(x)]
    save_onnx(graph, folder / "rows.onnx")
    save_echo(folder, DType.F32)
    save_echo(folder, DType.STRING)
    graph = Graph("wide")
    x = graph.input("x", ["batch", _COLUMNS])
    ones = graph.constant(np.ones((1, 1, _COPIES), np.float32))
    graph.outputs = [graph.reshape(x, [-1, _COLUMNS, 1]) * ones]
    save_onnx(graph, folder / "wide.onnx")


def connected(http: str, data: bytes, received_bytes: int | None = None) -> socket.socket:
    """Return a connection on which something was sent."""
    host, _, port = http.rpartition(":")
    found = socket.socket()
    if received_bytes is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_bytes)
    found.settimeout(30)
    found.connect((host, int(port)))
    found.sendall(data)
    return found


def infer_path(model: str) -> str:
    """Return the path of a model's inferences."""
    return f"/v2/models/{model}/infer"


def binary_request(model: str, shape: Sequence[int], datatype: str, data: bytes) -> bytes:
    """Return an HTTP request with binary data, which asks for a binary answer."""
    tensor = {"name": "x", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return request(head + data, f"Inference-Header-Content-Length: {len(head)}", path=infer_path(model))


def json_request(numbers: int) -> bytes:
    """Return an HTTP request with so many numbers as JSON."""
    head = json.dumps({"inputs": [{"name": "x", "shape": [numbers // 2, 2], "datatype": "FP32", "data": 0}]})
    data = "[" + ",".join(str(at % 10) + ".5" for at in range(numbers)) + "]"
    return request(head.replace('"data": 0', f'"data": {data}').encode(), path=infer_path("echo_fp32"))


def texts(total_bytes: int, each_bytes: int) -> tuple[int, bytes]:
    """Return how many texts there are in binary data of about such a size, an even number, and the data."""
    one = each_bytes.to_bytes(4, "little")
    count = total_bytes // (4 + each_bytes) // 2 * 2
    return count, b"".join(one + (b"%0*d" % (each_bytes, at))[-each_bytes:] for at in range(count))


def wide_message(rows: int) -> bytes:
    """Return a gRPC request for `wide`: 256 bytes a row, and 64 KiB a row of the answer."""
    found = messages.ModelInferRequest(model_name="wide")
    found.inputs.add(name="x", datatype="FP32", shape=[rows, _COLUMNS])
    found.raw_input_contents.append(bytes(4 * rows * _COLUMNS))
    data: bytes = found.SerializeToString()
    return data


def _together(calls: Sequence[Callable[[], str]]) -> str:
    """Make calls in threads, and return how often each result came."""
    found = Counter[str]()

    def one(call: Callable[[], str]) -> None:
        try:
            found[call()] += 1
        except (OSError, grpc.RpcError) as err:
            code = err.code().name if isinstance(err, grpc.RpcError) else type(err).__name__
            found[code] += 1

    threads = [threading.Thread(target=one, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ", ".join(f"{count} x {key}" for key, count in sorted(found.items()))


def _asked(http: str, data: bytes) -> Callable[[], str]:
    return lambda: str(ask(http, data, timeout_s=120)[0])


def _called(rpc: str, data: bytes, timeout_s: float = 120) -> Callable[[], str]:
    def call() -> str:
        with grpc.insecure_channel(rpc, options=_OPTIONS) as channel:
            channel.unary_unary(INFER)(data, timeout=timeout_s)
        return "OK"

    return call


def unread_streams(rpc: str, streams: int = 6, rows: int = 216, wait_s: float = 15) -> str:
    """Open gRPC streams of 64 requests each, and read no answer."""
    data = wide_message(rows)
    with contextlib.ExitStack() as stack:
        for _ in range(streams):
            channel = stack.enter_context(grpc.insecure_channel(rpc, options=_OPTIONS))
            stack.callback(channel.stream_stream(_STREAM)(_endless(data)).cancel)
        time.sleep(wait_s)
    return f"{streams} streams left unread"


def _endless(data: bytes) -> Iterator[bytes]:
    for _ in range(64):
        yield data
    time.sleep(3600)


def unread_calls(rpc: str, calls: int, rows: int = 216, wait_s: float = 15) -> str:
    """Make gRPC calls over connections whose client reads nothing."""
    host, _, port = rpc.rpartition(":")
    held = [UnreadCall(host, int(port), wide_message(rows)) for _ in range(calls)]
    time.sleep(wait_s)
    for each in held:
        each.close()
    return f"{calls} calls left unread"


class UnreadCall:
    """An HTTP/2 connection with one call, of which nothing is read: no window is given for the answer's bytes."""

    def __init__(self, host: str, port: int, message: bytes) -> None:
        self._socket = socket.create_connection((host, port), 10)
        body = b"\0" + len(message).to_bytes(4, "big") + message
        path = (INFER).encode()
        fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"localhost")]
        fields += [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
        head = b"".join(b"\0" + bytes([len(key)]) + key + bytes([len(value)]) + value for key, value in fields)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"") + _frame(1, 4, 1, head))
        for at in range(0, len(body), 16384):
            piece = body[at : at + 16384]
            self._socket.sendall(_frame(0, int(at + 16384 >= len(body)), 1, piece))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def unread_answers(http: str, clients: int = 200, rows: int = 216, wait_s: float = 15) -> str:
    """Ask over HTTP for large answers, and read none."""
    data = binary_request("wide", [rows, _COLUMNS], "FP32", bytes(4 * rows * _COLUMNS))
    held = [connected(http, data, 4096) for _ in range(clients)]
    time.sleep(wait_s)
    for each in held:
        each.close()
    return f"{clients} answers left unread"


def slow_bodies(http: str, clients: int = 1000, wait_s: float = 15) -> str:
    """Hold connections whose bodies do not end, and ask meanwhile as another client."""
    head = request(b"", path=infer_path("echo_fp32"), length=str(1 << 20))
    good = request(
        json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}).encode(),
        path=infer_path("echo_fp32"),
    )
    held, answers, until = [], Counter[int](), time.monotonic() + wait_s
    with contextlib.suppress(OSError):
        held += [connected(http, head + b" ") for _ in range(clients)]
    while time.monotonic() < until:
        try:
            answers[ask(http, good)[0]] += 1
        except OSError:
            answers[0] += 1
        for each in held:
            with contextlib.suppress(OSError):
                each.send(b" ")
        time.sleep(0.1)
    for each in held:
        each.close()
    return ", ".join(f"{count} x {key}" for key, count in sorted(answers.items()))


def large_bodies(http: str, clients: int = 40) -> str:
    """Send nearly all of large bodies, and hold them."""
    head = request(b"", path=infer_path("echo_fp32"), length=str(_LARGE))
    body = bytes(_LARGE - 1)

    def one() -> str:
        with connected(http, head) as connection:
            try:
                connection.sendall(body)
                connection.settimeout(20)
                return str(connection.recv(100).split()[1:2])
            except TimeoutError:
                return "held"

    return _together([one] * clients)


def _text_requests(each_bytes: int) -> bytes:
    count, data = texts(_LARGE, each_bytes)
    return binary_request("echo_bytes", [count // 2, 2], "BYTES", data)


def _infer_message(model: str, shape: Sequence[int], datatype: str, raw: bytes) -> bytes:
    found = messages.ModelInferRequest(model_name=model)
    found.inputs.add(name="x", datatype=datatype, shape=shape)
    found.raw_input_contents.append(raw)
    data: bytes = found.SerializeToString()
    return data


def _text_message(each_bytes: int) -> bytes:
    count, data = texts(_LARGE, each_bytes)
    return _infer_message("echo_bytes", [count // 2, 2], "BYTES", data)


def _contents_message() -> bytes:
    found = messages.ModelInferRequest(model_name="echo_fp32")
    tensor = found.inputs.add(name="x", datatype="FP32", shape=[2_000_000, 2])
    tensor.contents.fp32_contents.extend([0.5] * 4_000_000)
    data: bytes = found.SerializeToString()
    return data


def _parameters_message(count: int = 1_000_000) -> bytes:
    found = messages.ModelInferRequest(model_name="echo_fp32")
    for at in range(count):
        found.parameters[f"p{at}"].int64_param = at
    data: bytes = found.SerializeToString()
    return data


ATTACKS: Mapping[str, Callable[[str, str], str]] = {
    "none": lambda http, rpc: time.sleep(5) or "",
    "streams": lambda http, rpc: unread_streams(rpc),
    "calls": lambda http, rpc: unread_calls(rpc, 200),
    "answers": lambda http, rpc: unread_answers(http),
    "numbers": lambda http, rpc: _together(
        [_asked(http, binary_request("rows", [_ROWS, _WIDTH], "FP32", bytes(4 * _ROWS * _WIDTH)))] * 4
    ),
    "grpc-numbers": lambda http, rpc: _together(
        [_called(rpc, _infer_message("rows", [_ROWS, _WIDTH], "FP32", bytes(4 * _ROWS * _WIDTH)))] * 4
    ),
    "texts": lambda http, rpc: _together([_asked(http, _text_requests(2))] * 2),
    "long-texts": lambda http, rpc: _together([_asked(http, _text_requests(60))] * 2),
    "grpc-texts": lambda http, rpc: _together([_called(rpc, _text_message(2))] * 2),
    "json": lambda http, rpc: _together([_asked(http, json_request(2_000_000))] * 4),
    "json-nested": lambda http, rpc: _together(
        [_asked(http, request(b"[" + b"[],[]," * (4 << 18) + b"1]", path=infer_path("echo_fp32")))] * 4
    ),
    "contents": lambda http, rpc: _together([_called(rpc, _contents_message())] * 4),
    "parameters": lambda http, rpc: _together([_called(rpc, _parameters_message())] * 4),
    "empty-inputs": lambda http, rpc: _together([_called(rpc, b"\x2a\x00" * (_LARGE // 2))] * 2),
    "slow-bodies": lambda http, rpc: slow_bodies(http),
    "large-bodies": lambda http, rpc: large_bodies(http),
}
"""What each attack is called, and the attack itself on the addresses for HTTP and gRPC; it returns what came back."""

"""Clients that ask a server for much: large requests, answers that they do not read, and bodies that do not end."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import numpy as np
from served_attacks import request
from served_models import save_echo

from rlx_ort import DType, Graph, save_onnx
from rlx_ort.serving.messages import messages

INFER = "/inference.GRPCInferenceService/ModelInfer"
"""The path of the gRPC method for an inference."""
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
WIDTH = 16384
COLUMNS, _COPIES = 64, 256
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def save_models(folder: Path) -> None:
    """Write models that echo numbers and texts, and `wide`, whose output has 256 times the size of its input."""
    graph = Graph("rows")
    x = graph.input("x", ["batch", WIDTH])
    graph.outputs = [graph.neg(x)]
    save_onnx(graph, folder / "rows.onnx")
    save_echo(folder, DType.F32)
    save_echo(folder, DType.STRING)
    graph = Graph("wide")
    x = graph.input("x", ["batch", COLUMNS])
    ones = graph.constant(np.ones((1, 1, _COPIES), np.float32))
    graph.outputs = [graph.reshape(x, [-1, COLUMNS, 1]) * ones]
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


def wide_message(rows: int) -> bytes:
    """Return a gRPC request for `wide`: 256 bytes a row, and 64 KiB a row of the answer."""
    found = messages.ModelInferRequest(model_name="wide")
    found.inputs.add(name="x", datatype="FP32", shape=[rows, COLUMNS])
    found.raw_input_contents.append(bytes(4 * rows * COLUMNS))
    data: bytes = found.SerializeToString()
    return data


def unread_streams(rpc: str, streams: int = 6, rows: int = 216, wait_s: float = 15) -> str:
    """Open gRPC streams of 64 requests each, and read no answer."""
    data = wide_message(rows)
    with contextlib.ExitStack() as stack:
        for _ in range(streams):
            channel = stack.enter_context(grpc.insecure_channel(rpc, options=OPTIONS))
            stack.callback(channel.stream_stream(_STREAM)(_endless(data)).cancel)
        time.sleep(wait_s)
    return f"{streams} streams left unread"


def _endless(data: bytes) -> Iterator[bytes]:
    for _ in range(64):
        yield data
    time.sleep(3600)


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

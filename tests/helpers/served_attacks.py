"""Malformed and hostile requests against a server of `save_product` models, and what it may answer."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from rlx_ort.serving.messages import messages

GOOD = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
PATH = "/v2/models/product/infer"
CLOSED = 0
"""The status of a connection that was closed without an answer."""
REFUSED = frozenset({400, 404, 405, 408, 413, 415, 421, 431, 503})
_GRPC_REFUSED = frozenset({"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "INTERNAL", "UNIMPLEMENTED"})
_TEXTS = ("", "\0", "../../etc/passwd", "%2e%2e%2f", "x" * 5000, "\r\nX: y", "\ud800", "ä", "1e999", "-1", "{}")
_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 40, 1 << 62, 1 << 64, 10**400, 1.5, 1e308, float("nan"), float("inf"), [], {}, [[[1]]],
    [1] * 5000, {"a": {"a": {"a": []}}}, *_TEXTS,
)  # fmt: skip


@dataclass(frozen=True)
class Attack:
    """Bytes for a fresh connection and the statuses that may come back.

    Attributes:
        title: its kind.
        data: what is sent.
        statuses: what may be answered.
        unfinished: whether the client ends its side at once, since the request has no end.
    """

    title: str
    data: bytes
    statuses: frozenset[int] = REFUSED
    unfinished: bool = False


def request(body: bytes, *headers: str, method: str = "POST", path: str = PATH, length: str | None = "") -> bytes:
    """Return an HTTP request; `length` replaces its Content-Length, None leaves it out."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    if length is not None:
        lines.append(f"Content-Length: {length or len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def ask(
    address: str,
    data: bytes,
    *,
    unfinished: bool = False,
    timeout_s: float = 20.0,
    piece_bytes: int = 1 << 30,
    pause_s: float = 0.0,
) -> tuple[int, bytes]:
    """Send bytes to a server and return the status and body of its first answer.

    A server may answer and close while the rest is still being sent: that breaks sending, and the answer can be read.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout_s) as connection:
        found = bytearray()
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(data), piece_bytes):
                connection.sendall(data[start : start + piece_bytes])
                time.sleep(pause_s)
            if unfinished:
                connection.shutdown(socket.SHUT_WR)
        try:
            while not _is_complete(found, data[:5] == b"HEAD ") and (piece := connection.recv(1 << 20)):
                found += piece
        except ConnectionError:
            pass  # what arrived before counts
    head, _, body = bytes(found).partition(b"\r\n\r\n")
    return (int(head.split()[1]), body) if head.startswith(b"HTTP/1.1 ") else (CLOSED, found)


def _is_complete(found: bytearray, head_only: bool) -> bool:
    size = found.find(b"\r\n\r\n")
    head = bytes(found[: max(size, 0)])
    if size < 0 or head.split()[1] == b"100":
        return False
    if head_only:
        return True
    lengths = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    return bool(lengths) and len(found) - size - 4 >= lengths[0]


def attacks(seed: int, count: int) -> Iterator[Attack]:
    """Yield so many HTTP attacks, each kind in turn."""
    draw = random.Random(seed)
    for at in range(count):
        yield _KINDS[at % len(_KINDS)](draw)


def _damaged(draw: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(found) + 1)
        change = draw.randrange(3)
        if change == 0:
            found[at:at] = draw.randbytes(draw.randint(1, 9))
        elif change == 1:
            del found[at : at + draw.randint(1, 9)]
        elif at < len(found):
            found[at] = draw.randrange(256)
    return bytes(found)


def _any_status() -> frozenset[int]:
    return REFUSED | {200, 403, CLOSED}


def _request_line(draw: random.Random) -> Attack:
    method = draw.choice(
        ["GET", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "CONNECT", "HEAD", "post", "G\0T", "X" * 9000]
    )
    paths = [
        PATH,
        "/v2/models/%2e%2e/infer",
        "/v2/models/..%2f..%2fetc/infer",
        "*",
        "http://evil/v2/x",
        "//",
        "/%ff%fe",
    ]
    paths += ["/v2/models/product/versions/%00/infer", "/" + "a" * 70_000, "/v2/models/\xff", ""]
    path = draw.choice(paths)
    return Attack("request line", request(b"", method=method, path=path), _any_status())


def _headers(draw: random.Random) -> Attack:
    body = json.dumps(GOOD).encode()
    headers = draw.choice([
        ["Inference-Header-Content-Length: 99999999999999999999"], ["Inference-Header-Content-Length: -1"],
        ["Inference-Header-Content-Length: 0x10"], ["Inference-Header-Content-Length: 1e3"],
        ["Inference-Header-Content-Length: 4", "Inference-Header-Content-Length: 5"],
        ["Inference-Header-Content-Length: 5"], ["Content-Encoding: br"], ["Content-Encoding: gzip"],
        ["Content-Encoding: gzip, gzip"], ["Content-Encoding: deflate"], ["X: " + "y" * 100_000],
        [f"X{at}: y" for at in range(20_000)], ["Host: evil"], ["X\0: y"], ["X : y"], [" folded: y"], ["no colon"],
    ])  # fmt: skip
    return Attack("headers", request(body, *headers))


def _lengths(draw: random.Random) -> Attack:
    length = draw.choice(
        ["-1", "+5", "1e3", "0x5", "5, 5", "5 5", "18446744073709551616", "9" * 400, "99999999999", "ten"]
    )
    return Attack("lengths", request(json.dumps(GOOD).encode(), length=length), REFUSED | {CLOSED}, length == "5 5")


def _smuggled(draw: random.Random) -> Attack:
    body = json.dumps(GOOD).encode()
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    coding = draw.choice(["chunked", "gzip, chunked", "chunked, identity", "\tchunked", "xchunked", "chunked, chunked"])
    data = request(chunk, f"Transfer-Encoding: {coding}", length=draw.choice(["", "5", "0"]))
    return Attack("two lengths", data, REFUSED | {CLOSED})


def _chunks(draw: random.Random) -> Attack:
    chunks = draw.choice([
        b"zz\r\nab\r\n", b"-1\r\n", b"ffffffffffffffffff\r\nab", b"5\r\nabcdefgh\r\n0\r\n\r\n", b"1\nA\n0\n\n",
        b"1;" + b"x" * 90_000, b"0\r\n" + b"T: v\r\n" * 20_000, b"1\r\n{\r\n0\r\n\r\n",
    ])  # fmt: skip
    return Attack("chunks", request(chunks, "Transfer-Encoding: chunked", length=None), REFUSED | {CLOSED}, True)


def _noise(draw: random.Random) -> Attack:
    return Attack("noise", draw.randbytes(draw.randint(1, 5000)), REFUSED | {CLOSED}, True)


def _damaged_request(draw: random.Random) -> Attack:
    data = _damaged(draw, request(json.dumps(GOOD).encode(), "Inference-Header-Content-Length: 88"))
    return Attack("damaged request", data, _any_status(), True)


def _json(draw: random.Random) -> Attack:
    text = json.dumps(GOOD)
    body = draw.choice([
        text.replace("[1, 2, 3, 4]", "[1, 2, 3, NaN]"), text.replace("[1, 2, 3, 4]", "[1, 2, 3, -Infinity]"),
        text.replace("[1, 2, 3, 4]", "[1, 2, 3, 1e999]"), text.replace("[1, 2, 3, 4]", "[1, 2, 3, 1e300]"),
        text.replace("[1, 2, 3, 4]", "[1, 2, 3, " + "9" * 5000 + "]"), text[:-1] + ', "inputs": []}', text + "{}",
        text.replace('"name": "x"', '"name": "x", "name": "y"'), "[" * 50_000, '{"a":' * 50_000, "null", '"x"', "",
        text.replace("[1, 4]", "[0, 1000000000000]"), text.replace("[1, 4]", "[4294967296, 4294967296]"),
        text.replace("[1, 4]", "[1, 4" + ", 1" * 40 + "]"), text.replace("[1, 2, 3, 4]", "[[1, 2], 3]"),
    ])  # fmt: skip
    return Attack("JSON", request(body.encode()), frozenset({400}))


def _fields(draw: random.Random) -> Attack:
    """Put a value that does not belong there into a place of a good request."""
    document = json.loads(json.dumps(GOOD))
    tensor = document["inputs"][0]
    target: Any = draw.choice([document, tensor, tensor])
    keys = (
        ["name", "shape", "datatype", "data", "parameters"]
        if target is tensor
        else ["inputs", "outputs", "id", "parameters"]
    )
    target[draw.choice(keys)] = draw.choice(_VALUES)
    if draw.random() < 0.3:
        keys = ["binary_data_size", "shared_memory_region", "binary_data_output", "priority", "timeout", "sequence_id"]
        target["parameters"] = {draw.choice(keys): draw.choice(_VALUES)}
    return Attack("fields", request(json.dumps(document).encode()), frozenset({200, 400, 504}))


def _binary(draw: random.Random) -> Attack:
    shape, data = draw.choice([([1, 4], 16), ([0, 4], 0), ([1 << 20, 0], 0), ([1 << 39, 1 << 39, 0], 0), ([4], 16)])
    size = draw.choice([data, data + 1, data - 1, 1 << 63, True, "16", 16.0, [16]])
    datatype = draw.choice(["FP32", "BYTES", "FP64", "BOOL", "FP8"])
    tensor = {"name": "x", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor]}).encode()
    data = draw.randbytes(max(data + draw.randint(-2, 2), 0))
    length = len(head) + draw.choice([0, 0, 1, -1])
    return Attack("binary", request(head + data, f"Inference-Header-Content-Length: {length}"), frozenset({200, 400}))


def _compressed(draw: random.Random) -> Attack:
    good = gzip.compress(json.dumps(GOOD).encode())
    bomb = gzip.compress(b" " * (8 << 20))
    body = draw.choice([good[:-4], good + good, good + b"x", bomb, b"\x1f\x8b" + draw.randbytes(50), b""])
    return Attack("compressed", request(body, "Content-Encoding: gzip"), frozenset({400, 413}))


def _repository(draw: random.Random) -> Attack:
    path = draw.choice(["/v2/repository/index", "/v2/repository/models/%2e%2e/load", "/v2/repository/models/x/unload"])
    body = draw.choice(
        [b"[]", b'{"ready": 1}', b"\xff", b'{"parameters": {"file:1/model.onnx": "AA=="}}', b'"ready":true']
    )
    return Attack(
        "repository", request(body, path=path), frozenset({400, 403, 404} if "index" not in path else {200, 400})
    )


def _pipelined(draw: random.Random) -> Attack:
    one = request(b"", method="GET", path="/v2/health/live", length=None)
    return Attack("pipelined", one * draw.choice([2, 10, 500]), frozenset({200, 400}))


_KINDS: tuple[Callable[[random.Random], Attack], ...] = (
    _request_line, _headers, _lengths, _smuggled, _chunks, _noise, _damaged_request, _json, _fields, _binary,
    _compressed, _repository, _pipelined,
)  # fmt: skip


def judged(address: str, attack: Attack) -> str:
    """Return what is wrong with the answer to an attack; empty if nothing is."""
    try:
        status, body = ask(address, attack.data, unfinished=attack.unfinished)
    except TimeoutError:
        return f"{attack.title}: no answer"
    if status not in attack.statuses and not (attack.unfinished and status == CLOSED):
        return f"{attack.title}: status {status}: {body[:200]!r}"
    if status >= 400 and attack.data[:4] != b"HEAD":
        try:
            json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):
            return f"{attack.title}: status {status} with the body {body[:200]!r}"
    return ""


def grpc_attacks(address: str, seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Send so many messages that are damaged or do not fit, and yield the code of each and what is wrong with it."""
    draw = random.Random(seed)
    names = (
        "ModelInfer",
        "ModelMetadata",
        "ModelConfig",
        "ModelStatistics",
        "RepositoryIndex",
        "RepositoryModelLoad",
        "Nothing",
    )
    with grpc.insecure_channel(address) as channel:
        for _ in range(count):
            name = draw.choice(names) if draw.random() < 0.3 else "ModelInfer"
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{name}")
            data = draw.choice([_message, _message, lambda draw: draw.randbytes(draw.randint(0, 400))])(draw)
            try:
                call(data, timeout=20)
                yield "OK", ""
            except grpc.RpcError as err:
                code = err.code().name
                allowed = code in _GRPC_REFUSED or (code == "PERMISSION_DENIED" and name == "RepositoryModelLoad")
                yield code, "" if allowed else f"gRPC {name}: {code}: {err.details()}"


def good_message() -> Any:
    """Return a request that is answered."""
    found = messages.ModelInferRequest(model_name="product", id="1")
    found.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    found.raw_input_contents.append(struct.pack("<4f", 1, 2, 3, 4))
    return found


def _message(draw: random.Random) -> bytes:
    found = good_message()
    tensor = found.inputs[0]
    change = draw.randrange(9)
    if change == 0:
        tensor.shape[:] = draw.choice([[-1, 4], [1 << 62, 1 << 62], [0, 1 << 40], [4], [1] * 64, []])
    elif change == 1:
        tensor.datatype = draw.choice(["", "FP8", "BYTES", "FP64", "x" * 50_000])
    elif change == 2:
        found.raw_input_contents[:] = draw.choice([[b""], [b"1" * 15], [b"1" * 16] * 2, [b"1" * 17]])
    elif change == 3:
        del found.raw_input_contents[:]
        tensor.contents.fp32_contents[:] = [float("nan")] * draw.randint(0, 5)
    elif change == 4:
        found.model_name = draw.choice(["", "..", "x" * 50_000, "\0"])
    elif change == 5:
        found.parameters["priority"].int64_param = draw.choice([-1, 1 << 62])
    elif change == 6:
        found.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    elif change == 7:
        found.outputs.add(name=draw.choice(["", "z", "x" * 50_000]))
    data: bytes = found.SerializeToString()
    return _damaged(draw, data) if change == 8 else data


def answers(http: str, rpc: str) -> bool:
    """Return whether a good request is answered rightly on both sides."""
    status, body = ask(http, request(json.dumps(GOOD).encode()))
    weight = np.arange(12, dtype=np.float32).reshape(4, 3)
    expected = (np.array([1, 2, 3, 4], np.float32) @ weight).tolist()
    if status != 200 or json.loads(body)["outputs"][0]["data"] != expected:
        return False
    with grpc.insecure_channel(rpc) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=messages.ModelInferRequest.SerializeToString,
            response_deserializer=messages.ModelInferResponse.FromString,
        )
        found = call(good_message(), timeout=20)
    return np.frombuffer(found.raw_output_contents[0], np.float32).tolist() == expected


def run(http: str, rpc: str, count: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Send so many attacks, a fifth of them over gRPC; return how often each kind got each status, and the defects."""
    counts, defects = Counter[str](), list[str]()
    for attack in attacks(seed, count - count // 5):
        wrong = judged(http, attack)
        counts[attack.title] += 1
        if wrong:
            defects.append(f"{wrong}; sent {attack.data[:300]!r}")
    for code, wrong in grpc_attacks(rpc, seed, count // 5):
        counts[f"gRPC {code}"] += 1
        if wrong:
            defects.append(wrong)
    return counts, defects

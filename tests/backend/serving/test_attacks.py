"""Malformed requests, slow clients, many connections and oversized bodies cost little and leave the server working."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import grpc
import pytest
from served_attacks import GOOD, PATH, answers, ask, good_message, request, run
from served_models import Served, save_product, serving

from rlx_ort.selection.policy import DevicePolicy
from rlx_ort.serving.options import ConnectionLimits, HttpOptions, ServeOptions

BODY = json.dumps(GOOD).encode()
LIMITS = ConnectionLimits(most=20, idle_s=1.5, head_s=1.0, body_s=1.0, body_rate=1 << 20, write_s=1.0)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server with a token and limits that a test can reach."""
    folder = tmp_path_factory.mktemp("strict")
    save_product(folder / "product.onnx")
    http = HttpOptions(most_bytes=1 << 20, token="secret", most_json_bytes=1 << 16)
    options = ServeOptions(policy=DevicePolicy.only("cpu"), most_held_bytes=3 << 19)
    with serving(folder, options, http=http, connections=LIMITS) as found:
        yield found


def connected(served: Served, data: bytes) -> socket.socket:
    """Return a connection on which something was sent."""
    host, _, port = served.http.rpartition(":")
    found = socket.create_connection((host, int(port)), 10)
    found.sendall(data)
    return found


def good(served: Served) -> bool:
    """Return whether a request with the token is answered."""
    return ask(served.http, request(BODY, "Authorization: Bearer secret"))[0] == 200


def test_malformed_requests_get_the_right_status(served: Served) -> None:
    """Hundreds of every kind; a good request is answered afterwards."""
    counts, defects = run(served.http, served.grpc, 500, seed=1)
    assert defects == []
    assert sum(counts.values()) == 500
    assert answers(served.http, served.grpc)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request(BODY, "X: " + "y" * 500_000), 431),
        (b"no HTTP at all\r\n\r\n" + b"y" * 500_000, 400),
        (request(b" " * 500_000, "Authorization: Bearer wrong"), 401),
        (request(b"y" * 500_000, path="/v2/nothing"), 404),
    ],
    ids=["large head", "no HTTP", "wrong token", "no such path"],
)
def test_a_client_that_is_still_sending_can_read_its_refusal(strict: Served, data: bytes, status: int) -> None:
    """The connection ends without a reset, by which Windows drops what its client has not read."""
    with connected(strict, b"") as connection:
        for start in range(0, len(data), 1 << 14):
            connection.sendall(data[start : start + (1 << 14)])
            time.sleep(0.003)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while piece := connection.recv(1 << 16):
            found += piece
    head, _, body = found.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert json.loads(body)["error"]


def test_a_refused_client_that_sends_for_ever_is_cut_off(strict: Served) -> None:
    """After a second, or 16 MiB."""
    begun = time.monotonic()
    with connected(strict, b"no HTTP at all\r\n\r\n") as connection, contextlib.suppress(ConnectionError):
        while time.monotonic() < begun + 20:
            connection.sendall(bytes(1 << 16))
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET /v2/nothing", 404),
        ("GET /v2/", 404),
        ("GET " + PATH, 405),
        ("DELETE /v2", 405),
        ("HEAD /v2", 200),
        ("GET /v2/models/product/versions/9", 404),
        ("GET /v2/models/%2e%2e", 404),
    ],
)
def test_unknown_routes_have_errors_of_the_protocol(served: Served, line: str, status: int) -> None:
    """No page of the framework, and no redirect to what the client gave as host."""
    method, path = line.split()
    found, body = ask(served.http, request(b"", method=method, path=path, length=None))
    assert found == status
    assert status == 200 or list(json.loads(body)) == ["error"]


def test_a_body_is_refused_before_it_is_read(strict: Served) -> None:
    """Without the token, or larger than is allowed: the answer comes although nothing of the body was sent."""
    for headers, length, status in (([], "5000", 401), (["Authorization: Bearer secret"], "9999999999", 413)):
        begun = time.monotonic()
        found, body = ask(strict.http, request(b"", *headers, length=length))
        assert found == status
        assert json.loads(body)["error"]
        assert time.monotonic() - begun < 1
    found, _ = ask(strict.http, request(b"", "Expect: 100-continue", length="5000"))
    assert found == 401
    token = "Authorization: Bearer secret"
    assert ask(strict.http, request(b"[" * (1 << 17), token))[0] == 413  # more JSON than is allowed
    assert good(strict)


def test_the_memory_of_all_bodies_is_limited(strict: Served) -> None:
    """The third megabyte at a time gets status 503; the place is free again when the others went away."""
    head = request(b"", "Authorization: Bearer secret", length=str(1 << 20))
    others = [connected(strict, head + b" " * 900_000)]
    time.sleep(0.3)
    found, _ = ask(strict.http, head + b" " * (1 << 20))
    assert found == 503
    for other in others:
        other.close()
    time.sleep(0.2)
    assert good(strict)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", b""),
        (b"\r\n", b""),
        (b"POST / HTTP/1.1\r\nHost: loc", b"408"),
        (request(b"{", "Authorization: Bearer secret", length="100"), b"408"),
    ],
    ids=["nothing", "empty line", "head", "body"],
)
def test_slow_clients_are_ended(strict: Served, data: bytes, status: bytes) -> None:
    """A connection without a complete request is closed in time."""
    with connected(strict, data) as connection:
        begun = time.monotonic()
        found = connection.recv(1000)
        assert time.monotonic() - begun < 4
    assert status in found[:20]


def test_a_client_that_reads_no_answer_is_ended(strict: Served) -> None:
    """Its answers are dropped, and so are the requests behind them."""
    one = request(b"", "Authorization: Bearer secret", method="GET", path="/metrics", length=None)
    with connected(strict, b"") as connection:
        connection.settimeout(15)
        with pytest.raises(OSError):  # noqa: PT011, PT012  # reset or broken pipe
            for _ in range(200):  # Windows buffers a single send whole, whatever its size
                connection.sendall(one * 1000)
    assert good(strict)


def test_many_idle_connections_leave_room(strict: Served) -> None:
    """Beyond the limit, the connection that has been idle longest makes room."""
    with contextlib.ExitStack() as idle:
        for at in range(60):
            idle.enter_context(connected(strict, b"GET / HT" if at % 2 else b""))
        time.sleep(0.6)  # a head that has begun is waited for, for half a second
        assert good(strict)


def test_pages_of_other_hosts_are_refused(served: Served) -> None:
    """A web page cannot ask this machine's server, by its own name or by one that resolves to this machine."""
    get = request(b"", "Origin: http://evil.example", method="GET", path="/v2", length=None)
    assert ask(served.http, get)[0] == 403
    own = request(b"", "Origin: http://localhost", method="GET", path="/v2", length=None)
    assert ask(served.http, own)[0] == 200
    assert ask(served.http, own.replace(b"localhost", b"evil.example"))[0] == 421


def test_a_request_without_rows_is_refused(served: Served) -> None:
    """And the error says so; no batch is made of it."""
    document = {"inputs": [{"name": "x", "shape": [0, 4], "datatype": "FP32", "data": []}]}
    status, body = ask(served.http, request(json.dumps(document).encode(), path="/v2/models/versions/infer"))
    assert status == 400
    assert b"no rows" in body


def test_requests_of_any_size_leave_nothing_behind(served: Served) -> None:
    """A client chooses the rows of its requests; the statistics count large batches by powers of two."""
    for rows in range(1000, 1100):
        data = [0] * (4 * rows)
        document = {"inputs": [{"name": "x", "shape": [rows, 4], "datatype": "FP32", "data": data}]}
        assert ask(served.http, request(json.dumps(document).encode(), path="/v2/models/versions/infer"))[0] == 200
    sizes = served.repository.find("versions").statistics.batches
    assert sizes
    assert all(size <= 256 or size.bit_count() == 1 for size in sizes)


def test_a_call_of_very_many_tensors_is_refused(served: Served) -> None:
    """Over gRPC as over REST, before each is looked at."""
    message = good_message()
    for at in range(2000):
        message.inputs.add(name=str(at), datatype="FP32", shape=[0])
    with grpc.insecure_channel(served.grpc) as channel, pytest.raises(grpc.RpcError, match="2001 entries"):
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message.SerializeToString())


def test_grpc_refuses_before_it_reads(strict: Served) -> None:
    """Without the token nothing of a call is received; larger messages, packed ones too, are refused."""
    path = "/inference.GRPCInferenceService/ModelInfer"
    token = [("authorization", "Bearer secret")]
    with grpc.insecure_channel(strict.grpc) as channel:
        waiting = channel.stream_stream(path)(iter(lambda: time.sleep(0.1) or b"", None), timeout=5)
        with pytest.raises(grpc.RpcError) as refused:
            next(waiting)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        for given in ({}, {"compression": grpc.Compression.Gzip}):
            with pytest.raises(grpc.RpcError) as large:
                channel.unary_unary(path)(bytes(2 << 20), metadata=token, timeout=10, **given)
            assert large.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_of_two_tokens_none_counts(strict: Served) -> None:
    """A proxy may have checked the other one."""
    token = "Authorization: Bearer secret"
    assert ask(strict.http, request(BODY, "Authorization: Bearer wrong", token))[0] == 400
    metadata = [("authorization", "Bearer wrong"), ("authorization", "Bearer secret")]
    with grpc.insecure_channel(strict.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")(b"", metadata=metadata, timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_trailer_is_no_header(strict: Served) -> None:
    """A token behind the body is not looked at, even where the request before it is still under way."""
    body = b"%x\r\n%s\r\n0\r\nAuthorization: Bearer secret\r\n\r\n" % (len(BODY), BODY)
    sent = request(body, "Transfer-Encoding: chunked", length=None)
    assert ask(strict.http, sent)[0] == 401
    good_one = request(body, "Authorization: Bearer secret", "Transfer-Encoding: chunked", length=None)
    assert ask(strict.http, request(b"", method="GET", path="/v2/health/live", length=None) + sent)[0] == 200
    assert ask(strict.http, good_one)[0] == 200

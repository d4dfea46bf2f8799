"""Front processes read requests and write answers; what clients see is that of one server."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fault_provider import until
from served_attacks import GOOD, PATH, ask, attacks, judged, request
from served_models import WEIGHT, Served, gated, save_echo, save_product, serving, started_command

from rlx_ort import DevicePolicy, DType
from rlx_ort.serving import fronts
from rlx_ort.serving.channel import Channel
from rlx_ort.serving.options import ConnectionLimits, HttpOptions, ServeOptions
from rlx_ort.serving.protocol import Array

BODY = json.dumps(GOOD).encode()
MOST = 8 << 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server with a token and a small budget that passes every connection on to one of two fronts."""
    folder = tmp_path_factory.mktemp("fronts")
    save_product(folder / "product.onnx")
    for dtype in (DType.F32, DType.BF16, DType.STRING):
        save_echo(folder, dtype)
    http_options = HttpOptions(token="secret", repository_control=True, most_bytes=MOST)
    options = ServeOptions(policy=DevicePolicy.only("cpu"), most_held_bytes=MOST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fronts, "_OWN", 0)
        limits = ConnectionLimits(most=40)
        with serving(folder, options, http=http_options, grpc_port=None, connections=limits, fronts=2) as found:
            yield found
    assert not _front_processes()


def _front_processes(parent: int | None = None) -> list[psutil.Process]:
    children = psutil.Process(parent).children(recursive=True)
    return [child for child in children if any("serving.front" in word for word in child.cmdline())]


def authorized(data: bytes, path: str = PATH, *headers: str, method: str = "POST") -> bytes:
    """Return a request with the token."""
    length = "" if method == "POST" else None
    return request(data, "Authorization: Bearer secret", *headers, method=method, path=path, length=length)


def binary(model: str, datatype: str, shape: list[int], data: bytes) -> bytes:
    """Return a request with a binary tensor, and binary outputs."""
    entry = {"name": "x", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    header = f"Inference-Header-Content-Length: {len(head)}"
    return authorized(head + data, f"/v2/models/{model}/infer", header)


def test_answers_are_those_of_the_server(served: Served) -> None:
    """Of inferences, and of what the server's process answers altogether."""
    before = served.repository.find("product").statistics.inferences
    for _ in range(3):
        status, body = ask(served.http, authorized(BODY))
        assert status == 200
        np.testing.assert_allclose(json.loads(body)["outputs"][0]["data"], np.array([1, 2, 3, 4.0]) @ WEIGHT)
    assert served.repository.find("product").statistics.inferences == before + 3
    status, body = ask(served.http, authorized(b"", "/v2/models/product", method="GET"))
    assert (status, json.loads(body)["inputs"][0]["shape"]) == (200, [-1, 4])
    status, body = ask(served.http, authorized(b"", "/metrics", method="GET"))
    assert (status, b"rlx_inference_request_success_total" in body) == (200, True)
    status, body = ask(served.http, authorized(b"", "/status", method="GET"))
    rows = {row["name"]: row for row in json.loads(body)["models"]}
    assert rows["product"]["answered"] == before + 3
    assert sum(rows["product"]["batches"]["cpu"].values()) > 0
    for path in ("/v2/health/ready", "/"):
        assert ask(served.http, request(b"", method="GET", path=path, length=None))[0] == 200


@pytest.mark.parametrize("rows", [1, 4000, 200_000])
def test_tensors_cross_unchanged(served: Served, rows: int) -> None:
    """Small ones over the socket, large ones through shared memory; of 16 bits as well."""
    data = np.arange(2 * rows, dtype=np.float32).tobytes()
    status, body = ask(served.http, binary("echo_fp32", "FP32", [rows, 2], data))
    assert status == 200
    assert body.endswith(data)
    status, body = ask(served.http, binary("echo_bf16", "BF16", [2 * rows, 2], data))
    assert status == 200
    assert body.endswith(data)


def test_tensors_without_room_in_shared_memory_cross_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the socket, however many they are."""
    monkeypatch.setattr(fronts, "_OWN", 0)
    monkeypatch.setattr(fronts, "_MEMORY_BYTES", 1 << 20)
    save_echo(tmp_path, DType.F32)
    data = np.arange(1 << 18, dtype=np.float32).tobytes() + b"\0" * 8
    with serving(tmp_path, http=HttpOptions(token="secret"), grpc_port=None, fronts=1) as served:
        for _ in range(3):
            status, body = ask(served.http, binary("echo_fp32", "FP32", [(1 << 17) + 1, 2], data))
            assert status == 200
            assert body.endswith(data)


def test_shared_memory_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bodies and of answers, also of clients that go away; later tensors still cross through it."""
    made, kinds = list[Channel](), list[list[type]]()

    class Seen(Channel):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

        def _unpacked(self, packed: Any) -> dict[str, Array]:
            kinds.append([type(data) for *_, data in packed])
            return super()._unpacked(packed)

    monkeypatch.setattr(fronts, "_OWN", 0)
    monkeypatch.setattr(fronts, "_MEMORY_BYTES", 4 << 20)
    monkeypatch.setattr(fronts, "Channel", Seen)
    save_echo(tmp_path, DType.F32)
    data = np.arange(1 << 18, dtype=np.float32).tobytes()
    whole, wrong = (binary("echo_fp32", "FP32", [1 << 17, size], data) for size in (2, 1))
    with serving(tmp_path, http=HttpOptions(token="secret"), grpc_port=None, fronts=1) as served:
        host, _, port = served.http.rpartition(":")
        for _ in range(5):
            assert ask(served.http, wrong)[0] == 400
            assert ask(served.http, whole)[0] == 200
            for most in (-1000, len(whole)):
                with socket.create_connection((host, int(port)), 10) as connection:
                    connection.sendall(whole[:most])
                    time.sleep(0.05)
        assert ask(served.http, whole)[1].endswith(data)
        assert kinds[-1] == [int]
        [channel] = made
        until(lambda: len(channel.arena._free) == 1 and channel.arena._free[0][1] == 4 << 20)


def test_an_answer_that_is_read_late_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that come meanwhile do not take its place in shared memory."""
    monkeypatch.setattr(fronts, "_OWN", 0)
    monkeypatch.setattr(fronts, "_MEMORY_BYTES", 64 << 20)
    save_echo(tmp_path, DType.F32)
    rows = 3 << 20
    late = np.arange(2 * rows, dtype=np.float32).tobytes()
    with serving(tmp_path, http=HttpOptions(token="secret"), grpc_port=None, fronts=1) as served:
        host, _, port = served.http.rpartition(":")
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            connection.sendall(binary("echo_fp32", "FP32", [rows, 2], late))
            time.sleep(0.5)
            for at in range(8):
                other = np.full(2 * rows, -1 - at, np.float32).tobytes()
                status, body = ask(served.http, binary("echo_fp32", "FP32", [rows, 2], other))
                assert status == 200
                assert body.endswith(other)
            received = bytearray()
            while len(received) < len(late) and (piece := connection.recv(1 << 20)):
                received += piece
            while not received.endswith(late[-64:]) and (piece := connection.recv(1 << 20)):
                received += piece
    assert received.endswith(late)


def test_texts_cross(served: Served) -> None:
    """With what is no ASCII."""
    texts = ["a", "ä€𝄞"]
    entry = {"name": "x", "shape": [1, 2], "datatype": "BYTES", "data": texts}
    status, body = ask(served.http, authorized(json.dumps({"inputs": [entry]}).encode(), "/v2/models/echo_bytes/infer"))
    assert (status, json.loads(body)["outputs"][0]["data"]) == (200, texts)


def test_refusals_are_those_of_the_server(served: Served) -> None:
    """With their statuses: of the caller, the path, the model before its body is read, and the tensors."""
    assert ask(served.http, request(BODY))[0] == 401
    assert ask(served.http, authorized(BODY, "/v2/nothing"))[0] == 404
    head = authorized(b"", "/v2/models/none/infer").replace(b"Content-Length: 0", b"Content-Length: 1000")
    status, body = ask(served.http, head)
    assert (status, b"there is no model 'none'" in body) == (404, True)
    status, body = ask(served.http, authorized(BODY.replace(b"[1, 4]", b"[4, 1]")))
    assert (status, b"given: float32 [4, 1]" in body) == (400, True)


def test_malformed_requests_get_the_right_status(served: Served) -> None:
    """As without fronts; a good request is answered afterwards."""
    defects = [defect for attack in attacks(2, 100) if (defect := judged(served.http, attack))]
    defects = [each for each in defects if "401" not in each]  # they have no token
    assert defects == []
    assert ask(served.http, authorized(BODY))[0] == 200


def test_a_model_that_was_unloaded_is_refused(served: Served) -> None:
    """Also by a front that has seen it, and answered again once it is loaded."""
    for action, status in (("unload", 503), ("load", 200)):
        assert ask(served.http, authorized(b"", f"/v2/repository/models/echo_fp32/{action}"))[0] == 200
        for _ in range(4):
            assert ask(served.http, binary("echo_fp32", "FP32", [1, 2], bytes(8)))[0] == status


def test_one_budget_counts_the_bytes_of_all_processes(served: Served) -> None:
    """A body that arrives at one front leaves no room for one at another; later all is free again."""
    budget = served.repository.budget
    until(lambda: budget.held_bytes == 0)
    host, _, port = served.http.rpartition(":")
    large = authorized(b"", "/v2/models/echo_fp32/infer").replace(b"Length: 0", b"Length: %d" % (MOST - 1000))
    with socket.create_connection((host, int(port)), 10) as slow:
        slow.sendall(large + bytes(MOST - 2000))
        until(lambda: budget.held_bytes > MOST - 4000)
        statuses = [ask(served.http, binary("echo_fp32", "FP32", [1000, 2], bytes(8000)))[0] for _ in range(2)]
        assert statuses == [503, 503]
    until(lambda: budget.held_bytes == 0)
    assert budget.refused >= 2
    assert ask(served.http, binary("echo_fp32", "FP32", [1000, 2], bytes(8000)))[0] == 200


def test_a_client_that_goes_away_is_dropped_before_it_runs(served: Served) -> None:
    """The second request waits while the first one runs; its client leaves; it never runs."""
    scheduler = served.repository.find("product").scheduler
    with gated(served, "product") as gate:
        first = threading.Thread(target=ask, args=(served.http, authorized(BODY)))
        first.start()
        until(lambda: gate.rows == [1])
        host, _, port = served.http.rpartition(":")
        with socket.create_connection((host, int(port)), 10) as second:
            second.sendall(authorized(BODY.replace(b"[1, 2", b"[7, 2")))
            until(lambda: scheduler.depth == 1)
            time.sleep(0.1)  # after this long a server looks whether the client is there
        until(lambda: scheduler.depth == 0)
        gate.open.set()
        first.join()
    assert gate.rows == [1]


def test_a_connection_beyond_the_limit_ends_one_that_is_idle(served: Served) -> None:
    """The fronts share the number of connections that may be open."""
    host, _, port = served.http.rpartition(":")
    idle = [socket.create_connection((host, int(port)), 10) for _ in range(60)]
    try:
        assert ask(served.http, authorized(BODY))[0] == 200
        time.sleep(0.3)
        for connection in idle:
            connection.setblocking(False)
        assert sum(map(_is_open, idle)) <= 40
    finally:
        for connection in idle:
            connection.close()


def _is_open(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_the_command_drains_its_fronts(tmp_path: Path) -> None:
    """A request whose body is under way at a front is answered after the signal, then all processes end."""
    save_product(tmp_path / "product.onnx")
    process, rest, _ = started_command([str(tmp_path), "--device", "cpu", "--fronts", "2"])
    kept: list[http.client.HTTPConnection] = []
    try:
        processes = _front_processes(process.pid)
        assert len(processes) in (2, 4)  # in environments of Windows, each has a launcher
        host, _, port = rest.rpartition(":")
        kept = _kept(rest)
        with socket.create_connection((host, int(port)), 10) as connection:
            data = request(BODY)
            connection.sendall(data[:-10])
            time.sleep(0.2)
            if os.name == "nt":
                return  # a process cannot be asked to end there
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert process.poll() is None
            connection.sendall(data[-10:])
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert process.wait(20) == 0
        assert not any(each.is_running() for each in processes)
    finally:
        _ended(process, kept)


def test_a_front_that_ends_takes_its_connections_only(tmp_path: Path) -> None:
    """New ones go to the others, and once there is none, to the server."""
    save_product(tmp_path / "product.onnx")
    process, rest, _ = started_command([str(tmp_path), "--device", "cpu", "--fronts", "2"])
    kept = _kept(rest)
    try:
        for front in _front_processes(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):  # a launcher ends with the process that it has started
                front.kill()
            until(lambda front=front: not front.is_running())
            until(lambda: all(ask(rest, request(BODY))[0] == 200 for _ in range(4)))
    finally:
        _ended(process, kept)


def _kept(address: str) -> list[http.client.HTTPConnection]:
    """Return connections that the server does not pass on; later ones go to fronts."""
    kept = [http.client.HTTPConnection(address, timeout=10) for _ in range(fronts._OWN)]
    for connection in kept:
        connection.request("POST", PATH, BODY)
        assert connection.getresponse().read()
    return kept


def _ended(process: subprocess.Popen[str], kept: Sequence[http.client.HTTPConnection]) -> None:
    for connection in kept:
        connection.close()
    process.kill()
    process.wait()

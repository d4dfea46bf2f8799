"""Clients that go away, reloads under load, signed packages, and warming."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from fault_provider import until
from sample_packages.keys import write_keys
from sample_packages.packages import SIZE, X, make, reference
from served_attacks import GOOD, PATH, ask, good_message, request
from served_models import ON_CPU, WEIGHT, Gate, Served, gated, save_product, serving

from rlx_ort import ConversionError, Device, DevicePolicy, ServingError
from rlx_ort.deploy.open import PackageDevices, warm_package
from rlx_ort.deploy.package import Package, sign_package
from rlx_ort.providers.engine.compiled.starts import SavedSession
from rlx_ort.serving import repository
from rlx_ort.serving.host import HostOptions, serve
from rlx_ort.serving.messages import messages
from rlx_ort.serving.options import HttpOptions, ServeOptions
from rlx_ort.serving.repository import Repository


@pytest.fixture
def gate(served: Served) -> Iterator[Gate]:
    """Yield a gate of the product model."""
    with gated(served, "product") as found:
        yield found


def asked_for(first: float) -> dict[str, Any]:
    """Return a request whose first element is this."""
    return {"inputs": [{**GOOD["inputs"][0], "data": [first, 0, 0, 0]}]}


@pytest.mark.parametrize("side", ["http", "grpc"])
def test_a_client_that_goes_away_is_dropped_before_it_runs(served: Served, gate: Gate, side: str) -> None:
    """The second request waits while the first one runs; its client leaves; it never runs."""
    scheduler = served.repository.find("product").scheduler
    first = threading.Thread(target=ask, args=(served.http, request(json.dumps(asked_for(1)).encode())))
    first.start()
    until(lambda: gate.rows == [1])
    if side == "http":
        second = http.client.HTTPConnection(served.http, timeout=5)
        second.request("POST", PATH, json.dumps(asked_for(7)))
        until(lambda: scheduler.depth == 1)
        time.sleep(0.1)  # after this long a server looks whether the client is there
        second.close()
    else:
        message = good_message()
        message.raw_input_contents[0] = np.array([7, 0, 0, 0], np.float32).tobytes()
        with grpc.insecure_channel(served.grpc) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer").future(message.SerializeToString())
            until(lambda: scheduler.depth == 1)
            call.cancel()
    time.sleep(0.2)
    gate.open.set()
    first.join()
    third = ask(served.http, request(json.dumps(asked_for(3)).encode()))
    assert third[0] == 200
    assert gate.rows == [1, 3]


def test_an_ending_server_answers_what_runs(tmp_path: Path) -> None:
    """On both sides: the requests that run or wait are answered after the end was asked for; new ones are refused."""
    save_product(tmp_path / "product.onnx")
    statuses: list[int] = []
    with serving(tmp_path) as served, gated(served, "product") as gate:
        body = request(json.dumps(GOOD).encode())
        first = threading.Thread(target=lambda: statuses.append(ask(served.http, body)[0]))
        first.start()
        until(lambda: gate.rows)
        with grpc.insecure_channel(served.grpc) as channel:
            method = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            second = method.future(good_message().SerializeToString())
            until(lambda: served.repository.find("product").scheduler.depth == 1)
            served.end()
            until(lambda: not served.repository.ready)
            time.sleep(0.3)
            with pytest.raises(OSError, match="refused"):
                ask(served.http, request(b"", method="GET", path="/v2", length=None))
            with pytest.raises(grpc.RpcError) as refused:
                method(good_message().SerializeToString(), timeout=5)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert served.thread.is_alive()
            gate.open.set()
            assert second.result(timeout=10)
        first.join()
        served.wait()
    assert statuses == [200]


def test_fifty_reloads_under_load_drop_no_request(served: Served) -> None:
    """Every answer is that of one of the two files, and none is an error."""
    path = served.folder / "busy.onnx"
    save_product(path)
    rest = http.client.HTTPConnection(served.http, timeout=30)

    def load() -> None:
        rest.request("POST", "/v2/repository/models/busy/load", "")
        answer = rest.getresponse()
        assert (answer.read(), answer.status) == (b"{}", 200)

    load()
    ended = threading.Event()
    wrong: list[object] = []
    answered = [0] * 4
    right = [(factor * np.array([1, 2, 3, 4], np.float32) @ WEIGHT).tolist() for factor in (1, 2)]

    def ask_http(number: int) -> None:
        connection = http.client.HTTPConnection(served.http, timeout=30)
        while not ended.is_set():
            connection.request("POST", "/v2/models/busy/infer", json.dumps(GOOD))
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200 or json.loads(body)["outputs"][0]["data"] not in right:
                wrong.append(body)
            answered[number] += 1
        connection.close()

    def ask_grpc(number: int) -> None:
        message = good_message()
        message.model_name = "busy"
        with grpc.insecure_channel(served.grpc) as channel:
            call = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                request_serializer=messages.ModelInferRequest.SerializeToString,
                response_deserializer=messages.ModelInferResponse.FromString,
            )
            while not ended.is_set():
                try:
                    found = call(message, timeout=30).raw_output_contents[0]
                    if np.frombuffer(found, np.float32).tolist() not in right:
                        wrong.append(found)
                except grpc.RpcError as err:
                    wrong.append(err)
                answered[number] += 1

    threads = [threading.Thread(target=(ask_http, ask_grpc)[at % 2], args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    try:
        for at in range(50):
            other = served.folder / "other.tmp"
            save_product(other, 1.0 + at % 2)
            other.replace(path)
            load()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        rest.close()
        path.unlink()
        del served.repository.entries["busy"]
    assert wrong == []
    assert min(answered) > 20


def test_only_signed_packages_are_served_where_that_is_asked(tmp_path: Path) -> None:
    """An ONNX file, an unsigned package and one that another key signed are refused; the server goes on."""
    ours, theirs = write_keys(tmp_path, "ours"), write_keys(tmp_path, "theirs")
    folder = tmp_path / "models"
    folder.mkdir()
    save_product(folder / "plain.onnx")
    for name, key in (("good", ours[0]), ("bad", theirs[0]), ("unsigned", None)):
        path = make(folder / f"{name}.ortpackage")
        if key is not None:
            with Package(path) as package:
                sign_package(package, key)
    options = ServeOptions(policy=ON_CPU.policy, require_signature=str(ours[1]), signed_only=True)
    repository = Repository([folder], options)

    async def load() -> list[dict[str, str]]:
        await repository.load_all()
        found = repository.index()
        await repository.close()
        return found

    rows = {row["name"]: row for row in asyncio.run(load())}
    assert {name for name, row in rows.items() if row["state"] == "READY"} == {"good"}
    assert "only signed packages" in rows["plain"]["reason"]
    assert "sign" in rows["bad"]["reason"]
    assert "sign" in rows["unsigned"]["reason"]


def test_golden_inputs_run_before_a_package_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each device, so that the first request of that shape finds everything opened."""
    seen = []
    run = PackageDevices.run

    def watched(self: PackageDevices, device: Any, inputs: Any, **limits: Any) -> Any:
        seen.append(inputs["x"].shape)
        return run(self, device, inputs, **limits)

    monkeypatch.setattr(PackageDevices, "run", watched)
    with serving(make(tmp_path / "small.ortpackage")):
        assert (3, 32) in seen


@pytest.fixture
def warmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a package that was warmed, with a compile cache of the test's own."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    path = make(tmp_path / "small.ortpackage", folder=True)
    assert warm_package(path, [Device.CPU])[0].starts
    return path


def test_a_warmed_package_answers_before_it_is_opened_in_full(warmed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ready after a run of its golden inputs from the compile cache; its devices and batches follow."""
    runs, opening = list[Any](), threading.Event()
    run, package = SavedSession.run, repository._package

    def watched(self: SavedSession, inputs: Any) -> Any:
        runs.append(inputs["x"].shape)
        return run(self, inputs)

    def held(*args: Any, **expected: Any) -> Any:
        assert opening.wait(60)  # as the request for the config, which waits for it
        return package(*args, **expected)

    monkeypatch.setattr(SavedSession, "run", watched)
    monkeypatch.setattr(repository, "_package", held)
    body = json.dumps({"inputs": [{"name": "x", "shape": [3, SIZE], "datatype": "FP32", "data": X.tolist()}]}).encode()
    with serving(warmed, ServeOptions()) as served:
        assert runs == [(3, SIZE)]
        model = served.repository.find("small")
        for batched in (None, "rows"):
            assert model.batched_along == batched
            status, found = ask(served.http, request(body, path="/v2/models/small/infer"))
            assert status == 200
            output = json.loads(found)["outputs"][0]
            result = np.reshape(output["data"], output["shape"])
            np.testing.assert_allclose(result, reference(X), rtol=1e-3, atol=1e-3)
            opening.set()
            asked = request(b"", method="GET", path="/v2/models/small/config", length=None)
            _, config = ask(served.http, asked, timeout_s=60)
            assert json.loads(config)["max_batch_size"] == 256
    assert len(runs) == 2


async def test_a_package_that_cannot_be_opened_in_full_is_unloaded(warmed: Path) -> None:
    """Without golden inputs nothing else of it was read; the index of the repository gives the reason."""
    path = make(warmed.with_name("bare.ortpackage"), folder=True, golden=[])
    assert warm_package(path, [Device.CPU])[0].starts
    graph = path / "graph.json"
    graph.write_bytes(graph.read_bytes().replace(b"relu", b"rely"))
    repository = Repository([path])
    await repository.load_all(complete=False)
    assert repository.ready
    repository.complete()
    await repository.find("bare").completed()
    assert not repository.ready
    assert "graph.json" in repository.index()[0]["reason"]
    await repository.close()


def test_a_package_that_may_not_run_on_the_cpu_does_not_start_there(warmed: Path) -> None:
    """Packages that refuse the CPU themselves cannot be warmed for it."""
    assert repository._started(warmed, ServeOptions(policy=DevicePolicy.only("webgpu"))) is None
    found = repository._started(warmed, ON_CPU)
    assert found is not None
    found.close()


def test_clients_load_nothing_unless_they_may(tmp_path: Path) -> None:
    """Repository control is off by default; where it is on, files in the request are refused."""
    save_product(tmp_path / "product.onnx")
    with serving(tmp_path) as served:
        for change in ("load", "unload"):
            status, body = ask(served.http, request(b"{}", path=f"/v2/repository/models/product/{change}"))
            assert status == 403
            assert b"--repository-control" in body
        with grpc.insecure_channel(served.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelUnload")(b"")
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_the_access_log_has_a_line_for_each_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of both sides, refused ones too, with the trace that the client named; whatever it sends stays in its line."""
    save_product(tmp_path / "product.onnx")
    trace = "0af7651916cd43dd8448eb211c80319c"
    http_options = HttpOptions(access_log=True)
    with caplog.at_level("INFO", "rlx_ort.serving.access"), serving(tmp_path, http=http_options) as served:
        ask(served.http, request(json.dumps(GOOD).encode(), f"traceparent: 00-{trace}-b7ad6b7169203331-01"))
        ask(served.http, request(b"", method="GET", path="/%0a{}", length=None))
        with grpc.insecure_channel(served.grpc) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/inference.GRPCInferenceService/ModelReady")(b"\n\x01z")
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "rlx_ort.serving.access"]
    assert [(line["side"], line["status"]) for line in lines] == [("http", 200), ("http", 404), ("grpc", "NOT_FOUND")]
    assert lines[0]["trace_id"] == trace
    assert lines[1]["path"] == "/\n{}"
    assert all(line["ms"] > 0 for line in lines)


def test_a_model_in_a_request_is_refused(served: Served) -> None:
    """Triton's `file:` and `config` parameters of the load."""
    body = json.dumps({"parameters": {"config": "{}", "file:1/model.onnx": "AA=="}}).encode()
    status, answer = ask(served.http, request(body, path="/v2/repository/models/product/load"))
    assert status == 400
    assert b"folders only" in answer


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    """So is a certificate that cannot be read."""
    with pytest.raises(ConversionError, match="no model"):
        Repository([tmp_path])
    save_product(tmp_path / "product.onnx")
    (tmp_path / "cert.pem").write_text("nothing", encoding="utf-8")
    host = HostOptions(certificate=tmp_path / "cert.pem", private_key=tmp_path / "cert.pem")
    with pytest.raises(ServingError, match="not a certificate"):
        asyncio.run(serve(Repository([tmp_path]), host))


def test_the_end_does_not_wait_for_a_body_that_does_not_come(tmp_path: Path) -> None:
    """Its client gets status 503 after some seconds, not after the time of requests that run."""
    save_product(tmp_path / "product.onnx")
    with serving(tmp_path) as served:
        host, _, port = served.http.rpartition(":")
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(request(json.dumps(GOOD).encode())[:-10])
            time.sleep(0.3)
            begun_s = time.monotonic()
            served.end()
            assert connection.recv(100).startswith(b"HTTP/1.1 503")
            served.wait()
            assert time.monotonic() - begun_s < 8


def test_the_end_does_not_wait_for_a_call_without_a_message_or_an_idle_stream(tmp_path: Path) -> None:
    """The call is refused after some seconds, the stream ends, and clients may keep their connections."""
    save_product(tmp_path / "product.onnx")
    hold = threading.Event()

    def requests(*sent: bytes) -> Iterator[bytes]:
        yield from sent
        hold.wait(30)

    with serving(tmp_path) as served, grpc.insecure_channel(served.grpc) as channel:
        path = "/inference.GRPCInferenceService/Model"
        stream = channel.stream_stream(path + "StreamInfer")(requests(good_message().SerializeToString()))
        assert next(stream)
        silent = channel.stream_unary(path + "Infer").future(requests())
        time.sleep(0.3)
        served.end()
        served.wait(10)
        hold.set()
        assert silent.code() is grpc.StatusCode.UNAVAILABLE
        assert list(stream) == []

"""Two replicas on a Ray cluster of this machine: right answers, a replica that is killed, new models, and the end."""

from __future__ import annotations

import collections
import os
import signal
import socket
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fault_provider import until
from serve_client import Client
from served_models import WEIGHT, save_product

from rlx_ort import DevicePolicy
from rlx_ort.serving.host import HostOptions
from rlx_ort.serving.options import ServeOptions
from rlx_ort.serving.ray import NAME, OWN_CLUSTER, RayOptions, build, run

pytest.importorskip("tritonclient.grpc")
from tritonclient import grpc as triton_grpc
from tritonclient import http as triton_http
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.filterwarnings("ignore")
_CLIENTS = 8
PATIENCE_S = 90.0


@dataclass
class Cluster:
    """What runs: the folder of its models, its addresses, the lines on its devices, and `ray` and `ray.serve`."""

    folder: Path
    http: str
    grpc: str
    devices: list[str]
    ray: Any
    serve: Any
    end: Callable[[], None]

    def pids(self) -> set[int]:
        """Return the processes of the replicas."""
        found = set()
        for process in psutil.Process().children(recursive=True):
            try:
                if " ".join(process.cmdline()).startswith(f"ray::ServeReplica:{NAME}:"):
                    found.add(process.pid)
            except psutil.Error:
                pass  # it has ended in the meantime
        return found

    def running(self) -> int:
        """Return how many replicas Ray counts as running."""
        application = self.serve.status().applications.get(NAME)
        states = application.deployments[NAME].replica_states if application and application.deployments else {}
        return int(sum(count for state, count in states.items() if getattr(state, "value", state) == "RUNNING"))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, cache_folder: Path) -> Iterator[Cluster]:
    """Yield a cluster of four logical CPUs, with two replicas of one CPU each."""
    ray = pytest.importorskip("ray")
    from ray import serve

    folder = tmp_path_factory.mktemp("models")
    save_product(folder / "product.onnx")
    os.environ.update(OWN_CLUSTER, RLX_CACHE_DIR=str(cache_folder))
    ray.init(num_cpus=4, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
    place = HostOptions("0.0.0.0", _free_port(), _free_port())
    stop, ready, devices = threading.Event(), threading.Event(), list[str]()

    def on_ready(rest: str | None, rpc: str | None, lines: list[str]) -> None:
        devices.extend(lines)
        ready.set()

    served = ServeOptions(DevicePolicy().with_prefer(["cuda", "cpu"]))
    options = {"on_ready": on_ready, "stop": stop}
    thread = threading.Thread(target=run, args=([folder], served, place, RayOptions((2, 2))), kwargs=options)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join(90)

    assert ready.wait(180)
    yield Cluster(folder, f"127.0.0.1:{place.http_port}", f"127.0.0.1:{place.grpc_port}", devices, ray, serve, end)
    end()
    serve.shutdown()
    ray.shutdown()
    assert not thread.is_alive()


class Load:
    """Clients that send again as `examples/serve_client.py` does, and how their requests ended."""

    def __init__(self, address: str, factors: tuple[float, ...]) -> None:
        self.counts = collections.Counter[str]()
        self._address, self._factors, self._ended = address, factors, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(_CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)

    def wait(self, more: int) -> None:
        """Wait until so many more requests were answered."""
        wanted = self.counts.total() + more
        until(lambda: self.counts.total() >= wanted, PATIENCE_S)

    def _ask(self, number: int) -> None:
        draw, client = np.random.default_rng(number), Client(self._address)
        while not self._ended.is_set():
            data = draw.integers(0, 9, (2, 4)).astype(np.float32)
            try:
                found = client.infer("product", {"x": data})["matmul"]
                right = any(np.allclose(found, data @ WEIGHT * factor) for factor in self._factors)
                self.counts["right" if right else "wrong"] += 1
            except (Exception, SystemExit) as err:
                self.counts[f"lost: {err!r}"] += 1
        client.close()


@pytest.mark.parametrize("side", ["http", "grpc"])
def test_two_replicas_answer_tritonclient(cluster: Cluster, side: str) -> None:
    """Binary HTTP and gRPC give right results, the protocol's errors, metadata and health."""
    module: Any = triton_http if side == "http" else triton_grpc
    client = module.InferenceServerClient(getattr(cluster, side))
    draw = np.random.default_rng(0)
    output = module.InferRequestedOutput("matmul")
    for rows in range(1, 20):
        data = draw.standard_normal((rows, 4)).astype(np.float32)
        given = module.InferInput("x", list(data.shape), "FP32")
        given.set_data_from_numpy(data)
        found = client.infer("product", [given], outputs=[output], request_id=str(rows))
        np.testing.assert_allclose(found.as_numpy("matmul"), data @ WEIGHT, rtol=1e-5)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("product")
    with pytest.raises(InferenceServerException, match="there is no model 'nothing'"):
        client.get_model_metadata("nothing")
    with pytest.raises(InferenceServerException, match="clients may not load"):
        client.unload_model("product")
    client.close()
    assert cluster.running() == len(cluster.pids()) == 2


def test_the_devices_of_the_replicas_are_told_and_why_others_are_not_used(cluster: Cluster) -> None:
    """Replicas without a GPU of Ray's run on the CPU alone, whatever is preferred."""
    [running, refused] = cluster.devices
    assert running == "product on cpu"
    assert refused.startswith("not on cuda: ")


def test_a_grpc_stream_is_answered_in_order(cluster: Cluster) -> None:
    """`ModelStreamInfer` passes Ray's proxy; an error answers its request and leaves the stream open."""
    client = triton_grpc.InferenceServerClient(cluster.grpc)
    answers: list[Any] = []
    client.start_stream(lambda result, error: answers.append(error or result.as_numpy("matmul")[0, 0]))
    for number, model in enumerate(["product", "nothing", "product"]):
        given = triton_grpc.InferInput("x", [1, 4], "FP32")
        given.set_data_from_numpy(np.full((1, 4), number, np.float32))
        client.async_stream_infer(model, [given])
    until(lambda: len(answers) == 3, PATIENCE_S)
    client.stop_stream()
    client.close()
    assert [answers[0], answers[2]] == [0, 2 * WEIGHT[:, 0].sum()]
    assert "there is no model 'nothing'" in str(answers[1])


def test_a_killed_replica_loses_no_request(cluster: Cluster) -> None:
    """Under load of clients that send again, nothing is wrong or lost, and Ray starts another replica."""
    before = cluster.pids()
    with Load(cluster.http, (1.0,)) as load:
        load.wait(100)
        os.kill(min(before), getattr(signal, "SIGKILL", signal.SIGTERM))
        load.wait(100)
        until(lambda: cluster.running() == 2 and len(cluster.pids() - before) == 1, PATIENCE_S)
        load.wait(100)
    assert set(load.counts) == {"right"}


def test_running_it_again_replaces_the_models_without_losing_a_request(cluster: Cluster, tmp_path: Path) -> None:
    """The old replicas finish what they accepted; here the new models come from an archive that a node fetches once."""
    save_product(tmp_path / "product.onnx", 3.0)
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as written:
        written.write(tmp_path / "product.onnx", "top/models/product.onnx")
    before = cluster.pids()
    with Load(cluster.http, (1.0, 3.0)) as load:
        load.wait(50)
        app = build(["models"], scale=RayOptions((2, 2), archive=archive.as_uri()))
        cluster.serve.run(app, name=NAME, route_prefix="/")
        load.wait(50)
    assert set(load.counts) == {"right"}
    until(lambda: not cluster.pids() & before, PATIENCE_S)
    client = Client(cluster.http)
    for _ in range(10):
        found = client.infer("product", {"x": np.ones((1, 4), np.float32)})["matmul"]
        np.testing.assert_allclose(found, 3 * WEIGHT.sum(0, keepdims=True))
    client.close()
    fetched = {psutil.Process(pid).cwd() for pid in cluster.pids()}
    assert len(fetched) == 1
    assert "working_dir_files" in fetched.pop()


def test_the_end_unloads_the_models(cluster: Cluster) -> None:
    """After `stop` no replica is left."""
    cluster.end()
    until(lambda: not cluster.pids(), PATIENCE_S)

"""Servers on free ports, the models that tests of serving ask, and requests to a scheduler without a server."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from rlx_ort import DevicePolicy, DType, Graph, save_onnx
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.serving.host import HostOptions, serve
from rlx_ort.serving.lanes import Answer, Array
from rlx_ort.serving.options import HttpOptions, ServeOptions
from rlx_ort.serving.pending import awaited
from rlx_ort.serving.protocol import DATATYPES
from rlx_ort.serving.repository import Repository
from rlx_ort.serving.scheduler import Scheduler

WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3)
ON_CPU = ServeOptions(policy=DevicePolicy.only("cpu"))


@dataclass
class Served:
    """A running server: its addresses, its repository, and the folder of its models."""

    folder: Path
    repository: Repository
    http: str = ""
    grpc: str = ""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop | None = None
    thread: threading.Thread = field(init=False)

    def end(self) -> None:
        """Stop the server from any thread."""
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.stop.set)

    def wait(self, seconds: float = 30.0) -> None:
        """Wait for the end of a server that was asked to end."""
        self.thread.join(seconds)
        assert not self.thread.is_alive()


def save_echo(folder: Path, dtype: DType) -> None:
    """Write a model that returns its input of a type."""
    graph = Graph("echo")
    x = graph.input("x", ["batch", 2], dtype)
    kind = TensorType(dtype, Shape(["batch", 2]))
    graph.outputs = list(graph.onnx_node("Identity", [x], {}, types=[kind], version=21, name="y"))
    save_onnx(graph, folder / f"echo_{DATATYPES[dtype].lower()}.onnx")


def save_product(path: Path, factor: float = 1.0, total: bool = False) -> None:
    """Write `y = x @ WEIGHT * factor`, `x` of 4 columns; with `total`, a second output that adds up all rows."""
    graph = Graph("product")
    x = graph.input("x", ["batch", 4])
    y = x @ graph.param("w", [4, 3], data=WEIGHT * np.float32(factor))
    graph.outputs = [y, graph.neg(y)] if not total else [y, y + graph.sum(y, [0], keep_dim=True)]
    save_onnx(graph, path)


async def submit(scheduler: Scheduler, inputs: Mapping[str, Array], **limits: Any) -> Answer:
    """Wait for the outputs of one request."""
    return await awaited(lambda ended: scheduler.accept(inputs, None, ended, **limits))


@contextmanager
def serving(
    folder: Path, options: ServeOptions = ON_CPU, *, interval_s: float = 10.0, **place: Any
) -> Iterator[Served]:
    """Yield a server in a thread once it is ready, and end it.

    Its history has a sample every `interval_s` seconds; `place` has fields of `HostOptions`.
    """
    ready = threading.Event()
    found: list[Served] = []

    async def run() -> None:
        served = Served(folder, Repository([folder], options))
        served.repository.history.interval_s = interval_s
        served.loop = asyncio.get_running_loop()
        found.append(served)

        def listening(rest: str | None, rpc: str | None) -> None:
            served.http, served.grpc = rest or "", rpc or ""

        host = HostOptions(**{"http_port": 0, "grpc_port": 0, **place})
        loaded = asyncio.Event()  # front processes are ready as well then
        running = asyncio.create_task(
            serve(served.repository, host, on_listening=listening, on_loaded=loaded.set, stop=served.stop)
        )
        while not ((loaded.is_set() and served.repository.ready and (served.http or served.grpc)) or running.done()):
            await asyncio.sleep(0.01)
        ready.set()
        await running

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(60)
    found[0].thread = thread
    try:
        yield found[0]
    finally:
        found[0].end()
        found[0].wait()


@contextmanager
def serving_under_load(
    folder: Path, models: int = 20, token: str | None = None, seconds: float = 0.0
) -> Iterator[Served]:
    """Yield a server of products that four clients ask all the time, `seconds` after they began to.

    Its history has a sample each second.
    """
    for at in range(models):
        save_product(folder / f"product-{at:02}.onnx", at + 1)
    body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
    data, headers = json.dumps(body), {} if token is None else {"Authorization": f"Bearer {token}"}
    ended = threading.Event()

    def ask(served: Served, first: int) -> None:
        connection = http.client.HTTPConnection(served.http, timeout=20)
        at = first
        while not ended.wait(0.002):
            at += 3
            connection.request("POST", f"/v2/models/product-{at % models:02}/infer", data, headers)
            connection.getresponse().read()
        connection.close()

    with serving(folder, http=HttpOptions(token=token), interval_s=1.0) as served:
        clients = [threading.Thread(target=ask, args=(served, first)) for first in range(4)]
        for client in clients:
            client.start()
        try:
            time.sleep(seconds)
            yield served
        finally:
            ended.set()
            for client in clients:
                client.join()


def started_command(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[str], str, str]:
    """Run `rlx-ort serve` on free ports, and return the process and its REST and gRPC addresses once it is ready."""
    command = [sys.executable, "-c", "from rlx_ort.cli import main; main()", "serve", *arguments]
    command += ["--http", "0", "--grpc", "0"]
    environment = {**os.environ, **(environment or {}), "PYTHONUTF8": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8", env=environment)
    assert process.stderr is not None
    http = rpc = ""
    seen = []
    for line in process.stderr:
        seen.append(line)
        if found := re.search(r"REST on https?://(\S+:\d+)", line):
            http = found[1]
        if found := re.search(r"gRPC on (\S+:\d+)", line):
            rpc = found[1]
        if "ready" in line:
            break
    else:
        raise subprocess.SubprocessError("".join(seen))
    threading.Thread(target=_dropped, args=(process.stderr,), daemon=True).start()  # a full pipe would block the server
    return process, http.rstrip(","), rpc


def _dropped(stream: IO[str]) -> None:
    with stream:
        for _ in stream:
            pass


class Gate:
    """Holds runs until it is opened, and keeps the first elements of the rows that were run."""

    def __init__(self, run: Any) -> None:
        self._run, self.open, self.rows = run, threading.Event(), list[float]()

    def __call__(self, inputs: Any, wanted: Any) -> Any:
        """Run once the gate is open."""
        self.rows += inputs["x"][:, 0].tolist()
        assert self.open.wait(20)
        return self._run(inputs, wanted)


@contextmanager
def gated(served: Served, name: str) -> Iterator[Gate]:
    """Yield a gate before the runs of a model's first device; afterwards they run as before."""
    lane: Any = served.repository.find(name).scheduler.lanes[0]
    run, gate = lane.run, Gate(lane.run)
    lane.run, lane.runs_inline = gate, lambda *_: False  # a held run would hold the event loop
    try:
        yield gate
    finally:
        gate.open.set()
        lane.run = run
        del lane.runs_inline

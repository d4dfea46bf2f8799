"""Servers on free ports, and the models that tests of serving ask."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlx_ort.converters.files import save_onnx
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.serving.host import HostOptions, serve
from rlx_ort.serving.models import Repository, ServeOptions
from rlx_ort.serving.protocol import DATATYPES
from rlx_ort.serving.rest import HttpOptions

WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3)


@dataclass
class Served:
    """A running server: its addresses, its repository, and the folder of its models."""

    folder: Path
    repository: Repository
    http: str = ""
    grpc: str = ""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop | None = None

    def end(self) -> None:
        """Stop the server from any thread."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.stop.set)


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


def started(folder: Path, http: HttpOptions, options: ServeOptions) -> tuple[Served, threading.Thread]:
    """Start a server in a thread and wait until it is ready."""
    ready = threading.Event()
    found: list[Served] = []

    async def run() -> None:
        served = Served(folder, Repository([folder], options))
        served.loop = asyncio.get_running_loop()
        found.append(served)

        def listening(rest: str | None, rpc: str | None) -> None:
            served.http, served.grpc = rest or "", rpc or ""

        place = HostOptions(http_port=0, grpc_port=0, http=http)
        running = asyncio.create_task(serve(served.repository, place, on_listening=listening, stop=served.stop))
        while not served.repository.ready and not running.done():
            await asyncio.sleep(0.01)
        ready.set()
        await running

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(60)
    return found[0], thread

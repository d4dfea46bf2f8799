"""Servers on free ports, and the models that tests of serving ask."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from rlx_ort import DType, Graph, save_onnx
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.serving.host import HostOptions, serve
from rlx_ort.serving.options import HttpOptions, ServeOptions
from rlx_ort.serving.protocol import DATATYPES
from rlx_ort.serving.repository import Repository

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


def started(folder: Path, http: HttpOptions, options: ServeOptions, **place: Any) -> tuple[Served, threading.Thread]:
    """Start a server in a thread and wait until it is ready; `place` has fields of `HostOptions`."""
    ready = threading.Event()
    found: list[Served] = []

    async def run() -> None:
        served = Served(folder, Repository([folder], options))
        served.loop = asyncio.get_running_loop()
        found.append(served)

        def listening(rest: str | None, rpc: str | None) -> None:
            served.http, served.grpc = rest or "", rpc or ""

        host = HostOptions(**{"http_port": 0, "grpc_port": 0, "http": http, **place})
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
    return found[0], thread


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

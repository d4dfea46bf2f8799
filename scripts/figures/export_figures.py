"""The cost of writing and reading ONNX: time that grows with the nodes, memory that does not grow with the weights."""

from __future__ import annotations

import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from figures.graphs import chain
from figures.record import Figure, fresh, peak_bytes, seconds_of
from rlx_ort.converters.files import save_onnx
from rlx_ort.converters.from_onnx import from_onnx
from rlx_ort.converters.to_onnx import to_onnx
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.ir.graph import Graph

REPEATS = 5
WIDTH, LARGE = 16, 4096


def measure() -> Iterator[Figure]:
    """Yield the times of export and import, how they grow, and the memory that large weights take on the way out."""
    large, small = layers(10_000), layers(1_000)
    seconds, before = _best(lambda: export_model(large).skeleton), _best(lambda: export_model(small).skeleton)
    yield Figure("IR graph of 10,000 nodes to ONNX bytes", seconds, "s", 1.0)
    yield Figure("the same, 10,000 over 1,000 nodes", seconds / before, "times", 12)
    models = {nodes: to_onnx(layers(nodes * 7 // 5 + 20)).SerializeToString() for nodes in (1_000, 3_000, 10_000)}
    times = {nodes: _best(partial(from_onnx, data)) for nodes, data in models.items()}
    yield Figure("ONNX model of 3,000 nodes to IR", times[3_000], "s", 0.5)
    yield Figure("the same, 10,000 over 1,000 nodes", times[10_000] / times[1_000], "times", 12)
    with tempfile.TemporaryDirectory() as folder:
        yield Figure("extra memory of exporting 8 GB of weights", fresh(exported_bytes, folder, 128) / 1e6, "MB", 50)
        yield Figure("extra memory of saving 1 GB of weights", fresh(saved_bytes, folder, 16) / 1e6, "MB", 50)


def layers(nodes: int) -> Graph:
    """Return a graph of about that many nodes: products, activations, sums, normalisations and reshapes in turn."""
    graph = Graph("layers")
    x = graph.input("x", ["batch", WIDTH])
    weight = graph.param("w", [WIDTH, WIDTH], data=np.eye(WIDTH, dtype=np.float32))
    ones, zeros = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
    while len(graph) < nodes:
        h = graph.gelu(x @ weight) + x
        x = graph.reshape(graph.layer_norm(h, ones, zeros), ["batch", WIDTH])
    graph.outputs = [x]
    return graph


def exported_bytes(folder: str, count: int) -> int:
    """Return by how much exporting so many matrices of a file raises this process's peak memory."""
    warm = layers(10)
    export_model(warm).skeleton  # noqa: B018  # it is made when it is read
    graph = _of_file(folder, count)
    before = peak_bytes()
    export_model(graph).skeleton  # noqa: B018
    return peak_bytes() - before


def saved_bytes(folder: str, count: int) -> int:
    """Return the most memory that Python takes while so many matrices of a file are saved."""
    graph = _of_file(folder, count)
    tracemalloc.start()
    save_onnx(graph, f"{folder}/big.onnx", external_data=True)
    return tracemalloc.get_traced_memory()[1]


def _of_file(folder: str, count: int) -> Graph:
    """Return products by matrices of a sparse file, which takes no room on disk and gives zeros."""
    path = Path(folder) / f"{count}.weights"
    with path.open("wb") as stream:
        stream.truncate((count + LARGE * LARGE) * 4)
    return chain(count, LARGE, np.memmap(path, np.float32, "r"))


def _best(action: Callable[[], object]) -> float:
    """Return the shortest of several times, in seconds: others on the machine only ever add."""
    return min(seconds_of(action) for _ in range(REPEATS))

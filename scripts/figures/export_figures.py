"""What writing and reading ONNX costs: time that grows with the nodes, memory that does not grow with the weights."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from figures.record import Figure, python_json
from rlx_ort.converters.from_onnx import from_onnx
from rlx_ort.converters.to_onnx import to_onnx
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.ir.graph import Graph

__all__ = ["measure"]

REPEATS = 5
WIDTH = 16

# An empty file of the size of the weights: a sparse file takes no room on disk, and reading it gives zeros.
BIG_EXPORT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from figures.record import peak_bytes
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.ir.graph import Graph

folder, count, rows = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
graph = Graph("big")
x = graph.input("x", ["batch", rows])
warm = Graph("warm")
warm.outputs = [warm.relu(warm.input("x", [2]))]
export_model(warm).skeleton
for index in range(count):
    data = np.memmap(f"{folder}/weights", np.float32, "r", index * rows * rows * 4, (rows, rows))
    x = x @ graph.param(f"w{index}", data.shape, data=data)
graph.outputs = [x]
before = peak_bytes()
export_model(graph).skeleton
print(json.dumps(peak_bytes() - before))
"""

BIG_SAVE = """
import json, sys, tracemalloc
import numpy as np
from rlx_ort.converters.files import save_onnx
from rlx_ort.ir.graph import Graph

folder, count, rows = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
graph = Graph("big")
x = graph.input("x", ["batch", rows])
for index in range(count):
    data = np.memmap(f"{folder}/weights", np.float32, "r", index * rows * rows * 4, (rows, rows))
    x = x @ graph.param(f"w{index}", data.shape, data=data)
graph.outputs = [x]
tracemalloc.start()
save_onnx(graph, f"{folder}/big.onnx", external_data=True)
print(json.dumps(tracemalloc.get_traced_memory()[1]))
"""


def measure() -> Iterator[Figure]:
    """Yield the times of export and import, how they grow, and the memory that large weights take on the way out."""
    large, small = layers(10_000), layers(1_000)
    seconds, before = best(lambda: export_model(large).skeleton), best(lambda: export_model(small).skeleton)
    yield Figure("IR graph of 10,000 nodes to ONNX bytes", seconds, "s", 1.0)
    yield Figure("the same, 10,000 over 1,000 nodes", seconds / before, "times", 12)
    models = {nodes: onnx_bytes(nodes) for nodes in (1_000, 3_000, 10_000)}
    times = {nodes: best(partial(from_onnx, data)) for nodes, data in models.items()}
    yield Figure("ONNX model of 3,000 nodes to IR", times[3_000], "s", 0.5)
    yield Figure("the same, 10,000 over 1,000 nodes", times[10_000] / times[1_000], "times", 12)
    yield memory("extra memory of exporting 8 GB of weights", BIG_EXPORT, 128, 4096)
    yield memory("extra memory of saving 1 GB of weights", BIG_SAVE, 16, 4096)


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


def onnx_bytes(nodes: int) -> bytes:
    """Return an ONNX model of at least that many nodes."""
    graph = layers(nodes * 7 // 5 + 20)
    found = len(export_model(graph).nodes)
    if found < nodes:
        raise RuntimeError(f"the graph became {found} ONNX nodes, fewer than {nodes}")
    data: bytes = to_onnx(graph).SerializeToString()
    return data


def best(action: Callable[[], object]) -> float:
    """Return the shortest of several times, in seconds: others on the machine only ever add."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def memory(figure: str, program: str, count: int, rows: int) -> Figure:
    """Run a program in a fresh process on weights in a sparse file, and return the memory it took on top, in MB."""
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "weights").open("wb") as stream:
            stream.truncate(count * rows * rows * 4)
        found = python_json(program, str(Path(__file__).resolve().parents[1]), folder, str(count), str(rows))
    return Figure(figure, found / 1e6, "MB", 50)

"""Weights once: what further sessions over the same weights add to memory, and how fast mapped weights open."""

from __future__ import annotations

import json
import statistics
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures.record import Figure, python_json

__all__ = ["measure"]

LAYERS, WIDTH = 25, 2048  # 25 matrices of 16 MiB: 400 MiB
REPEATS = 3
MEBIBYTE = 2**20

PRELUDE = """
import json, os, sys, time, statistics
import numpy as np
from rlx_ort.execution.options import CompileOptions, WeightSharing
from rlx_ort.execution.session import Session
from rlx_ort.execution.weights import WeightStore
from rlx_ort.ir.graph import Graph

LAYERS, WIDTH = int(sys.argv[1]), int(sys.argv[2])

def chain():
    graph = Graph("chain")
    x = graph.input("x", ["rows", WIDTH])
    for layer in range(LAYERS):
        x = x @ graph.param(f"w{layer}", [WIDTH, WIDTH])
    graph.outputs = [x]
    return graph
"""

SESSIONS = (
    PRELUDE
    + """
def memory():
    found = {}
    for line in open("/proc/self/smaps_rollup", encoding="ascii"):
        name, _, rest = line.partition(":")
        if name in ("Rss", "Pss"):
            found[name] = int(rest.split()[0]) * 1024
    return found

graph = chain()
store = WeightStore.for_graph(graph)
source = np.random.default_rng(0)
for name in store.names:
    store.set(name, (source.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32))
x = np.ones((1, WIDTH), np.float32)
session = Session("cpu", CompileOptions(sharing=WeightSharing(sys.argv[3])))
held, steps = [], []
for count in range(3):
    before = memory()
    held.append(session.compile(graph, store))
    held[-1].run({"x": x})
    after = memory()
    steps.append({name: after[name] - before[name] for name in after})
print(json.dumps(steps[1:]))
"""
)

LATENCY = (
    PRELUDE
    + """
sys.path.insert(0, sys.argv[3])
from figures.record import in_turns
graph = chain()
store = WeightStore.for_graph(graph)
source = np.random.default_rng(0)
for name in store.names:
    store.set(name, (source.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32))
inputs = {"x": np.ones((8, WIDTH), np.float32)}
prepacked, private = (
    Session("cpu", CompileOptions(sharing=sharing)).compile(graph, store)
    for sharing in (WeightSharing.PREPACKED, WeightSharing.PRIVATE)
)
print(json.dumps(in_turns(lambda: prepacked.run(inputs), lambda: private.run(inputs), 9, 5)))
"""
)

MAPPED = (
    PRELUDE
    + """
graph = chain()
session = Session("cpu", CompileOptions(sharing=WeightSharing.RAW))
start = time.perf_counter()
store = WeightStore.for_graph(graph)
store.load_safetensors(sys.argv[3])
compiled = session.compile(graph, store)
seconds = time.perf_counter() - start
assert store.nbytes == LAYERS * WIDTH * WIDTH * 4
print(json.dumps(seconds))
"""
)


def measure() -> Iterator[Figure]:
    """Yield the memory of further sessions, the latency of packed weights, and the time to open mapped ones."""
    if sys.platform == "linux":  # elsewhere nothing tells which memory processes share
        yield from _further_sessions("raw", "Rss")
        yield from _further_sessions("prepacked", "Pss")
    yield _latency()
    yield _mapped()


def _further_sessions(sharing: str, kind: str) -> Iterator[Figure]:
    """Yield what the second and the third session add, each the median over fresh processes."""
    runs = [python_json(SESSIONS, str(LAYERS), str(WIDTH), sharing) for _ in range(REPEATS)]
    total = LAYERS * WIDTH * WIDTH * 4 / MEBIBYTE
    for place, ordinal in enumerate(("second", "third")):
        extra = statistics.median(run[place][kind] for run in runs) / MEBIBYTE
        title = f"{total:.0f} MiB of weights on cpu, {sharing}: {kind.upper()} of a {ordinal} session"
        yield Figure(title, extra, "MiB", 20)


def _latency() -> Figure:
    scripts = str(Path(__file__).resolve().parents[1])
    runs = [python_json(LATENCY, str(LAYERS), str(WIDTH), scripts) for _ in range(REPEATS)]
    ours, theirs, ratio = (statistics.median(values) for values in zip(*runs, strict=True))
    detail = f"{ours * 1e3:.1f} ms against {theirs * 1e3:.1f} ms, 8 rows"
    return Figure("latency of prepacked over private", ratio, "times", 1.05, detail)


def _mapped() -> Figure:
    """Return the time from a file of 3 GiB to an open session, the file's pages not read before."""
    layers = 192
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        _write(path, layers)
        seconds = [python_json(MAPPED, str(layers), str(WIDTH), str(path)) for _ in range(REPEATS)]
    return Figure("3 GiB of safetensors to an open session, mapped and raw", statistics.median(seconds), "s", 1)


def _write(path: Path, layers: int) -> None:
    """Write a safetensors file whose data is a hole, so that it takes no space on the disk."""
    size = WIDTH * WIDTH * 4
    header = {
        f"w{layer}": {"dtype": "F32", "shape": [WIDTH, WIDTH], "data_offsets": [layer * size, (layer + 1) * size]}
        for layer in range(layers)
    }
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + layers * size)

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
EXPERT_COUNT, EXPERT_WIDTH = 16, 1024  # three stacks of 16 matrices of 4 MiB: 192 MiB
EXPERTS_TARGET = 0.35
MEBIBYTE = 2**20

PRELUDE = """
import json, os, sys, time, statistics
import numpy as np
from rlx_ort.options.compile_options import CompileOptions, WeightSharing
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
from dataclasses import asdict
from figures.record import turns_of
graph = chain()
store = WeightStore.for_graph(graph)
source = np.random.default_rng(0)
for name in store.names:
    store.set(name, (source.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32))
inputs = {"x": np.ones((8, WIDTH), np.float32)}
shared, private = (
    Session("cpu", CompileOptions(sharing=sharing)).compile(graph, store)
    for sharing in (WeightSharing(sys.argv[4]), WeightSharing.PRIVATE)
)
print(json.dumps(asdict(turns_of(lambda: shared.run(inputs), lambda: private.run(inputs), 9, 5))))
"""
)

EXPERTS = """
import json, os, sys
import numpy as np
import psutil
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.execution.session import Session
from rlx_ort.ir.graph import Graph

EXPERTS, WIDTH, RESIDENT = (int(text) for text in sys.argv[1:])
graph = Graph("experts")
ids = graph.input("ids", [4], "i32")
rows = graph.input("x", [4, WIDTH])
for name in ("gate", "up", "down"):
    rows = graph.grouped_matmul(rows, graph.param(name, [EXPERTS, WIDTH, WIDTH]), ids, name=name)
graph.outputs = [rows]
compiled = Session("webgpu", CompileOptions(placement=PlacementRule.ASSISTED)).compile(graph)
if RESIDENT < EXPERTS:
    compiled.set_moe_resident_experts(np.arange(EXPERTS) < RESIDENT)
source = np.random.default_rng(0)
for name in ("gate", "up", "down"):
    compiled.set_param(name, source.standard_normal((EXPERTS, WIDTH, WIDTH), np.float32) / WIDTH**0.5)
before = psutil.Process().memory_info().rss
feeds = {"ids": np.array([0, 1, EXPERTS - 2, EXPERTS - 1], np.int32), "x": np.ones((4, WIDTH), np.float32)}
for _ in range(3):
    compiled.run(feeds)
print(json.dumps(psutil.Process().memory_info().rss - before), flush=True)
os._exit(0)  # the driver writes to standard output when it goes down
"""

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
    """Yield memory of further sessions, latency of shared weights, time to open mapped ones, and memory of experts."""
    if sys.platform == "linux":  # other systems do not report which memory processes share
        yield from _further_sessions("raw", "Rss")
        yield from _further_sessions("prepacked", "Pss")
    yield _latency("prepacked", 1.05)
    yield _latency("raw", None)
    yield _mapped()
    yield from _experts()


def _further_sessions(sharing: str, kind: str) -> Iterator[Figure]:
    """Yield what the second and the third session add, each the median over fresh processes."""
    runs = [python_json(SESSIONS, str(LAYERS), str(WIDTH), sharing) for _ in range(REPEATS)]
    total = LAYERS * WIDTH * WIDTH * 4 / MEBIBYTE
    for place, ordinal in enumerate(("second", "third")):
        extra = statistics.median(run[place][kind] for run in runs) / MEBIBYTE
        title = f"{total:.0f} MiB of weights on cpu, {sharing}: {kind.upper()} of a {ordinal} session"
        yield Figure(title, extra, "MiB", 20)


def _latency(sharing: str, target: float | None) -> Figure:
    """Return the median over fresh processes of what is a median over blocks in each."""
    scripts = str(Path(__file__).resolve().parents[1])
    runs = [python_json(LATENCY, str(LAYERS), str(WIDTH), scripts, sharing) for _ in range(REPEATS)]
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    times = f"{middle['first'] * 1e3:.1f} ms against {middle['second'] * 1e3:.1f} ms, 8 rows"
    ratios = f"{min(run['ratio'] for run in runs):.3f} to {max(run['ratio'] for run in runs):.3f}"
    detail = f"{times}; {ratios} in {REPEATS} processes, least times {middle['least_ratio']:.3f}"
    return Figure(f"latency of {sharing} over private", middle["ratio"], "times", target, detail)


def _experts() -> Iterator[Figure]:
    """Yield what keeping half of the experts on the host saves where the device's memory is memory of this process."""
    from rlx_ort.device import Device
    from rlx_ort.providers.registry import default_registry

    if not default_registry().availability(Device("webgpu")).available:
        return
    counts = (EXPERT_COUNT, EXPERT_COUNT // 2)
    arguments = (str(EXPERT_COUNT), str(EXPERT_WIDTH))
    whole, half = (python_json(EXPERTS, *arguments, str(count)) / MEBIBYTE for count in counts)
    moved = 3 * (counts[0] - counts[1]) * EXPERT_WIDTH**2 * 4 / MEBIBYTE
    detail = f"a session adds {half:.0f} MiB in place of {whole:.0f} MiB; the experts that moved have {moved:.0f} MiB"
    title = "half of the experts on the host, webgpu: share of their memory that is not saved"
    yield Figure(title, 1 - (whole - half) / moved, "", EXPERTS_TARGET, detail)


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

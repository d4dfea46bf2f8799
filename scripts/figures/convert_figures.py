"""What a conversion of 3 GiB costs: its time beside that of copying the file, and the memory it takes at most.

The speed is measured with and without the verification, which reads both models once more and runs them. The peak is
that of the resident set, so mapped pages of weight files count, which the system may drop at any time; the peak of the
anonymous part, which it cannot drop, is printed beside it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from figures.record import Figure, python_json

__all__ = ["measure"]

LAYERS, WIDTH = 192, 2048  # 192 matrices of 16 MiB: 3 GiB
REPEATS = 3

MAKE = """
import json, sys
import numpy as np
from rlx_ort.converters.files import save_onnx
from rlx_ort.ir.graph import Graph

layers, width = int(sys.argv[2]), int(sys.argv[3])
data = (np.random.default_rng(0).standard_normal((width, width)) / width**0.5).astype(np.float32)
graph = Graph("chain")
x = graph.input("x", ["rows", width])
for layer in range(layers):  # each differs, as ONNX Runtime keeps equal packed weights once
    x = x @ graph.param(f"w{layer}", data.shape, data=np.roll(data, layer, axis=1))
graph.outputs = [x]
save_onnx(graph, sys.argv[1], external_data=True)
print(json.dumps(None))
"""

CONVERT = """
import json, sys, threading, time
sys.path.insert(0, sys.argv[1])
from figures.record import peak_bytes
from rlx_ort.conversion.convert import ConvertOptions, convert

def watch():
    while not ended.wait(0.01):
        for line in open("/proc/self/status", encoding="ascii"):
            if line.startswith("RssAnon:"):
                found[0] = max(found[0], int(line.split()[1]) * 1024)

source, target, verify, precision = sys.argv[2:6]
options = ConvertOptions(verify=verify == "1", precision=precision or None)
found, ended = [0], threading.Event()
if sys.platform == "linux":
    threading.Thread(target=watch, daemon=True).start()
start = time.perf_counter()
report = convert(source, target, options)
seconds = time.perf_counter() - start
ended.set()
assert (report.comparison is not None) == options.verify
print(json.dumps({"seconds": seconds, "peak": peak_bytes(), "anonymous": found[0]}))
"""


@dataclass(frozen=True)
class Case:
    """A conversion, with the most it may take of a copy's time and of the model's size; None without a target."""

    title: str
    suffix: str
    precision: str = ""
    verify: bool = False
    most_times: float | None = None
    most_memory: float | None = 1.3


def measure() -> Iterator[Figure]:
    """Yield time over copy time and peak memory over size, for another format and for another precision."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "model.onnx"
        python_json(MAKE, str(source), str(LAYERS), str(WIDTH))
        yield from _figures(folder, source, Case("to JSON and safetensors", ".json", most_times=2))  # half the speed
        yield from _figures(folder, source, Case("to JSON and safetensors", ".json", verify=True))
        yield from _figures(folder, source, Case("to ONNX in f16", ".onnx", "f16", most_times=2))
        yield from _figures(folder, source, Case("to ONNX in f16", ".onnx", "f16", verify=True))


def _figures(folder: Path, source: Path, case: Case) -> Iterator[Figure]:
    size = LAYERS * WIDTH * WIDTH * 4
    runs, ratios, copies = [], [], []
    for _ in range(REPEATS):
        copied = _copy_seconds(source.with_name("model.onnx.data"), folder / "copy")
        runs.append(_convert(folder, source, case))
        ratios.append(runs[-1]["seconds"] / copied)
        copies.append(copied)
    seconds, peak = (statistics.median(run[key] for run in runs) for key in ("seconds", "peak"))
    title = f"3 GiB of f32 ONNX {case.title}, {'verified' if case.verify else 'not verified'}"
    detail = f"{seconds:.2f} s against {statistics.median(copies):.2f} s for the copy"
    yield Figure(f"{title}: time over a copy", statistics.median(ratios), "times", case.most_times, detail)
    anonymous = max(run["anonymous"] for run in runs)
    detail = f"peak resident set {peak / 2**30:.2f} GiB, of it anonymous at most {anonymous / 2**30:.2f} GiB"
    yield Figure(f"{title}: peak memory over the model's size", peak / size, "times", case.most_memory, detail)


def _convert(folder: Path, source: Path, case: Case) -> dict[str, float]:
    place, scripts = folder / f"converted{case.suffix}", str(Path(__file__).resolve().parents[1])
    arguments = (scripts, str(source), str(place), str(int(case.verify)), case.precision)
    found: dict[str, float] = python_json(CONVERT, *arguments)
    for file in folder.glob("converted*"):
        file.unlink()
    return found


def _copy_seconds(source: Path, target: Path) -> float:
    """Return the time of a copy in pieces of 8 MiB that ends when the data is on the disk."""
    start = time.perf_counter()
    with source.open("rb") as reader, target.open("wb") as writer:
        while piece := reader.read(8 << 20):
            writer.write(piece)
        writer.flush()
        os.fsync(writer.fileno())
    seconds = time.perf_counter() - start
    target.unlink()
    return seconds

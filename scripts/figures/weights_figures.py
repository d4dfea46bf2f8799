"""Weights once: the memory of further sessions over the same weights, and the time to open mapped weights."""

from __future__ import annotations

import json
import statistics
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil

from figures.graphs import chain
from figures.record import MEBIBYTE, Figure, fresh, seconds_of, turns_of
from rlx_ort.execution.session import Session
from rlx_ort.execution.weights import WeightStore
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions, WeightSharing

LAYERS, WIDTH, MAPPED_LAYERS = 25, 2048, 192  # matrices of 16 MiB: 400 MiB, 3 GiB
REPEATS = 3


def measure() -> Iterator[Figure]:
    """Yield memory of further sessions, latency of shared weights, and the time to open mapped ones."""
    total = LAYERS * WIDTH * WIDTH * 4 / MEBIBYTE
    if sys.platform == "linux":  # other systems do not report which memory processes share
        for sharing, kind in (("raw", "rss"), ("prepacked", "pss")):
            runs = [fresh(further_sessions, sharing, kind) for _ in range(REPEATS)]
            for ordinal, added in zip(("second", "third"), zip(*runs, strict=True), strict=True):
                title = f"{total:.0f} MiB of weights on cpu, {sharing}: {kind.upper()} of a {ordinal} session"
                yield Figure(title, statistics.median(added) / MEBIBYTE, "MiB", 20)
    for sharing, target in (("prepacked", 1.05), ("raw", None)):
        turns = [fresh(latency, sharing) for _ in range(REPEATS)]
        middle = {name: statistics.median(each[name] for each in turns) for name in turns[0]}
        detail = f"{middle['first'] * 1e3:.1f} ms against {middle['second'] * 1e3:.1f} ms, 8 rows; "
        detail += f"{min(each['ratio'] for each in turns):.3f} to {max(each['ratio'] for each in turns):.3f} "
        detail += f"in {REPEATS} processes, least times {middle['least_ratio']:.3f}"
        yield Figure(f"latency of {sharing} over private", middle["ratio"], "times", target, detail)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        _write(path)
        seconds = statistics.median(fresh(mapped, str(path)) for _ in range(REPEATS))
    yield Figure("3 GiB of safetensors to an open session, mapped and raw", seconds, "s", 1)


def _filled() -> tuple[Graph, WeightStore]:
    graph = chain(LAYERS, WIDTH)
    store, draw = WeightStore.for_graph(graph), np.random.default_rng(0)
    for name in store.names:
        store.set(name, (draw.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32))
    return graph, store


def further_sessions(sharing: str, kind: str) -> list[int]:
    """Return the bytes that a second and a third session over the same weights add."""
    graph, store = _filled()
    session = Session("cpu", CompileOptions(sharing=WeightSharing(sharing)))
    held, levels = [], []
    for _ in range(3):
        held.append(session.compile(graph, store))
        held[-1].run({"x": np.ones((1, WIDTH), np.float32)})
        levels.append(getattr(psutil.Process().memory_full_info(), kind))
    return [levels[1] - levels[0], levels[2] - levels[1]]


def latency(sharing: str) -> dict[str, float]:
    """Return the times of a way of sharing and of private weights, in turns."""
    graph, store = _filled()
    inputs = {"x": np.ones((8, WIDTH), np.float32)}
    ways = [CompileOptions(sharing=way) for way in (WeightSharing(sharing), WeightSharing.PRIVATE)]
    shared, private = (Session("cpu", options).compile(graph, store) for options in ways)
    return asdict(turns_of(lambda: shared.run(inputs), lambda: private.run(inputs), 9, 5))


def mapped(path: str) -> float:
    """Return the seconds from a file to an open session, the file's pages not read before."""
    graph = chain(MAPPED_LAYERS, WIDTH)
    session = Session("cpu", CompileOptions(sharing=WeightSharing.RAW))
    store = WeightStore.for_graph(graph)
    return seconds_of(lambda: (store.load_safetensors(path), session.compile(graph, store)))


def _write(path: Path) -> None:
    """Write a safetensors file whose data is a hole, so that it takes no space on the disk."""
    size = WIDTH * WIDTH * 4
    header = {
        f"w{layer}": {"dtype": "F32", "shape": [WIDTH, WIDTH], "data_offsets": [layer * size, (layer + 1) * size]}
        for layer in range(MAPPED_LAYERS)
    }
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + MAPPED_LAYERS * size)

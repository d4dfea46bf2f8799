"""A model exported by torch: the same answers, as fast, in the same memory as ONNX Runtime by itself."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from figures.bert_inputs import sample_inputs
from figures.record import Figure, in_turns, python_json

__all__ = ["measure"]

BLOCKS, RUNS = 9, 3
MEMORY_REPEATS = 3

OURS = """
import json, sys
sys.path.insert(0, sys.argv[2])
from figures.bert_inputs import sample_inputs
from rlx_ort.converters.files import load_graph
from rlx_ort.execution.session import Session
compiled = Session("cpu").compile(load_graph(sys.argv[1]))
compiled.run(sample_inputs())
from figures.record import peak_bytes
print(json.dumps(peak_bytes()))
"""

THEIRS = """
import json, sys
sys.path.insert(0, sys.argv[2])
from figures.bert_inputs import sample_inputs
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
session.run(None, sample_inputs())
from figures.record import peak_bytes
print(json.dumps(peak_bytes()))
"""


def measure() -> Iterator[Figure]:
    """Yield the error against torch, and latency and peak memory against `InferenceSession`."""
    from figures import bert

    path = bert.exported_file()
    yield from _answers_and_latency(path)
    yield _memory(path)


def _answers_and_latency(path: Path) -> list[Figure]:
    from rlx_ort.converters.files import load_graph
    from rlx_ort.execution.session import Session

    inputs = sample_inputs()
    compiled = Session("cpu").compile(load_graph(path))
    error = _error(compiled.run(inputs), inputs)
    engine = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in engine.get_outputs()]
    ours, theirs, ratio = in_turns(lambda: compiled.run(inputs), lambda: engine.run(names, inputs), BLOCKS, RUNS)
    detail = f"{ours * 1e3:.1f} ms against {theirs * 1e3:.1f} ms, {inputs['input_ids'].shape[1]} tokens"
    return [
        Figure("BERT-110M on cpu, error against torch", error, "relative", 1e-4),
        Figure("BERT-110M on cpu, latency over InferenceSession", ratio, "times", 1.03, detail),
    ]


def _error(outputs: list[npt.NDArray[Any]], inputs: dict[str, npt.NDArray[Any]]) -> float:
    import torch

    from figures import bert

    with torch.inference_mode():
        expected = bert.make()(*(torch.from_numpy(array) for array in inputs.values()))
    return max(
        float(np.abs(got - want.numpy()).max() / np.abs(want.numpy()).max())
        for got, want in zip(outputs, expected, strict=True)
    )


def _memory(path: Path) -> Figure:
    scripts = str(Path(__file__).resolve().parents[1])
    peaks: dict[str, list[int]] = {OURS: [], THEIRS: []}
    for _ in range(MEMORY_REPEATS):
        for program, found in peaks.items():
            found.append(python_json(program, str(path), scripts))
    ours, theirs = (statistics.median(found) for found in peaks.values())
    detail = f"{ours / 2**20:.0f} MiB against {theirs / 2**20:.0f} MiB"
    return Figure("BERT-110M on cpu, peak memory over InferenceSession", ours / theirs, "times", 1.05, detail)

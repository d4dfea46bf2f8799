"""Files that were damaged or made up: each is read, or refused with a typed error, and quickly.

The numbers in `KEPT` gave untyped errors once. `RLX_FUZZ_COUNT=20000 RLX_FUZZ_FIRST=1000` tries as many others by hand.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from genai_folders import write_folder
from mutations import mutated_json

from rlx_ort import Device, DType, Graph, RlxError, verify
from rlx_ort.calibration.features import Kernel
from rlx_ort.calibration.model import MeasuredCostModel
from rlx_ort.calibration.profile import CalibrationProfile, ProfileKey, Row
from rlx_ort.converters.files import load_graph
from rlx_ort.converters.to_onnx.exporter import exported
from rlx_ort.execution.weights import WeightStore
from rlx_ort.genai.config import read_config
from rlx_ort.ir.serde import save_json, to_json
from rlx_ort.ir.tensor import TensorData, read_tensors, write_tensors

COUNT = int(os.environ.get("RLX_FUZZ_COUNT", "240"))
FIRST = int(os.environ.get("RLX_FUZZ_FIRST", "0"))
LONGEST_S = 2.0
KEPT: dict[str, tuple[int, ...]] = {
    "graph": (370, 1353),
    "tensors": (1362, 1544, 2261),
    "profile": (257, 395, 460, 555, 676, 864),
    "genai": (),
}


class GraphFile:
    """A graph with weights beside it: what can be read can be exported and written again."""

    def __init__(self, folder: Path) -> None:
        graph = Graph("g")
        value = graph.input("x", ["n", 4]) @ graph.param("w", [4, 4], data=np.ones((4, 4), np.float32))
        value = graph.narrow(graph.concat([value, value], axis=1), 1, 0, 4) + graph.constant(np.ones(4, np.float32))
        large = graph.param("large", [4, 300], data=np.ones((4, 300), np.float32))
        graph.outputs = [graph.activation("relu", value) @ large, graph.cast(graph.softmax(value, axis=-1), "i32")]
        self.path = folder / "graph.json"
        save_json(graph, self.path)
        self.document = json.loads(self.path.read_bytes())

    def write(self, text: bytes) -> None:
        """Replace the file."""
        self.path.write_bytes(text)

    def use(self) -> None:
        """Read the file, and use all of what it holds."""
        graph = load_graph(self.path)
        verify(graph)
        WeightStore.for_graph(graph)
        to_json(graph)
        exported(graph)


class TensorFile(GraphFile):
    """Tensors of ordinary and of packed types."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tensors.safetensors"
        tensors = {
            "a": TensorData.from_array(np.ones((4, 4), np.float32)),
            "b": TensorData.from_array(np.ones((3, 5)).astype(DType.I4.numpy)),
            "c": TensorData.from_array(np.ones((0, 3), np.int64)),
        }
        write_tensors(self.path, tensors, {"identity": "x"})
        data = self.path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        self.document, self._rest = json.loads(data[8:end]), data[end:]

    def write(self, text: bytes) -> None:
        """Replace the header."""
        self.path.write_bytes(len(text).to_bytes(8, "little") + text + self._rest)

    def use(self) -> None:
        """Read every tensor, and write all of them again."""
        tensors, metadata = read_tensors(self.path)
        for tensor in tensors.values():
            tensor.numpy()
        again = self.path.with_name("again.safetensors")
        write_tensors(again, tensors, metadata)
        assert read_tensors(again)[0] == tensors


class ProfileFile(GraphFile):
    """A calibration profile: what can be read prices kernels."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "profile.json"
        self._key = ProfileKey("cpu", "CPUExecutionProvider", "a processor", threads=4)
        rows = [Row("run", (), 9.0), Row("launch", (), 3.0), Row("?Det-1", (128,), 900.0, "f64", 0.1, 7)]
        rows += [
            Row("MatMul", (4, 16), 3.0),
            Row("MatMul", (4, 4096), 30.0),
            Row("Add", (9,), 3.0),
            Row("Add", (99,), 4.0),
        ]
        self.document = json.loads(CalibrationProfile(self._key, tuple(rows), skipped={"conv": "no memory"}).to_json())

    def use(self) -> None:
        """Read the profile, compare and write it, and predict with it."""
        found = CalibrationProfile.from_json(self.path.read_text(encoding="utf-8", errors="replace"))
        assert found.key.file_name
        self._key.difference(found.key)
        assert CalibrationProfile.from_json(found.to_json()) == found
        model = MeasuredCostModel(Device.CPU, found)
        for kernel in (
            ("MatMul", (64, 64, 64), "f32"),
            ("Add", (50,), "f16"),
            ("Det-1", (64,), "f64"),
            ("X", (5,), "f32"),
        ):
            assert model.price(Kernel(*kernel, 128.0, 1024.0)).ns >= 0
        model.memory_bw()


class GenaiFile(GraphFile):
    """The config of a language model."""

    def __init__(self, folder: Path) -> None:
        self._folder = write_folder(folder / "model", providers=[{"cuda": {"device_id": "0"}}])
        self.path = self._folder / "genai_config.json"
        self.document = json.loads(self.path.read_bytes())
        self._graph = load_graph(self._folder / "model.onnx")

    def use(self) -> None:
        """Read the config, and what follows from it for the model."""
        config = read_config(self._folder)
        config.dims(self._graph)
        config.feeds(self._graph, 3, 2)
        config.cache_bytes(self._graph, 5)


_KINDS: dict[str, Callable[[Path], GraphFile]] = {
    "graph": GraphFile,
    "tensors": TensorFile,
    "profile": ProfileFile,
    "genai": GenaiFile,
}


def _outcome(file: GraphFile, document: Any, number: int) -> str | None:
    """Return the message of the error that a mutation ends in, None if it is read; both are quick."""
    file.write(mutated_json(document, number))
    begin = time.process_time()
    try:
        file.use()
    except RlxError as err:
        return str(err)
    finally:
        assert time.process_time() - begin < LONGEST_S
    return None


@pytest.mark.parametrize("kind", _KINDS)
def test_a_mutated_file_is_read_or_refused(tmp_path: Path, kind: str) -> None:
    """Nothing but a typed error leaves its readers, whatever stands in the file."""
    file = _KINDS[kind](tmp_path)
    file.write(json.dumps(file.document).encode())
    file.use()
    found = [_outcome(file, file.document, number) for number in (*KEPT[kind], *range(FIRST, FIRST + COUNT))]
    assert "" not in found
    assert 0 < found.count(None) < 0.8 * len(found)

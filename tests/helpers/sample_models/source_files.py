"""Small files of every source format, and damaged copies of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from rlx_ort import Graph, save_onnx
from rlx_ort.converters.bundle import graph_from_bundle
from rlx_ort.converters.sources import open_source, read_weights
from rlx_ort.ir.serde import save_json
from rlx_ort.ir.tensor import TensorData, write_tensors

__all__ = [
    "LARGE",
    "SMALL",
    "SOURCES",
    "arrays",
    "damaged",
    "model_with_bodies",
    "read_all",
    "small_graph",
    "write_gguf",
    "write_source",
]

SOURCES = ("onnx", "onnx-external", "json", "safetensors", "sharded", "npz", "npz-deflated", "gguf")
"""Names that `write_source` knows."""

LARGE = np.arange(64, dtype=np.float32).reshape(8, 8)
SMALL = np.arange(4, dtype=np.float32)
"""The weights of `model_with_bodies`, one to stand outside a model and one inside."""


def small_graph() -> Graph:
    """Return a graph of a product, a sum and a loop-free body, with a large, a small and a constant weight."""
    rng = np.random.default_rng(7)
    graph = Graph("small")
    x = graph.input("x", ["batch", 16])
    w = graph.param("w", [16, 8], data=rng.standard_normal((16, 8)).astype(np.float32))
    b = graph.param("b", [8], data=rng.standard_normal(8).astype(np.float32))
    table = graph.constant(rng.standard_normal((8, 8)).astype(np.float32), name="table")
    graph.set_outputs([graph.relu(x @ w + b) @ table], ["y"])
    return graph


def model_with_bodies() -> onnx.ModelProto:
    """Return a model whose branches each have a weight of one name, and one a large Constant node."""

    def branch(name: str, values: npt.NDArray[Any], constant: bool) -> onnx.GraphProto:
        nodes = [helper.make_node("MatMul", ["x", "w"], [f"{name}_y"])]
        weights = [numpy_helper.from_array(values, "w")]
        if constant:
            nodes.insert(0, helper.make_node("Constant", [], ["w"], value=weights.pop()))
        output = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, [None, 8])
        return helper.make_graph(nodes, name, [], [output], weights)

    node = helper.make_node(
        "If", ["flag"], ["y"], then_branch=branch("a", LARGE, False), else_branch=branch("b", LARGE + 1, True)
    )
    graph = helper.make_graph(
        [node],
        "main",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8]),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
            helper.make_tensor_value_info("w0", TensorProto.FLOAT, [8, 8]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
        [numpy_helper.from_array(LARGE, "w0"), numpy_helper.from_array(SMALL, "small")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def arrays() -> dict[str, npt.NDArray[Any]]:
    """Return arrays of several dtypes, one of them empty and one without axes."""
    rng = np.random.default_rng(3)
    return {
        "w": rng.standard_normal((16, 8)).astype(np.float32),
        "half": rng.standard_normal((5, 3)).astype(np.float16),
        "whole": np.arange(12, dtype=np.int64).reshape(3, 4),
        "nothing": np.empty((0, 4), np.float32),
        "one": np.float32(2.5).reshape(()),
    }


class Trap:
    """An object whose pickle makes a file when it is read: the proof that something was unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a call that makes the file."""
        return Path.touch, (self._path,)


def write_source(kind: str, folder: Path) -> Path:
    """Write a file of a kind into a folder; return the path to open."""
    path = folder / f"{kind}.bin"  # a name that says nothing: the content decides
    if kind.startswith("onnx"):
        save_onnx(small_graph(), path, external_data=kind == "onnx-external")
    elif kind == "json":
        save_json(small_graph(), path)
    elif kind == "safetensors":
        write_tensors(path, {name: TensorData.from_array(value) for name, value in arrays().items()}, {})
    elif kind == "sharded":
        tensors = {name: TensorData.from_array(value) for name, value in arrays().items()}
        write_tensors(folder / "a.safetensors", {"w": tensors["w"]}, {})
        write_tensors(folder / "b.safetensors", {name: data for name, data in tensors.items() if name != "w"}, {})
        places = {name: "a.safetensors" if name == "w" else "b.safetensors" for name in tensors}
        path.write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    elif kind.startswith("npz"):
        with path.open("wb") as file:
            (np.savez_compressed if kind == "npz-deflated" else np.savez)(file, **arrays())
    elif kind == "gguf":
        write_gguf(path)
    return path


def write_gguf(path: Path) -> None:
    """Write a GGUF file of version 3 by hand: an alignment, a text, an array, an f32 and a q8_0 tensor."""
    rng = np.random.default_rng(5)
    plain = rng.standard_normal((4, 32)).astype("<f4").tobytes()
    scales = rng.standard_normal(8).astype("<f2")
    blocks = b"".join(scale.tobytes() + rng.integers(0, 256, 32, np.uint8).tobytes() for scale in scales)
    entries = [
        _text("general.alignment") + struct.pack("<II", 4, 32),
        _text("general.name") + struct.pack("<I", 8) + _text("small"),
        _text("tokens") + struct.pack("<IIQ", 9, 8, 2) + _text("a") + _text("b"),
        _text("numbers") + struct.pack("<IIQ", 9, 5, 3) + struct.pack("<3i", 1, 2, 3),
    ]
    tensors = [
        _text("plain") + struct.pack("<I2QIQ", 2, 32, 4, 0, 0),
        _text("packed") + struct.pack("<I2QIQ", 2, 64, 4, 8, len(plain)),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % 32) + plain + blocks)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def damaged(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Yield a file's content cut off, with bytes changed, and with numbers made huge, half of it near the beginning."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        reach = len(content) if number % 2 else min(len(content), 400)
        at = int(rng.integers(0, reach))
        changed = bytearray(content)
        match number % 5:
            case 0:
                del changed[at:]
            case 1:
                changed[at] ^= 1 << int(rng.integers(0, 8))
            case 2:
                changed[at : at + 8] = b"\xff" * min(8, len(changed) - at)
            case 3:
                changed[at : at + 4] = rng.bytes(min(4, len(changed) - at))
            case 4:
                changed[at:at] = rng.bytes(int(rng.integers(1, 9)))
        yield bytes(changed)


def read_all(kind: str, path: Path) -> None:
    """Read everything of a file, also what is only read on demand."""
    if kind in ("onnx", "onnx-external", "json"):
        bundle = open_source(path)
        graph_from_bundle(bundle)
        parts = dict(bundle.weights)
    else:
        weights = read_weights(path)
        parts = {name: weights[name] for name in weights}
    for data in parts.values():
        data.numpy().tobytes()

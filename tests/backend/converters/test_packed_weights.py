"""Quantised weights that stay packed: a graph computes with them what it computes with the dequantised ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rlx_ort import Device, Graph, GraphDevices
from rlx_ort.converters.sources import Rename, Renames, apply_weights, read_weights
from rlx_ort.ir.ops.dequant import DequantMatMul

gguf = pytest.importorskip("gguf")

KINDS = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")
K, N = 512, 24


def graph() -> Graph:
    """Return x @ a + x @ transpose(b) + x * c, where the last is no product."""
    made = Graph("products")
    x = made.input("x", ["rows", K])
    a, b, c = made.param("a", [K, N]), made.param("b", [N, K]), made.param("c", [1, K])
    made.outputs = [x @ a + x @ b.transpose(1, 0) + (x * c).sum([1], keep_dim=True)]
    return made


def weight_file(path: Path, kind: str) -> tuple[Path, dict[str, npt.NDArray[Any]]]:
    """Write three matrices of random blocks with small scales; return them unpacked by gguf in float64, too."""
    number = gguf.GGMLQuantizationType[kind]
    elements, block_bytes = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(KINDS.index(kind))
    scales = {"Q8_0": (0,), "Q4_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    writer = gguf.GGUFWriter(path, "test")
    expected = {}
    for name, rows in (("a", N), ("b", N), ("c", 1)):
        raw = rng.integers(0, 256, (rows, K // elements, block_bytes), np.uint8)
        for at in scales:
            numbers = rng.uniform(-0.01, 0.01, (rows, K // elements)).astype("<f2")
            raw[:, :, at : at + 2] = numbers[..., None].view(np.uint8)
        raw = raw.reshape(rows, -1)
        writer.add_tensor(name, raw, raw_dtype=number)
        expected[name] = gguf.quants.dequantize(raw, number).astype(np.float64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep_packed", [False, True])
def test_products_with_weights_of_a_file_are_right(kind: str, keep_packed: bool, tmp_path: Path) -> None:
    """Packed where that is possible, dequantised elsewhere: within 1e-5 of float64 with the weights gguf unpacks."""
    path, expected = weight_file(tmp_path / "w.gguf", kind)
    made = graph()
    report = apply_weights(
        made, read_weights(path), Renames.of({"a": Rename("a", transpose=True)}), keep_packed=keep_packed, strict=True
    )
    assert set(report.packed) == ({"a", "b"} if keep_packed else set())
    assert report.loaded.keys() == {"a", "b", "c"}
    packed = [node.op for node in made.nodes if isinstance(node.op, DequantMatMul)]
    assert [op.scheme for op in packed] == [kind.lower()] * (2 if keep_packed else 0)

    x = np.random.default_rng(9).standard_normal((3, K)).astype(np.float32)
    (found,) = GraphDevices(made).run(Device.CPU, {"x": x})
    wide = x.astype(np.float64)
    reference = wide @ expected["a"].T + wide @ expected["b"].T + (wide * expected["c"]).sum(axis=1, keepdims=True)
    assert np.abs(found - reference).max() < 1e-5 * np.abs(reference).max()


def test_a_weight_that_something_else_reads_too_is_dequantised(tmp_path: Path) -> None:
    """A sum over it cannot take blocks."""
    path, expected = weight_file(tmp_path / "w.gguf", "Q8_0")
    made = Graph("shared")
    x, a = made.input("x", ["rows", K]), made.param("a", [K, N])
    made.outputs = [x @ a + a.sum([0])]
    renames = Renames.of({"a": Rename("a", transpose=True)})
    report = apply_weights(made, read_weights(path), renames, keep_packed=True)
    assert report.packed == ()
    assert np.array_equal(made.weights["a"].numpy(), expected["a"].T.astype(np.float32))

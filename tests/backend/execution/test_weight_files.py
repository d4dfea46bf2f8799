"""Weights from safetensors files: mapped, checked, and used without a copy."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rlx_ort import CompileOptions, ConversionError, Graph, ParamError, Session, WeightSharing
from rlx_ort.execution.weights import WeightStore

W = np.arange(64 * 3, dtype=np.float32).reshape(64, 3)
B = np.ones(3, np.float32)
X = np.ones((1, 64), np.float32)


def _graph() -> Graph:
    graph = Graph("file")
    graph.outputs = [graph.input("x", ["n", 64]) @ graph.param("w", [64, 3]) + graph.param("b", [3])]
    return graph


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file with both weights."""
    target = tmp_path / "weights.safetensors"
    save_file({"w": W, "b": B}, target)
    return target


@pytest.mark.parametrize("sharing", list(WeightSharing), ids=lambda sharing: sharing.value)
def test_a_mapped_file_computes_what_arrays_compute(path: Path, sharing: WeightSharing) -> None:
    """With every way of sharing weights."""
    graph = _graph()
    store = WeightStore.for_graph(graph)
    report = store.load_safetensors(path)
    assert (set(report.loaded), report.missing, report.unused) == ({"w", "b"}, (), ())
    compiled = Session("cpu", CompileOptions(sharing=sharing)).compile(graph, store)
    np.testing.assert_allclose(compiled.run({"x": X})[0], X @ W + B, rtol=1e-6)


def test_the_data_is_the_file_s_and_not_a_copy(path: Path) -> None:
    """The buffers are views of a memory map, and have their position in the file."""
    store = WeightStore.for_graph(_graph())
    store.load_safetensors(path)
    data = store.get("w")
    assert data is not None
    assert data.source is not None
    base: object = data.buffer
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    raw = path.read_bytes()[data.source.offset :][: data.nbytes]
    assert raw == W.tobytes()


def test_names_are_mapped_and_left_out(path: Path) -> None:
    """`rename` maps names; None skips a tensor, which the report lists as unused."""
    graph = Graph("renamed")
    graph.outputs = [graph.input("x", ["n", 64]) @ graph.param("layer.w", [64, 3])]
    store = WeightStore.for_graph(graph)
    report = store.load_safetensors(path, lambda name: None if name == "b" else f"layer.{name}")
    assert (report.loaded, report.unused) == (("layer.w",), ("b",))


def test_what_does_not_match_is_refused_and_changes_nothing(path: Path) -> None:
    """A strict load names what is missing on either side; a lenient one reports it."""
    graph = Graph("other")
    graph.outputs = [graph.input("x", ["n", 64]) @ graph.param("w", [64, 3]) + graph.param("bias", [3])]
    store = WeightStore.for_graph(graph)
    with pytest.raises(ParamError, match=r"no tensors for the parameters 'bias'.*its tensors 'b'"):
        store.load_safetensors(path)
    assert not store.is_set("w")
    report = store.load_safetensors(path, strict=False)
    assert (report.loaded, report.missing, report.unused) == (("w",), ("bias",), ("b",))


def test_a_tensor_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    """The message names file, tensor and parameter, and no tensor of the file is taken."""
    path = tmp_path / "wrong.safetensors"
    save_file({"b": B, "w": W.astype(np.float16)}, path)
    store = WeightStore.for_graph(_graph())
    with pytest.raises(ParamError, match=r"tensor 'w'.*parameter 'w' is f32"):
        store.load_safetensors(path)
    assert store.missing() == ["w", "b"]


def test_two_tensors_cannot_be_one_parameter(path: Path) -> None:
    """A renaming that runs together raises."""
    with pytest.raises(ParamError, match="are both parameter 'w'"):
        WeightStore.for_graph(_graph()).load_safetensors(path, lambda name: "w")


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """Absent files and other formats raise a ConversionError."""
    store = WeightStore.for_graph(_graph())
    with pytest.raises(ConversionError, match="cannot be read"):
        store.load_safetensors(tmp_path / "absent.safetensors")
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"no header at all")
    with pytest.raises(ConversionError, match="not a safetensors file"):
        store.load_safetensors(other)


def test_weights_in_use_cannot_be_released(path: Path) -> None:
    """An open session refuses, and a closed one does not."""
    graph = _graph()
    store = WeightStore.for_graph(graph)
    store.load_safetensors(path)
    compiled = Session("cpu", CompileOptions(sharing=WeightSharing.RAW)).compile(graph, store)
    with pytest.raises(ParamError, match="in use by 1 open session"):
        store.release("w")
    compiled.close()
    gc.collect()
    store.release("w")
    assert not store.is_set("w")

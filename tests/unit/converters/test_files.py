"""Writing ONNX files: what is in them, where the weights go, and what is left after a failure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from rlx_ort import ConversionError, DType, Graph, from_onnx, to_onnx
from rlx_ort.converters import files
from rlx_ort.converters.files import load_graph, save_onnx
from rlx_ort.ir.types import Shape, TensorType


def small_graph() -> Graph:
    """Return a graph with weights of several sizes and dtypes, an empty one among them."""
    graph = Graph("small")
    x = graph.input("x", [300, 1024])
    rng = np.random.default_rng(1)
    kind = TensorType(DType.F32, Shape([300, 1024]))
    big = graph.param("big", [300, 1024], data=rng.random((300, 1024), np.float32))
    row = graph.param("row", [1024], data=rng.random(1024, np.float32))
    one = graph.param("one", [1], data=[0.5])
    constant = graph.constant(rng.random(1024, np.float32), name="table")
    (y,) = graph.onnx_node("Sum", [x, big, row, one, constant], types=[kind])
    nothing = graph.param("nothing", [0, 1024], data=np.empty((0, 1024), np.float32))
    (z,) = graph.onnx_node("Concat", [nothing, y], {"axis": 0}, types=[kind])
    half = graph.param("half", [3], DType.I4, data=np.array([1, -2, 3]))
    (h,) = graph.onnx_node("Cast", [half], {"to": 1}, types=[TensorType(DType.F32, Shape([3]))])
    graph.set_outputs([z, h], ["z", "h"])
    return graph


def weights_in(path: Path) -> dict[str, bytes]:
    """Return name -> bytes of every initializer, as onnx itself reads the file."""
    model = onnx.load(path)
    return {tensor.name: tensor.raw_data for tensor in model.graph.initializer}


def expected() -> dict[str, bytes]:
    graph = small_graph()
    found = {name: data.buffer.tobytes() for name, data in graph.weights.items()}
    table = next(node.op for node in graph.nodes if node.name == "table")
    return {**found, "table": table.data.buffer.tobytes()}  # type: ignore[attr-defined]  # a Constant


@pytest.mark.parametrize("external", [False, True])
def test_a_written_file_holds_the_model_and_every_weight(tmp_path: Path, external: bool) -> None:
    """Onnx's own loader and checker find what was there, wherever the weights are."""
    path = tmp_path / "model.onnx"
    save_onnx(small_graph(), path, external_data=external)
    onnx.checker.check_model(str(path), full_check=True)
    assert weights_in(path) == expected()
    names = {"model.onnx", "model.onnx.data"} if external else {"model.onnx"}
    assert {file.name for file in tmp_path.iterdir()} == names


def test_a_file_with_weights_inside_is_what_to_onnx_gives(tmp_path: Path) -> None:
    """Streaming by hand and protobuf's own writer agree on the content."""
    path = tmp_path / "model.onnx"
    save_onnx(small_graph(), path, external_data=False)
    streamed, built = onnx.load(path), to_onnx(small_graph())
    assert {t.name: t.SerializeToString() for t in streamed.graph.initializer} == {
        t.name: t.SerializeToString() for t in built.graph.initializer
    }
    for model in (streamed, built):
        del model.graph.initializer[:]
    assert streamed == built


def test_large_weights_are_aligned_for_mapping(tmp_path: Path) -> None:
    """Windows maps files in steps of 64 KiB."""
    path = tmp_path / "model.onnx"
    save_onnx(small_graph(), path, external_data=True)
    model = onnx.load(path, load_external_data=False)
    offsets = {
        tensor.name: int(entry.value)
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "offset"
    }
    assert offsets["big"] % 65536 == 0
    assert all(offset % 64 == 0 for offset in offsets.values())


def test_weights_above_the_limit_go_to_a_data_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word from the caller the total decides."""
    monkeypatch.setattr(files, "EXTERNAL_ABOVE_BYTES", 1000)
    save_onnx(small_graph(), tmp_path / "large.onnx")
    assert (tmp_path / "large.onnx.data").exists()


def test_a_graph_without_weights_needs_no_data_file(tmp_path: Path) -> None:
    """An empty data file would only be lost."""
    graph = Graph()
    graph.set_outputs([graph.input("x", [2])], ["y"])
    save_onnx(graph, tmp_path / "model.onnx", external_data=True)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
def test_existing_files_are_not_replaced_unasked(tmp_path: Path, name: str) -> None:
    """Neither the model nor its data file is overwritten by accident."""
    (tmp_path / name).write_text("precious", encoding="utf-8")
    with pytest.raises(ConversionError, match="overwrite=True"):
        save_onnx(small_graph(), tmp_path / "model.onnx", external_data=True)
    assert (tmp_path / name).read_text(encoding="utf-8") == "precious"
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_model_may_be_saved_over_the_files_it_is_mapped_from(tmp_path: Path) -> None:
    """The new files take the place of the old ones, whose content stays until nobody reads it."""
    path = tmp_path / "model.onnx"
    save_onnx(small_graph(), path, external_data=True)
    graph = from_onnx(path)
    try:
        save_onnx(graph, path, external_data=True, overwrite=True)
    except ConversionError as err:
        pytest.skip(f"this system replaces no mapped file: {err}")
    assert weights_in(path) == expected()


def test_a_missing_folder_is_an_error_of_ours(tmp_path: Path) -> None:
    """The path is named."""
    with pytest.raises(ConversionError, match=r"model\.onnx"):
        save_onnx(small_graph(), tmp_path / "absent" / "model.onnx")


def test_a_parameter_without_data_cannot_be_written(tmp_path: Path) -> None:
    """The file would be no model."""
    graph = small_graph()
    del graph.weights["row"]
    with pytest.raises(ConversionError, match="row"):
        save_onnx(graph, tmp_path / "model.onnx")
    with pytest.raises(ConversionError, match="row"):
        to_onnx(graph)


def huge_graph() -> Graph:
    """Return a graph with 3 GiB of weights that take no memory: every row is the same zeros."""
    from rlx_ort.ir.tensor import TensorData

    graph = Graph()
    size = 3 << 30
    kind = TensorType(DType.U8, Shape([size]))
    w = graph.param("w", [size], DType.U8)
    graph.weights["w"] = TensorData(DType.U8, (size,), np.broadcast_to(np.zeros(1, np.uint8), (size,)))
    graph.set_outputs([graph.onnx_node("Identity", [w], types=[kind])[0]], ["y"])
    return graph


def test_what_no_message_can_hold_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    """The message says how to write it instead."""
    with pytest.raises(ConversionError, match="external_data=True"):
        to_onnx(huge_graph())
    with pytest.raises(ConversionError, match="external_data=True"):
        save_onnx(huge_graph(), tmp_path / "model.onnx", external_data=False)
    assert list(tmp_path.iterdir()) == []


def test_load_graph_tells_formats_apart_by_content(tmp_path: Path) -> None:
    """The name of a file says nothing."""
    from rlx_ort.ir.serde import save_json

    graph = Graph("g")
    graph.set_outputs([graph.input("x", [2])], ["y"])
    save_json(graph, tmp_path / "graph.onnx")
    save_onnx(graph, tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.onnx").output_names == ["y"]
    assert load_graph(tmp_path / "graph.json").output_names == ["y"]

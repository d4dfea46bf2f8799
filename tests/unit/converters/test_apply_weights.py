"""Bringing weights and models together: by name, by a rename file, by pattern; all or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_models.source_files import model_with_bodies, small_graph

from rlx_ort import ConversionError, DType, Graph
from rlx_ort.converters.bundle import ModelBundle, bundle_from_graph, bundle_of
from rlx_ort.converters.sources import Rename, Renames, WeightFile, apply_weights, load_renames
from rlx_ort.converters.sources.weights import WeightEntry
from rlx_ort.ir.tensor import TensorData

NEW_W = np.full((16, 8), 3, np.float32)
NEW_B = np.full(8, 4, np.float32)


def tensors(**arrays: Any) -> dict[str, TensorData]:
    """Return arrays as tensors."""
    return {name: TensorData.from_array(array) for name, array in arrays.items()}


def small_initializer(bundle: ModelBundle, name: str) -> bytes:
    """Return the bytes of an initializer inside the model."""
    return bytes(next(tensor for tensor in bundle.proto.graph.initializer if tensor.name == name).raw_data)


def test_a_bundle_gives_a_new_one_with_the_new_weights() -> None:
    """Outside and inside the model; the old bundle is as it was."""
    bundle = bundle_from_graph(small_graph())
    report = apply_weights(bundle, tensors(w=NEW_W, b=NEW_B))
    assert np.array_equal(report.model.weights["w"].numpy(), NEW_W)
    assert small_initializer(report.model, "b") == NEW_B.tobytes()
    assert report.loaded == {"w": "w", "b": "b"}
    assert report.missing == ("table",)
    assert bundle.weights["w"] == small_graph().weights["w"]
    assert small_initializer(bundle, "b") != NEW_B.tobytes()


def test_a_graph_is_changed_itself() -> None:
    """Its parameters have the new data."""
    graph = small_graph()
    report = apply_weights(graph, tensors(w=NEW_W))
    assert report.model is graph
    assert np.array_equal(graph.weights["w"].numpy(), NEW_W)
    assert report.missing == ("b",)


def test_mapped_tensors_stay_the_ones_of_the_file() -> None:
    """Nothing is copied that fits as it is."""
    given = tensors(w=NEW_W)
    assert apply_weights(bundle_from_graph(small_graph()), given).model.weights["w"] is given["w"]


def test_what_is_left_over_is_reported() -> None:
    """By the name in the file, and what it was renamed to."""
    renames = Renames.of({"a": "nowhere", "c": ""})
    report = apply_weights(small_graph(), tensors(a=NEW_B, c=NEW_B, d=NEW_B, w=NEW_W), renames)
    assert report.unused == ("a (renamed to nowhere)", "d")
    assert report.left_out == ("c",)


def test_a_transposed_rename_swaps_the_axes() -> None:
    """PyTorch's layers have outputs first."""
    values = np.arange(128, dtype=np.float32).reshape(8, 16)
    report = apply_weights(small_graph(), tensors(fc=values), Renames.of({"fc": Rename("w", transpose=True)}))
    assert np.array_equal(report.model.weights["w"].numpy(), values.T)


def test_floats_are_cast_only_on_request() -> None:
    """Silent rounding would be a surprise."""
    half = tensors(w=np.full((16, 8), 0.1, np.float16))
    with pytest.raises(ConversionError, match=r"f16\[16, 8\].*f32\[16, 8\]; cast=True converts floats"):
        apply_weights(small_graph(), half)
    found = apply_weights(small_graph(), half, cast=True).model.weights["w"]
    assert found.dtype is DType.F32
    assert np.array_equal(found.numpy(), half["w"].numpy().astype(np.float32))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"w": NEW_W.T}, "transpose = true"),
        ({"w": NEW_W[:4]}, r"f32\[4, 8\], weight 'w' is f32\[16, 8\]"),
        ({"w": NEW_W.astype(np.int32)}, r"i32\[16, 8\], weight 'w' is f32\[16, 8\]"),
    ],
)
def test_a_tensor_that_does_not_fit_changes_nothing(given: dict[str, Any], message: str) -> None:
    """Although the others would fit."""
    graph = small_graph()
    before = dict(graph.weights)
    with pytest.raises(ConversionError, match=message):
        apply_weights(graph, tensors(b=NEW_B, **given))
    assert graph.weights == before


def test_a_tensor_that_cannot_be_read_changes_nothing() -> None:
    """All are read before the first is set."""

    def broken() -> TensorData:
        raise ConversionError("damaged")

    entries = {"w": WeightEntry(DType.F32, (16, 8), lambda: TensorData.from_array(NEW_W))}
    file = WeightFile("f", entries | {"b": WeightEntry(DType.F32, (8,), broken)})
    graph = small_graph()
    before = dict(graph.weights)
    with pytest.raises(ConversionError, match="damaged"):
        apply_weights(graph, file)
    assert graph.weights == before


def test_parameters_without_data_are_required() -> None:
    """The message says what the file may mean."""
    graph = Graph("g")
    graph.outputs = [graph.input("x", [1]) + graph.param("layer.bias", [4])]
    with pytest.raises(
        ConversionError, match=r"no tensors for the weights 'layer\.bias'; did you mean its 'layer\.bia'"
    ):
        apply_weights(graph, {"layer.bia": TensorData.from_array(np.zeros(4, np.float32))})


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        *((["w", "b"], {"required": [name]}, "no tensors for the weights 'table'") for name in ("table", "t*", "*")),
        (["w"], {"required": ["tabel"]}, "'tabel'"),
        (["ww"], {"strict": True}, "its tensors match no weight of the model: 'ww'; did you mean 'w' by 'ww'"),
        (["a", "w"], {"renames": Renames.of({"a": "w"})}, "'a' and 'w' are both weight 'w'"),
    ],
)
def test_weights_that_do_not_match_the_model_are_refused(given: list[str], options: Any, message: str) -> None:
    """Required ones that are not there, misspelt ones, those that no weight takes, and two of a name."""
    arrays = {"b": NEW_B} | dict.fromkeys(("w", "ww", "a"), NEW_W)
    with pytest.raises(ConversionError, match=message):
        apply_weights(bundle_from_graph(small_graph()), tensors(**{name: arrays[name] for name in given}), **options)


def test_weights_of_bodies_go_by_their_location() -> None:
    """Two bodies may each have a weight of one name."""
    bundle = bundle_of(model_with_bodies())
    inner = [name for name in bundle.weights if name != "w0"]
    given = {name: TensorData.from_array(np.full((8, 8), at, np.float32)) for at, name in enumerate(inner)}
    report = apply_weights(bundle, given)
    assert [report.model.weights[name].numpy()[0, 0] for name in inner] == [0, 1]


RENAMES = {
    "json": '{"names": {"x": {"to": "w", "transpose": true}, "y": null}, '
    '"patterns": [{"match": "l(\\\\d+)\\\\.(?P<what>.*)", "to": "\\\\g<what>_\\\\1"}]}',
    "toml": "[names]\nx = { to = 'w', transpose = true }\ny = false\n"
    "[[patterns]]\nmatch = 'l(\\d+)\\.(?P<what>.*)'\nto = '\\g<what>_\\1'\n",
}


@pytest.mark.parametrize("syntax", RENAMES)
def test_a_rename_file_has_names_and_patterns(syntax: str, tmp_path: Path) -> None:
    """Names first, then the patterns; whoever is in neither keeps its name."""
    path = tmp_path / "renames"
    path.write_text(RENAMES[syntax], encoding="utf-8")
    renames = load_renames(path)
    assert renames("x") == Rename("w", transpose=True)
    assert renames("y") == Rename("")
    assert renames("l12.bias") == Rename("bias_12")
    assert renames("other.l12.bias") == Rename("other.l12.bias")


def test_a_flat_rename_file_is_names(tmp_path: Path) -> None:
    """The simplest form."""
    (tmp_path / "r").write_text(json.dumps({"a.b": "c"}), encoding="utf-8")
    assert load_renames(tmp_path / "r")("a.b") == Rename("c")


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        '{"a": {"to": "b", "transpse": true}}',
        '{"a": {"to": "b", "transpose": 1}}',
        '{"patterns": [{"to": "a"}]}',
        '{"patterns": [{"match": "(", "to": "a"}]}',
        '{"patterns": [{"match": "a", "to": "\\\\1"}]}',
        '{"patterns": "a"}',
        '{"patterns": [{"match": 1, "to": "a"}]}',
        "{",
        "[names",
        "\x00",
    ],
)
def test_a_file_that_is_no_rename_file_is_refused(text: str, tmp_path: Path) -> None:
    """With its name and what is wrong."""
    (tmp_path / "renames").write_text(text, encoding="utf-8")
    with pytest.raises(ConversionError, match="renames is not a rename file"):
        load_renames(tmp_path / "renames")

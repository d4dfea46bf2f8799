"""Bundles: which tensors are outside the model, what they are over, and the ways to graphs, onnx-ir and files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_text import parsed
from sample_models.source_files import LARGE, SMALL, model_with_bodies, small_graph

from rlx_ort import ConversionError, to_onnx
from rlx_ort.converters.bundle import (
    ModelBundle,
    bundle_from_graph,
    bundle_of,
    external_tensors,
    graph_from_bundle,
    location_of,
)
from rlx_ort.converters.files import save_bundle, save_onnx, written_files
from rlx_ort.converters.onnx_ir_bridge import bundle_from_ir, bundle_to_ir
from rlx_ort.converters.sources import open_source
from rlx_ort.ir.tensor import TensorData


def whole(bundle: ModelBundle) -> onnx.ModelProto:
    """Return the model with every weight inside, put there by onnx's own means."""
    model = onnx.ModelProto.FromString(bundle.proto.SerializeToString())
    for tensor in external_tensors(model):
        tensor.CopyFrom(numpy_helper.from_array(bundle.weights[location_of(tensor)].numpy(), tensor.name))
    return model


def test_large_tensors_are_outside_and_small_ones_inside() -> None:
    """Of 128 bytes and more, a weight is a reference; in bodies too, each under its own location."""
    bundle = bundle_of(model_with_bodies())
    assert {tensor.name for tensor in external_tensors(bundle.proto)} == {"w0", "w"}
    assert len(bundle.weights) == 3
    assert {location_of(tensor) for tensor in external_tensors(bundle.proto)} == bundle.weights.keys()
    small = next(tensor for tensor in bundle.proto.graph.initializer if tensor.name == "small")
    assert small.raw_data == SMALL.tobytes()
    assert sorted(float(data.numpy()[0, 0]) for data in bundle.weights.values()) == [0.0, 0.0, 1.0]


def test_a_large_constant_node_becomes_an_initializer_of_its_graph() -> None:
    """The Constant node of the second branch is gone; both branches compute what they did."""
    bundle = bundle_of(model_with_bodies())
    bodies = [attribute.g for attribute in bundle.proto.graph.node[0].attribute]
    assert [node.op_type for body in bodies for node in body.node] == ["MatMul", "MatMul"]
    onnx.checker.check_model(whole(bundle), full_check=True)


def test_constants_stay_nodes_where_every_initializer_must_be_an_input() -> None:
    """Before IR version 4 a new initializer would be a new input."""
    model = parsed("() => (float[8, 8] c) { c = Constant () }", 7, 3)
    model.graph.node[0].attribute.append(helper.make_attribute("value", numpy_helper.from_array(LARGE)))
    bundle = bundle_of(model)
    assert [node.op_type for node in bundle.proto.graph.node] == ["Constant"]
    assert bundle.weights == {}


def test_external_tensors_of_attributes_are_brought_inside(tmp_path: Path) -> None:
    """No pass looks for data of an attribute outside the model."""
    (tmp_path / "data").write_bytes(SMALL.tobytes())
    value = TensorProto(name="v", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    value.external_data.add(key="location", value="data")
    model = parsed("() => (float[4] c) { c = Constant () }", 17)
    model.graph.node[0].attribute.append(helper.make_attribute("value", value))
    bundle = bundle_of(model, tmp_path)
    found = bundle.proto.graph.node[0].attribute[0].t
    assert numpy_helper.to_array(found).tolist() == SMALL.tolist()


def test_what_a_run_is_fed_leaves_out_inputs_with_a_default() -> None:
    """Old models list their weights among the inputs."""
    bundle = bundle_of(model_with_bodies())
    assert list(bundle.input_types()) == ["x", "flag"]
    assert list(bundle.output_types()) == ["y"]
    assert (bundle.opset, bundle.node_count) == (17, 3)


def test_two_initializers_of_one_name_are_refused() -> None:
    """Which one is meant is anybody's guess."""
    model = model_with_bodies()
    model.graph.initializer.append(model.graph.initializer[0])
    with pytest.raises(ConversionError, match=r"net\.onnx.*duplicate initializers: w0"):
        bundle_of(model, origin="net.onnx")


def test_a_graph_and_its_bundle_share_the_memory_of_the_weights() -> None:
    """Nothing is copied on the way there, nor on the way back."""
    graph = small_graph()
    bundle = bundle_from_graph(graph)
    assert bundle.weights["w"].buffer is graph.weights["w"].buffer
    again = graph_from_bundle(bundle)
    assert again.weights["w"].buffer is graph.weights["w"].buffer
    assert again.weights["b"] == graph.weights["b"]


def test_a_bundle_of_a_graph_is_the_model_that_to_onnx_gives() -> None:
    """Apart from where the weights are."""
    graph = small_graph()
    expected = bundle_of(to_onnx(graph))
    found = bundle_from_graph(graph)
    assert found.proto == expected.proto
    assert found.weights == expected.weights


def test_a_changed_model_drops_the_weights_it_no_longer_refers_to() -> None:
    """Their memory is not held by a bundle that has no use for them."""
    bundle = bundle_of(model_with_bodies())
    proto = onnx.ModelProto.FromString(bundle.proto.SerializeToString())
    del proto.graph.initializer[0]
    proto.graph.input.pop()
    assert len(bundle.with_proto(proto).weights) == 2
    assert len(bundle.weights) == 3


def test_a_model_that_refers_to_a_weight_that_is_not_there_is_refused() -> None:
    """Names it in the message."""
    bundle = bundle_of(model_with_bodies())
    proto = onnx.ModelProto.FromString(bundle.proto.SerializeToString())
    proto.graph.initializer[0].external_data[0].value = "elsewhere"
    with pytest.raises(ConversionError, match="elsewhere"):
        bundle.with_proto(proto)


def test_weights_of_another_shape_are_refused() -> None:
    """A reference and its data must agree."""
    bundle = bundle_of(model_with_bodies())
    with pytest.raises(ConversionError, match=r"f32\[8, 8\], given is f32\[64\]"):
        bundle.with_weights({**bundle.weights, "w0": TensorData.from_array(LARGE.reshape(-1))})


def test_a_model_of_onnx_ir_is_over_the_same_memory() -> None:
    """Its tensors are views of our weights, and the bundle made from it has the very same ones."""
    pytest.importorskip("onnx_ir")
    bundle = bundle_of(model_with_bodies())
    model = bundle_to_ir(bundle)
    tensor = model.graph.initializers["w0"].const_value
    assert tensor is not None
    assert np.shares_memory(tensor.numpy(), bundle.weights["w0"].buffer)
    again = bundle_from_ir(model, "again")
    assert [node.op_type for node in again.proto.graph.node] == ["If"]
    assert all(again.weights[name].buffer is data.buffer for name, data in bundle.weights.items())
    assert model.graph.initializers["w0"].const_value is tensor  # serializing puts everything back


def test_tensors_that_onnx_ir_made_are_taken_over() -> None:
    """A pass may put its own tensors in; bytes are ONNX's, packed types too."""
    ir = pytest.importorskip("onnx_ir")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    model = bundle_to_ir(bundle_of(model_with_bodies()))
    nibbles = np.arange(-8, 8).repeat(32).astype(ml_dtypes.int4)
    halves = np.linspace(0, 1, 128).astype(ml_dtypes.bfloat16)
    for name, values in (("nibbles", nibbles), ("halves", halves)):
        value = ir.Value(name=name, const_value=ir.tensor(values, name=name))
        model.graph.register_initializer(value)
    bundle = bundle_from_ir(model)
    assert np.array_equal(bundle.weights["nibbles"].numpy(), nibbles)
    assert bundle.weights["nibbles"].nbytes == 256
    assert np.array_equal(bundle.weights["halves"].numpy(), halves)


@pytest.mark.parametrize("external", [False, True])
def test_a_file_that_is_opened_and_saved_again_is_the_same(tmp_path: Path, external: bool) -> None:
    """Byte for byte, wherever the weights are."""
    source = tmp_path / "a" / "model.onnx"
    target = tmp_path / "b" / "model.onnx"
    for path in (source, target):
        path.parent.mkdir()
    save_onnx(small_graph(), source, external_data=external)
    save_bundle(open_source(source), target, external_data=external)
    for path in source.parent.iterdir():
        assert (target.parent / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("external", [False, True])
def test_weights_of_bodies_are_written_too(tmp_path: Path, external: bool) -> None:
    """Onnx's own loader finds the weight of each branch."""
    path = tmp_path / "model.onnx"
    save_bundle(bundle_of(model_with_bodies()), path, external_data=external)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    found = [onnx.numpy_helper.to_array(attribute.g.initializer[0]) for attribute in model.graph.node[0].attribute]
    assert sorted(float(values[0, 0]) for values in found) == [0.0, 1.0]
    assert all(values.shape == LARGE.shape for values in found)


def test_progress_counts_every_byte_of_the_weights(tmp_path: Path) -> None:
    """A progress bar with a known total ends full."""
    bundle = bundle_from_graph(small_graph())
    written: list[int] = []
    save_bundle(bundle, tmp_path / "model.onnx", progress=written.append)
    assert sum(written) == sum(data.nbytes for data in bundle.weights.values())


def test_the_files_that_will_be_written_are_known_before(tmp_path: Path) -> None:
    """So that a caller can ask before it overwrites."""
    bundle = bundle_from_graph(small_graph())
    path = tmp_path / "model.onnx"
    assert written_files(bundle, path) == (path,)
    assert written_files(bundle, path, external_data=True) == (path, tmp_path / "model.onnx.data")


def test_a_source_that_was_written_to_is_refused(tmp_path: Path) -> None:
    """Its map may be shorter than it was; reading on would end the process."""
    source = tmp_path / "model.onnx"
    save_onnx(small_graph(), source)
    bundle = open_source(source)
    with source.open("r+b") as file:
        file.seek(300)
        file.write(b"changed")
    os.utime(source, ns=(0, 0))
    with pytest.raises(ConversionError, match="was written to since"):
        save_bundle(bundle, tmp_path / "out.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]

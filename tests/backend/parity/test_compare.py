"""Comparing models: the same, another one, on two devices, and pairs that cannot be compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from rlx_ort import CompileOptions, EngineError, Graph, InputError, PlacementError, PlacementRule
from rlx_ort.parity.compare import compare
from rlx_ort.parity.metrics import Tolerance


def _model(body: str, opening: str = "(float[rows, 2] x) => (float[rows, 2] y)", version: int = 8) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: {version}, opset_import: ["": 18]>\nm {opening} {{ {body} }}')


def test_the_difference_is_that_of_the_outputs() -> None:
    """2x against 2x + 0.5: a largest difference of 0.5, beyond the default tolerance and within a generous one."""
    a, b = _model("y = Add (x, x)"), _model("h = Constant <value_float = 0.5> ()\n z = Add (x, x)\n y = Add (z, h)")
    inputs = {"x": np.ones((3, 2), np.float32)}
    found = compare(a, b, inputs=inputs)
    assert (found.ok, found.seed) == (False, None)
    assert found.outputs[0].found.max_abs == 0.5
    assert found.outputs[0].found.relative_l2 == pytest.approx(0.2)
    assert compare(a, b, inputs=inputs, tolerance=Tolerance(0.3)).ok


def test_outputs_and_inputs_of_other_names_are_matched_by_position() -> None:
    """A renamed model is the same model."""
    a = _model("y = Sub (x, z)", "(float[2] x, float[2] z) => (float[2] y)")
    b = _model("c = Sub (a, b)", "(float[2] a, float[2] b) => (float[2] c)")
    found = compare(a, b)
    assert found.ok
    assert (found.outputs[0].name, found.outputs[0].other_name) == ("y", "c")


def test_outputs_of_the_same_names_are_matched_by_name() -> None:
    """The order of outputs does not matter if their names match."""
    a = _model("y = Add (x, x)\n z = Neg (x)", "(float[2] x) => (float[2] y, float[2] z)")
    b = _model("y = Add (x, x)\n z = Neg (x)", "(float[2] x) => (float[2] z, float[2] y)")
    assert compare(a, b).ok


def test_other_dtypes_are_compared_by_value() -> None:
    """A model in f16 takes the f32 inputs of its reference, rounded, and differs by that."""
    a = _model("y = Add (x, x)")
    b = _model("y = Add (x, x)", "(float16[rows, 2] x) => (float16[rows, 2] y)")
    found = compare(a, b, tolerance=Tolerance(1e-3))
    assert found.ok
    assert found.outputs[0].dtypes == ("float32", "float16")
    assert 0 < found.outputs[0].found.relative_l2 < 1e-3


def test_a_graph_compares_with_its_file(tmp_path: Path) -> None:
    """Graphs, files and messages may be mixed."""
    from rlx_ort.converters.files import save_onnx

    graph = Graph("mlp")
    x = graph.input("x", ["batch", 64])
    graph.outputs = [graph.relu(x @ graph.param("w", [64, 64], data=np.eye(64, dtype=np.float32)))]
    save_onnx(graph, tmp_path / "mlp.onnx", external_data=True)
    assert compare(graph, tmp_path / "mlp.onnx").ok


def test_models_of_ir_version_3_compare() -> None:
    """There, weights are inputs too, which need not be fed."""
    body = "y = MatMul (x, w)"
    model = _model(body, "(float[rows, 8] x, float[8, 8] w) => (float[rows, 8] y)", version=3)
    model.opset_import[0].version = 8
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(8, dtype=np.float32), "w"))
    found = compare(model, model)
    assert found.ok
    assert list(found.inputs) == ["x"]


def test_weights_in_a_body_are_there() -> None:
    """A weight of a branch, which engines do not take by reference, arrives as well."""
    text = """
<ir_version: 8, opset_import: ["": 18]>
m (float[64] x, bool f) => (float[64] y) {
  y = If (f) <then_branch = t () => (float[64] u) { u = Add (x, x) },
              else_branch = e () => (float[64] v) <float[64] w> { v = Neg (x) }>
}
"""
    model = parser.parse_model(text)
    branch = model.graph.node[0].attribute[0].g
    branch.initializer.append(onnx.numpy_helper.from_array(np.arange(64, dtype=np.float32), "w2"))
    branch.node[0].input[1] = "w2"
    x = np.ones(64, np.float32)
    found = compare(model, model, inputs={"x": x, "f": np.array(True)})
    assert found.ok


def test_smaller_sizes_are_tried_where_the_assumed_ones_do_not_fit() -> None:
    """A model that takes one row only, though its dim has a name, is run on one."""
    model = _model(
        "s = Constant <value_ints = [1, 2]> ()\n y = Reshape (x, s)", "(float[rows, 2] x) => (float[1, 2] y)"
    )
    found = compare(model, model)
    assert found.ok
    assert found.assumed == {"rows": 1}


def test_a_model_that_does_not_run_says_with_which_sizes() -> None:
    """The message names the sizes that were made up, and what to give instead."""
    model = _model(
        "s = Constant <value_ints = [7, 7]> ()\n y = Reshape (x, s)", "(float[rows, 2] x) => (float[7, 7] y)"
    )
    with pytest.raises(EngineError, match=r"(?s)rows=2.*npz"):
        compare(model, model)


def test_models_with_other_interfaces_are_refused() -> None:
    """Two inputs against one, and two outputs against one, are no pair; the message lists both."""
    one = _model("y = Neg (x)")
    more_in = _model("y = Add (x, z)", "(float[rows, 2] x, float[rows, 2] z) => (float[rows, 2] y)")
    more_out = _model("a = Neg (x)\n b = Neg (x)", "(float[rows, 2] x) => (float[rows, 2] a, float[rows, 2] b)")
    with pytest.raises(InputError, match="inputs x, z"):
        compare(one, more_in)
    with pytest.raises(InputError, match="outputs a, b"):
        compare(one, more_out)


def test_a_missing_input_is_named() -> None:
    """Given inputs have to be all of them."""
    with pytest.raises(InputError, match="not given: x"):
        compare(_model("y = Neg (x)"), _model("y = Neg (x)"), inputs={"z": np.ones(2, np.float32)})


def test_sequences_are_compared_by_element() -> None:
    """Each element of a list is an output of its own."""
    text = "y = SplitToSequence <axis = 0> (x)"
    model = _model(text, "(float[3, 2] x) => (seq(float[1, 2]) y)")
    found = compare(model, model)
    assert [output.name for output in found.outputs] == ["y[0]", "y[1]", "y[2]"]


@pytest.mark.webgpu
def test_one_model_on_two_devices() -> None:
    """The second run is on the device that was named, and agrees within the rounding of f32."""
    graph = Graph("layers")
    x = graph.input("x", ["batch", 32])
    w = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32) / 6
    for index in range(4):
        x = graph.tanh(x @ graph.param(f"w{index}", [32, 32], data=w))
    graph.outputs = [x]
    found = compare(graph, graph, devices=("cpu", "webgpu"), tolerance=Tolerance(1e-4))
    assert found.ok
    assert found.devices == ("cpu", "webgpu")
    assert found.placements[1].requested == "WebGpuExecutionProvider"
    assert found.placements[1].requested_share == 1.0


@pytest.mark.webgpu
def test_a_device_that_takes_only_a_part_is_refused_unless_the_cpu_may_help() -> None:
    """The strict rule holds for comparisons too."""
    model = _model("a = Neg (x)\n b = Det (s)\n y = Add (a, b)", "(float[2] x, float[2, 2] s) => (float[2] y)")
    with pytest.raises(PlacementError, match="Det"):
        compare(model, model, devices=("cpu", "webgpu"))
    helped = CompileOptions(placement=PlacementRule.ASSISTED)
    assert compare(model, model, devices=("cpu", "webgpu"), options=helped).ok

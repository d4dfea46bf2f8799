"""Moving models between opsets: what is rewritten, what is refused, and what is left alone."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_text import parsed

from rlx_ort.converters.bundle import ModelBundle, bundle_of
from rlx_ort.converters.transforms.opset import to_opset
from rlx_ort.errors import ConversionError


def ops(made: ModelBundle) -> list[str]:
    return [node.op_type for node in made.proto.graph.node]


SOFTMAX = bundle_of(parsed("(float[2,3,4] x) => (float[2,3,4] y) { y = Softmax <axis=1> (x) }", 9, 4))


def test_a_node_that_means_the_same_is_not_touched() -> None:
    """Its name, its doc string and its metadata stay, and nothing is reported."""
    source = bundle_of(parsed("(float[2] x) => (float[2] y) { y = Relu (x) }", 13, 8))
    node = source.proto.graph.node[0]
    node.name, node.doc_string = "act", "kept"
    node.metadata_props.add(key="a", value="b")
    made, report = to_opset(source, 21)
    assert made.proto.graph.node[0] == node
    assert (made.opset, report.source, report.target, report.rewritten) == (21, 13, 21, ())
    assert source.opset == 13  # the given bundle is left as it was


def test_softmax_keeps_its_old_meaning() -> None:
    """Before 13 it flattened to two dimensions: the sum over the last two axes is one."""
    made, report = to_opset(SOFTMAX, 21)
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    (y,) = ReferenceEvaluator(made.proto).run(None, {"x": x})
    flat = np.exp(x.astype(np.float64).reshape(2, 12))
    np.testing.assert_allclose(y, (flat / flat.sum(1, keepdims=True)).reshape(2, 3, 4), rtol=1e-5)
    assert report.rewritten == ("Softmax 'y'",)


def test_an_attribute_that_became_an_input_is_a_constant_with_a_free_name() -> None:
    """Squeeze got its axes as an input in 13; the constant's name clashes with nothing."""
    body = "{ z = Squeeze <axes=[0]> (axes) y = Squeeze <axes=[1]> (z) }"
    made, _ = to_opset(bundle_of(parsed(f"(float[1,2,1] axes) => (float[2] y) {body}", 11, 7)), 21)
    x = np.array([[[1], [2]]], np.float32)
    np.testing.assert_array_equal(ReferenceEvaluator(made.proto).run(None, {"axes": x})[0], [1, 2])
    onnx.checker.check_model(made.proto, full_check=True)


def test_nodes_in_bodies_are_rewritten_too() -> None:
    """A ReduceSum in a branch gets its axes as an input; names of values in sibling bodies may be equal."""
    text = """(bool c, float[2,2] x) => (float[2] y) {
      y = If (c) <then_branch = t () => (float[2] r) { r = ReduceSum <axes = [0], keepdims = 0> (x) },
                  else_branch = e () => (float[2] r) { r = ReduceSum <axes = [1], keepdims = 0> (x) }>
    }"""
    source = bundle_of(parsed(text, 11, 6))
    made, report = to_opset(source, 21)
    x = np.array([[1, 2], [3, 4]], np.float32)
    run = ReferenceEvaluator(made.proto)
    np.testing.assert_array_equal(run.run(None, {"c": np.array(True), "x": x})[0], [4, 6])
    np.testing.assert_array_equal(run.run(None, {"c": np.array(False), "x": x})[0], [3, 7])
    assert len(report.rewritten) == 2


def test_a_weight_is_not_looked_at() -> None:
    """A reference whose data is nowhere passes through, as long as nothing needs its values."""
    text = "(float[2,64] x) => (float[2,64] y) { h = Gemm (x, w) y = Softmax <axis = 0> (h) }"
    source = bundle_of(parsed(text, 9, 4, w=np.ones((64, 64), np.float32)))
    made, _ = to_opset(source, 21)
    assert made.weights["w"] is source.weights["w"]
    assert all(not tensor.raw_data or tensor.name != "w" for tensor in made.proto.graph.initializer)


def test_an_operator_that_is_newer_is_written_out() -> None:
    """Swish came in 24; below, it is what ONNX defines it by."""
    source = bundle_of(parsed("(float[3] x) => (float[3] y) { y = Swish (x) }", 24))
    made, report = to_opset(source, 21)
    x = np.array([-1, 0, 2], np.float32)
    np.testing.assert_allclose(
        ReferenceEvaluator(made.proto).run(None, {"x": x})[0], x / (1 + np.exp(-x.astype(np.float64))), rtol=1e-6
    )
    assert "Swish" not in ops(made)
    assert report.rewritten == ("Swish 'y'",)


def test_functions_are_kept_where_their_nodes_mean_the_same_and_inlined_where_not() -> None:
    """A function of Relu stays; one with a Softmax of the old meaning cannot."""
    text = """(float[2,3,4] x) => (float[2,3,4] y) { y = f.act (x) }
    <domain: "f", opset_import: ["": 11]> act (a) => (b) { b = OP (a) }"""
    relu, softmax = (bundle_of(parsed(text.replace("OP", op), 11, 8, '"f": 1')) for op in ("Relu", "Softmax"))
    kept, report = to_opset(relu, 21)
    assert (ops(kept), report.functions_inlined) == (["act"], False)
    assert {entry.version for entry in kept.proto.functions[0].opset_import if not entry.domain} == {21}
    inlined, report = to_opset(softmax, 21)
    assert report.functions_inlined
    assert "act" not in ops(inlined)
    assert not inlined.proto.functions


def test_what_the_target_cannot_say_is_named() -> None:
    """All nodes that stand in the way are in one message, with the reason of each."""
    text = """(float[1,1,4,4] x) => (float[1,1,2,2] y, float[3] s) {
      [pool] y = AveragePool <kernel_shape=[2,2], dilations=[2,2]> (x)
      [three] s = Constant <value_floats=[1.0, 2.0, 3.0]> ()
    }"""
    with pytest.raises(ConversionError, match=r"from opset 21 to 11:\n  AveragePool 'pool': .*dilations"):
        to_opset(bundle_of(parsed(text)), 11)


def test_a_change_of_meaning_that_nobody_can_rewrite_is_refused() -> None:
    """ONNX's converter would pass a ConvTranspose with SAME padding on as it is."""
    text = """(float[1,1,4,4] x, float[1,1,3,3] w) => (float[1,1,8,8] y)
    { y = ConvTranspose <auto_pad="SAME_UPPER", strides=[2,2]> (x, w) }"""
    with pytest.raises(ConversionError, match="ConvTranspose changed in opset 11"):
        to_opset(bundle_of(parsed(text, 10, 6)), 21)


@pytest.mark.parametrize("opset", [0, -1, 1000])
def test_an_opset_that_does_not_exist_is_refused(opset: int) -> None:
    """The message says which there are."""
    with pytest.raises(ConversionError, match=f"opset {opset} was asked for; onnx .* knows 1 to"):
        to_opset(SOFTMAX, opset)


def test_the_ir_version_is_the_lowest_that_has_the_opset() -> None:
    """Opset 21 came with IR version 10, opset 11 with 6; a lower one is refused."""
    assert to_opset(SOFTMAX, 21)[1].ir_version == 10
    assert to_opset(SOFTMAX, 11)[1].ir_version == 6
    assert to_opset(SOFTMAX, 21, 11)[0].proto.ir_version == 11
    with pytest.raises(ConversionError, match="IR version 9 was asked for; opset 21 and this model take 10 to"):
        to_opset(SOFTMAX, 21, 9)


def test_an_old_ir_version_has_its_weights_among_the_inputs() -> None:
    """IR version 3 knows no initializer that is no input."""
    text = "(float[2] x) => (float[2] y) { y = Add (x, w) }"
    source = bundle_of(parsed(text, 9, 4, w=np.ones(2, np.float32)))
    made, _ = to_opset(source, 8, 3)
    assert [value.name for value in made.proto.graph.input] == ["x", "w"]
    onnx.checker.check_model(made.proto)

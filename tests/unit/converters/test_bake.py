"""Tensors of a file as weights of a model."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from rlx_ort.converters.bundle import ModelBundle, bundle_of, graph_from_bundle
from rlx_ort.converters.sources import bake
from rlx_ort.errors import ConversionError
from rlx_ort.ir.tensor import TensorData


def model() -> ModelBundle:
    """Return y = x * w + b, where w is a large weight, b a small one, and `scale` an input."""
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "w"], ["m"]),
            helper.make_node("Mul", ["m", "scale"], ["s"]),
            helper.make_node("Add", ["s", "b"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", 1, [64]), helper.make_tensor_value_info("scale", 1, ["k"])],
        [helper.make_tensor_value_info("y", 1, [64])],
        [onnx.numpy_helper.from_array(np.ones(64, np.float32), "w"),
         onnx.numpy_helper.from_array(np.zeros(1, np.float32), "b")],
    )  # fmt: skip
    return bundle_of(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


def tensors(**arrays: object) -> dict[str, TensorData]:
    return {name: TensorData.from_array(np.asarray(array, np.float32)) for name, array in arrays.items()}


def test_weights_are_replaced_and_inputs_become_weights() -> None:
    """Large and small ones; the report says what happened to each, and the given bundle is as it was."""
    source, w = model(), np.arange(64)
    made, report = bake(source, tensors(w=w, b=[5], scale=[2], other=[1]))
    assert [value.name for value in made.proto.graph.input] == ["x"]
    x = np.full(64, 3, np.float32)
    graph = graph_from_bundle(made)
    np.testing.assert_array_equal(graph.weights["w"].numpy(), w)
    whole = onnx.ModelProto.FromString(made.proto.SerializeToString())
    for tensor in whole.graph.initializer:
        if tensor.name == "w":
            tensor.CopyFrom(onnx.numpy_helper.from_array(made.weights["w"].numpy(), "w"))
    np.testing.assert_array_equal(ReferenceEvaluator(whole).run(None, {"x": x})[0], 3.0 * w * 2 + 5)
    assert (report.replaced, report.promoted, report.unchanged, report.unused) == (
        ("w", "b"),
        ("scale",),
        (),
        ("other",),
    )
    np.testing.assert_array_equal(source.weights["w"].numpy(), np.ones(64))


def test_what_the_file_lacks_stays() -> None:
    """And is named in the report."""
    made, report = bake(model(), tensors(b=[1]))
    assert report.unchanged == ("w",)
    assert [value.name for value in made.proto.graph.input] == ["x", "scale"]


def test_a_tensor_of_another_type_is_refused() -> None:
    """All misfits are listed with what the model declares and what is given."""
    given = tensors(w=np.ones(63)) | {"b": TensorData.from_array(np.zeros(1, np.float16))}
    with pytest.raises(ConversionError) as caught:
        bake(model(), given)
    assert "'w' is f32[64] in the model, given is f32[63]" in str(caught.value)
    assert "'b' is f32[1] in the model, given is f16[1]" in str(caught.value)


def test_an_input_takes_any_size_of_an_open_dim_but_no_other_rank() -> None:
    """`scale` is declared `[k]`."""
    assert bake(model(), tensors(scale=np.ones(64)))[1].promoted == ("scale",)
    with pytest.raises(ConversionError, match=r"'scale' is f32\[k\] in the model, given is f32\[1, 2\]"):
        bake(model(), tensors(scale=[[1, 2]]))


def test_a_file_that_has_nothing_to_do_with_the_model_is_refused() -> None:
    """The message gives names of both sides."""
    with pytest.raises(ConversionError, match=r"none of the 1 tensors given is .* 'ww'; did you mean 'w'"):
        bake(model(), tensors(ww=[1]))
    with pytest.raises(ConversionError, match="none of the 0 tensors"):
        bake(model(), {})

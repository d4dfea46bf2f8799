"""Cutting a part out of a model and replacing its weights: what is kept, what it needs, and what is refused."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_text import parsed

from rlx_ort.converters.bundle import ModelBundle, bundle_of, graph_from_bundle
from rlx_ort.converters.sources import bake
from rlx_ort.converters.transforms.cut import cut
from rlx_ort.errors import ConversionError
from rlx_ort.ir.tensor import TensorData

W = np.arange(64, dtype=np.float32)


def chain() -> ModelBundle:
    """Return h = x + w, s = relu(h), y = s * k, z = y - x."""
    text = """(float[n, 64] x, float[n, 64] k) => (float[n, 64] y, float[n, 64] z) {
      [add] h = Add (x, w)
      [relu] s = Relu (h)
      [mul] y = Mul (s, k)
      [sub] z = Sub (y, x)
    }"""
    return bundle_of(parsed(text, w=W))


def test_a_part_between_values_computes_what_the_whole_does_there() -> None:
    """Its input is a value in between, with the inferred type; the weight before it is gone."""
    made, report = cut(chain(), ["h"], ["s"])
    assert [node.name for node in made.proto.graph.node] == ["relu"]
    assert dict(made.weights) == {}
    assert (report.inputs, report.outputs, report.nodes_kept, report.nodes_dropped) == (("h",), ("s",), 1, 3)
    h = np.array([[-1.0] * 32 + [2.0] * 32], np.float32)
    np.testing.assert_array_equal(ReferenceEvaluator(made.proto).run(None, {"h": h})[0], np.maximum(h, 0))
    onnx.checker.check_model(made.proto, full_check=True)


def test_without_inputs_those_of_the_model_that_are_needed_stay() -> None:
    """`s` needs x and the weight, and not k."""
    made, report = cut(chain(), outputs=["s"])
    assert (report.inputs, set(made.weights)) == (("x",), {"w"})


def test_without_outputs_those_of_the_model_stay() -> None:
    """Both outputs, from the value in between and what else they need."""
    made, _ = cut(chain(), ["s", "k", "x"])
    assert [value.name for value in made.proto.graph.input] == ["s", "k", "x"]
    assert [value.name for value in made.proto.graph.output] == ["y", "z"]


def test_a_weight_may_become_an_input() -> None:
    """It is fed from then on, and its data is gone."""
    made, _ = cut(chain(), ["x", "w"], ["h"])
    assert dict(made.weights) == {}
    x = np.ones((1, 64), np.float32)
    np.testing.assert_array_equal(ReferenceEvaluator(made.proto).run(None, {"x": x, "w": W})[0], x + W)


def test_what_a_body_takes_from_outside_is_needed() -> None:
    """A branch that reads h keeps the node that makes it."""
    text = """(float[2] x, bool c) => (float[2] y) {
      h = Relu (x)
      y = If (c) <then_branch = t () => (float[2] r) { r = Neg (h) },
                  else_branch = e () => (float[2] r) { r = Abs (h) }>
    }"""
    source = bundle_of(parsed(text))
    assert cut(source, outputs=["y"])[1].nodes_kept == 2
    with pytest.raises(ConversionError, match="output 'r' is inside a body of If"):
        cut(source, outputs=["r"])


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (["hh"], ["s"], "input 'hh' is not a value of the model; did you mean 'h'"),
        ([], ["nothing"], "output 'nothing' is not a value of the model; known are"),
        (["s"], ["y"], "output 'y' cannot be computed from 's' alone; the model's input 'k' is needed as well"),
        (["h", "k"], ["s"], "input 'k' does not contribute to 's'; remove it"),
        (["h"], ["h"], "'h' is asked for as input and as output"),
        ([], ["x"], "output 'x' is an input or weight"),
        (["h", "h"], ["s"], "input 'h' is given twice"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(inputs: list[str], outputs: list[str], message: str) -> None:
    """The message uses the names as they were given and says what to change."""
    with pytest.raises(ConversionError, match=message):
        cut(chain(), inputs, outputs)


def test_a_value_of_unknown_type_cannot_be_an_input() -> None:
    """A foreign operator's result has no type that anybody could declare."""
    text = "(float[2] x) => (float[2] y) { m = d.Magic (x) y = Relu (m) }"
    source = bundle_of(parsed(text, imports='"d": 1'))
    with pytest.raises(ConversionError, match="the type of input 'm' cannot be inferred; cut at another value"):
        cut(source, ["m"], ["y"])


def model() -> ModelBundle:
    """Return y = x * w + b, where w is a large weight, b a small one, and `scale` an input."""
    text = "(float[64] x, float[k] scale) => (float[64] y) { m = Mul (x, w) s = Mul (m, scale) y = Add (s, b) }"
    return bundle_of(parsed(text, w=np.ones(64, np.float32), b=np.zeros(1, np.float32)))


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

"""Simplifying: what goes, what stays, and that results do not change."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_text import parsed

from rlx_ort.converters.bundle import ModelBundle, bundle_of
from rlx_ort.converters.transforms.simplify import fold_constants, simplify

pytest.importorskip("onnx_ir")


def bundle(body: str, signature: str = "(float[2, 3] x) => (float[2, 3] y)", **weights: object) -> ModelBundle:
    return bundle_of(parsed(f"{signature} {{ {body} }}", **weights))


def ops(made: ModelBundle) -> list[str]:
    return [node.op_type for node in made.proto.graph.node]


X = np.array([[1, -2, 3], [4, -5, 6]], np.float32)


def test_identities_dead_nodes_and_repeats_go() -> None:
    """Three of the five nodes are left, and the result is the same."""
    source = bundle("i = Identity (x) dead = Exp (x) a = Relu (i) b = Relu (x) y = Add (a, b)")
    made, report = simplify(source)
    assert ops(made) == ["Relu", "Add"]
    assert report.removed_ops == {"Identity": 1, "Exp": 1, "Relu": 1}
    assert (report.nodes_before, report.nodes_after) == (5, 2)
    np.testing.assert_array_equal(ReferenceEvaluator(made.proto).run(None, {"x": X})[0], 2 * np.maximum(X, 0))


def test_shape_arithmetic_on_static_shapes_is_folded() -> None:
    """A reshape to (rows * columns) needs no Shape, Gather and Mul at run time."""
    body = (
        "s = Shape (x) zero = Constant <value_ints=[0]> () one = Constant <value_ints=[1]> () "
        "r = Gather (s, zero) c = Gather (s, one) n = Mul (r, c) y = Reshape (x, n)"
    )
    made, report = simplify(bundle(body, "(float[2, 3] x) => (float[6] y)"))
    assert ops(made) == ["Reshape"]
    assert set(report.folded) == {"s", "r", "c", "n"}
    np.testing.assert_array_equal(ReferenceEvaluator(made.proto).run(None, {"x": X})[0], X.reshape(-1))


def test_an_open_shape_is_not_folded() -> None:
    """Only the sizes that are known are constants: the rows are not, the columns are."""
    body = "s = Shape <start=0, end=1> (x) c = Shape <start=1> (x) t = Concat <axis=0> (c, s) y = Reshape (x, t)"
    made, report = simplify(bundle(body, "(float[n, 3] x) => (float[a, b] y)"))
    assert report.folded == ("c",)
    assert ops(made) == ["Shape", "Concat", "Reshape"]


def test_a_constant_that_would_be_large_is_not_made() -> None:
    """A model of a few bytes must not make this process fill the memory."""
    body = "n = Constant <value_ints=[1000000, 1000000]> () c = ConstantOfShape (n) y = Identity (c)"
    made, folded = fold_constants(bundle(body, "(float[2] x) => (float[a, b] y)"))
    assert folded == []
    assert "ConstantOfShape" in ops(made)


@pytest.mark.parametrize("body", [
    "a = Constant <value_ints=[-7]> () b = Constant <value_ints=[2]> () q = Div (a, b) y = Add (x, q)",
    "a = Constant <value_floats=[3.0e9]> () q = Cast <to=6> (a) y = Add (x, q)",
    "a = Constant <value_floats=[0.0]> () q = Div (a, a) f = Cast <to=7> (q) y = Add (x, f)",
])  # fmt: skip
def test_arithmetic_that_engines_do_differently_is_left_to_them(body: str) -> None:
    """Negative division, casts out of range, and NaN."""
    kind = "int32" if "to=6" in body else "int64"
    made, folded = fold_constants(bundle(body, f"({kind}[1] x) => ({kind}[1] y)"))
    assert "f" not in folded
    assert "Cast" in ops(made) or "Div" in ops(made)


def test_random_numbers_are_not_shared() -> None:
    """Two draws stay two draws."""
    body = "a = RandomNormalLike (x) b = RandomNormalLike (x) y = Sub (a, b)"
    assert ops(simplify(bundle(body))[0]).count("RandomNormalLike") == 2


def test_weights_keep_their_bytes_and_inferred_shapes_are_written() -> None:
    """Nothing of a large weight is copied, and a value in between gets its type."""
    signature, eye = "(float[n, 8] x) => (float[n, 8] y)", np.eye(9, dtype=np.float32)
    source = bundle("h = MatMul (x, w) y = Relu (h)", signature, w=eye[:8, :8], unread=eye)
    made, _ = simplify(source)
    assert set(made.weights) == {"w"}
    assert np.shares_memory(made.weights["w"].buffer, source.weights["w"].buffer)
    assert [info.name for info in made.proto.graph.value_info] == ["h"]


def test_a_classifier_that_gives_maps_is_simplified() -> None:
    """onnx-ir has no types of maps; the declared ones come back, and so do inputs that are maps."""
    source = bundle(
        "i = Identity (x) zipped = ai.onnx.ml.ZipMap <classlabels_int64s = [3, 5, 8]> (i)"
        " row = ai.onnx.ml.DictVectorizer <int64_vocabulary = [1, 2]> (given)",
        "(float[2, 3] x, map(int64, float) given) => (seq(map(int64, float)) zipped, float[1, 2] row)",
    )
    made, report = simplify(source)
    assert ops(made) == ["ZipMap", "DictVectorizer"]
    assert report.removed_ops == {"Identity": 1}
    assert made.proto.graph.output == source.proto.graph.output
    assert made.proto.graph.input == source.proto.graph.input

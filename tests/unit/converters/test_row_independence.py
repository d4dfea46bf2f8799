"""Rows are proved independent over graphs in ONNX text form, or the node and the reason are named."""

from __future__ import annotations

import onnx
import pytest

from rlx_ort.converters.row_independence import model_row_independence

FLOATS = "float[N,4] x", "float[N,M] y"
PROVEN = {
    "elementwise with a broadcast": "b = Constant<value_floats=[1.0,2.0,3.0,4.0]>() y = Add(x, b)",
    "softmax within rows": "y = Softmax(x)",
    "sum within rows": "a = Constant<value_ints=[1]>() y = ReduceSum(x, a)",
    "cumulative sum within rows": "a = Constant<value_int=1>() y = CumSum(x, a)",
    "product with a weight": "w = Constant<value=float[4,2]{1,2,3,4,5,6,7,8}>() y = MatMul(x, w)",
    "transposed twice": "t = Transpose(x) y = Transpose(t)",
    "reshape by the batch's size": (
        "s = Shape(x) z = Constant<value_ints=[0]>() b = Gather(s, z) m = Constant<value_ints=[-1]>()"
        "t = Concat<axis=0>(b, m) y = Reshape(x, t)"
    ),
    "merged rows and back": (
        "m = Constant<value_ints=[-1,2]>() f = Reshape(x, m) r = Relu(f) s = Shape(x) y = Reshape(r, s)"
    ),
    "chosen by a constant condition": (
        "c = Constant<value=bool{1}>() y = If(c) <then_branch = t () => (p) { p = Relu(x) },"
        " else_branch = e () => (q) { q = Neg(x) }>"
    ),
}
REFUSED = {
    "maximum over rows": ("m = ReduceMax<axes=[0]>(x) y = Add(x, m)", "ReduceMax"),
    "cumulative sum over rows": ("a = Constant<value_int=0>() y = CumSum(x, a)", "CumSum"),
    "softmax over rows": ("y = Softmax<axis=0>(x)", "Softmax"),
    "product of rows with rows": ("t = Transpose(x) y = MatMul(x, t)", "MatMul"),
    "sum over everything": ("s = ReduceSum(x) y = Add(x, s)", "ReduceSum"),
    "any row above a threshold": (
        "o = Constant<value=float{1}>() g = Greater(x, o) c = Cast<to=6>(g) m = ReduceMax<axes=[0]>(c)"
        "f = Cast<to=1>(m) y = Add(x, f)",
        "ReduceMax",
    ),
    "scale over the batch": (
        "q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z)",
        "DynamicQuantizeLinear",
    ),
    "rows from the other end": (
        "b = Constant<value_ints=[-1]>() e = Constant<value_ints=[-9223372036854775807]>()"
        "a = Constant<value_ints=[0]>() y = Slice(x, b, e, a, b)",
        "Slice",
    ),
    "first row for all": (
        "z = Constant<value_ints=[0]>() f = Gather(x, z) y = Add(x, f)",
        "Gather",
    ),
    "divided by the number of rows": (
        "s = Shape(x) z = Constant<value_int=0>() b = Gather(s, z) c = Cast<to=1>(b) y = Div(x, c)",
        "Cast",
    ),
    "rows mixed by a reshape": (
        "t = Transpose(x) s = Shape(x) y = Reshape(t, s)",
        "Reshape",
    ),
    "weights for each place in the batch": (
        "w = Constant<value=float[3,4]{1,2,3,4,5,6,7,8,9,10,11,12}>() y = Add(x, w)",
        "Add",
    ),
    "random": ("r = RandomUniformLike(x) y = Add(x, r)", "RandomUniformLike"),
    "not known": ("y = com.example.Mystery(x)", "Mystery"),
    "no rows": ("y = Constant<value=float[1,1]{1}>()", ""),
}


def model(body: str, takes: str = FLOATS[0], gives: str = FLOATS[1]) -> onnx.ModelProto:
    text = f'<ir_version: 8, opset_import: ["": 17, "com.example": 1]> g ({takes}) => ({gives}) {{ {body} }}'
    text = text.replace("ReduceSum(x) ", "ReduceSum(x)\n")
    return onnx.parser.parse_model(text)


@pytest.mark.parametrize("body", PROVEN.values(), ids=PROVEN.keys())
def test_rows_that_are_independent_are_proved(body: str) -> None:
    """Nothing but the row itself is read."""
    assert str(model_row_independence(model(body), "N")) == "rows are independent"


@pytest.mark.parametrize(("body", "operator"), REFUSED.values(), ids=REFUSED.keys())
def test_rows_that_may_influence_each_other_are_refused_with_the_node(body: str, operator: str) -> None:
    """The operator at which the proof ends is named."""
    found = model_row_independence(model(body), "N")
    assert not found.proven
    assert found.node.split(" ")[0] == operator
    assert found.reason


def test_the_indices_of_a_pool_are_refused() -> None:
    """They count over all rows."""
    body = "y, i = MaxPool<kernel_shape=[2]>(x) z = Cast<to=1>(i)"
    found = model_row_independence(model(body, "float[N,2,4] x", "float[N,2,3] z"), "N")
    assert found.node == "MaxPool"

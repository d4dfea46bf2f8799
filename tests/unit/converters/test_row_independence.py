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
    "split within rows": (
        "k = Constant<value_ints=[2,2]>() a, b = Split<axis=1>(x, k) j = Concat<axis=1>(b, a) s = Shape(x)"
        "y = Reshape(j, s)"
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
    "divided by the number of rows, repeated": (
        "s = Shape(x) r = Constant<value_ints=[2]>() t = Tile(s, r) c = Cast<to=1>(t) y = Div(x, c)",
        "Tile",
    ),
    "divided by the number of rows, expanded": (
        "s = Shape(x) z = Constant<value_ints=[0]>() b = Gather(s, z) f = Constant<value_ints=[4]>()"
        "e = Expand(b, f) c = Cast<to=1>(e) y = Div(x, c)",
        "Expand",
    ),
    "the number of rows or of columns, by row": (
        "s = Shape(x) i = Cast<to=7>(x) g = Gather(s, i) c = Cast<to=1>(g) y = Div(x, c)",
        "Gather",
    ),
    "an element by the number of rows": (
        "s = Shape(x) z = Constant<value_ints=[0]>() b = Gather(s, z) t = Constant<value_ints=[5,6,7,8]>()"
        "g = Gather(t, b) c = Cast<to=1>(g) y = Mul(x, c)",
        "Gather",
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
# Elements by the row's number: `flat` are the 4 elements of each row, `r` the rows' numbers, `k` an offset.
COUNTED = (
    "m = Constant<value_ints=[-1,1]>() flat = Reshape(x, m) s = Shape(x) z = Constant<value_int=0>()"
    "o = Constant<value_int=1>() b = Gather(s, z) w = Gather(s, o) a = Range(z, b, o) u = Constant<value_ints=[1]>()"
    "r = Unsqueeze(a, u) {} g = Gather(flat, i) y = Reshape(g, s)"
)
COUNTED_PROVEN = {
    "all elements of the own row": "n = Mul(r, w) k = Range(z, w, o) i = Add(n, k)",
    "offset first": "n = Mul(w, r) k = Constant<value_ints=[3,0,1,2]>() i = Add(k, n)",
    "a stride in numbers": (
        "f = Constant<value_int=4>() n = Mul(r, f) k = Constant<value_ints=[3,3,3,3]>() i = Add(n, k)"
    ),
    "two offsets within the row": (
        "n = Mul(r, w) k = Constant<value_ints=[0,1,0,1]>() j = Add(n, k)"
        "h = Constant<value_ints=[2,2,0,0]>() i = Add(j, h)"
    ),
    "not before the first row": (
        "n = Mul(r, w) k = Range(z, w, o) i = Add(n, k) c = GreaterOrEqual(a, z) d = Unsqueeze(c, u) e = Not(d)"
    ),
}
COUNTED_REFUSED = {
    "a shorter stride": ("f = Constant<value_int=2>() n = Mul(r, f) k = Range(z, w, o) i = Add(n, k)", "Gather"),
    "a longer stride": ("f = Constant<value_int=5>() n = Mul(r, f) k = Range(z, w, o) i = Add(n, k)", "Gather"),
    "no stride": ("k = Range(z, w, o) i = Add(r, k)", "Gather"),
    "a negative stride": ("f = Neg(w) n = Mul(r, f) k = Range(z, w, o) i = Add(n, k)", "Mul"),
    "as many rows as a stride": ("n = Mul(r, b) k = Range(z, w, o) i = Add(n, k)", "Mul"),
    "an offset of the next row": ("n = Mul(r, w) k = Constant<value_ints=[1,2,3,4]>() i = Add(n, k)", "Gather"),
    "an offset of the row before": ("n = Mul(r, w) k = Constant<value_ints=[-1,0,1,2]>() i = Add(n, k)", "Add"),
    "offsets from below zero": (
        "n = Mul(r, w) l = Constant<value_int=-1>() e = Constant<value_int=3>() k = Range(l, e, o) i = Add(n, k)",
        "Add",
    ),
    "two offsets that reach the next row": (
        "n = Mul(r, w) k = Constant<value_ints=[0,1,2,3]>() j = Add(n, k)"
        "h = Constant<value_ints=[1,0,0,1]>() i = Add(j, h)",
        "Gather",
    ),
    "a sum multiplied": (
        "k = Constant<value_ints=[0,1,0,1]>() j = Add(r, k) i = Mul(j, w)",
        "Mul",
    ),
    "the row's number squared": ("i = Mul(r, r)", "Mul"),
    "counted down": ("n = Mul(r, w) k = Range(z, w, o) i = Sub(n, k)", "Sub"),
    "later rows only": ("c = GreaterOrEqual(r, o) n = Mul(r, w) k = Range(z, w, o) i = Add(n, k)", "GreaterOrEqual"),
    "the number of another row": ("c = GreaterOrEqual(z, r) n = Mul(r, w) i = Identity(n)", "GreaterOrEqual"),
    "elements of a value without rows": (
        "n = Mul(r, w) k = Range(z, w, o) j = Add(n, k) t = Constant<value=float[12]{1,2,3,4,5,6,7,8,9,10,11,12}>()"
        "q = Gather(t, j) i = Add(n, k)",
        "Gather",
    ),
    "the axis within rows": ("n = Mul(r, w) k = Range(z, w, o) i = Add(n, k) q = Gather<axis=1>(x, i)", "Gather"),
    "the row's number as an element": ("v = Gather(a, z) i = Mul(r, w)", "Gather"),
    "the row's number taken within the row": (
        "e = Expand(r, s) v = Cast<to=7>(x) l = Constant<value_ints=[-1]>() c = Unsqueeze(v, l)"
        "q = GatherND<batch_dims=1>(e, c) f = Cast<to=1>(q) i = Mul(r, w)",
        "GatherND",
    ),
    "rows further apart as the number itself": (
        "n = Mul(r, w) l = Constant<value_ints=[-1]>() c = Concat<axis=1>(n, n) q = GatherND(x, c) i = Add(n, n)",
        "Concat",
    ),
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


@pytest.mark.parametrize("index", COUNTED_PROVEN.values(), ids=COUNTED_PROVEN.keys())
def test_elements_taken_by_the_row_s_number_from_the_own_row_are_proved(index: str) -> None:
    """The index is the row's number times the elements of a row, plus an offset within the row."""
    assert str(model_row_independence(model(COUNTED.format(index)), "N")) == "rows are independent"


@pytest.mark.parametrize(("index", "operator"), COUNTED_REFUSED.values(), ids=COUNTED_REFUSED.keys())
def test_elements_that_may_be_taken_from_other_rows_are_refused(index: str, operator: str) -> None:
    """An index outside the own row, or an operator that may make one, ends the proof."""
    found = model_row_independence(model(COUNTED.format(index)), "N")
    assert not found.proven
    assert found.node.split(" ")[0] == operator


def test_rows_of_the_same_number_in_another_order_are_refused() -> None:
    """Elements of transposed rows are not where the row's number says."""
    index = "n = Mul(r, w) k = Range(z, w, o) i = Add(n, k)"
    body = COUNTED.format(index).replace("flat = Reshape(x, m)", "t = Transpose(x) flat = Reshape(t, m)")
    assert not model_row_independence(model(body), "N").proven


# Pads as PyTorch's older exporter writes them: `p` holds two numbers an axis, from the last axis to the first.
PADDED = (
    "s = Shape(x) o = Constant<value_ints=[1]>() q = Mod(o, o) z = Sub(o, o)"
    "c = Concat<axis=0>(%s) m = Constant<value_ints=[-1,2]>() r = Reshape(c, m) b = Constant<value_ints=[-1]>()"
    "l = Constant<value_ints=[-9223372036854775807]>() h = Constant<value_ints=[0]>() v = Slice(r, b, l, h, b)"
    "t = Transpose<perm=[1,0]>(v) p = Reshape(t, b) y = Pad(x, p)"
)


def padded(order: str) -> onnx.ModelProto:
    return model(PADDED % order)


def test_pads_computed_for_the_other_axes_are_proved() -> None:
    """Those of the axis of rows are zero, whatever the others are."""
    assert str(model_row_independence(padded("z, q, z, z"), "N")) == "rows are independent"


@pytest.mark.parametrize("order", ["z, z, z, q", "z, z, q, z", "q, q, q, q", "z, z, o, z"])
def test_pads_that_may_add_rows_are_refused(order: str) -> None:
    """A pad of the axis of rows is not zero or not known."""
    assert model_row_independence(padded(order), "N").node == "Pad"


def test_a_comparison_with_the_number_of_rows_is_refused_behind_one_that_is_open() -> None:
    """Every pair of sizes is compared, not only those before the first that is not known."""
    body = (
        "t = Transpose(x) s = Shape(t) k = Constant<value_ints=[3,2]>() e = Equal(s, k) c = Cast<to=1>(e)"
        "a = ReduceMax(c) y = Add(x, a)"
    )
    found = model_row_independence(model(body, "float[N,M] x", "float[N,M] y"), "N")
    assert found.node == "Equal"


def test_the_indices_of_a_pool_are_refused() -> None:
    """They count over all rows."""
    body = "y, i = MaxPool<kernel_shape=[2]>(x) z = Cast<to=1>(i)"
    found = model_row_independence(model(body, "float[N,2,4] x", "float[N,2,3] z"), "N")
    assert found.node == "MaxPool"


def test_rows_that_only_together_fill_a_shape_are_refused() -> None:
    """3 rows of 1 element are divisible by 3, and would be joined."""
    body = "t = Constant<value_ints=[-1,3]>() r = Reshape(x, t) f = Softmax(r) s = Shape(x) y = Reshape(f, s)"
    assert model_row_independence(model(body, "float[N,M] x", "float[N,M] y"), "N").node == "Reshape"

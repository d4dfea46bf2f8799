"""Rows are proved independent over graphs in ONNX text form, or the node and the reason are named."""

from __future__ import annotations

import onnx
import pytest
from onnx_text import parsed

from rlx_ort.converters.row_independence import model_row_independence

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
REFUSED: dict[str, tuple[str, ...]] = {
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
# Pads as PyTorch's older exporter writes them: `p` holds two numbers an axis, from the last axis to the first.
PADDED = (
    "s = Shape(x) o = Constant<value_ints=[1]>() q = Mod(o, o) z = Sub(o, o)"
    "c = Concat<axis=0>(%s) m = Constant<value_ints=[-1,2]>() r = Reshape(c, m) b = Constant<value_ints=[-1]>()"
    "l = Constant<value_ints=[-9223372036854775807]>() h = Constant<value_ints=[0]>() v = Slice(r, b, l, h, b)"
    "t = Transpose<perm=[1,0]>(v) p = Reshape(t, b) y = Pad(x, p)"
)
PROVEN |= {name: COUNTED.format(index) for name, index in COUNTED_PROVEN.items()}
PROVEN["pads computed as zero for the axis of rows"] = PADDED % "z, q, z, z"
REFUSED |= {name: (COUNTED.format(index), operator) for name, (index, operator) in COUNTED_REFUSED.items()}
REFUSED |= {
    f"pads {order}": (PADDED % order, "Pad") for order in ("z, z, z, q", "z, z, q, z", "q, q, q, q", "z, z, o, z")
}
REFUSED["elements of transposed rows"] = (
    COUNTED.format(COUNTED_PROVEN["all elements of the own row"]).replace(
        "flat = Reshape(x, m)", "t = Transpose(x) flat = Reshape(t, m)"
    ),
    "Reshape",
)
OTHER_SHAPES = {
    "a comparison with the number of rows behind one that is open": (
        "t = Transpose(x) s = Shape(t) k = Constant<value_ints=[3,2]>() e = Equal(s, k) c = Cast<to=1>(e)"
        "a = ReduceMax(c) y = Add(x, a)",
        "Equal",
        "float[N,M] x => float[N,M] y",
    ),
    "the indices of a pool, which count over all rows": (
        "y, i = MaxPool<kernel_shape=[2]>(x) z = Cast<to=1>(i)",
        "MaxPool",
        "float[N,2,4] x => float[N,2,3] z",
    ),
    "rows that only together fill a shape, as 3 rows of 1 element would be joined": (
        "t = Constant<value_ints=[-1,3]>() r = Reshape(x, t) f = Softmax(r) s = Shape(x) y = Reshape(f, s)",
        "Reshape",
        "float[N,M] x => float[N,M] y",
    ),
}


def model(body: str, interface: str = "float[N,4] x => float[N,M] y") -> onnx.ModelProto:
    takes, gives = interface.split(" => ")
    text = f"({takes}) => ({gives}) {{ {body} }}".replace("ReduceSum(x) ", "ReduceSum(x)\n")
    return parsed(text, opset=17, ir_version=8, imports='"com.example": 1')


@pytest.mark.parametrize("body", PROVEN.values(), ids=PROVEN)
def test_rows_that_are_independent_are_proved(body: str) -> None:
    """Nothing but the row itself is read."""
    assert str(model_row_independence(model(body), "N")) == "rows are independent"


@pytest.mark.parametrize("case", [*REFUSED.values(), *OTHER_SHAPES.values()], ids=[*REFUSED, *OTHER_SHAPES])
def test_rows_that_may_influence_each_other_are_refused_with_the_node(case: tuple[str, ...]) -> None:
    """The operator at which the proof ends is named."""
    body, operator, *interface = case
    found = model_row_independence(model(body, *interface), "N")
    assert not found.proven
    assert found.node.split(" ")[0] == operator
    assert found.reason

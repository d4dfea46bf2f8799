"""Each rule of the row proof beside runs by ONNX Runtime: what is proved gives the same values alone and together."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx_text import parsed
from row_runs import difference, opened

from rlx_ort.converters.row_independence import model_row_independence

ROWS = 4


class Case(NamedTuple):
    """A graph in text form: its inputs, its body, and the version of ai.onnx."""

    takes: str
    body: str
    opset: int = 21


ROW3 = "float[N,3,4] x"  # rows of 3 tokens of 4 elements
FLIP = "t = Transpose<perm=[1,0,2]>(x) {} y = Transpose<perm=[1,0,2]>(r)"
QKV = "w = Constant<value=float[4,12]{{{}}}>() b = Constant<value=float[12]{{{}}}>()".format(
    ",".join(str((7 * i % 11 - 5) / 8) for i in range(48)), ",".join(str((3 * i % 5 - 2) / 4) for i in range(12))
)
HEADS = "s4 = Constant<value_ints=[0,0,2,2]>() h = Reshape(x, s4) q = Transpose<perm=[0,2,1,3]>(h)"
BACK = "u = Transpose<perm=[0,2,1,3]>(a) s3 = Constant<value_ints=[0,0,4]>() y = Reshape(u, s3)"
WEIGHTS = "".join(
    f"{name} = Constant<value=float[{dims}]{{{','.join(str((5 * i % 9 - 4) / 8) for i in range(size))}}}>() "
    for name, dims, size in (
        ("w1", "1,2,4", 8), ("r1", "1,2,2", 4), ("w3", "1,6,4", 24), ("r3", "1,6,2", 12), ("w4", "1,8,4", 32),
        ("r4", "1,8,2", 16), ("w2d", "2,8,4", 64), ("r2d", "2,8,2", 32),
    )
)  # fmt: skip
CUBE = "float[N,1,2,2] x"
LOOP = (
    "m = Constant<value_int=3>() c = Constant<value=bool{{1}}>()"
    "y = Loop(m, c, x) <body = b (int64 i, bool go, float[N,4] s) => (bool on, float[N,4] e) {{ {} }}>"
)
SCAN = (
    "t = Transpose<perm=[1,0,2]>(x) z = Constant<value_ints=[0]>() f = Gather<axis=1>(x, z)"
    "u = Constant<value_ints=[1]>() g = Squeeze(f, u)"
    "l, v = Scan(g, {}) <num_scan_inputs = 1, body = b (float[N,4] s, float[N,4] e) => (float[N,4] a, float[N,4] o)"
    "{{ a = Add(s, e) o = Tanh(a) }}>"
)
TREE = (
    "ai.onnx.ml.TreeEnsembleRegressor<n_targets=1, nodes_treeids=[0,0,0], nodes_nodeids=[0,1,2],"
    'nodes_featureids=[1,0,0], nodes_modes=["BRANCH_LEQ","LEAF","LEAF"], nodes_values=[0.5,0.0,0.0],'
    "nodes_truenodeids=[1,0,0], nodes_falsenodeids=[2,0,0], target_treeids=[0,0], target_nodeids=[1,2],"
    "target_ids=[0,0], target_weights=[1.0,2.0]>"
)

NUMBERS = (  # of rows and of columns, and the larger of both, in the shape of x
    "s = Shape(x) z = Constant<value_int=0>() o = Constant<value_int=1>() n = Gather(s, z) w = Gather(s, o)"
    "i = Range(z, n, o) j = Range(z, w, o) u = Constant<value_ints=[1]>() c = Unsqueeze(i, u) m = Max(c, j)"
)

PROVEN = {
    "elements at the row's number and any column": Case(
        "float[N,4] x",
        NUMBERS + "d = Shape(m) l = Constant<value_ints=[-1]>() e = Expand(c, d) g = Unsqueeze(e, l) v = Expand(j, d)"
        "h = Unsqueeze(v, l) p = Concat<axis=-1>(g, h) y = GatherND(x, p)",
    ),
    "mean and variance within rows": Case(ROW3, "y = MeanVarianceNormalization<axes=[1,2]>(x)"),
    "features of two inputs": Case(
        "float[N,2] x, float[N,3] z", "y = ai.onnx.ml.FeatureVectorizer<inputdimensions=[2,3]>(x, z)"
    ),
    "the branch that is taken": Case(
        "float[N,4] x",
        "s = Shape<start=1>(x) o = Constant<value_ints=[4]>() c = Equal(s, o) z = Constant<value_ints=[0]>()"
        "y = If(c) <then_branch = a () => (p) { p = Relu(x) },"
        " else_branch = b () => (q) { m = ReduceMax(x, z) q = Sub(x, m) }>",
    ),
    "places that are not zero in a constant": Case(
        "float[N,4] x",
        "c = Constant<value=float[4]{0,1,2,0}>() n = NonZero(c) z = Constant<value_ints=[0]>() i = Squeeze(n, z)"
        "y = Gather<axis=1>(x, i)",
    ),
    "positions by row": Case(
        "float[N,3,4] x, int64[N,3] k",
        "c = Constant<value=float[4,2]{1,0.5,0.25,0,1,0.5,0.25,0}>()"
        "y = com.microsoft.RotaryEmbedding<num_heads=1>(x, k, c, c)",
    ),
    "a table cut to the number of tokens, and heads split and joined": Case(
        "float[N,M,4] x",
        "t = Constant<value=float[1,3,4]{1,2,3,4,5,6,7,8,9,10,11,12}>() z = Constant<value_ints=[0]>()"
        "o = Constant<value_ints=[1]>() s = Shape<start=1, end=2>(x) c = Slice(t, z, s, o) e = Add(x, c)"
        "n = Shape<end=1>(x) w = Constant<value_ints=[2]>() r = Constant<value_ints=[-1]>()"
        "h = Concat<axis=0>(n, s, w, r) v = Reshape(e, h) p = Transpose<perm=[0,2,1,3]>(v)"
        "k = Concat<axis=0>(r, s, w) f = Reshape(p, k) g = Softmax<axis=1>(f) q = Concat<axis=0>(r, w, s, w)"
        "y = Reshape(g, q)",
    ),
    "a table of positions resized to the image": Case(
        CUBE,
        "t = Constant<value=float[1,1,3,3]{1,2,3,4,5,6,7,8,9}>() o = Constant<value_ints=[1,1]>()"
        'h = Shape<start=2>(x) s = Concat<axis=0>(o, h) r = Resize<mode="linear">(t, , , s) y = Add(x, r)',
    ),
    "labels by number": Case(
        "float[N,4] x",
        "i = ArgMax<axis=1>(x) t = Constant<value_ints=[7,5,8,6]>() a = ai.onnx.ml.ArrayFeatureExtractor(t, i)"
        "m = Constant<value_ints=[-1]>() y = Reshape(a, m)",
    ),
    "Attention of com.microsoft": Case(ROW3, QKV + "y = com.microsoft.Attention<num_heads=2>(x, w, b)"),
    "Attention of com.microsoft, masked by row": Case(
        "float[N,3,4] x, int32[N,3] k", QKV + "y = com.microsoft.Attention<num_heads=2>(x, w, b, k)"
    ),
    "MultiHeadAttention": Case(ROW3, "y = com.microsoft.MultiHeadAttention<num_heads=2>(x, x, x)"),
    "Attention": Case(ROW3, HEADS + "a = Attention(q, q, q)" + BACK, 23),
    "Attention with one mask for all": Case(
        ROW3, HEADS + "m = Constant<value=bool[3,3]{1,0,1,1,1,0,0,1,1}>() a = Attention(q, q, q, m)" + BACK, 23
    ),
    "Attention masked by row": Case("float[N,3,4] x, float[N,1,3,3] m", HEADS + "a = Attention(q, q, q, m)" + BACK, 23),
    "RNN": Case(
        ROW3,
        WEIGHTS + FLIP.format("o, z = RNN<hidden_size=2>(t, w1, r1) u = Constant<value_ints=[1]>()r = Squeeze(o, u)"),
    ),
    "GRU": Case(
        ROW3,
        WEIGHTS + FLIP.format("o, z = GRU<hidden_size=2>(t, w3, r3) u = Constant<value_ints=[1]>()r = Squeeze(o, u)"),
    ),
    "last state of an LSTM": Case(
        ROW3,
        WEIGHTS + "t = Transpose<perm=[1,0,2]>(x) o, h, c = LSTM<hidden_size=2>(t, w4, r4)"
        "y = Transpose<perm=[1,0,2]>(h)",
    ),
    "LSTM in both directions with a length for each row": Case(
        "float[N,3,4] x, int32[N] k",
        WEIGHTS + "t = Transpose<perm=[1,0,2]>(x)"
        'o, h, c = LSTM<hidden_size=2, direction="bidirectional">(t, w2d, r2d, , k)'
        "y = Transpose<perm=[2,0,1,3]>(o)",
    ),
    "Loop": Case("float[N,4] x", LOOP.format("e = Tanh(s) on = Identity(go)")),
    "Scan along the tokens": Case(ROW3, SCAN.format("t") + "y = Transpose<perm=[1,0,2]>(v)"),
    "last state of a Scan": Case(ROW3, SCAN.format("t") + "y = Identity(l)"),
    "If by what is the same for all": Case(
        "float[N,M] x",
        "s = Shape(x) o = Constant<value_int=1>() d = Gather(s, o) k = Constant<value_int=3>() c = Less(d, k)"
        "y = If(c) <then_branch = a () => (p) { p = Relu(x) }, else_branch = b () => (q) { q = Neg(x) }>",
    ),
    "Einsum": Case(ROW3, 'y = Einsum<equation="bij,bkj->bik">(x, x)'),
    "Einsum without an output named": Case(
        ROW3, 'w = Constant<value=float[4,2]{1,2,3,4,5,6,7,8}>() y = Einsum<equation="bij,jk">(x, w)'
    ),
    "Einsum with an ellipsis": Case(ROW3, 'y = Einsum<equation="...ij,...kj->...ik">(x, x)'),
    "Resize by scales": Case(CUBE, 's = Constant<value=float[4]{1,1,2,2}>() y = Resize<mode="linear">(x, , s)'),
    "Resize by sizes": Case(
        CUBE,
        "s = Shape<end=2>(x) h = Constant<value_ints=[3,5]>() z = Concat<axis=0>(s, h)"
        'y = Resize<mode="linear">(x, , , z)',
    ),
    "Resize to the nearest": Case("float[N,2,2] x", "s = Constant<value=float[3]{1,2,2}>() y = Resize(x, , s)"),
    "MatMulInteger": Case(
        "uint8[N,4] x",
        "w = Constant<value=uint8[4,2]{1,2,3,4,5,6,7,8}>() z = Constant<value=uint8{3}>() y = MatMulInteger(x, w, z)",
    ),
    "QLinearMatMul": Case(
        "uint8[N,4] x",
        "w = Constant<value=uint8[4,2]{1,2,3,4,5,6,7,8}>() z = Constant<value=uint8{3}>()"
        "s = Constant<value=float{0.5}>() y = QLinearMatMul(x, s, z, w, s, z, s, z)",
    ),
    "a scale for each row": Case(
        "float[N,4] x",
        "a = Constant<value_ints=[1]>() b = Abs(x) m = ReduceMax(b, a) h = Constant<value_float=9.0>() s = Div(m, h)"
        "q = Div(x, s) r = Round(q) y = Mul(r, s)",
    ),
    "trees": Case("float[N,4] x", f"y = {TREE}(x)"),
    "Scaler": Case("float[N,4] x", "y = ai.onnx.ml.Scaler<offset=[1.0,2.0,3.0,4.0], scale=[2.0,2.0,2.0,2.0]>(x)"),
    "Normalizer": Case("float[N,4] x", 'y = ai.onnx.ml.Normalizer<norm="L2">(x)'),
    "TopK within rows": Case("float[N,4] x", "k = Constant<value_ints=[2]>() y, i = TopK(x, k)"),
    "a table's rows by number": Case(
        "int64[N,3] x", "t = Constant<value=float[4,2]{1,2,3,4,5,6,7,8}>() y = Gather(t, x)"
    ),
    "elements of the own row by number": Case("float[N,4] v, int64[N,1] x", "y = GatherND<batch_dims=1>(v, x)"),
    "elements of the own row along another axis": Case(
        "float[N,4] v, int64[N,2] x", "y = GatherElements<axis=1>(v, x)"
    ),
    "elements of all rows by the same numbers": Case(
        "float[N,4] x", "i = Constant<value_ints=[3,0]>() y = Gather<axis=1>(x, i)"
    ),
    "heads joined with the rows and split off again": Case(
        ROW3,
        HEADS + "m = Constant<value_ints=[-1,3,2]>() f = Reshape(q, m) g = Softmax<axis=1>(f)"
        "d = Constant<value_ints=[-1,2,3,2]>() a = Reshape(g, d)" + BACK,
    ),
    "transposed, and softmax along the first axis": Case(
        "float[N,4] x", "t = Transpose(x) s = Softmax<axis=0>(t) y = Transpose(s)"
    ),
    "a start token expanded to the number of rows": Case(
        ROW3,
        "s = Shape<end=1>(x) o = Constant<value_ints=[1,4]>() d = Concat<axis=0>(s, o)"
        "c = Constant<value=float[1,1,4]{1,2,3,4}>() e = Expand(c, d) y = Concat<axis=1>(e, x)",
    ),
    "sizes chosen by Where": Case(
        "float[N,4] x",
        "s = Shape(x) m = Constant<value_ints=[-1,-1]>() o = Constant<value_ints=[1,1]>() e = Equal(m, m)"
        "d = Where(e, s, o) c = Constant<value=float[1,4]{1,2,3,4}>() b = Expand(c, d) y = Mul(x, b)",
    ),
    "zeros of the sizes of the input": Case("float[N,4] x", "s = Shape(x) z = ConstantOfShape(s) y = Max(x, z)"),
    "Compress within rows": Case("float[N,4] x", "c = Constant<value=bool[4]{1,0,0,1}>() y = Compress<axis=1>(x, c)"),
}
MIXED = {
    "mean and variance over rows": Case(ROW3, "y = MeanVarianceNormalization<axes=[0,2]>(x)"),
    "the larger of the row's number and others": Case("float[N,4] x", NUMBERS + "f = Cast<to=1>(m) y = Mul(x, f)"),
    "Attention of com.microsoft along the rows": Case(
        ROW3, QKV + FLIP.format("r = com.microsoft.Attention<num_heads=2>(t, w, b)")
    ),
    "MultiHeadAttention along the rows": Case(
        ROW3, FLIP.format("r = com.microsoft.MultiHeadAttention<num_heads=2>(t, t, t)")
    ),
    "Attention along the rows": Case(ROW3, FLIP.format("r = Attention<q_num_heads=2, kv_num_heads=2>(t, t, t)"), 23),
    "RNN along the rows": Case(
        ROW3, WEIGHTS + "o, z = RNN<hidden_size=2>(x, w1, r1) u = Constant<value_ints=[1]>() y = Squeeze(o, u)"
    ),
    "GRU along the rows": Case(
        ROW3, WEIGHTS + "o, z = GRU<hidden_size=2>(x, w3, r3) u = Constant<value_ints=[1]>() y = Squeeze(o, u)"
    ),
    "LSTM along the rows": Case(
        ROW3, WEIGHTS + "o, h, c = LSTM<hidden_size=2>(x, w4, r4) u = Constant<value_ints=[1]>() y = Squeeze(o, u)"
    ),
    "Loop that reads other rows": Case(
        "float[N,4] x", LOOP.format("a = Constant<value_ints=[0]>() m = ReduceMax(s, a) e = Sub(s, m)on = Identity(go)")
    ),
    "Loop that goes on as long as a row says": Case(
        "float[N,4] x",
        LOOP.format("h = Constant<value_float=0.5>() e = Mul(s, h) m = ReduceMax<keepdims=0>(e) on = Greater(m, h)"),
    ),
    "Scan along the rows": Case(
        ROW3,
        SCAN.replace("[N,4]", "[3,4]").format("x").replace("Gather<axis=1>", "Gather").replace("[1]>() g", "[0]>() g")
        + "y = Identity(v)",
    ),
    "If by a row": Case(
        "float[N,4] x",
        "m = ReduceMax<keepdims=0>(x) k = Constant<value_float=1.0>() c = Less(m, k)"
        "y = If(c) <then_branch = a () => (p) { p = Exp(x) }, else_branch = b () => (q) { q = Neg(x) }>",
    ),
    "Einsum over the rows": Case(ROW3, 'y = Einsum<equation="bij,cij->bc">(x, x)'),
    "Einsum without an output named, over the rows": Case(
        ROW3, 'z = Einsum<equation="bca,bda">(x, x) y = Add(x, w)m = ReduceSum<keepdims=0>(z) w = Mul(m, m)'
    ),
    "Resize along the rows": Case(
        CUBE,
        's = Constant<value=float[4]{2,1,1,1}>() r = Resize<mode="linear">(x, , s)'
        "b = Constant<value_ints=[0]>() e = Constant<value_ints=[99]>() t = Constant<value_ints=[2]>()"
        "y = Slice(r, b, e, b, t)",
    ),
    "Resize to as many columns as rows": Case(
        CUBE,
        "s = Shape<end=2>(x) b = Shape<end=1>(x) h = Constant<value_ints=[3]>() z = Concat<axis=0>(s, h, b)"
        "r = Resize(x, , , z) a = Constant<value_ints=[3]>() m = ReduceSum(r, a) y = Mul(x, m)",
    ),
    "a table of positions resized to the number of rows": Case(
        CUBE,
        "t = Constant<value=float[1,1,3,3]{1,2,3,4,5,6,7,8,9}>() o = Constant<value_ints=[1,1,2]>()"
        "n = Shape<end=1>(x) s = Concat<axis=0>(o, n) r = Resize(t, , , s) a = Constant<value_ints=[3]>()"
        "m = ReduceSum(r, a) y = Add(x, m)",
    ),
    "one scale for all rows": Case("float[N,4] x", "q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z)"),
    "a product of integers by one scale for all rows": Case(
        "float[N,4] x",
        "q, s, z = DynamicQuantizeLinear(x) w = Constant<value=uint8[4,2]{1,2,3,4,5,6,7,8}>()"
        "m = MatMulInteger(q, w, z) f = Cast<to=1>(m) y = Mul(f, s)",
    ),
    "Normalizer across the rows": Case(
        "float[N,4] x", 't = Transpose(x) n = ai.onnx.ml.Normalizer<norm="L1">(t) y = Transpose(n)'
    ),
    "trees over features of other rows": Case(
        "float[N,4] x", f"t = Transpose(x) f = {TREE}(t) m = ReduceMax<keepdims=0>(f) y = Mul(x, m)"
    ),
    "NonZero": Case("float[N,4] x", "n = NonZero(x) m = ReduceSum<keepdims=0>(n) f = Cast<to=1>(m) y = Mul(x, f)"),
    "Unique": Case("float[N,4] x", "u, i, v, c = Unique(x) s = Size(u) f = Cast<to=1>(s) y = Mul(x, f)"),
    "Compress of rows": Case(
        "float[N,4] x",
        "a = Constant<value_ints=[1]>() m = ReduceMax<keepdims=0>(x, a) z = Constant<value_float=0.0>()"
        "c = Greater(m, z) k = Compress<axis=0>(x, c) o = Constant<value_ints=[0]>() p = ReduceSum(k, o) y = Add(x, p)",
    ),
    "TopK over the rows": Case(
        "float[N,4] x", "k = Constant<value_ints=[1]>() v, i = TopK<axis=0>(x, k) y = Sub(x, v)"
    ),
    "rows by number": Case("float[N,4] v, int64[N] x", "y = Gather(v, x)"),
    "elements of other rows by number": Case("float[N,4] v, int64[N,1] x", "y = GatherND(v, x)"),
    "elements of other rows along the first axis": Case(
        "float[N,4] v, int64[N,4] x", "y = GatherElements<axis=0>(v, x)"
    ),
    "rows split among two others": Case(
        "float[N,4] x",
        "m = Constant<value_ints=[4,-1]>() f = Reshape(x, m) g = Softmax(f) s = Shape(x)y = Reshape(g, s)",
    ),
    "transposed, and softmax along the rows": Case("float[N,4] x", "t = Transpose(x) s = Softmax(t) y = Transpose(s)"),
    "as many zeros as there are rows, counted": Case(
        "float[N,4] x",
        "s = Shape(x) o = Constant<value_float=1.0>() e = Expand(o, s) a = Constant<value_ints=[0]>()"
        "m = ReduceSum(e, a) y = Div(x, m)",
    ),
    "a weight by the row's number": Case(
        "float[N,4] x",
        "s = Shape(x) z = Constant<value_int=0>() o = Constant<value_int=1>() n = Gather(s, z) r = Range(z, n, o)"
        "f = Cast<to=1>(r) u = Constant<value_ints=[1]>() c = Unsqueeze(f, u) y = Mul(x, c)",
    ),
    "a number of rows under a limit": Case(
        "float[N,4] x",
        "s = Shape(x) z = Constant<value_ints=[0]>() n = Gather(s, z) l = Constant<value_ints=[2]>() c = Less(n, l)"
        "k = Neg(x) y = Where(c, x, k)",
    ),
    "a shape that rows fill in turn": Case(
        "float[N,4] x", "s = Shape(x) t = Transpose(x) f = Reshape(t, s) y = Add(f, x)"
    ),
}
UNKNOWN = {
    "random values": Case("float[N,4] x", "r = RandomNormalLike(x) y = Add(x, r)"),
    "values dropped at random": Case(
        "float[N,4] x", "h = Constant<value_float=0.5>() t = Constant<value=bool{1}>()y = Dropout(x, h, t)"
    ),
}


def model(case: Case) -> onnx.ModelProto:
    """Return the model of a case, whose output has any type and shape."""
    more = '"com.microsoft": 1, "ai.onnx.ml": 3'
    made = parsed(f"({case.takes}) => (float y) {{ {case.body} }}", case.opset, imports=more)
    _sorted(made.graph)
    del made.graph.output[:]
    made.graph.output.append(onnx.ValueInfoProto(name="y"))
    return made


def _sorted(graph: onnx.GraphProto) -> None:
    """Put the nodes into an order in which each value is made before it is used."""
    nodes, known = list(graph.node), {"", *(value.name for value in graph.input)}
    del graph.node[:]
    while nodes:
        place = next(at for at, node in enumerate(nodes) if known.issuperset(node.input))
        graph.node.append(nodes.pop(place))
        known.update(graph.node[-1].output)


def feeds(made: onnx.ModelProto, rows: int = ROWS) -> dict[str, Any]:
    """Return values for the inputs: floats of both signs, of another magnitude in each row; small whole numbers."""
    source, found = np.random.default_rng(8), {}
    for value in made.graph.input:
        kind = value.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        shape = [rows if dim.dim_param == "N" else dim.dim_value or 2 for dim in kind.shape.dim]
        if dtype.kind == "f":
            scale = 3.0 ** np.arange(rows).reshape(-1, *[1] * (len(shape) - 1))
            found[value.name] = (source.normal(size=shape) * scale / 3).astype(dtype)
        else:
            few = 1 if kind.elem_type == onnx.TensorProto.INT64 and len(shape) < 3 and value.name == "x" else 0
            found[value.name] = source.integers(1 - few, 4 if dtype.kind == "u" or not few else rows, shape).astype(
                dtype
            )
    return found


@pytest.mark.parametrize("case", PROVEN.values(), ids=PROVEN.keys())
def test_what_is_proved_gives_the_same_alone_and_together(case: Case) -> None:
    """The proof says yes, and so do runs."""
    made = model(case)
    assert difference(opened(made), feeds(made)) == ""
    assert str(model_row_independence(made, "N")) == "rows are independent"


@pytest.mark.parametrize("case", MIXED.values(), ids=MIXED.keys())
def test_what_mixes_rows_in_runs_is_refused(case: Case) -> None:
    """Rows give other values together, or only together; the proof names a node."""
    made = model(case)
    try:
        found = difference(opened(made), feeds(made))
    except Exception as err:  # such as an index of another row, which a row alone does not have
        found = str(err)
    assert found
    proof = model_row_independence(made, "N")
    assert not proof
    assert proof.node


@pytest.mark.parametrize("case", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_what_is_random_is_refused(case: Case) -> None:
    """A row does not decide it."""
    assert not model_row_independence(model(case), "N")

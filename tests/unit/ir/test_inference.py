"""Result types of the ops, with sizes, named dims and unknown dims."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlx_ort import DType, Graph, GraphVerifyError, Value
from rlx_ort.ir.ops.conv import Conv2d
from rlx_ort.ir.ops.elementwise import StopGradient
from rlx_ort.ir.ops.linalg import MatMul
from rlx_ort.ir.types import Shape, TensorType, UnknownType, ValueType

F32 = DType.F32


def graph_with(*shapes: tuple[object, ...], dtype: str = "f32") -> tuple[Graph, list[Value]]:
    g = Graph("g")
    return g, [g.input(f"x{i}", shape, dtype) for i, shape in enumerate(shapes)]  # type: ignore[arg-type]  # test shapes


CASES: list[tuple[str, list[tuple[object, ...]], Callable[..., Value], tuple[object, ...]]] = [
    ("matmul broadcasts the batch", [(5, 1, 2, 3), (4, 3, 7)], lambda g, a, b: g.matmul(a, b), (5, 4, 2, 7)),
    ("matmul keeps names", [("b", "s", 8), (8, 4)], lambda g, a, b: a @ b, ("b", "s", 4)),
    ("binary broadcasts", [(3, 1), (1, 4)], lambda g, a, b: a + b, (3, 4)),
    ("binary keeps a name against 1", [("n", 4), (1, 4)], lambda g, a, b: a * b, ("n", 4)),
    ("binary of two names is unknown", [("n",), ("m",)], lambda g, a, b: a - b, (None,)),
    ("reduce drops axes", [(2, 3, 4)], lambda g, a: g.sum(a, [0, -1]), (3,)),
    ("reduce keeps axes as 1", [("b", 3)], lambda g, a: g.mean(a, -1, keep_dim=True), ("b", 1)),
    ("reduce of all axes", [(2, 3)], lambda g, a: g.reduce(a, "max", None), ()),
    ("reduce of no axes", [(2, 3)], lambda g, a: g.reduce(a, "prod", []), (2, 3)),
    ("reshape works out -1", [(2, 3, 4)], lambda g, a: g.reshape(a, [-1, 6]), (4, 6)),
    ("reshape cancels names", [("b", 12)], lambda g, a: g.reshape(a, ["b", -1, 4]), ("b", 3, 4)),
    ("reshape gives the name back", [("b", 1, 6)], lambda g, a: g.reshape(a, [-1, 6]), ("b", 6)),
    ("reshape of two names is unknown", [("b", "s", 6)], lambda g, a: g.reshape(a, [-1, 6]), (None, 6)),
    ("reshape of nothing", [(0, 3)], lambda g, a: g.reshape(a, [3, 0]), (3, 0)),
    ("transpose", [("b", 2, 3)], lambda g, a: g.transpose(a, [0, 2, 1]), ("b", 3, 2)),
    ("expand keeps with -1", [("b", 1)], lambda g, a: g.expand(a, [5, -1, 4]), (5, "b", 4)),
    ("concat sums", [(2, 3), (2, 4)], lambda g, a, b: g.concat([a, b], -1), (2, 7)),
    ("concat of a named dim is unknown", [("n", 3), (2, 3)], lambda g, a, b: g.concat([a, b], 0), (None, 3)),
    ("concat learns the other dims", [("n", 3), (2, 3)], lambda g, a, b: g.concat([a, b], 1), (2, 6)),
    ("narrow", [("b", 8)], lambda g, a: g.narrow(a, 1, 2, 3), ("b", 3)),
    ("slice backwards", [(7,)], lambda g, a: g.slice(a, [0], [None], [None], [-2]), (4,)),
    ("slice keeps a whole named dim", [("n", 7)], lambda g, a: g.slice(a, [0, 1], [0, 1], [None, -1]), ("n", 5)),
    ("pad", [(2, "n")], lambda g, a: g.pad(a, [1, 0], [2, 0]), (5, "n")),
    ("tile", [(2, "n")], lambda g, a: g.tile(a, [3, 1]), (6, "n")),
    ("topk takes the last axis", [("b", 9)], lambda g, a: g.topk(a, 4), ("b", 4)),
    ("argmax drops its axis", [(2, 9)], lambda g, a: g.argmax(a, 0), (9,)),
    ("conv2d", [(1, 3, 9, 8), (6, 3, 3, 3)], lambda g, a, b: g.conv2d(a, b, None, 2, 1), (1, 6, 5, 4)),
    ("conv2d of groups", [(1, 4, 5, 5), (6, 2, 1, 1)], lambda g, a, b: g.conv2d(a, b, groups=2), (1, 6, 5, 5)),
    ("conv2d that keeps named dims", [("n", 3, "h", 8), (6, 3, 3, 3)],
     lambda g, a, b: g.conv2d(a, b, None, 1, 1), ("n", 6, "h", 8)),
    ("conv_transpose2d", [(1, 4, 5, 5), (4, 3, 3, 3)],
     lambda g, a, b: g.conv_transpose2d(a, b, None, 2, 1, 1), (1, 3, 10, 10)),
    ("pool", [(1, 2, 7, 7)], lambda g, a: g.pool("mean", a, 3, 2, 1), (1, 2, 4, 4)),
    ("resize", [(1, 2, 3, "w")], lambda g, a: g.resize_nearest_2x(a), (1, 2, 6, None)),
    ("swiglu halves", [("b", 8)], lambda g, a: g.fused_swiglu(a), ("b", 4)),
    ("dot_general orders batch, lhs, rhs", [(2, 3, 4, 5), (5, 2, 7)],
     lambda g, a, b: g.dot_general(a, b, [3], [0], [0], [1]), (2, 3, 4, 7)),
    ("attention has the shape of q", [("b", "q", 8), ("b", "k", 8)],
     lambda g, a, b: g.attention_kind(a, b, b, 2, 4, "causal"), ("b", "q", 8)),
]  # fmt: skip


@pytest.mark.parametrize(("shapes", "build", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_shape_follows_from_the_inputs(
    shapes: list[tuple[object, ...]], build: Callable[..., Value], expected: tuple[object, ...]
) -> None:
    """The builder infers the documented shape."""
    g, values = graph_with(*shapes)
    assert tuple(build(g, *values).shape) == expected


def test_gather_has_onnx_semantics() -> None:
    """The dims before the axis stay, those of the indices take its place."""
    g = Graph("g")
    table, indices = g.input("t", ["b", 9, 4]), g.input("i", [2, "n"], "i64")
    assert tuple(g.gather(table, indices, 1).shape) == ("b", 2, "n", 4)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("f16", "bf16", "f32"),
        ("i32", "f16", "f32"),
        ("i64", "f32", "f64"),
        ("bool", "i8", "i8"),
        ("u8", "i8", "u8"),
        ("f32", "f64", "f64"),
    ],
)
def test_mixed_operands_meet_in_the_promoted_dtype(left: str, right: str, expected: str) -> None:
    """A Cast is put before the operand that has another dtype than the result."""
    g = Graph("g")
    result = g.input("a", [2], left) + g.input("b", [2], right)
    assert result.dtype is DType.parse(expected)
    casts = [node for node in g.nodes if node.op.kind == "Cast"]
    assert len(casts) == sum(side != expected for side in (left, right))


def test_python_numbers_take_the_dtype_of_the_other_operand() -> None:
    """A plain number does not widen a half-precision value."""
    g = Graph("g")
    x = g.input("x", [2], "f16")
    assert [(x + 1).dtype, (2.5 * x).dtype, g.maximum(x, 0).dtype] == [DType.F16] * 3
    assert (g.input("n", [2], "i32") * 0.5).dtype is F32


def test_numpy_arrays_keep_their_dtype() -> None:
    """An array is data with a dtype, so it promotes."""
    g = Graph("g")
    assert (g.input("x", [2]) + np.ones(2)).dtype is DType.F64
    assert (np.ones(2, np.float32) - g.input("y", [2])).dtype is F32


def test_comparison_is_bool_and_where_takes_it() -> None:
    """Compare gives bool of the broadcast shape; where_ gives the branches' dtype."""
    g, (a, b) = graph_with((3, 1), (4,))
    less = g.lt_(a, b)
    assert (less.dtype, tuple(less.shape)) == (DType.BOOL, (3, 4))
    assert g.where_(less, a, 0.0).dtype is F32


def test_declared_shape_is_checked_and_may_add_names() -> None:
    """A declared shape must fit; it gives sizes where inference has none."""
    g, (a, b) = graph_with(("n",), ("m",))
    assert tuple(g.binary("add", a, b, shape=["n"]).shape) == ("n",)
    with pytest.raises(GraphVerifyError, match=r"declared with shape \(3,\)"):
        g.binary("add", g.input("c", [2]), 1.0, shape=[3])
    with pytest.raises(GraphVerifyError, match="declared f16"):
        g.matmul_with_shape(g.input("d", [2, 2]), g.input("e", [2, 2]), [2, 2], "f16")


ERRORS: list[tuple[str, list[tuple[object, ...]], Callable[..., object], str]] = [
    ("inner dims differ", [(2, 3), (4, 5)], lambda g, a, b: a @ b, "of lhs is 3, the second last of rhs is 4"),
    ("vector in matmul", [(3,), (3, 2)], lambda g, a, b: a @ b, "reshape it to rank 2"),
    ("no broadcast", [(2,), (3,)], lambda g, a, b: a + b, "do not broadcast"),
    ("reshape size", [(2, 3)], lambda g, a: g.reshape(a, [4, 2]), "cannot turn"),
    ("two open dims", [(2, 3)], lambda g, a: g.reshape(a, [-1, -1]), "at most one"),
    ("open dim of an empty tensor", [(0, 3)], lambda g, a: g.reshape(a, [0, -1]), "cannot be inferred"),
    ("axis out of range", [(2, 3)], lambda g, a: g.softmax(a, 2), "has axis 2, but its input has rank 2"),
    ("axis twice", [(2, 3)], lambda g, a: g.sum(a, [1, -1]), "names an axis twice"),
    ("narrow too long", [(4,)], lambda g, a: g.narrow(a, 0, 2, 3), "which has 4"),
    ("perm", [(2, 3)], lambda g, a: g.transpose(a, [0, 0]), "twice"),
    ("concat ranks", [(2, 3), (2,)], lambda g, a, b: g.concat([a, b], 0), "one rank"),
    ("empty concat", [], lambda g: g.concat([], 0), "at least 1"),
    ("unknown activation", [(2,)], lambda g, a: g.activation("gelo", a), "did you mean 'gelu'"),
    ("unknown reduction", [(2,)], lambda g, a: g.reduce(a, "median", 0), "known: sum, mean"),
    ("k too large", [(2,)], lambda g, a: g.topk(a, 3), "TopK of 3"),
    ("gamma size", [(2, 4), (3,)], lambda g, a, b: g.layer_norm(a, b, b), "size of gamma to be 4, got 3"),
    ("group count", [(1, 4, 2, 2), (4,)], lambda g, a, b: g.group_norm(a, b, b, 3), "4 channels into 3"),
    ("odd swiglu", [(2, 3)], lambda g, a: g.fused_swiglu(a), "even"),
    ("conv channels", [(1, 3, 4, 4), (2, 4, 1, 1)], lambda g, a, b: g.conv2d(a, b), "input channels to be 4, got 3"),
    ("conv window", [(1, 1, 2, 2), (1, 1, 3, 3)], lambda g, a, b: g.conv2d(a, b), "leaves nothing"),
    ("declared kernel", [(1, 1, 4, 4), (1, 1, 3, 3)], lambda g, a, b: g.conv2d(a, b, kernel=5), "with kernel 5"),
    ("prod pool", [(1, 1, 4, 4)], lambda g, a: g.pool("prod", a, 2), "unknown pool 'prod'"),
    ("head count", [(1, 2, 9)], lambda g, a: g.attention_kind(a, a, a, 2, 4, "none"), "to be 8, got 9"),
    ("mask kind", [(1, 2, 8)], lambda g, a: g.attention_kind(a, a, a, 2, 4, "sliding"), "sliding:N"),
    ("mask kind with window", [(1, 2, 8)], lambda g, a: g.attention_kind(a, a, a, 2, 4, "causal:3"), "sliding:N"),
    ("mask of wrong size", [(1, 2, 8), (1, 3)], lambda g, a, m: g.attention(a, a, a, m, 2, 4), "keys of the mask"),
    ("odd n_rot", [(2, 8), (2, 2)], lambda g, a, t: g.rope_n(a, t, t, 4, 3), "even"),
    ("too few rows", [(5, 8), (2, 2)], lambda g, a, t: g.rope(a, t, t, 4), "as many rows"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "build", "message"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS]
)
def test_error_says_what_does_not_fit(
    shapes: list[tuple[object, ...]], build: Callable[..., object], message: str
) -> None:
    """A builder refuses inputs that do not fit, and says why."""
    g, values = graph_with(*shapes)
    with pytest.raises(GraphVerifyError, match=message.replace("(", r"\(")):
        build(g, *values)


@pytest.mark.parametrize(
    ("dtype", "build"),
    [
        ("bool", lambda g, x: x + x),
        ("i32", lambda g, x: g.gelu(x)),
        ("f32", lambda g, x: g.binary("<<", x, x)),
        ("i32", lambda g, x: g.softmax(x)),
        ("bool", lambda g, x: g.sum(x, 0)),
        ("u8", lambda g, x: g.neg(x)),
    ],
)
def test_dtype_that_an_op_does_not_take_is_refused(dtype: str, build: Callable[..., object]) -> None:
    """An op names the dtype it was given instead of failing later in the engine."""
    g, (x,) = graph_with((4,), dtype=dtype)
    with pytest.raises(GraphVerifyError, match=dtype):
        build(g, x)


def test_values_of_another_graph_are_refused() -> None:
    """Two graphs cannot share values."""
    a, b = Graph("a"), Graph("b")
    with pytest.raises(GraphVerifyError, match="of graph 'b'"):
        a.matmul(a.input("x", [2, 2]), b.input("y", [2, 2]))


MATRIX = TensorType(F32, Shape((2, 2)))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([MATRIX], r"MatMul needs a tensor as input 1 \(rhs\), got nothing"),
        ([UnknownType(), MATRIX], r"MatMul needs a tensor as input 0 \(lhs\), got \?"),
        ([MATRIX] * 3, "MatMul takes 2 inputs, got 3"),
    ],
)
def test_the_operands_of_the_class_line_are_checked(inputs: list[ValueType], message: str) -> None:
    """An input that is missing, no tensor or too many is refused before the op's own rule."""
    with pytest.raises(GraphVerifyError, match=message):
        MatMul().infer(inputs)


def test_an_operand_with_a_question_mark_may_be_left_out() -> None:
    """The class line gives the smallest and the largest number of inputs."""
    assert (Conv2d.operands, Conv2d.arity) == (("x", "weight", "bias"), (2, 3))
    image, weight = TensorType(F32, Shape((1, 2, 4, 4))), TensorType(F32, Shape((3, 2, 1, 1)))
    assert Conv2d().infer([image, weight]) == (TensorType(F32, Shape((1, 3, 4, 4))),)


def test_an_op_without_a_rule_has_the_type_of_its_first_input() -> None:
    """A marker such as StopGradient needs no code for its type."""
    assert StopGradient().infer([MATRIX]) == (MATRIX,)


def test_every_builder_of_one_value_takes_a_name_and_a_shape() -> None:
    """A declared shape is checked, and its names are kept where inference has none."""
    g, (x,) = graph_with((None, 4))
    value = g.stop_gradient(x, name="kept", shape=["rows", 4])
    assert (value.name, value.shape) == ("kept", ("rows", 4))
    with pytest.raises(GraphVerifyError, match="declared with shape"):
        g.tile(x, [1, 2], shape=["rows", 4])

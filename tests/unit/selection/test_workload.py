"""What an exported model asks for: kinds of work and sizes, and what costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph, Value
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.types import TensorType
from rlx_ort.selection.op_classes import CLASSES, VIEWS
from rlx_ort.selection.workload import DEFAULT_DIM, Work, Workload, workload_of


def workload(graph: Graph, **dims: int) -> Workload:
    """Return the work of a graph as it is exported."""
    return workload_of(export_model(graph), dims)


def kinds(graph: Graph, **dims: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return kind and size of every piece of work but views."""
    works = [step.work for step in workload(graph, **dims).steps]
    return [(work.kind, work.size) for work in works if work is not None and work.kind != "view"]


def test_a_product_with_a_weight_has_rows_depth_and_columns() -> None:
    """A batch in front of the rows counts as rows."""
    graph = Graph("mm")
    graph.outputs = [graph.input("x", [5, 8, 16]) @ graph.param("w", [16, 4])]
    assert kinds(graph) == [("gemm", (40, 16, 4))]


def test_a_product_of_two_computed_values_keeps_its_batch() -> None:
    """Five products of (8, 16) and (16, 4) are not one of 40 rows."""
    graph = Graph("bmm")
    graph.outputs = [graph.input("x", [5, 8, 16]) @ graph.input("y", [5, 16, 4])]
    assert kinds(graph) == [("bmm", (5, 8, 16, 4))]


@pytest.mark.parametrize(
    ("weight", "groups", "kind", "channels"),
    [((32, 8, 3, 3), 1, "conv", 16), ((8, 1, 3, 3), 8, "depthwise", 8), ((32, 8, 1, 1), 1, "pointwise", 16)],
)
def test_a_convolution_has_pixels_and_the_channels_of_a_square_one(
    weight: tuple[int, ...], groups: int, kind: str, channels: int
) -> None:
    """From 8 to 32 channels is as much work as from 16 to 16."""
    graph = Graph("conv")
    x = graph.input("x", [2, 8, 10, 10])
    graph.outputs = [graph.conv2d(x, graph.param("w", list(weight)), padding=weight[2] // 2, groups=groups)]
    assert kinds(graph) == [(kind, (200, channels))]


def test_a_bias_after_a_product_is_fused() -> None:
    """ONNX Runtime makes one Gemm of both, and of an activation on the CPU."""
    graph = Graph("dense")
    x = graph.input("x", [8, 16]) @ graph.param("w", [16, 4]) + graph.param("b", [4])
    graph.outputs = [graph.relu(x)]
    assert [kind for kind, _ in kinds(graph)] == ["gemm", "fused", "fused"]


def test_a_bias_is_not_fused_with_a_product_that_others_read() -> None:
    """The product has to exist by itself."""
    graph = Graph("shared")
    product = graph.input("x", [8, 16]) @ graph.param("w", [16, 4])
    graph.outputs = [product + graph.param("b", [4]), graph.exp(product)]
    assert [kind for kind, _ in kinds(graph)] == ["gemm", "op", "op"]


def test_a_sum_of_two_computed_values_is_not_a_bias() -> None:
    """Only a weight of one row folds into the product."""
    graph = Graph("residual")
    x = graph.input("x", [8, 16])
    graph.outputs = [x @ graph.param("w", [16, 16]) + x]
    assert [kind for kind, _ in kinds(graph)] == ["gemm", "op"]


def test_what_weights_alone_decide_costs_nothing() -> None:
    """It is computed once, when the session is opened."""
    graph = Graph("folded")
    weight = graph.transpose(graph.param("w", [4, 16]), [1, 0]) * 2.0
    graph.outputs = [graph.input("x", [8, 16]) @ weight]
    assert kinds(graph) == [("gemm", (8, 16, 4))]


def test_a_named_dim_takes_its_size_from_the_inputs() -> None:
    """Without a size it has the default, and the workload says so."""
    graph = Graph("dynamic")
    graph.outputs = [graph.input("x", ["n", 16]) @ graph.param("w", [16, 4])]
    assert kinds(graph, n=7) == [("gemm", (7, 16, 4))]
    assert kinds(graph) == [("gemm", (DEFAULT_DIM, 16, 4))]
    assert workload(graph).assumed == ("n",)


def test_half_the_bytes_count_as_half_the_elements() -> None:
    """Operators that move memory are measured in f32."""
    sizes = []
    for dtype in (DType.F32, DType.F16):
        graph = Graph("exp")
        graph.outputs = [graph.exp(graph.input("x", [100, 10], dtype))]
        sizes.append(kinds(graph)[0][1])
    assert sizes == [(1000,), (500,)]


def test_an_lstm_written_as_a_raw_node_has_steps_and_sizes() -> None:
    """Steps, batch, width of the input, hidden size and directions."""
    graph = Graph("lstm")
    x = graph.input("x", [12, 3, 20])
    weights = [graph.param("w", [1, 160, 20]), graph.param("r", [1, 160, 40])]
    kind = TensorType(DType.F32, Shape([12, 1, 3, 40]))
    graph.outputs = list(graph.onnx_node("LSTM", [x, *weights], {"hidden_size": 40}, types=[kind]))
    assert kinds(graph) == [("rnn", (12, 3, 20, 40, 1))]


def test_a_lookup_costs_what_it_reads_and_not_the_table() -> None:
    """Ten rows of a table of a million are ten rows."""
    graph = Graph("lookup")
    table = graph.param("table", [1_000_000, 8])
    graph.outputs = [graph.gather(table, graph.input("i", [10], DType.I64), 0)]
    assert kinds(graph) == [("op", (80, 8))]


@pytest.mark.parametrize(
    ("table", "like"),
    [
        (lambda g: g.param("table", [1000, 8]), "Lookup"),
        (lambda g: g.input("table", [1000, 8]), "Lookup"),
        (lambda g: g.softmax(g.input("x", [1000, 8])), "Gather"),
    ],
)
def test_a_lookup_is_told_from_a_copy_of_what_was_just_written(table: Callable[[Graph], Value], like: str) -> None:
    """A weight or an input lies where it always has, and a result lies in the caches of the cores that wrote it."""
    graph = Graph("lookup")
    graph.outputs = [graph.gather(table(graph), graph.input("i", [10], DType.I64), 0)]
    assert [work.like for work in workload(graph).works if work is not None][-1] == like


def test_equal_work_is_counted_once() -> None:
    """A graph that repeats itself is priced by its different parts, of which the first product is one."""
    graph = Graph("repeats")
    x = graph.input("x", [8, 16])
    for index in range(5):
        x = x @ graph.param(f"w{index}", [16, 16])
    graph.outputs = [x]
    counts = workload(graph).counts
    assert {work.first: count for work, count in counts.items()} == {"input": 1, "": 4}


def test_an_operator_nobody_listed_still_has_a_price() -> None:
    """It is priced by its elements."""
    graph = Graph("foreign")
    kind = TensorType(DType.F32, Shape([10, 10]))
    x = graph.input("x", [10, 10])
    graph.outputs = list(graph.onnx_node("Novel", [x], types=[kind], domain="some.where", version=1))
    assert kinds(graph) == [("op", (200,))]


def _operators() -> Sequence[str]:
    import onnx

    named = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == "" and not schema.deprecated}
    return sorted(named)


# Control flow, containers, strings, training, and operators newer than what ONNX Runtime loads.
_NO_CLASS = """
If Loop Scan Constant SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength
SequenceMap OptionalHasElement RegexFullMatch StringConcat StringNormalizer StringSplit TfIdfVectorizer
NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss MaxRoiPool MaxUnpool Dropout BitCast LinearAttention
CausalConvWithState FlexAttention
"""


@pytest.mark.parametrize("op_type", _operators())
def test_every_onnx_operator_that_computes_has_a_class(op_type: str) -> None:
    """Nothing that ONNX defines is priced by guess, but control flow, containers, strings and training."""
    assert op_type in CLASSES or op_type in VIEWS or op_type in _NO_CLASS.split()


def test_work_is_told_apart_by_all_its_fields() -> None:
    """Two pieces of another type or size are not one."""
    assert Work("op", "Add", (4,)) != Work("op", "Add", (4,), dtype="f16")


def test_a_transpose_for_one_product_is_told_from_others() -> None:
    """Only one that swaps the last two axes for a single product may be fused with it."""

    def transpose(perm: list[int], *, shown: bool) -> Work | None:
        graph = Graph("turned")
        x, y = graph.input("x", [4, 8, 16]), graph.input("y", [4, 8, 16])
        turned = graph.transpose(y, perm)
        graph.outputs = [x @ turned, turned] if shown else [x @ turned if perm[-1] == 1 else graph.relu(turned)]
        return next(step.work for step in workload(graph).steps if step.node.op_type == "Transpose")

    found = [transpose([0, 2, 1], shown=False), transpose([0, 2, 1], shown=True), transpose([1, 0, 2], shown=False)]
    assert [(work.kind, work.like) for work in found if work] == [
        ("fused", "turned"),
        ("op", "Transpose"),
        ("op", "TransposeRows"),
    ]


def test_each_product_knows_what_all_weights_take() -> None:
    """1,024 and 6,144 bytes are 7,168; a weight that is used twice counts once."""
    graph = Graph("resident")
    x = graph.input("x", [2, 16])
    small, wide = graph.param("small", [16, 16]), graph.param("wide", [16, 96])
    graph.outputs = [(x @ small @ small) @ wide]
    works = [step.work for step in workload(graph).steps if step.work is not None and step.work.kind == "gemm"]
    assert [work.resident for work in works] == [7168] * 3


@pytest.mark.parametrize(("columns", "resident"), [(16, 1024), (17, 1152), (18, 1152), (19, 1280), (31, 2048)])
def test_what_all_weights_take_is_rounded_up_to_four_binary_digits(columns: int, resident: int) -> None:
    """Graphs of about one size then share prices: columns of 64 bytes count in steps of an eighth of 1,024."""
    graph = Graph("rounded")
    graph.outputs = [graph.input("x", [2, 16]) @ graph.param("w", [16, columns])]
    (work,) = [step.work for step in workload(graph).steps if step.work is not None]
    assert work.resident == resident


@pytest.mark.parametrize(
    ("made", "multiplies"),
    [
        (lambda g, x: x, "input"),
        (lambda g, x: g.reshape(x, [8, 8]), "input"),
        (lambda g, x: g.softmax(x), "node"),
        (lambda g, x: g.reshape(g.softmax(x), [8, 8]), "node"),
    ],
)
def test_the_first_product_of_a_run_says_what_it_multiplies(
    made: Callable[[Graph, Value], Value], multiplies: str
) -> None:
    """An input, as it is or as a view of it, or the result of another node; the second product says nothing."""
    graph = Graph("first")
    x = made(graph, graph.input("x", [4, 16]))
    width = x.type.shape[1]
    graph.outputs = [x @ graph.param("w", [width, 16]) @ graph.param("v", [16, 16])]
    works = [step.work for step in workload(graph).steps if step.work is not None and step.work.kind == "gemm"]
    assert [work.first for work in works] == [multiplies, ""]


@pytest.mark.parametrize(
    ("build", "row"),
    [
        (lambda g, x: g.softmax(x), 6),
        (lambda g, x: g.layer_norm(x, g.param("s", [6]), g.param("b", [6])), 6),
        (lambda g, x: g.mean(x, [2]), 6),
        (lambda g, x: g.max(x, [1]), 6),
        (lambda g, x: g.max(x, [1], True), 6),
        (lambda g, x: g.sum(x, [0]), 30),
        (lambda g, x: g.sum(x, [0, 1]), 6),
        (lambda g, x: g.gather(x, g.input("i", [3], DType.I64), 1), 6),
        (lambda g, x: g.gather(x, g.input("i", [3], DType.I64), 0), 30),
        (lambda g, x: g.concat([x, g.input("y", [4, 5, 6])], 2), 12),
        (lambda g, x: g.concat([x, g.input("y", [4, 2, 6])], 1), 42),
    ],
)
def test_work_over_rows_says_how_long_they_are(build: Callable[[Graph, Value], Value], row: int) -> None:
    """What is normalised, reduced, kept or copied together; a concatenation's mean piece counts twice."""
    graph = Graph("rows")
    graph.outputs = [build(graph, graph.input("x", [4, 5, 6]))]
    ((kind, size),) = kinds(graph)
    assert (kind, size[1]) == ("op", row)


@pytest.mark.parametrize(
    ("build", "like"),
    [
        (lambda g, x: g.mean(x, [0]), "SumColumns"),
        (lambda g, x: g.sum(x, [1]), "SumColumns"),
        (lambda g, x: g.sum(x, [0], True), "SumColumns"),
        (lambda g, x: g.max(x, [0, 1]), "MaxColumns"),
        (lambda g, x: g.max(x, [0], True), "MaxColumns"),
        (lambda g, x: g.max(x, [2]), "ReduceMean"),
        (lambda g, x: g.sum(x, [1, 2], True), "ReduceMean"),
        (lambda g, x: g.mean(x, [0, 1, 2]), "ReduceMean"),
    ],
)
def test_a_reduction_says_whether_it_leaves_the_last_axis(build: Callable[[Graph, Value], Value], like: str) -> None:
    """Engines have other kernels for that, which take several times as long."""
    graph = Graph("reduced")
    graph.outputs = [build(graph, graph.softmax(graph.input("x", [4, 5, 6])))]
    _, work = [step.work for step in workload(graph).steps if step.work is not None]
    assert work.like == like


@pytest.mark.parametrize(
    ("build", "like"),
    [
        (lambda g, x: g.max(x, [0]), "MaxOfGiven"),
        (lambda g, x: g.max(g.param("w", [4, 5, 6]) + x, [0]), "MaxColumns"),
        (lambda g, x: g.sum(x, [1]), "SumOfGiven"),
        (lambda g, x: g.max(x, [2]), "ReduceMean"),
    ],
)
def test_reducing_an_input_is_told_from_reducing_what_was_just_written(
    build: Callable[[Graph, Value], Value], like: str
) -> None:
    """Each core finds its columns of an input where they have always been; within rows that makes no difference."""
    graph = Graph("given")
    graph.outputs = [build(graph, graph.input("x", [4, 5, 6]))]
    assert [work.like for work in workload(graph).works if work is not None][-1] == like


def test_a_square_says_nothing_so_that_rows_are_reduced() -> None:
    """Of (6, 6) either axis leaves six elements; the last one is the usual one."""
    graph = Graph("square")
    graph.outputs = [graph.sum(graph.input("x", [6, 6]), [0])]
    (work,) = [step.work for step in workload(graph).steps if step.work is not None]
    assert work.like == "ReduceMean"

"""What an exported model asks for: kernels and sizes, and what costs nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlx_ort import CompileOptions, DType, Graph, Value
from rlx_ort.calibration.features import DEFAULT_DIM, Workload, workload_of
from rlx_ort.converters.to_onnx.exporter import drafted
from rlx_ort.ir.types import Shape, TensorType


def workload(graph: Graph, **dims: int) -> Workload:
    """Return the work of a graph as it is exported."""
    return workload_of(drafted(graph, CompileOptions()).outline, dims)


def kernels(graph: Graph, **dims: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and sizes of every kernel but views."""
    return [
        (kernel.name, kernel.size) for kernel in workload(graph, **dims).kernels if kernel and kernel.name != "View"
    ]


WORK: dict[str, tuple[Callable[[Graph], Value], tuple[str, tuple[int, ...]]]] = {
    "a batch before a weight counts as rows": (
        lambda g: g.input("x", [5, 8, 16]) @ g.param("w", [16, 4]),
        ("MatMul", (40, 16, 4)),
    ),
    "a product of computed values keeps its batch": (
        lambda g: g.input("x", [5, 8, 16]) @ g.input("y", [5, 16, 4]),
        ("BatchedMatMul", (5, 8, 16, 4)),
    ),
    "what weights alone decide is computed once": (
        lambda g: g.input("x", [8, 16]) @ (g.transpose(g.param("w", [4, 16]), [1, 0]) * 2.0),
        ("MatMul", (8, 16, 4)),
    ),
    "a lookup costs its rows and not the table": (
        lambda g: g.gather(g.param("table", [1_000_000, 8]), g.input("i", [10], DType.I64), 0),
        ("Gather", (80, 8)),
    ),
}


@pytest.mark.parametrize(("build", "kernel"), WORK.values(), ids=WORK)
def test_a_graph_asks_for_one_kernel(build: Callable[[Graph], Value], kernel: tuple[str, tuple[int, ...]]) -> None:
    """With rows, depth and columns, or elements and the length of a row."""
    graph = Graph("one")
    graph.outputs = [build(graph)]
    assert kernels(graph) == [kernel]


@pytest.mark.parametrize(
    ("weight", "groups", "name", "size"),
    [
        ((32, 8, 3, 3), 1, "Conv3x3", (200, 16)),
        ((8, 1, 3, 3), 8, "DepthwiseConv", (1600,)),
        ((32, 8, 1, 1), 1, "Conv1x1", (200, 16)),
    ],
)
def test_a_convolution_has_pixels_and_the_channels_of_a_square_one(
    weight: tuple[int, ...], groups: int, name: str, size: tuple[int, ...]
) -> None:
    """From 8 to 32 channels is as much work as from 16 to 16; one of each channel has elements."""
    graph = Graph("conv")
    x = graph.input("x", [2, 8, 10, 10])
    graph.outputs = [graph.conv2d(x, graph.param("w", list(weight)), padding=weight[2] // 2, groups=groups)]
    assert kernels(graph) == [(name, size)]


def test_a_named_dim_takes_its_size_from_the_inputs() -> None:
    """Without a size it has the default, and the workload says so."""
    graph = Graph("dynamic")
    graph.outputs = [graph.input("x", ["n", 16]) @ graph.param("w", [16, 4])]
    assert kernels(graph, n=7) == [("MatMul", (7, 16, 4))]
    assert kernels(graph) == [("MatMul", (DEFAULT_DIM, 16, 4))]
    assert workload(graph).assumed == ("n",)


def test_half_the_bytes_count_as_half_the_elements() -> None:
    """Operators that move memory are measured in f32."""
    sizes = []
    for dtype in (DType.F32, DType.F16):
        graph = Graph("exp")
        graph.outputs = [graph.exp(graph.input("x", [100, 10], dtype))]
        sizes.append(kernels(graph)[0][1])
    assert sizes == [(1000,), (500,)]


@pytest.mark.parametrize(("op_type", "gates", "hidden"), [("LSTM", 4, 40), ("GRU", 3, 30), ("RNN", 1, 10)])
def test_a_recurrent_node_counts_as_an_lstm_of_as_many_gates(op_type: str, gates: int, hidden: int) -> None:
    """Steps, batch, width of the input, hidden size and directions."""
    graph = Graph("recurrent")
    x = graph.input("x", [12, 3, 20])
    weights = [graph.param("w", [1, gates * 40, 20]), graph.param("r", [1, gates * 40, 40])]
    kind = TensorType(DType.F32, Shape([12, 1, 3, 40]))
    graph.outputs = list(graph.onnx_node(op_type, [x, *weights], {"hidden_size": 40}, types=[kind]))
    assert kernels(graph) == [("LSTM", (12, 3, 20, hidden, 1))]


def test_equal_work_is_counted_once() -> None:
    """A graph that repeats itself is priced by its different parts."""
    graph = Graph("repeats")
    x = graph.input("x", [8, 16])
    for index in range(5):
        x = x @ graph.param(f"w{index}", [16, 16])
    graph.outputs = [x]
    assert list(workload(graph).counts.values()) == [5]


@pytest.mark.parametrize(
    ("build", "name", "row"),
    [
        (lambda g, x: g.softmax(x), "Softmax", 6),
        (lambda g, x: g.layer_norm(x, g.param("s", [6]), g.param("b", [6])), "LayerNormalization", 6),
        (lambda g, x: g.mean(x, [2]), "ReduceMean", 6),
        (lambda g, x: g.sum(x, [1, 2], True), "ReduceMean", 30),
        (lambda g, x: g.sum(x, [0]), "ReduceRows", 30),
        (lambda g, x: g.sum(x, [0, 1]), "ReduceRows", 6),
        (lambda g, x: g.gather(x, g.input("i", [3], DType.I64), 1), "Gather", 6),
        (lambda g, x: g.gather(x, g.input("i", [3], DType.I64), 0), "Gather", 30),
        (lambda g, x: g.concat([x, g.input("y", [4, 2, 6])], 1), "Concat", 42),
        (lambda g, x: x + g.param("b", [6]), "AddRow", 6),
        (lambda g, x: x + g.param("b", [5, 6]), "AddRow", 30),
        (lambda g, x: x + g.param("b", [5, 1]), "AddRow", 6),
        (lambda g, x: x + g.param("b", [4, 1, 1]), "AddRow", 30),
        (lambda g, x: g.transpose(x, [1, 0, 2]), "TransposeRows", 6),
    ],
)
def test_work_over_rows_says_how_long_they_are(build: Callable[[Graph, Value], Value], name: str, row: int) -> None:
    """Elements that are normalised, reduced, kept, added or copied together; reduced rows have their own kernel."""
    graph = Graph("rows")
    graph.outputs = [build(graph, graph.input("x", [4, 5, 6]))]
    ((found, size),) = kernels(graph)
    assert (found, size[1]) == (name, row)


def novel(graph: Graph, x: Value, **attributes: int) -> Value:
    """Return the result of an operator that no table has."""
    kind = TensorType(DType.F32, Shape([10, 10]))
    return graph.onnx_node("Novel", [x], attributes, types=[kind], domain="some.where", version=1)[0]


def test_an_operator_outside_the_table_is_named_with_its_attributes() -> None:
    """Other attributes may take another time; equal ones share a price, whatever the names of the nodes."""
    graph = Graph("foreign")
    x = graph.input("x", [10, 10])
    graph.outputs = [novel(graph, x, how=1), novel(graph, x, how=1), novel(graph, x, how=2)]
    names = [name for name, _ in kernels(graph)]
    assert names[0].startswith("Novel-")
    assert names[0] == names[1] != names[2]


def test_an_operator_outside_the_table_is_named_with_its_small_constants() -> None:
    """Axes are inputs since opset 18, and decide how long a reduction takes."""
    graph = Graph("axes")
    x = graph.input("x", [6, 6])
    graph.outputs = [graph.max(x, [0], True), graph.max(x, [1], True)]
    first, second = (name for name, _ in kernels(graph))
    assert first.startswith("ReduceMax-")
    assert first != second


def test_control_flow_keeps_runs_from_being_recorded() -> None:
    """The host decides what runs, so each launch is made anew."""
    graph = Graph("plain")
    graph.outputs = [graph.relu(graph.input("x", [4]))]
    random = Graph("random")
    kind = TensorType(DType.F32, Shape([4]))
    (noise,) = random.onnx_node("RandomNormal", [], {"shape": np.array([4])}, types=[kind])
    random.outputs = [noise + random.input("x", [4])]
    assert (workload(graph).host_decides, workload(random).host_decides) == (False, True)

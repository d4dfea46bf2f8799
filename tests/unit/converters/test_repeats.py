"""A node that is written like an earlier one is written as it would be alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from op_tests.cases import CASES, Case, plain

from rlx_ort import CompileOptions, ConversionError, Graph, KernelDispatch, KernelDispatchPolicy
from rlx_ort.converters.to_onnx.dispatch import NATIVE, KernelSet
from rlx_ort.converters.to_onnx.exported import ExportedModel
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.converters.to_onnx.repeats import Repeats
from rlx_ort.ir.core import Ref, Value
from rlx_ort.ir.ops.elementwise import Clamp
from rlx_ort.ir.ops.leaf import Input, Param

TIMES = 4
"""How often a graph is laid beside itself: the first and the second time nothing is known yet."""


def beside_itself(graph: Graph) -> Graph:
    """Return a graph with every node but the leaves that are fed written several times."""
    result = Graph(graph.name)
    fed: dict[Ref, Value] = {}
    for node in graph.nodes:
        if isinstance(node.op, Input | Param):
            (fed[Ref(node.id)],) = result.add_node(node.op, (), name=node.name, types=node.types)
    result.weights = dict(graph.weights)
    outputs = []
    for _ in range(TIMES):
        values = dict(fed)
        for node in graph.nodes:
            if Ref(node.id) not in fed:
                inputs = [None if ref is None else values[ref] for ref in node.inputs]
                made = result.add_node(node.op, inputs, name=node.name, types=node.types)
                values |= {Ref(node.id, index): value for index, value in enumerate(made)}
        outputs += [values[value.ref] for value in graph.outputs]
    result.set_outputs(outputs, [f"out{index}" for index in range(len(outputs))])
    return result


def description(model: ExportedModel) -> tuple[Any, ...]:
    """Return all that an exported model says."""
    nodes = [
        (node[3:], node.domain, node.op_type, node.version, node.origin, node.inputs, node.outputs, node.shape_only)
        for node in model.nodes
    ]
    return model.skeleton, nodes, model.params, model.forms, sorted(model.constants), model.output_types


def check_written_as_alone(graph: Graph, options: CompileOptions | None = None) -> None:
    """Compare the model with the one of a lowering of every node by itself, whatever is known of others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Repeats, "key_of", lambda self, node, inputs: None)
        alone = description(export_model(graph, options))
    assert description(export_model(graph, options)) == alone


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_op_is_written_the_same_again(case: Case) -> None:
    """Model, nodes, names, forms and constants are those of lowering each node by itself."""
    check_written_as_alone(beside_itself(plain(case)[0]))


def chain(*steps: Callable[[Graph, Value], Value]) -> Graph:
    """Return a graph that takes steps one after the other."""
    graph = Graph("chain")
    value = graph.input("x", [2, 3])
    for step in steps:
        value = step(graph, value)
    graph.outputs = [value]
    return graph


def test_what_a_constant_holds_is_no_repetition() -> None:
    """A lowering that looks into a constant is asked anew: one divisor may be -1, the other is not."""

    def divided(by: int) -> Callable[[Graph, Value], Value]:
        return lambda graph, x: graph.cast(graph.cast(x, "i32") / graph.constant(by, "i32"), "f32")

    nodes = export_model(chain(*map(divided, (3, 4, 5, -1, 6)))).nodes
    assert [node.op_type for node in nodes].count("Where") == 2  # of the divisor and of the sign, for -1 alone


@pytest.mark.parametrize(("usual", "other"), [(0.0, -0.0), (1, 1.0)], ids=["sign of zero", "integer"])
def test_numbers_that_are_equal_are_not_the_same(usual: float, other: float) -> None:
    """An attribute that compares equal may be written differently."""

    def clamped(low: float) -> Callable[[Graph, Value], Value]:
        return lambda graph, x: graph.append(Clamp(low, 9.0), x)

    check_written_as_alone(chain(*map(clamped, (usual, usual, usual, other))))


def test_types_tell_nodes_apart() -> None:
    """The same op on another type is lowered by itself: a Relu of integers is a Max."""
    graph = Graph("mixed")
    x, n = graph.input("x", [2]), graph.input("n", [2], "i32")
    for _ in range(4):
        x, n = graph.relu(x), graph.relu(n)
    graph.outputs = [x, n]
    assert [node.op_type for node in export_model(graph).nodes] == ["Relu", "Max"] * 4


def widening(*steps: Callable[[Graph, Value], Value]) -> Graph:
    """Return a graph that takes steps one after the other, each on a wider value than the one before."""
    graph = Graph("widening")
    value = graph.input("x", ["n", 1])
    for at, step in enumerate(steps):
        value = step(graph, value @ graph.param(f"w{at}", [value.shape[-1], at + 2]))
    graph.outputs = [value]
    return graph


def dense(graph: Graph, x: Value) -> Value:
    """Return a layer of ops that are written by element types and ranks alone, and of one that is not."""
    return graph.softmax(graph.relu(x) / (x + graph.tanh(x)), -1) + graph.narrow(x, 1, 0, 1)


def test_nodes_that_differ_by_sizes_are_written_as_they_would_be_alone() -> None:
    """Each keeps its own types, and what a lowering writes by sizes is written anew."""
    check_written_as_alone(widening(*[dense] * 5))


def test_ranks_tell_nodes_apart() -> None:
    """Axis 1 is the last one of a matrix, whose norm needs no transposes around it."""
    graph = Graph("ranks")
    scale, shift = graph.param("scale", [4]), graph.param("shift", [4])
    shapes = [[2, 4], [3, 4], [5, 4], [6, 4, 2], [7, 4]]
    values = [graph.input(f"x{at}", shape) for at, shape in enumerate(shapes)]
    graph.outputs = [graph.layer_norm(value, scale, shift, axis=1) for value in values]
    norm = ["LayerNormalization"]
    assert [node.op_type for node in export_model(graph).nodes] == norm * 3 + ["Transpose", *norm, "Transpose"] + norm


def test_one_value_twice_is_no_two_values() -> None:
    """`x * x` says nothing of `x * y`."""
    graph = Graph("squares")
    x, y = graph.input("x", [2]), graph.input("y", [2])
    graph.outputs = [x * x, y * y, x * x, x * y, y * x, x * y]
    names = [node.input_names for node in export_model(graph).nodes]
    assert names == [("x", "x"), ("y", "y"), ("x", "x"), ("x", "y"), ("y", "x"), ("x", "y")]


def test_sizes_of_a_run_are_read_where_the_node_stands() -> None:
    """A lowering that needs the size of a named dim is asked each time; the size is read once."""
    graph = Graph("views")
    x = graph.input("x", ["n", 4])
    for _ in range(4):
        x = graph.reshape(graph.relu(graph.reshape(x, ["n", 2, 2])), ["n", 4])
    graph.outputs = [x]
    check_written_as_alone(graph)


def test_attributes_that_an_opset_lacks_are_taken_off_all() -> None:
    """Nodes that repeat one share its attributes, whatever becomes of them."""
    graph = chain(*[lambda graph, x: graph.reshape(graph.reshape(x, [3, 2]), [2, 3])] * 4)
    check_written_as_alone(graph, CompileOptions(opset=13))


def test_a_repeated_result_may_be_an_output() -> None:
    """Outputs get the names they were given, and no Identity, wherever they come from."""
    graph = Graph("outputs")
    x = graph.input("x", [2])
    values = [x]
    for _ in range(5):
        values.append(graph.tanh(values[-1]))
    graph.set_outputs(values[1:] + values[4:5], [f"y{index}" for index in range(6)])
    model = export_model(graph)
    assert list(model.output_types) == [f"y{index}" for index in range(6)]
    assert [node.op_type for node in model.nodes] == ["Tanh"] * 5 + ["Identity"]


def test_constants_are_shared_by_those_that_repeat() -> None:
    """Equal constants of a lowering are one initializer, also where an operand is equal to one."""
    graph = Graph("constants")
    x = graph.input("x", [2], "i32")
    zero = graph.constant(np.zeros((), np.int32))
    for _ in range(4):
        x = graph.relu(x) + zero
    graph.outputs = [x]
    check_written_as_alone(graph)


def test_an_operand_that_equals_a_constant_of_the_lowering_says_nothing_of_others() -> None:
    """The Relu of an integer is its maximum with 0; with an operand that is 0 both inputs are one value."""
    graph = Graph("operands")
    operands = [graph.constant(number, "i32") for number in (0, 0, 0, 5)]
    graph.outputs = [graph.relu(operand) for operand in operands]
    nodes = export_model(graph).nodes
    assert [len(set(node.input_names)) for node in nodes] == [1, 1, 1, 2]


def test_a_forced_form_is_refused_for_each_node_that_cannot_have_it() -> None:
    """The message names all of them, though they are alike."""
    options = CompileOptions(kernel_dispatch=KernelDispatch(policy=KernelDispatchPolicy.FORCE_NATIVE))
    kernels = KernelSet("nobody", "none", lambda *_: False)
    with pytest.raises(ConversionError, match=r"4 node\(s\) cannot have it"):
        export_model(chain(*[lambda graph, x: graph.silu(x)] * 4), options, kernels)


def test_the_form_of_each_node_is_told() -> None:
    """Nodes that repeat one are in the record of native and common forms as it is."""
    kernels = KernelSet("everybody", "all", lambda *_: True)
    model = export_model(chain(*[lambda graph, x: graph.silu(x)] * 5), None, kernels)
    assert model.forms == {node: frozenset({NATIVE}) for node in range(1, 6)}

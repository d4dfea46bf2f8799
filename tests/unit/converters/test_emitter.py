"""What a lowering can write with the emitter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from rlx_ort.converters.to_onnx import to_onnx
from rlx_ort.converters.to_onnx.emitter import Emitter, lowering_of, lowers
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.errors import ConversionError, GraphVerifyError
from rlx_ort.ir import op as op_module
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.op import Op, OpTypes
from rlx_ort.ir.ops.leaf import Capture, Input
from rlx_ort.ir.types import Shape, TensorType, ValueType


class Probe(Op):
    """An op whose lowering each test writes itself."""

    kind = "test_probe"
    arity = (0, None)
    results: tuple[ValueType, ...]
    body: Graph | None

    def __init__(self, *results: ValueType, body: Graph | None = None) -> None:
        object.__setattr__(self, "results", results)
        object.__setattr__(self, "body", body)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        return self.results

    def bodies(self) -> tuple[Graph, ...]:
        return () if self.body is None else (self.body,)


op_module._classes.pop(Probe.kind)  # other tests go through all kinds, and this is none of the library's


@pytest.fixture
def lower() -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Return a function that sets the lowering of `Probe` for one test."""
    from rlx_ort.converters.to_onnx import emitter

    yield lambda function: lowers(Probe)(function)  # type: ignore[func-returns-value]  # only the table matters
    emitter._lowerings.pop(Probe, None)


F32 = TensorType(DType.F32, Shape(["n", 3]))
VECTOR = TensorType(DType.I64, Shape([2]))


def probe_graph(*results: ValueType, body: Graph | None = None) -> Graph:
    graph = Graph()
    x = graph.input("x", ["n", 3])
    values = graph.add_node(Probe(*results, body=body), [x], name="probe")
    graph.set_outputs(values, [f"y{index}" for index in range(len(values))])
    return graph


def run(graph: Graph, **feeds: Any) -> list[Any]:
    model = to_onnx(graph)
    onnx.checker.check_model(model, full_check=True)
    results: list[Any] = ReferenceEvaluator(model).run(None, feeds)
    return results


X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_an_op_without_a_lowering_is_named() -> None:
    """The message says which node has no ONNX form."""
    assert lowering_of(Probe()) is None
    with pytest.raises(ConversionError, match="'probe'"):
        export_model(probe_graph(F32))


def test_nodes_are_named_after_the_ir_node(lower: Any) -> None:
    """The first has its name, the others add the operator."""

    def several(emit: Emitter, op: Probe, inputs: Any) -> Any:
        return emit.op("Abs", emit.op("Abs", emit.op("Neg", inputs[0])))

    lower(several)
    names = [node.name for node in export_model(probe_graph(F32)).nodes]
    assert names == ["probe", "probe/Abs", "probe/Abs_2"]


def test_results_have_the_types_of_the_ir_node(lower: Any) -> None:
    """The lowering need not repeat them."""
    lower(lambda emit, op, inputs: emit.op("Neg", inputs[0]))
    assert export_model(probe_graph(F32)).nodes[0].outputs == (F32,)


def test_attributes_of_every_kind_are_written(lower: Any) -> None:
    """Python values say their kind; None leaves one out; a dtype is a number."""

    def attributes(emit: Emitter, op: Probe, inputs: Any) -> Any:
        return emit.op(
            "Odd", inputs[0], domain="my.ops", i=3, b=True, f=0.5, s="text", ii=[1, 2], ff=[1, 2.5], ss=["a"],
            t=np.array([1], np.int64), d=DType.F16, none=None,
        )  # fmt: skip

    lower(attributes)
    model = onnx.ModelProto.FromString(export_model(probe_graph(F32)).skeleton)
    found = {a.name: onnx.helper.get_attribute_value(a) for a in model.graph.node[0].attribute}
    tensor = found.pop("t")
    assert found == {
        "i": 3, "b": 1, "f": 0.5, "s": b"text", "ii": [1, 2], "ff": [1.0, 2.5], "ss": [b"a"],
        "d": onnx.TensorProto.FLOAT16,
    }  # fmt: skip
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), [1])


def test_a_mixed_list_is_refused(lower: Any) -> None:
    """No attribute holds text and numbers."""
    lower(lambda emit, op, inputs: emit.op("Neg", inputs[0], odd=["a", 1]))
    with pytest.raises(ConversionError, match="'odd'"):
        export_model(probe_graph(F32))


def test_a_cast_to_the_same_dtype_writes_nothing(lower: Any) -> None:
    """And another one writes a Cast whose type is known."""

    def casts(emit: Emitter, op: Probe, inputs: Any) -> Any:
        same = emit.cast(inputs[0], DType.F32)
        return emit.cast(emit.cast(same, DType.F64), DType.F64)

    lower(casts)
    (node,) = export_model(probe_graph(TensorType(DType.F64, Shape(["n", 3])))).nodes
    assert (node.op_type, str(node.outputs[0])) == ("Cast", "f64(n, 3)")


def test_python_floats_are_f32_constants(lower: Any) -> None:
    """Numpy would make them f64."""
    lower(lambda emit, op, inputs: emit.op("Mul", inputs[0], emit.constant(2.0)))
    np.testing.assert_array_equal(run(probe_graph(F32), x=X)[0], X * 2)


def test_named_dims_are_read_at_run_time(lower: Any) -> None:
    """Sizes that are known are written, names are taken from a value that has them."""
    lower(lambda emit, op, inputs: emit.op("Reshape", inputs[0], emit.dims([3, "n"])))
    assert run(probe_graph(TensorType(DType.F32, Shape([3, "n"]))), x=X)[0].shape == (3, 2)


def test_a_named_dim_is_read_once(lower: Any) -> None:
    """The second question has the answer of the first."""

    def twice(emit: Emitter, op: Probe, inputs: Any) -> Any:
        return emit.op("Add", emit.dims(["n", 1]), emit.dims([1, "n"]))

    lower(twice)
    graph = probe_graph(VECTOR)
    assert [node.op_type for node in export_model(graph).nodes].count("Shape") == 1
    np.testing.assert_array_equal(run(graph, x=X)[0], [3, 3])


def test_a_dim_nobody_has_is_named(lower: Any) -> None:
    """The message says which node wants which dim."""
    lower(lambda emit, op, inputs: emit.dims(["m"]))
    with pytest.raises(ConversionError, match=r"'probe'.*'m'"):
        export_model(probe_graph(VECTOR))


def test_an_unknown_dim_cannot_be_read(lower: Any) -> None:
    """None has no name to look for."""
    lower(lambda emit, op, inputs: emit.dims([None]))
    with pytest.raises(ConversionError, match="'probe'"):
        export_model(probe_graph(VECTOR))


def test_several_results_are_several_values(lower: Any) -> None:
    """A tuple has one per result, in order."""
    lower(lambda emit, op, inputs: (emit.op("Neg", inputs[0]), emit.op("Abs", inputs[0])))
    first, second = run(probe_graph(F32, F32), x=X)
    np.testing.assert_array_equal(first, -X)
    np.testing.assert_array_equal(second, X)


def test_a_lowering_may_return_its_input(lower: Any) -> None:
    """Nothing is written but the Identity that an output needs."""
    lower(lambda emit, op, inputs: inputs[0])
    assert [node.op_type for node in export_model(probe_graph(F32)).nodes] == ["Identity"]


def test_a_missing_input_type_is_named(lower: Any) -> None:
    """Lowerings ask for types by place."""
    lower(lambda emit, op, inputs: emit.input_type(3))
    with pytest.raises(GraphVerifyError, match="input 3"):
        export_model(probe_graph(F32))


def body_with_capture() -> Graph:
    """Return r = a - x, where a is the formal input and x is captured as input 0 of the owner."""
    body = Graph("body")
    a = body.add_node(Input("a", F32), [], name="a")[0]
    x = body.add_node(Capture(0, F32), [], name="x")[0]
    body.set_outputs([body.onnx_node("Sub", [a, x], types=[F32])[0]], ["r"])
    return body


def test_a_body_is_inlined_with_its_captures(lower: Any) -> None:
    """Formal inputs are replaced, captures mean the owner's inputs."""
    body = body_with_capture()
    lower(lambda emit, op, inputs: emit.inline(body, [emit.op("Neg", inputs[0])])[0])
    np.testing.assert_array_equal(run(probe_graph(F32, body=body), x=X)[0], -2 * X)


def test_a_body_inlined_twice_has_names_of_its_own_each_time(lower: Any) -> None:
    """Static single assignment holds in the result."""
    body = body_with_capture()

    def twice(emit: Emitter, op: Probe, inputs: Any) -> Any:
        (once,) = emit.inline(body, [inputs[0]])
        return emit.inline(body, [once])[0]

    lower(twice)
    np.testing.assert_array_equal(run(probe_graph(F32, body=body), x=X)[0], -X)


def test_a_subgraph_reads_values_around_it(lower: Any) -> None:
    """A branch takes what it captures from the owner's inputs, without a copy."""
    body = Graph("branch")
    x = body.add_node(Capture(0, F32), [], name="x")[0]
    body.set_outputs([body.onnx_node("Neg", [x], types=[F32])[0]], ["r"])

    def branch(emit: Emitter, op: Probe, inputs: Any) -> Any:
        condition = emit.constant(np.array(True))
        both = {f"{side}_branch": emit.subgraph(body, inputs) for side in ("then", "else")}
        return emit.op("If", condition, **both)

    lower(branch)
    np.testing.assert_array_equal(run(probe_graph(F32, body=body), x=X)[0], -X)


def test_a_node_that_needs_a_newer_opset_raises_the_models(lower: Any) -> None:
    """Only as far as it must."""
    lower(lambda emit, op, inputs: emit.op("Swish", inputs[0], version=24))
    assert export_model(probe_graph(F32)).opsets == {"": 24}


def test_fused_operators_import_their_domain(lower: Any) -> None:
    """com.microsoft has one version."""
    lower(lambda emit, op, inputs: emit.op("QuickGelu", inputs[0], domain="com.microsoft", alpha=1.0))
    assert export_model(probe_graph(F32)).opsets == {"": 21, "com.microsoft": 1}

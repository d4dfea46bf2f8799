"""What a lowering can write with the emitter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from rlx_ort import ConversionError, DType, Graph, GraphVerifyError, to_onnx
from rlx_ort.converters.to_onnx.emitter import lowering_of, lowers
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.ir import op as op_module
from rlx_ort.ir.op import Op, OpTypes
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


def test_an_op_without_a_lowering_is_named() -> None:
    """The message says which node has no ONNX form."""
    assert lowering_of(Probe()) is None
    with pytest.raises(ConversionError, match="'probe'"):
        export_model(probe_graph(F32))


@pytest.mark.parametrize(
    ("lowering", "result", "error", "message"),
    [
        (lambda emit, op, inputs: emit.op("Neg", inputs[0], odd=["a", 1]), F32, ConversionError, "'odd'"),
        (lambda emit, op, inputs: emit.dims(["m"]), VECTOR, ConversionError, "'probe'.*'m'"),
        (lambda emit, op, inputs: emit.dims([None]), VECTOR, ConversionError, "'probe'"),
        (lambda emit, op, inputs: emit.input_type(3), F32, GraphVerifyError, "input 3"),
    ],
    ids=["an attribute of text and numbers", "a dim nobody has", "an unknown dim", "a missing input"],
)
def test_what_a_lowering_cannot_write_is_named(
    lower: Any, lowering: Callable[..., Any], result: ValueType, error: type[Exception], message: str
) -> None:
    """With the node, the attribute or the input."""
    lower(lowering)
    with pytest.raises(error, match=message):
        export_model(probe_graph(result))

"""Operators that ONNX defines by functions: which ones are expanded, and into what."""

import pytest

from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import Shape, TensorType, ValueType
from rlx_ort.selection.node_claims import function_body, is_function


def call(op_type: str, *inputs: ValueType) -> ExportedNode:
    """Return a node of opset 21 with one result of the type of its first input."""
    return ExportedNode.of("n", "", op_type, 21, 1, inputs, inputs[:1], (), ())


@pytest.mark.parametrize(
    ("op_type", "expanded"), [("Mish", True), ("HardSwish", True), ("Erf", False), ("Conv", False)]
)
def test_an_operator_with_a_function_is_expanded(op_type: str, expanded: bool) -> None:
    """ONNX writes Mish and HardSwish as functions, Erf and Conv as operators of their own."""
    assert is_function("", op_type, 21) == expanded


def test_a_function_whose_body_has_changed_its_meaning_is_not_expanded() -> None:
    """Softplus is written with opset 18's CastLike: it expands in a model of opset 18 and not of 21."""
    assert is_function("", "Softplus", 18)
    assert not is_function("", "Softplus", 21)


def test_an_operator_that_onnx_does_not_know_is_not_expanded() -> None:
    """Operators of ONNX Runtime have no schema in ONNX."""
    assert not is_function("com.microsoft", "FusedMatMul", 1)


def test_a_body_has_the_types_of_the_call() -> None:
    """Every node of x tanh(softplus(x)) computes in the type that Mish was asked for."""
    f64 = TensorType(DType.F64, Shape([4]))
    body = function_body(call("Mish", f64))
    assert body is not None
    assert [node.op_type for node in body] == ["Softplus", "Tanh", "Mul"]
    assert {kind.dtype for node in body for kind in node.outputs if isinstance(kind, TensorType)} == {DType.F64}


def test_a_body_that_depends_on_attributes_is_not_looked_into() -> None:
    """GroupNormalization is built for its number of groups, and SequenceMap for its body."""
    f32 = TensorType(DType.F32, Shape([2, 4, 8]))
    assert function_body(call("GroupNormalization", f32, f32, f32)) is None
    assert function_body(call("SequenceMap", f32)) is None


def test_a_body_of_a_domain_that_lacks_an_opset_for_it_is_not_expanded() -> None:
    """The functions of ai.onnx.preview are made of operators of ai.onnx, whose version a single node does not say."""
    f32 = TensorType(DType.F32, Shape([1, 2, 3, 4]))
    assert (
        function_body(ExportedNode.of("n", "ai.onnx.preview", "FlexAttention", 1, 1, (f32,) * 3, (f32,), (), ()))
        is None
    )

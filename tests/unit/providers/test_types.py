"""ONNX Runtime's type strings."""

from __future__ import annotations

import pytest

from rlx_ort.converters.onnx_types import elem_type
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, Shape, TensorType, UnknownType
from rlx_ort.providers.engine.values import element_dtypes, refined, value_type

F32 = TensorType(DType.F32)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("tensor(float)", F32),
        ("tensor(bfloat16)", TensorType(DType.BF16)),
        ("tensor(uint4)", TensorType(DType.U4)),
        ("tensor(int64)", TensorType(DType.I64)),
        ("tensor(float8e5m2fnuz)", TensorType(DType.F8E5M2FNUZ)),
        ("seq(tensor(float))", SequenceType(F32)),
        ("optional(seq(tensor(float)))", OptionalType(SequenceType(F32))),
        ("seq(map(int64,tensor(float)))", SequenceType(MapType(DType.I64, F32))),
        ("sparse_tensor(float)", UnknownType()),
        ("opaque(a,b)", UnknownType()),
    ],
)
def test_type_strings_become_ir_types(text, wanted):
    """Nesting is followed; what has no counterpart is unknown."""
    assert value_type(text) == wanted


def test_dims_may_be_sizes_names_or_unknown():
    """ONNX Runtime gives None for a dim nobody named."""
    assert value_type("tensor(float)", ["N", 2, None]) == TensorType(DType.F32, Shape(("N", 2, None)))


def test_the_declared_shape_stands_in_for_an_unknown_rank():
    """ONNX Runtime shows unknown rank as a scalar; a scalar that is declared stays one."""
    found = value_type("tensor(float)", [])
    assert refined(found, F32) == F32
    assert refined(found, TensorType(DType.F32, Shape())) == TensorType(DType.F32, Shape())


def test_element_types_are_found_inside_containers():
    """Kernel constraints mix tensors and sequences."""
    assert element_dtypes(["tensor(float)", "seq(tensor(int64))"]) == {DType.F32, DType.I64}


def test_every_dtype_has_onnx_number():
    """The numbers of onnx.TensorProto.DataType, all different."""
    numbers = {dtype: elem_type(dtype) for dtype in DType}
    assert len(set(numbers.values())) == len(DType)
    assert (numbers[DType.F32], numbers[DType.BF16], numbers[DType.I4]) == (1, 16, 22)


def test_a_negative_size_counts_as_unknown() -> None:
    """ONNX Runtime shows -1 for an output whose size its shape inference could not find."""
    assert value_type("tensor(float)", [2, -1, "n"]) == TensorType(DType.F32, Shape([2, None, "n"]))

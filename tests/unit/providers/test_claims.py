"""ONNX Runtime's version rule: open-ended kernels match only the version they start at."""

from __future__ import annotations

import pytest

from rlx_ort.converters.onnx_types import elem_type
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, Shape, TensorType, UnknownType
from rlx_ort.providers import claims as module
from rlx_ort.providers.base import KernelClaim
from rlx_ort.providers.engine.values import element_dtypes, refined, value_type


class Formal:
    def __init__(self, name: str, type_text: str) -> None:
        self.name = name
        self.typeStr = type_text


class Schema:
    inputs = (Formal("X", "T"), Formal("axes", "tensor(int64)"))
    outputs = (Formal("Y", "T"),)


@pytest.fixture(autouse=True)
def schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the operator `Op` versions 1, 7 and 13 without ONNX Runtime."""
    monkeypatch.setattr(module, "_schemas", lambda: {("", "Op"): {1: Schema, 7: Schema, 13: Schema}})
    module.schema_version.cache_clear()
    yield
    module.schema_version.cache_clear()


def claim(first: int, last: int | None, *dtypes: DType) -> KernelClaim:
    return KernelClaim("", "Op", first, last, {"T": frozenset(dtypes or (DType.F32,))})


@pytest.mark.parametrize(
    ("kernel", "opset", "wanted"),
    [
        (claim(13, None), 13, True),
        (claim(13, None), 21, True),  # the schema is still that of 13
        (claim(7, None), 13, False),
        (claim(7, None), 12, True),
        (claim(7, 12), 12, True),
        (claim(1, 13), 21, True),
        (claim(1, 6), 7, False),
    ],
)
def test_a_kernel_takes_the_versions_its_range_says(kernel, opset, wanted):
    """A closed range holds all versions in it; an open one only its first."""
    assert module.takes((kernel,), "", "Op", opset) is wanted


F32 = TensorType(DType.F32)
TAKEN = {
    "the element type of the input": ("Op", (F32,), (), True),
    "another element type": ("Op", (TensorType(DType.F16),), (), False),
    "another element type of the output": ("Op", (F32,), (TensorType(DType.F16),), False),
    "an absent input, and one whose type the kernel does not mention": (
        "Op",
        (None, TensorType(DType.STRING)),
        (),
        True,
    ),
    "a sequence of another element type": ("Op", (SequenceType(TensorType(DType.F64)),), (), False),
    "another operator": ("Other", (), (), False),
}


@pytest.mark.parametrize(("op", "inputs", "outputs", "wanted"), TAKEN.values(), ids=TAKEN)
def test_a_kernel_takes_its_element_types(op, inputs, outputs, wanted):
    """The type parameters of the formal inputs and outputs decide."""
    assert module.takes((claim(13, None),), "", op, 13, inputs, outputs) is wanted


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


@pytest.mark.parametrize("unknown", [None, -1])
def test_dims_may_be_sizes_names_or_unknown(unknown):
    """ONNX Runtime gives None for a dim nobody named, and -1 for one that its shape inference could not find."""
    assert value_type("tensor(float)", ["N", 2, unknown]) == TensorType(DType.F32, Shape(("N", 2, None)))


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

"""ONNX Runtime's version rule: open-ended kernels match only the version they start at."""

from __future__ import annotations

import pytest

from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import SequenceType, TensorType
from rlx_ort.providers import claims as module
from rlx_ort.providers.base import KernelClaim


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


@pytest.mark.parametrize(("dtype", "wanted"), [(DType.F32, True), (DType.F16, False)])
def test_a_kernel_takes_its_element_types(dtype, wanted):
    """The type parameter of the formal input decides."""
    assert module.takes((claim(13, None),), "", "Op", 13, (TensorType(dtype),)) is wanted


def test_output_types_count_as_well():
    """A kernel without f16 results does not take a node that has one."""
    kernel = claim(13, None)
    assert not module.takes((kernel,), "", "Op", 13, (TensorType(DType.F32),), (TensorType(DType.F16),))


def test_unconstrained_and_absent_inputs_are_free():
    """An input whose type the kernel does not mention, or that is absent, refuses nothing."""
    kinds = (None, TensorType(DType.STRING))
    assert module.takes((claim(13, None),), "", "Op", 13, kinds)


def test_a_sequence_is_judged_by_its_elements():
    """The element type inside a sequence must be one of the kernel's."""
    kernel = claim(13, None)
    assert not module.takes((kernel,), "", "Op", 13, (SequenceType(TensorType(DType.F64)),))


def test_another_operator_is_not_taken():
    """Claims of one operator say nothing of another."""
    assert not module.takes((claim(13, None),), "", "Other", 13)

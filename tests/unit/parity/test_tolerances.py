"""The default tolerances."""

from __future__ import annotations

import onnx.parser
import pytest

from rlx_ort.conversion.convert import ConvertOptions, ModelFacts, default_tolerance
from rlx_ort.converters.bundle import bundle_of
from rlx_ort.parity.metrics import Tolerance, dtypes_of, tolerance_for


@pytest.mark.parametrize(
    ("options", "weights", "expected"),
    [
        ({}, {"f32": 8}, Tolerance(1e-5)),
        ({"opset": 17}, {"f32": 8, "f16": 2}, Tolerance(5e-3)),
        ({"precision": "f16"}, {"f32": 8}, Tolerance(5e-3)),
        ({"precision": "mixed"}, {"f32": 8}, Tolerance(5e-3)),
        ({"precision": "bf16"}, {"f32": 8}, Tolerance(4e-2)),
        ({"quantize": "int8-dynamic"}, {"f32": 8}, Tolerance(None, 0.99)),
        ({"quantize": "int8-static"}, {"f32": 8}, Tolerance(None, 0.99)),
        ({"quantize": "int4-weights"}, {"f32": 8}, Tolerance(None, 0.98)),
        ({"device": "webgpu"}, {"f32": 8}, Tolerance(1e-3)),
        ({"device": "cpu"}, {"f32": 8}, Tolerance(1e-5)),
    ],
)
def test_a_conversion_is_judged_by_its_precision(
    options: dict[str, str], weights: dict[str, int], expected: Tolerance
) -> None:
    """The figures of the docstring, for each precision, quantisation and device."""
    facts = ModelFacts(1, 21, 10, weights, 8)
    assert default_tolerance(ConvertOptions(**options), facts) == expected


def test_two_devices_are_not_held_to_less_than_their_precision() -> None:
    """f16 on two devices keeps the tolerance of f16."""
    assert tolerance_for({"f32"}, other_device=True) == Tolerance(1e-3)
    assert tolerance_for({"f16"}, other_device=True) == Tolerance(5e-3)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("h = Cast <to: int = 10> (x) y = Cast <to: int = 1> (h)", {"f32", "f16"}),
        ("h = Cast <to: int = 16> (x) y = Cast <to: int = 1> (h)", {"f32", "bf16"}),
        ("h = EyeLike <dtype: int = 10> (x) y = Cast <to: int = 1> (h)", {"f32", "f16"}),
        ("y = Relu (x)", {"f32"}),
    ],
)
def test_a_half_precision_that_is_only_inside_counts(node: str, expected: set[str]) -> None:
    """A model of f32 weights, inputs and outputs may compute in f16 or bf16 between casts."""
    text = f'<ir_version: 8, opset_import: ["": 18]> g (float[2, 2] x) => (float[n, n] y) {{ {node} }}'
    assert dtypes_of(bundle_of(onnx.parser.parse_model(text))) == expected

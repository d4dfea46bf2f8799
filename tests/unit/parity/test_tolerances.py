"""The default tolerances."""

from __future__ import annotations

import pytest

from rlx_ort.conversion.convert import ConvertOptions, default_tolerance
from rlx_ort.conversion.options import ModelFacts
from rlx_ort.parity.metrics import Tolerance, tolerance_for


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

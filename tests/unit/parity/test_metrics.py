"""How far arrays are apart, and the default tolerances."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import onnx.parser
import pytest

from rlx_ort.conversion.convert import ConvertOptions, ModelFacts, default_tolerance
from rlx_ort.converters.bundle import bundle_of
from rlx_ort.parity.metrics import Tolerance, difference, dtypes_of, tolerance_for


def test_figures_are_those_of_float64() -> None:
    """Max abs, relative L2 and cosine equal a float64 computation, over more than one block."""
    source = np.random.default_rng(3)
    a = source.standard_normal(700_001).astype(np.float32)
    b = (a + 1e-3 * source.standard_normal(a.size)).astype(np.float32)
    x, y = a.astype(np.float64), b.astype(np.float64)
    found = difference(a, b)
    larger = max(np.linalg.norm(x), np.linalg.norm(y))
    assert found.max_abs == np.abs(x - y).max()
    assert found.relative_l2 == pytest.approx(np.linalg.norm(x - y) / larger, rel=1e-12)
    assert found.cosine == pytest.approx(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)), rel=1e-12)


def test_equal_values_have_no_difference() -> None:
    """NaN equals NaN and an infinity one of its sign; then nothing differs."""
    a = np.array([1.0, np.nan, np.inf, -np.inf, 0.0], np.float32)
    found = difference(a, a.copy())
    assert (found.max_abs, found.relative_l2, found.cosine, found.nonfinite) == (0.0, 0.0, 1.0, 0)
    assert found.size == 0.0


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1.0])
def test_a_value_that_is_not_finite_on_one_side_is_never_accepted(wrong: float) -> None:
    """No tolerance covers an overflow; the finite rest is still measured."""
    found = difference(np.array([-np.inf, 2.0], np.float32), np.array([wrong, 2.5], np.float32))
    assert (found.nonfinite, found.max_abs) == (1, 0.5)
    assert found.size == math.inf
    assert not Tolerance(relative_l2=None).accepts(found)


HALVES = np.array([1.5, -2.0], np.float32)
PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "squares beyond f64 do not overflow": (
        np.array([1e300]),
        np.array([2e300]),
        {"relative_l2": pytest.approx(0.5), "cosine": pytest.approx(1.0)},
    ),
    "any value beside zeros is wholly off, and not infinitely": (
        np.zeros(3, np.float32),
        np.full(3, 1e-9, np.float32),
        {"relative_l2": 1.0, "cosine": 0.0},
    ),
    "integers that are equal as f64 still differ": (np.array([2**60]), np.array([2**60 + 1]), {"differing": 1}),
    "narrow floats compare by value": (HALVES, HALVES.astype(ml_dtypes.bfloat16), {"size": 0.0}),
    "an imaginary part counts": (
        np.array([3 + 4j], np.complex64),
        np.array([3 + 3j], np.complex64),
        {"max_abs": 1.0, "relative_l2": pytest.approx(0.2)},
    ),
    "texts are equal or not": (np.array(["a", "b"], object), np.array(["a", "c"], object), {"differing": 1}),
    "shapes have to agree": (np.zeros((2, 3)), np.zeros((3, 2)), {"shapes": ((2, 3), (3, 2))}),
    "no floats are equal": (np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32), {"size": 0.0}),
    "no integers are equal": (np.zeros((0, 3), np.int64), np.zeros((0, 3), np.int64), {"size": 0.0}),
    "a float may have no dim": (np.array(2, np.float32), np.array(2, np.float32), {"size": 0.0}),
    "an integer may have no dim": (np.array(2), np.array(2), {"size": 0.0}),
}


@pytest.mark.parametrize(("a", "b", "figures"), PAIRS.values(), ids=PAIRS)
def test_two_arrays_differ_by_these_figures(a: Any, b: Any, figures: dict[str, Any]) -> None:
    """Elements that differ, and other shapes, are accepted by no tolerance without a floor of the cosine."""
    found = difference(a, b)
    assert {name: getattr(found, name) for name in figures} == figures
    if "differing" in figures or "shapes" in figures:
        assert not Tolerance().accepts(found)
        assert not Tolerance(relative_l2=None).accepts(found)


def test_a_large_output_costs_little_memory() -> None:
    """Comparing two arrays of 40 MB takes less than 20 MB on top, where float64 copies would take 160."""
    a = np.ones(10_000_000, np.float32)
    b = a.copy()
    tracemalloc.start()
    difference(a, b)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


def test_a_tolerance_says_what_it_allows() -> None:
    """Its text is for people."""
    assert str(Tolerance(1e-5)) == "relative L2 <= 1e-05"
    assert str(Tolerance(None, 0.98)) == "cosine >= 0.98"


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

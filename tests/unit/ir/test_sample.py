"""`Sample` checks its settings, and its random numbers are Philox4x32-10."""

from __future__ import annotations

from typing import Any

import pytest
from op_tests.philox import stream

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.ops.norm import Sample, uniforms
from rlx_ort.ir.types import Shape, TensorType


def f32(*dims: int | str) -> TensorType:
    return TensorType(DType.F32, Shape(dims))


@pytest.mark.parametrize("seed", [0, 1, 0xDEADBEEF, 2**32, 2**64 - 1])
@pytest.mark.parametrize("count", [0, 1, 4, 11])
def test_numbers_are_the_generators(seed: int, count: int) -> None:
    """Each number is the upper 24 bits of a word, in order."""
    assert uniforms(seed, count).tolist() == stream(seed, count)


def test_there_is_one_token_a_row() -> None:
    """The last axis goes away."""
    assert Sample().infer([f32("b", 7)]) == (TensorType(DType.I32, Shape(("b",))),)
    assert Sample(dtype=DType.I64).infer([f32(7)]) == (TensorType(DType.I64, Shape()),)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": -1},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"seed": 2**64},
        {"dtype": DType.BOOL},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    """NaN is out of every range."""
    with pytest.raises(GraphVerifyError, match="Sample"):
        Sample(**settings)


@pytest.mark.parametrize("kind", [f32(2, 3, 4), f32("b", "v"), f32(2, 0), TensorType(DType.I32, Shape((2, 3)))])
def test_other_logits_are_refused(kind: TensorType) -> None:
    """One or two axes, a known number of tokens, floating-point numbers."""
    with pytest.raises(GraphVerifyError, match="Sample"):
        Sample().infer([kind])

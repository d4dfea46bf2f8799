"""`Sample` checks its settings, and its random numbers are Philox4x32-10."""

from __future__ import annotations

from typing import Any

import pytest
from op_tests.philox import block, stream

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.ops.norm import Sample, uniforms
from rlx_ort.ir.types import Shape, TensorType


def f32(*dims: int | str) -> TensorType:
    return TensorType(DType.F32, Shape(dims))


# Known answers published with the Random123 library: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_the_reference_gives_the_published_answers(counter: Any, key: Any, result: Any) -> None:
    """The plain generator the other tests compare with is right."""
    assert block(counter, key) == result


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

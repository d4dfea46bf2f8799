"""Fourier ops check their layout; frequencies follow the contract."""

from __future__ import annotations

import numpy as np
import pytest

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph, Value
from rlx_ort.ir.ops.leaf import Constant
from rlx_ort.ir.ops.signal import Conjugate, Fft
from rlx_ort.ir.types import Shape, TensorType


def kind(*dims: int | str, dtype: DType = DType.F32) -> TensorType:
    return TensorType(dtype, Shape(dims))


def values(constant: Value) -> list[float]:
    op = constant.node.op
    assert isinstance(op, Constant)
    return [float(item) for item in op.data.numpy()]


@pytest.mark.parametrize("wrong", [kind(3), kind(0), kind("n"), kind()])
def test_the_last_dimension_holds_both_parts(wrong: TensorType) -> None:
    """An odd, empty or unknown last dimension is no `[re | im]`."""
    with pytest.raises(GraphVerifyError, match="even last dimension"):
        Fft().infer([wrong])


@pytest.mark.parametrize(
    ("dtype", "remedy"), [(DType.F16, "cast it"), (DType.C64, "store the parts of complex numbers as f32")]
)
def test_other_dtypes_are_refused_with_a_remedy(dtype: DType, remedy: str) -> None:
    """Transforms are computed in f32 or f64."""
    for op in (Fft(), Conjugate()):
        with pytest.raises(GraphVerifyError, match=remedy):
            op.infer([kind(2, dtype=dtype)])


def test_an_unknown_norm_gets_a_suggestion() -> None:
    """A typo is named with the closest norm."""
    with pytest.raises(GraphVerifyError, match="did you mean 'ortho'"):
        Fft(norm="orto")


@pytest.mark.parametrize(
    ("norm", "inverse", "scale"),
    [
        ("backward", False, 1.0),
        ("backward", True, 1.0),
        ("forward", False, 1.0),
        ("forward", True, 0.25),
        ("ortho", False, 0.5),
        ("ortho", True, 0.5),
    ],
)
def test_the_scale_of_four_elements(norm: str, inverse: bool, scale: float) -> None:
    """Only forward's inverse and ortho are scaled."""
    assert Fft(inverse, norm).scale(4) == scale


def test_frequencies_have_the_middle_one_positive() -> None:
    """+0.5, where numpy has -0.5; the rest is numpy's."""
    g = Graph()
    assert values(g.fftfreq(4)) == [0.0, 0.25, 0.5, -0.25]
    assert values(g.fftfreq(5)) == pytest.approx(np.fft.fftfreq(5).tolist())
    assert values(g.fftfreq(1)) == [0.0]
    assert values(g.rfftfreq(6)) == pytest.approx(np.fft.rfftfreq(6).tolist())
    with pytest.raises(GraphVerifyError, match="at least 1 element"):
        g.fftfreq(0)


def test_helpers_name_what_they_need() -> None:
    """Wrong numbers of elements, frames longer than the signal, axes without a size."""
    g = Graph()
    x, named = g.input("x", [4]), g.input("named", ["n", 8])
    with pytest.raises(GraphVerifyError, match="irfft of 8 numbers needs 5 elements of re"):
        g.irfft(x, x, 8)
    with pytest.raises(GraphVerifyError, match="frames of 5 every 1 from 4"):
        g.stft(x, 5, 1)
    with pytest.raises(GraphVerifyError, match="size of axis 0"):
        g.fft_axis(named, 0)
    with pytest.raises(GraphVerifyError, match="known size"):
        g.rfft(g.input("open", ["n"]))

"""Attention over a cache, recurrent layers, sampling and Fourier ops: their types, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from op_tests.philox import stream

from rlx_ort import DType, Graph, GraphVerifyError, Value
from rlx_ort.ir.ops.leaf import Constant
from rlx_ort.ir.ops.norm import Sample, uniforms
from rlx_ort.ir.ops.sequence import GatedDeltaNet, SelectiveScan
from rlx_ort.ir.ops.signal import Conjugate, Fft
from rlx_ort.ir.types import Shape, TensorType


def test_the_new_cache_has_the_type_of_the_past_one() -> None:
    """The result is like q; keys and values keep the longest length."""
    g = Graph("step")
    q = g.input("q", ["batch", 1, 64])
    k, v = (g.input(name, ["batch", 1, 32]) for name in "kv")
    past = tuple(g.input(name, ["batch", 2, 100, 16]) for name in ("keys", "values"))
    found = g.cached_attention(q, k, v, past, g.input("past_length", ["batch"], "i32"), 4)
    assert [str(value.type) for value in found] == ["f32(batch, 1, 64)", *["f32(batch, 2, 100, 16)"] * 2]


def test_a_cache_of_another_rank_is_refused() -> None:
    """The message says what a cache looks like."""
    g = Graph("step")
    q = g.input("q", ["batch", 1, 64])
    past = (g.input("keys", ["batch", 100, 64]), g.input("values", ["batch", 100, 64]))
    with pytest.raises(GraphVerifyError, match=r"past keys are \(batch, heads, longest, head size\)"):
        g.cached_attention(q, q, q, past, g.input("past_length", ["batch"], "i32"), 4)


@pytest.mark.parametrize(("head", "rotated"), [(12, False), (8, True)])
def test_a_size_of_heads_that_no_kernel_takes_is_refused(head: int, rotated: bool) -> None:
    """The graph is refused when it is built, not in its first run."""
    g = Graph("step")
    q = g.input("q", ["batch", 1, head])
    past = (g.input("keys", ["batch", 1, 100, head]), g.input("values", ["batch", 1, 100, head]))
    tables = (g.input("cos", [100, head // 2]), g.input("sin", [100, head // 2])) if rotated else None
    with pytest.raises(GraphVerifyError, match="a head has a multiple of"):
        g.cached_attention(q, q, q, past, g.input("past_length", ["batch"], "i32"), 1, rotation=tables)


def f32(*dims: int | str) -> TensorType:
    return TensorType(DType.F32, Shape(dims))


SCAN = [f32("b", "s", 3), f32("b", "s", 3), f32(3, 4), f32("b", "s", 4), f32("b", "s", 4)]
NET = [f32(2, "s", 3, 4)] * 3 + [f32(2, "s", 3)] * 2


def test_results_have_the_type_of_what_goes_through() -> None:
    """The selective scan gives x's type, the delta rule v's and its state's."""
    assert SelectiveScan(4).infer(SCAN) == (SCAN[0],)
    assert GatedDeltaNet(4).infer(NET) == (NET[2],)
    assert GatedDeltaNet(4, True).infer([*NET, f32(2, 3, 4, 4)]) == (NET[2], f32(2, 3, 4, 4))


@pytest.mark.parametrize("place", range(5))
def test_each_input_must_fit_the_others(place: int) -> None:
    """A last dimension that differs is named with its input."""
    for op, good in ((SelectiveScan(4), SCAN), (GatedDeltaNet(4), NET)):
        bad = list(good)
        shape = bad[place].shape or Shape()
        bad[place] = f32(*[dim for dim in shape[:-1] if dim is not None], 7)
        with pytest.raises(GraphVerifyError, match=op.kind):
            op.infer(bad)


def test_a_state_is_wanted_only_when_it_is_carried() -> None:
    """The number of inputs goes with `carry_state`."""
    with pytest.raises(GraphVerifyError, match="takes q, k, v, g and beta; got 6 inputs"):
        GatedDeltaNet(4).infer([*NET, f32(2, 3, 4, 4)])
    with pytest.raises(GraphVerifyError, match="and a state; got 5 inputs"):
        GatedDeltaNet(4, True).infer(NET)


def test_the_number_of_states_is_read_from_a_and_must_be_known() -> None:
    """A named last dimension needs n given."""
    g = Graph()
    x, delta, a, b, c = (g.input(name, kind.shape or ()) for name, kind in zip("xdabc", SCAN, strict=True))
    assert g.selective_scan(x, delta, a, b, c).node.op == SelectiveScan(4)
    with pytest.raises(GraphVerifyError, match="give n"):
        g.selective_scan(x, delta, g.input("named", [3, "n"]), b, c)


@pytest.mark.parametrize("seed", [0, 1, 0xDEADBEEF, 2**32, 2**64 - 1])
@pytest.mark.parametrize("count", [0, 1, 4, 11])
def test_numbers_are_the_generators(seed: int, count: int) -> None:
    """Each number is the upper 24 bits of a word, in order."""
    assert uniforms(seed, count).tolist() == stream(seed, count)


def test_there_is_one_token_a_row() -> None:
    """The last axis goes away."""
    assert Sample().infer([f32("b", 7)]) == (TensorType(DType.I32, Shape(("b",))),)
    assert Sample(dtype=DType.I64).infer([f32(7)]) == (TensorType(DType.I64, Shape()),)


HALF = TensorType(DType.F16, Shape((2,)))
COMPLEX = TensorType(DType.C64, Shape((2,)))
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    **{
        f"a sample with {name} {value}": (lambda name=name, value=value: Sample(**{name: value}), "Sample")
        for name, value in (
            *(("top_k", -1), ("top_p", 1.5), ("top_p", math.nan), ("temperature", -0.1), ("temperature", math.nan)),
            *(("seed", 2**64), ("dtype", DType.BOOL)),
        )
    },
    "logits of three axes": (lambda: Sample().infer([f32(2, 3, 4)]), "Sample"),
    "logits of an unknown number of tokens": (lambda: Sample().infer([f32("b", "v")]), "Sample"),
    "logits of no token": (lambda: Sample().infer([f32(2, 0)]), "Sample"),
    "logits that are integers": (lambda: Sample().infer([TensorType(DType.I32, Shape((2, 3)))]), "Sample"),
    "an odd number of parts": (lambda: Fft().infer([f32(3)]), "even last dimension"),
    "no parts": (lambda: Fft().infer([f32(0)]), "even last dimension"),
    "an unknown number of parts": (lambda: Fft().infer([f32("n")]), "even last dimension"),
    "parts without an axis": (lambda: Fft().infer([f32()]), "even last dimension"),
    "a transform of f16": (lambda: Fft().infer([HALF]), "cast it"),
    "a conjugate of f16": (lambda: Conjugate().infer([HALF]), "cast it"),
    "a transform of complex numbers": (lambda: Fft().infer([COMPLEX]), "store the parts of complex numbers as f32"),
    "a conjugate of complex numbers": (lambda: Conjugate().infer([COMPLEX]), "store the parts of complex numbers as"),
    "a misspelt norm": (lambda: Fft(norm="orto"), "did you mean 'ortho'"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_an_op_does_not_take_is_refused_with_a_remedy(make: Callable[[], object], message: str) -> None:
    """NaN is out of every range; `[re | im]` has an even, known last dimension, and is f32 or f64."""
    with pytest.raises(GraphVerifyError, match=message):
        make()


def values(constant: Value) -> list[float]:
    op = constant.node.op
    assert isinstance(op, Constant)
    return [float(item) for item in op.data.numpy()]


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

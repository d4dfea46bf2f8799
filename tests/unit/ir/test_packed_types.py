"""Types and refusals of the quantised ops, packed products, solvers, blocks and lookups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx_ort import Graph, GraphVerifyError, Value
from rlx_ort.ir.ops.dequant import DequantMatMul

Leaf = tuple[tuple[Any, ...], str]

F, B, I8, I32, I64 = "f32", "u8", "i8", "i32", "i64"


def built(leaves: list[Leaf], build: Callable[..., Value]) -> tuple[Graph, Value]:
    g = Graph("g")
    value = build(g, *(g.input(f"x{i}", shape, dtype) for i, (shape, dtype) in enumerate(leaves)))
    g.outputs = [value]
    return g, value


NAMED: list[tuple[list[Leaf], Callable[..., Value], str]] = [
    ([(("n", 3), F)], lambda g, x: g.quantize(x, 0.5, -3), "i8(n, 3)"),
    ([(("b", 2, 3), I8), ((3, 4), I8)], lambda g, x, w: g.q_matmul(x, w, None, 1, 2, 3, 0.5), "i8(b, 2, 4)"),
    ([(("m", 6), F), ((6, 5), I8), ((3, 5), F)], lambda g, *v: g.dequant_matmul(*v, None, "Int8Block", 2), "f32(m, 5)"),
    ([(("m", 512), F), ((3 * 288,), B)], lambda g, x, w: g.dequant_matmul_packed(x, w, "Q4K"), "f32(m, 3)"),
    ([(("m", 3), F), ((4, 3, 5), F), (("m",), F)], lambda g, *v: g.grouped_matmul(*v), "f32(m, 5)"),
    ([(("u", 3), F), (("u",), I64)], lambda g, x, i: g.scatter_add(x, i, "t"), "f32(t, 3)"),
    ([(("b", 3, 3), F), (("b", 3, "k"), F)], lambda g, a, b: g.batched_dense_solve(a, b), "f32(b, 3, k)"),
    ([(("b", "q", 8), F), *[(("b", "k", 4), F)] * 2], lambda g, *v: g.gqa(*v, 4, 2, 2, "causal"), "f32(b, q, 8)"),
    ([(("n", 4), F), *[((4, 6), F)] * 2, ((6, 4), F)], lambda g, *v: g.swiglu_ffn(*v), "f32(n, 4)"),
    ([(("n", 2, 5, 4), F)], lambda g, x: g.im2col(x, (2, 3)), "f32(n, 12, 8)"),
    ([(("n", 2, "h", "w"), F)], lambda g, x: g.interpolate(x, (7, 3), "cubic"), "f32(n, 2, 7, 3)"),
]


@pytest.mark.parametrize(("leaves", "build", "expected"), NAMED, ids=[expected for _, _, expected in NAMED])
def test_named_dims_stay_named(leaves: list[Leaf], build: Callable[..., Value], expected: str) -> None:
    """Of every op that has sizes of its own; tests/backend/ops checks the types of all results."""
    _, value = built(leaves, build)
    assert str(value.type) == expected


REFUSALS: list[tuple[str, list[Leaf], Callable[..., Value], str]] = [
    ("a scale of 0", [((3,), F)], lambda g, x: g.quantize(x, 0.0), "finite scales above 0"),
    ("a zero point out of range", [((3,), F)], lambda g, x: g.quantize(x, 1.0, 128), "between -128 and 127"),
    ("quantize of integers", [((3,), I32)], lambda g, x: g.quantize(x, 1.0), "floating-point"),
    (
        "too few scales",
        [((2, 3), F)],
        lambda g, x: g.quantize_per_channel(x, 1, [1, 1], [0, 0]),
        "to be 2, got 3",
    ),
    ("dequantize of u8", [((3,), B)], lambda g, x: g.dequantize(x, 1.0), "as i8, got u8"),
    ("three bits", [((3,), F)], lambda g, x: g.fake_quantize(x, 3), "8, 4 and 2 bits"),
    ("fixed without a state", [((3,), F)], lambda g, x: g.fake_quantize(x, scale_mode="fixed"), "takes x and a state"),
    (
        "a float bias",
        [((2, 3), I8), ((3, 4), I8), ((4,), F)],
        lambda g, x, w, b: g.q_matmul(x, w, b, 0, 0, 0, 1.0),
        "i32",
    ),
    ("q_matmul of u8", [((2, 3), B), ((3, 4), I8)], lambda g, x, w: g.q_matmul(x, w, None, 0, 0, 0, 1.0), "x as i8"),
    (
        "odd groups",
        [((1, 4, 5, 5), I8), ((5, 2, 1, 1), I8)],
        lambda g, x, w: g.q_conv2d(x, w, None, 0, 0, 0, 1.0, groups=2),
        "5 channels into 2 groups",
    ),
    (
        "K that is no multiple of the block",
        [((2, 7), F), ((7, 5), I8), ((3, 5), F)],
        lambda g, x, w, s: g.dequant_matmul(x, w, s, None, "int8_block", 2),
        "K must be a multiple; got 7",
    ),
    (
        "K that is no multiple of a GGUF block",
        [((2, 300), F), ((3, 144), B)],
        lambda g, x, w: g.dequant_matmul_packed(x, w, "q4_k"),
        "k must be a multiple; got 300",
    ),
    (
        "rows of another format",
        [((2, 256), F), ((3, 110), B)],
        lambda g, x, w: g.dequant_matmul_packed(x, w, "q4_k"),
        "to be 144, got 110",
    ),
    (
        "a zero point for symmetric blocks",
        [((2, 4), F), ((4, 5), I8), ((2, 5), F)],
        lambda g, x, w, s: g.dequant_matmul(x, w, s, s, "int8_block", 2),
        "takes x, w and scale",
    ),
    (
        "a block scheme without a block",
        [((2, 4), F), ((4, 5), I8), ((2, 5), F)],
        lambda g, x, w, s: g.dequant_matmul(x, w, s, None, "int8_block"),
        "a block size of at least 1",
    ),
    (
        "a packed product there is none of",
        [((2, 256), F), ((3, 84), B)],
        lambda g, x, w: g.dequant_matmul_packed(x, w, "q2_k", packed=True),
        "no packed product, only int4_block, q4_0, q4_k",
    ),
    (
        "an odd number of nvfp4 columns",
        [((2, 16), F), ((16, 2), B), ((1, 5), B), ((1,), F)],
        lambda g, x, w, s, z: g.dequant_matmul_nvfp4(x, w, s, z),
        "N must be even; got 5",
    ),
    (
        "unknown K",
        [((2, "k"), F), ((3, 144), B)],
        lambda g, x, w: g.dequant_matmul_packed(x, w, "q4_k"),
        "bind it first",
    ),
    (
        "an expert for each row",
        [((3, 4), F), ((2, 4, 5), F), ((2,), I64)],
        lambda g, x, w, i: g.grouped_matmul(x, w, i),
        "to be 3, got 2",
    ),
    (
        "a matrix that is not square",
        [((3, 2), F), ((3,), F)],
        lambda g, a, b: g.dense_solve(a, b),
        "as many as columns",
    ),
    ("a batch for one solve", [((2, 3, 3), F), ((2, 3), F)], lambda g, a, b: g.dense_solve(a, b), r"\(N, N\)"),
    (
        "heads that cannot be shared out",
        [((2, 6), F), ((2, 4), F), ((2, 4), F)],
        lambda g, q, k, v: g.gqa(q, k, v, 3, 2, 2),
        "3 query heads cannot share 2",
    ),
    ("a head of 6", [((6, 6), F)], lambda g, x: g.axial_rope2d(x, 3, 2, 6, 1), "multiple of 4"),
    ("more tokens than places", [((7, 8), F)], lambda g, x: g.axial_rope2d(x, 3, 2, 8, 1), "6 places"),
    ("a scatter mode", [((3,), F), ((2, 1), I64), ((2,), F)], lambda g, x, i, u: g.scatter_nd(x, i, u, "avg"), "add"),
    ("too deep an index", [((3,), F), ((2, 2), I64)], lambda g, x, i: g.gather_nd(x, i), "1 to 1"),
    ("a running product of unknown size", [(("n",), F)], lambda g, x: g.cumprod(x), "bind the dimension"),
    ("corners of nearest", [((1, 1, 4), F)], lambda g, x: g.interpolate(x, (8,), "nearest", True), "linear or cubic"),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case[0])
def test_refusals_say_what_is_wrong(case: tuple[str, list[Leaf], Callable[..., Value], str]) -> None:
    """The message names what was found and what is wanted."""
    with pytest.raises(GraphVerifyError, match=case[3]):
        built(case[1], case[2])


def test_a_thousand_scales_are_not_printed() -> None:
    """Messages show the first scales only."""
    g = Graph("g")
    value = g.quantize_per_channel(g.input("x", [1000]), 0, np.ones(1000).tolist(), [0] * 1000)
    assert len(value.node.op.describe()) < 100


def test_a_block_of_a_packed_product_is_a_power_of_two() -> None:
    """The kernel takes 16, 32, 64 and so on."""
    with pytest.raises(GraphVerifyError, match="got 24"):
        DequantMatMul("int4_block", 24, packed=True)

"""Products with packed weights for every scheme, and those of mixtures of experts, against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from op_tests.harness import Array, check, rand, run

from rlx_ort.device import Device
from rlx_ort.ir.gguf_blocks import GGUF_FORMATS

CPU = Device.CPU
RECORDED = np.load(Path(__file__).parents[2] / "data" / "gguf_blocks.npz")
GGUF = sorted(set(GGUF_FORMATS) - {"q8_k"})


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def packed_bytes(codes: Array) -> Array:
    """Return half bytes as bytes, element p * N + j, low half first."""
    flat = codes.reshape(-1)
    even = np.append(flat, np.zeros(flat.size % 2, np.uint8)).astype(np.uint8)
    return (even[::2] | (even[1::2] << 4)).astype(np.uint8)


@pytest.mark.parametrize(("k", "n", "block"), [(64, 3, 32), (6, 3, 2), (3, 3, 1), (4, 1, 4)])
@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-5), (np.float16, 5e-3), (np.float64, 1e-12)])
def test_int8_blocks(k: int, n: int, block: int, dtype: type, bound: float) -> None:
    """(w - zp) * s with fractional zero points, and w * s."""
    codes = rng(k, n).integers(-128, 128, (k, n)).astype(np.int8)
    scale, zero = (rng(k, part).random((k // block, n)).astype(np.float32) for part in (1, 2))
    build = lambda g, x: [  # noqa: E731
        g.dequant_matmul(x, codes, scale, zero * 9, "int8_block_asym", block),
        g.dequant_matmul(x, codes, scale, None, "int8_block", block),
    ]
    check(CPU, build, rand(2, k).astype(dtype), bound=bound)


@pytest.mark.parametrize(("k", "n", "block"), [(64, 4, 32), (32, 5, 16), (3, 3, 1), (6, 3, 3)])
@pytest.mark.parametrize("form", ["bytes", "u4"])
@pytest.mark.parametrize("with_zero", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_int4_blocks(k: int, n: int, block: int, form: str, with_zero: bool, packed: bool) -> None:
    """Codes are 0 to 15 with no 8 taken off, in bytes or as u4, whether expanded or multiplied as they are."""
    if packed and block < 16:
        pytest.skip("the packed product takes blocks of 16 and more")
    codes = rng(k, n).integers(0, 16, (k, n)).astype(np.uint8)
    scale, zero = (rng(k, part).random((k // block, n)).astype(np.float32) for part in (1, 2))
    data: Array = packed_bytes(codes) if form == "bytes" else codes.astype(ml_dtypes.uint4)
    zeros = zero * 15 if with_zero else None
    check(CPU, lambda g, x: g.dequant_matmul(x, data, scale, zeros, "int4_block", block, packed=packed), rand(3, k))


def test_packed_products_of_f64_have_the_precision_of_f64() -> None:
    """The kernel for packed weights takes no f64, so the weight is expanded."""
    codes = rng(32, 4).integers(0, 16, (32, 4)).astype(np.uint8)
    scale, data = rng(2, 4).random((2, 4)).astype(np.float32), packed_bytes(codes)
    build = lambda g, x: g.dequant_matmul(x, data, scale, None, "int4_block", 16, packed=True)  # noqa: E731
    check(CPU, build, rand(3, 32) / np.float64(7), bound=1e-14)


@pytest.mark.parametrize(
    ("scheme", "kind"), [("fp8_e4m3", ml_dtypes.float8_e4m3fn), ("fp8_e5m2", ml_dtypes.float8_e5m2)]
)
@pytest.mark.parametrize("as_bytes", [True, False])
def test_fp8(scheme: str, kind: Any, as_bytes: bool) -> None:
    """8-bit floats, as such or as bytes, with a scale a column."""
    weight = rng(1).normal(size=(8, 5)).astype(kind)
    scale = rng(2).random(5).astype(np.float32)
    data = weight.view(np.uint8) if as_bytes else weight
    check(CPU, lambda g, x: g.dequant_matmul(x, data, scale, None, scheme), rand(3, 8))


@pytest.mark.parametrize("as_bytes", [True, False])
def test_nvfp4(as_bytes: bool) -> None:
    """All sixteen 4-bit floats, with scales in fp8 for 16 rows and one for all."""
    data = packed_bytes(np.arange(32 * 6) % 16).reshape(32, 3)
    scale = rng(3).random((2, 6)).astype(ml_dtypes.float8_e4m3fn)
    scales, whole = scale.view(np.uint8) if as_bytes else scale, np.array([0.3], np.float32)
    check(CPU, lambda g, x: g.dequant_matmul_nvfp4(x, data, scales, whole), rand(3, 32))


@pytest.mark.parametrize("name", GGUF)
def test_gguf_products(name: str) -> None:
    """Rows of blocks are the columns of the weight."""
    raw, weights = RECORDED[f"{name}_raw"], RECORDED[f"{name}_values"].astype(np.float64)
    x = rand(4, weights.shape[1])
    for data in (raw, raw.reshape(-1)):
        build = lambda g, x, data=data: g.dequant_matmul_packed(x, data, name)  # noqa: E731
        check(CPU, build, x, reference=lambda x: x @ weights.T)


@pytest.mark.parametrize("name", ["q4_0", "q4_k"])
@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-5), (np.float64, 1e-5)])
def test_gguf_products_that_stay_packed(name: str, dtype: type, bound: float) -> None:
    """The packed product gives the same numbers, for any leading dimensions."""
    raw, weights = RECORDED[f"{name}_raw"], RECORDED[f"{name}_values"].astype(np.float64)
    check(
        CPU,
        lambda g, x: g.dequant_matmul_packed(x, raw, name, packed=True),
        rand(2, 2, weights.shape[1]).astype(dtype),
        shapes=[["b", "s", weights.shape[1]]],
        bound=bound,
        reference=lambda x: x @ weights.T,
    )


def test_bytes_may_be_an_input_of_the_run() -> None:
    """Nothing relies on the weights being known before the run."""
    raw, weights = RECORDED["q6_k_raw"], RECORDED["q6_k_values"].astype(np.float64)
    x = rand(2, weights.shape[1])
    build = lambda g, x, w: g.dequant_matmul_packed(x, w, "q6_k")  # noqa: E731
    check(CPU, build, x, raw, reference=lambda x, w: x @ weights.T)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.25e-7, 65504.0, 6.1e-5, 5.96e-8, -5.96e-8, float("inf")])
def test_f16_scales_are_read_exactly(value: float) -> None:
    """Normal and subnormal numbers, zeros and infinities, from their two bytes."""
    half = np.array([value], "<f2")
    raw = np.concatenate([half.view(np.uint8), np.ones(32, np.uint8)]).reshape(1, 34)
    (result,) = run(CPU, lambda g, w: g.dequant_moe_weights(w, "q8_0"), raw[None])
    np.testing.assert_array_equal(result, np.full((1, 32, 1), half.astype(np.float32)[0]))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.1415927, 3e38, -1.2e-37, 7e-20])
def test_f32_scales_are_read_exactly(value: float) -> None:
    """Normal numbers from their four bytes."""
    single = np.array([value], "<f4")
    codes = np.ones(256, np.int8)
    raw = np.concatenate([single.view(np.uint8), codes.view(np.uint8), np.zeros(32, np.uint8)]).reshape(1, 292)
    (result,) = run(CPU, lambda g, w: g.dequant_moe_weights(w, "q8_k"), raw[None])
    np.testing.assert_array_equal(result, np.full((1, 256, 1), single[0]))


@pytest.mark.parametrize("name", GGUF)
def test_expert_slabs(name: str) -> None:
    """Bytes of (E, N) rows become weights (E, K, N)."""
    raw, weights = RECORDED[f"{name}_raw"], RECORDED[f"{name}_values"]
    expected = np.stack([weights.T, weights[::-1].T])
    build = lambda g, w: g.dequant_moe_weights(w, name)  # noqa: E731
    check(CPU, build, np.stack([raw, raw[::-1]]), bound=1e-6, reference=lambda w: expected)


@pytest.mark.parametrize("rows", [0, 2, 7])
@pytest.mark.parametrize("is_open", [True, False])
def test_grouped_products(rows: int, is_open: bool) -> None:
    """Few rows pick their expert's bytes; many, or an unknown number, go through the experts."""
    raw, weights = RECORDED["q4_k_raw"], RECORDED["q4_k_values"].astype(np.float64)
    slabs = np.stack([raw, raw[::-1], np.roll(raw, 1, 0)])
    expanded = np.stack([weights, weights[::-1], np.roll(weights, 1, 0)])
    chosen = rng(rows).integers(0, 2, rows)  # expert 2 has no row
    k = weights.shape[1]
    check(
        CPU,
        lambda g, x, chosen: g.dequant_grouped_matmul(x, slabs, chosen, "q4_k"),
        rand(rows, k),
        chosen,
        shapes=[["m", k], ["m"]] if is_open else [],
        strict=False,
        reference=lambda x, chosen: np.einsum("mk,mnk->mn", x, expanded[chosen]),
    )


@pytest.mark.parametrize("rows", [0, 1, 3, 9])
@pytest.mark.parametrize("is_open", [True, False])
def test_grouped_matmul(rows: int, is_open: bool, device: Device) -> None:
    """Each row meets its expert's matrix; an expert without rows does no harm."""
    if device.kind != "cpu" and (rows == 0 or is_open):
        pytest.skip("loops and empty tensors are checked on the CPU")
    chosen = np.random.default_rng(rows).integers(0, 3, rows).astype(np.int32)  # expert 3 has no row
    check(
        device,
        lambda g, x, w, i: g.grouped_matmul(x, w, i),
        rand(rows, 4),
        rand(4, 4, 5),
        chosen,
        shapes=[["m", 4], None, ["m"]] if is_open else [],
        strict=False,
    )


def test_grouped_matmul_takes_float_experts() -> None:
    """Indices may travel as floats."""
    experts = np.array([1.0, 0.0, 1.0], np.float32)
    check(CPU, lambda g, x, w, i: g.grouped_matmul(x, w, i), rand(3, 4), rand(2, 4, 5), experts, strict=False)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(np.float32, 1e-6), (np.float64, 1e-12), (np.float16, 2e-3), (np.int32, 0), (np.int64, 0)]
)
def test_scatter_add(dtype: type, bound: float) -> None:
    """Rows that meet are added; rows that nothing reaches are 0."""
    updates, indices = (rand(6, 2) * 10).astype(dtype), np.array([4, 0, 4, 4, 1, 0])
    check(CPU, lambda g, u, i: g.scatter_add(u, i, 6), updates, indices, bound=bound)


@pytest.mark.parametrize("shape", [(0, 3), (4,), (3, 2, 2)])
def test_scatter_add_of_any_rank(shape: tuple[int, ...]) -> None:
    """No updates at all, numbers, and matrices."""
    check(CPU, lambda g, u, i: g.scatter_add(u, i, 3), rand(*shape), np.arange(shape[0], dtype=np.int64) % 2)


def test_scatter_add_undoes_a_gather_of_named_rows() -> None:
    """The number of rows may be a named dim of another input."""
    build = lambda g, x, i: g.scatter_add(g.gather(x, i), i, "t")  # noqa: E731
    x, expected = rand(5, 3), np.zeros((5, 3))
    expected[[3, 0]] = 2 * x[3], x[0]
    check(CPU, build, x, np.array([3, 0, 3]), shapes=[["t", 3], ["u"]], reference=lambda *_: expected)

"""Grouped-query attention and blocks of whole layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from op_tests.harness import Array, check, rand, run

from rlx_ort import Device, Graph
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.ir.ops.blocks import FusedTransformerLayer

CPU = Device.CPU
BATCH, LENGTH, WIDTH, HEADS, SIZE, INNER = 2, 3, 8, 2, 4, 10
MASK = np.array([[1, 0, 1], [0.49, 0.5, 1]], np.float32)


def weight(*shape: int, seed: int = 0) -> Array:
    return rand(*shape, seed=seed) * np.float32(0.5)


QKV, OUT = weight(WIDTH, 3 * HEADS * SIZE), weight(HEADS * SIZE, WIDTH)
QKV_BIAS, OUT_BIAS = weight(3 * HEADS * SIZE), weight(WIDTH)
COS, SIN = weight(LENGTH, SIZE // 2), weight(LENGTH, SIZE // 2, seed=1)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("with_rope", [True, False])
def test_fused_attention_block(with_bias: bool, with_rope: bool, device: Device) -> None:
    """Projection, embedding, attention under a key mask, projection; the batch is open."""
    biases = (QKV_BIAS, OUT_BIAS) if with_bias else (None, None)
    tables = (COS, SIN) if with_rope else (None, None)
    check(
        device,
        lambda g, h: g.fused_attention_block(h, QKV, OUT, MASK, HEADS, SIZE, *biases, *tables),
        rand(BATCH, LENGTH, WIDTH),
        shapes=[["b", LENGTH, WIDTH]],
        strict=False,
    )


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("pre_norm", [True, False])
def test_fused_transformer_layer(with_bias: bool, pre_norm: bool) -> None:
    """Attention and feed-forward, each with a residual, normalised before or after."""
    norms = [weight(WIDTH, seed=seed) for seed in range(4)]
    arrays = [MASK, QKV, OUT, *norms[:2], weight(WIDTH, INNER), weight(INNER, WIDTH), *norms[2:]]
    arrays += [QKV_BIAS, OUT_BIAS, weight(INNER, seed=7), weight(WIDTH, seed=8)] if with_bias else []
    op = FusedTransformerLayer(HEADS, SIZE, with_bias, pre_norm)
    check(CPU, lambda g, h: g.append(op, h, *(g.constant(array) for array in arrays)), rand(BATCH, LENGTH, WIDTH))


@pytest.mark.parametrize("batch", [(), (2,)])
def test_axial_rope2d(batch: tuple[int, ...], device: Device) -> None:
    """Neighbours are turned by the column in the first half of a head, by the row in the second."""
    columns, rows, repeat, size, heads = 3, 2, 2, 8, 2
    x = rand(*batch, columns * rows * repeat, heads * size)
    check(device, lambda g, x: g.axial_rope2d(x, columns, rows, size, heads, 100.0, repeat), x, strict=False)


def test_linear_builders() -> None:
    """X W + b, plain, with an activation, and without a name for it."""
    w, b = weight(4, 5), weight(5)
    x = rand(3, 4)
    plain, bent, fused = run(
        CPU,
        lambda g, x: [g.linear_bias(x, w, b), g.linear_bias_act(x, w, b, "relu"), g.linear_fused(x, w, b)],
        x,
    )
    expected = x.astype(np.float64) @ w + b
    for found, wanted in ((plain, expected), (bent, np.maximum(expected, 0)), (fused, expected)):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_swiglu_builders() -> None:
    """(x U * silu(x G)) D, with two weights or with both in one, in either order."""
    up, gate, down = weight(4, 6), weight(4, 6, seed=1), weight(6, 4)
    x = rand(3, 4)
    results = run(
        CPU,
        lambda g, x: [
            *g.shared_matmul_pair(x, up, gate),
            g.swiglu_ffn(x, up, gate, down),
            g.fused_swiglu_ffn(x, np.concatenate([up, gate], 1), down),
            g.fused_swiglu_ffn(x, np.concatenate([gate, up], 1), down, gate_first=True),
        ],
        x,
    )
    raised, gated = x.astype(np.float64) @ up, x.astype(np.float64) @ gate
    mixed = (raised * gated / (1 + np.exp(-gated))) @ down
    for found, wanted in zip(results, (raised, gated, mixed, mixed, mixed), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


Q_HEADS, SHARED = 6, 2


def arranged(x: Array, layout: str) -> Array:
    """Bring `(B, H, S, D)` to a layout."""
    if layout == "bhsd":
        return x
    by_place = np.ascontiguousarray(x.swapaxes(1, 2))
    if layout == "bshd":
        return by_place
    flat = by_place.reshape(*by_place.shape[:2], -1)
    return flat[0] if layout == "sw" else flat


def open_shape(x: Array, layout: str, length: str) -> list[Any]:
    shape: list[Any] = list(x.shape)
    if layout != "sw":
        shape[0] = "b"
    shape[{"bhsd": 2, "sw": 0}.get(layout, 1)] = length
    return shape


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "bsw", "sw"])
@pytest.mark.parametrize("kind", ["none", "causal", "sliding", "custom", "bias"])
@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (1, 5), (5, 3)])
@pytest.mark.parametrize("is_open", [True, False])
def test_gqa(layout: str, kind: str, queries: int, keys: int, is_open: bool) -> None:
    """Every mask in every layout, with sizes known before the run or not."""
    batch = 1 if layout == "sw" else 2
    q = rand(batch, Q_HEADS, queries, SIZE)
    k, v = rand(batch, SHARED, keys, SIZE), rand(batch, SHARED, keys, SIZE, seed=1)
    masks = {
        "custom": (rand(batch, keys) > 0).astype(np.float32),
        "bias": rand(batch, Q_HEADS, queries, keys),
    }
    arrays = [arranged(item, layout) for item in (q, k, v)]
    shapes = [open_shape(array, layout, name) for array, name in zip(arrays, "qkk", strict=True)]
    spelled = "sliding:1" if kind == "sliding" else kind
    check(
        CPU,
        lambda g, q, k, v: g.gqa(q, k, v, Q_HEADS, SHARED, SIZE, spelled, masks.get(kind), scale=0.7, softcap=3.0),
        *arrays,
        shapes=shapes if is_open else [],
        strict=False,
    )


@pytest.mark.parametrize("kind", ["none", "causal"])
def test_gqa_on_the_device(kind: str, device: Device) -> None:
    """Basic ops suffice."""
    q, k = rand(1, Q_HEADS, 3, SIZE), rand(1, SHARED, 5, SIZE)
    check(
        device,
        lambda g, q, k: g.gqa(q, k, k, Q_HEADS, SHARED, SIZE, kind, scale=0.7, softcap=3.0),
        *(q, k),
        strict=False,
    )


def test_the_scale_defaults_to_that_of_a_head() -> None:
    """1 / sqrt(head_dim), as without sharing."""
    check(CPU, lambda g, q, k: g.gqa(q, k, k, 2, 1, SIZE), rand(1, 2, 2, SIZE), rand(1, 1, 3, SIZE))


@pytest.mark.parametrize(("kind", "queries", "copies"), [("none", 3, 0), ("causal", 1, 0), ("causal", 3, 2)])
def test_keys_and_values_are_copied_only_where_a_mask_needs_it(kind: str, queries: int, copies: int) -> None:
    """A decode step, with one query, reads the cache as it is."""
    g = Graph("g")
    q = g.input("q", [1, Q_HEADS, queries, SIZE])
    k, v = (g.input(name, [1, SHARED, 5, SIZE]) for name in "kv")
    g.outputs = [g.gqa(q, k, v, Q_HEADS, SHARED, SIZE, kind)]
    assert [node.op_type for node in export_model(g).nodes].count("Expand") == copies

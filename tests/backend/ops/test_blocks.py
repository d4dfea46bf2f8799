"""Blocks of whole layers against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from op_tests.harness import Array, check, rand, run

from rlx_ort.device import Device
from rlx_ort.ir.ops.blocks import FusedTransformerLayer

CPU = Device.CPU
BATCH, LENGTH, WIDTH, HEADS, SIZE, INNER = 2, 3, 8, 2, 4, 10
MASK = np.array([[1, 0, 1], [0.49, 0.5, 1]], np.float32)


def weight(*shape: int, seed: int = 0) -> Array:
    return rand(*shape, seed=seed) * np.float32(0.5)


QKV, OUT = weight(WIDTH, 3 * HEADS * SIZE), weight(HEADS * SIZE, WIDTH)
QKV_BIAS, OUT_BIAS = weight(3 * HEADS * SIZE), weight(WIDTH)
COS, SIN = weight(LENGTH, SIZE // 2), weight(LENGTH, SIZE // 2, seed=1)


def attended(hidden: Array, with_bias: bool, with_rope: bool) -> Array:
    """Compute the attention block in f64."""
    qkv = hidden @ QKV.astype(np.float64) + (QKV_BIAS if with_bias else 0)
    q, k, v = (part.reshape(BATCH, LENGTH, HEADS, SIZE) for part in np.split(qkv, 3, axis=-1))
    if with_rope:
        q, k = turned(q), turned(k)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(SIZE)
    scores = np.where(MASK[:, None, None, :] < 0.5, -1e9, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
    return mixed.reshape(BATCH, LENGTH, -1) @ OUT.astype(np.float64) + (OUT_BIAS if with_bias else 0)


def turned(x: Array) -> Array:
    low, high = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    cos, sin = COS[None, :, None], SIN[None, :, None]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("with_rope", [True, False])
def test_fused_attention_block(with_bias: bool, with_rope: bool, device: Device) -> None:
    """Projection, embedding, attention under a key mask, projection; the batch is open."""
    biases = (QKV_BIAS, OUT_BIAS) if with_bias else (None, None)
    tables = (COS, SIN) if with_rope else (None, None)
    check(
        device,
        lambda g, h: g.fused_attention_block(h, QKV, OUT, MASK, HEADS, SIZE, *biases, *tables),
        lambda h: attended(h, with_bias, with_rope),
        rand(BATCH, LENGTH, WIDTH),
        shapes=[["b", LENGTH, WIDTH]],
        strict=False,
    )


def normal(x: Array, gamma: Array, beta: Array) -> Array:
    middle = x - x.mean(-1, keepdims=True)
    return middle / np.sqrt((middle**2).mean(-1, keepdims=True) + 1e-5) * gamma + beta


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("pre_norm", [True, False])
def test_fused_transformer_layer(with_bias: bool, pre_norm: bool) -> None:
    """Attention and feed-forward, each with a residual, normalised before or after."""
    norms = [weight(WIDTH, seed=seed) for seed in range(4)]
    up, down = weight(WIDTH, INNER), weight(INNER, WIDTH)
    up_bias, down_bias = weight(INNER, seed=7), weight(WIDTH, seed=8)
    arrays = [MASK, QKV, OUT, *norms[:2], up, down, *norms[2:]]
    arrays += [QKV_BIAS, OUT_BIAS, up_bias, down_bias] if with_bias else []
    op = FusedTransformerLayer(HEADS, SIZE, with_bias, pre_norm)

    def feed_forward(x: Array) -> Array:
        y = x @ up.astype(np.float64) + (up_bias if with_bias else 0)
        y = y * 0.5 * (1 + np.vectorize(math.erf)(y / math.sqrt(2)))
        return y @ down.astype(np.float64) + (down_bias if with_bias else 0)

    def reference(hidden: Array) -> Array:
        if pre_norm:
            middle = hidden + attended(normal(hidden, *norms[:2]), with_bias, False)
            return middle + feed_forward(normal(middle, *norms[2:]))
        middle = normal(hidden + attended(hidden, with_bias, False), *norms[:2])
        return normal(middle + feed_forward(middle), *norms[2:])

    check(
        CPU,
        lambda g, h: g.append(op, h, *(g.constant(array) for array in arrays)),
        reference,
        rand(BATCH, LENGTH, WIDTH),
    )


@pytest.mark.parametrize("batch", [(), (2,)])
def test_axial_rope2d(batch: tuple[int, ...], device: Device) -> None:
    """Neighbours are turned by the column in the first half of a head, by the row in the second."""
    columns, rows, repeat, size, heads, theta = 3, 2, 2, 8, 2, 100.0
    tokens = columns * rows * repeat

    def reference(x: Array) -> Array:
        source = x.reshape(*batch, tokens, heads, size)
        result = source.copy()
        for token in range(tokens):
            place = token // repeat
            for half, step in ((0, place % columns), (1, place // columns)):
                for pair in range(size // 4):
                    angle = step * theta ** (-4 * pair / size)
                    i = half * size // 2 + 2 * pair
                    a, b = source[..., token, :, i], source[..., token, :, i + 1]
                    result[..., token, :, i] = a * math.cos(angle) - b * math.sin(angle)
                    result[..., token, :, i + 1] = b * math.cos(angle) + a * math.sin(angle)
        return result.reshape(x.shape)

    check(
        device,
        lambda g, x: g.axial_rope2d(x, columns, rows, size, heads, theta, repeat),
        reference,
        rand(*batch, tokens, heads * size),
        strict=False,
    )


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

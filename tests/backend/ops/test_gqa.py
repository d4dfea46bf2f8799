"""Attention with shared keys and values against numpy, which repeats them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from op_tests.harness import Array, check, rand

from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.device import Device
from rlx_ort.ir.graph import Graph

CPU = Device.CPU
HEADS, SHARED, SIZE = 6, 2, 4


def reference(q: Array, k: Array, v: Array, kind: str, window: int, mask: Array | None) -> Array:
    """Attend in f64 over `(B, H, S, D)`, query head h using head h // 3 of k and v; scale 0.7, cap 3."""
    k, v = (np.repeat(item, HEADS // SHARED, axis=1) for item in (k, v))
    scores = 3 * np.tanh(q @ k.swapaxes(-1, -2) * 0.7 / 3)
    queries, keys = scores.shape[-2:]
    place = np.arange(queries)[:, None] + max(keys - queries, 0)
    key = np.arange(keys)[None]
    if kind in {"causal", "sliding"}:
        seen = key <= place
        seen &= (key >= place - window) | (kind == "causal")
        scores = np.where(seen, scores, -1e9)
    if kind == "custom" and mask is not None:
        scores = np.where(mask[:, None, None, :] < 0.5, -1e9, scores)
    if kind == "bias" and mask is not None:
        scores = scores + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def arranged(x: Array, layout: str) -> Array:
    """Bring `(B, H, S, D)` to a layout."""
    if layout == "bhsd":
        return x
    by_place = np.ascontiguousarray(x.swapaxes(1, 2))
    if layout == "bshd":
        return by_place
    flat = by_place.reshape(*by_place.shape[:2], -1)
    return flat[0] if layout == "sw" else flat


def restored(x: Array, layout: str, heads: int) -> Array:
    if layout == "bhsd":
        return x
    lead = (1,) if layout == "sw" else ()
    return x.reshape(*lead, *x.shape[: 1 if layout == "sw" else 2], heads, SIZE).swapaxes(1, 2)


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
    q = rand(batch, HEADS, queries, SIZE)
    k, v = rand(batch, SHARED, keys, SIZE), rand(batch, SHARED, keys, SIZE, seed=1)
    masks = {
        "custom": (rand(batch, keys) > 0).astype(np.float32),
        "bias": rand(batch, HEADS, queries, keys),
    }
    mask = masks.get(kind)
    arrays = [arranged(item, layout) for item in (q, k, v)]
    shapes = [open_shape(array, layout, name) for array, name in zip(arrays, "qkk", strict=True)]
    spelled = "sliding:1" if kind == "sliding" else kind

    def expected(q: Array, k: Array, v: Array) -> Array:
        parts = zip((q, k, v), (HEADS, SHARED, SHARED), strict=True)
        return arranged(reference(*(restored(x, layout, h) for x, h in parts), kind, 1, mask), layout)

    check(
        CPU,
        lambda g, q, k, v: g.gqa(q, k, v, HEADS, SHARED, SIZE, spelled, mask, scale=0.7, softcap=3.0),
        expected,
        *arrays,
        shapes=shapes if is_open else [],
        strict=False,
    )


@pytest.mark.parametrize("kind", ["none", "causal"])
def test_gqa_on_the_device(kind: str, device: Device) -> None:
    """Basic ops suffice."""
    q, k = rand(1, HEADS, 3, SIZE), rand(1, SHARED, 5, SIZE)
    check(
        device,
        lambda g, q, k, v: g.gqa(q, k, v, HEADS, SHARED, SIZE, kind, scale=0.7, softcap=3.0),
        lambda q, k, v: reference(q, k, v, kind, 0, None),
        q,
        k,
        k,
        strict=False,
    )


def test_the_scale_defaults_to_that_of_a_head() -> None:
    """1 / sqrt(head_dim), as without sharing."""
    q, k = rand(1, 2, 2, SIZE), rand(1, 1, 3, SIZE)

    def expected(q: Array, k: Array) -> Array:
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(SIZE)
        weights = np.exp(scores)
        return weights / weights.sum(-1, keepdims=True) @ k

    check(CPU, lambda g, q, k: g.gqa(q, k, k, 2, 1, SIZE), expected, q, k)


@pytest.mark.parametrize(("kind", "queries", "copies"), [("none", 3, 0), ("causal", 1, 0), ("causal", 3, 2)])
def test_keys_and_values_are_copied_only_where_a_mask_needs_it(kind: str, queries: int, copies: int) -> None:
    """A decode step, with one query, reads the cache as it is."""
    g = Graph("g")
    q = g.input("q", [1, HEADS, queries, SIZE])
    k, v = (g.input(name, [1, SHARED, 5, SIZE]) for name in "kv")
    g.outputs = [g.gqa(q, k, v, HEADS, SHARED, SIZE, kind)]
    assert [node.op_type for node in export_model(g).nodes].count("Expand") == copies

"""Quantised ops and products with packed weights."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from interpreter.core import Array, rule, sized
from interpreter.layers import convolve, padded
from rlx_ort.ir.core import Node
from rlx_ort.ir.gguf_blocks import GGUF_FORMATS, dequantize_blocks
from rlx_ort.ir.ops import dequant, quant

__all__: list[str] = []

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _along(values: Array | tuple[float, ...] | tuple[int, ...], axis: int | None, rank: int) -> Array:
    """Return scales so that they broadcast along an axis; one scale broadcasts anyway."""
    array = np.asarray(values, np.float64)
    if axis is None:
        return array.reshape(())
    return array.reshape([-1 if place == axis % rank else 1 for place in range(rank)])


def _saturated(values: Array) -> Array:
    return np.clip(values, -128, 127).astype(np.int8)


@rule(quant.Quantize)
def _quantize(node: Node, op: quant.Quantize, x: Array) -> Array:
    scale, zero = (_along(item, op.axis, x.ndim) for item in (op.scales, op.zero_points))
    return _saturated(np.rint(x / scale) + zero)


@rule(quant.Dequantize)
def _dequantize(node: Node, op: quant.Dequantize, q: Array) -> Array:
    scale, zero = (_along(item, op.axis, q.ndim) for item in (op.scales, op.zero_points))
    return np.asarray((q.astype(np.float64) - zero) * scale)


def _simulated(x: Array, scale: Array, bits: int) -> Array:
    qmax = {8: 127, 4: 7, 2: 1}[bits]
    return np.asarray(np.clip(np.rint(x / scale), -qmax, qmax) * scale)


@rule(quant.FakeQuantize)
def _fake_quantize(node: Node, op: quant.FakeQuantize, x: Array, state: Array | None = None) -> Array:
    if state is not None:
        return _simulated(x, _along(state, op.axis, x.ndim), op.bits)
    others = None if op.axis is None else tuple(place for place in range(x.ndim) if place != op.axis % x.ndim)
    largest = np.abs(x).max(axis=others, keepdims=True) if x.size else np.zeros(())
    return _simulated(x, np.maximum(largest / {8: 127, 4: 7, 2: 1}[op.bits], 1e-12), op.bits)


@rule(quant.FakeQuantizeLSQ)
def _fake_lsq(node: Node, op: quant.FakeQuantizeLSQ, x: Array, scale: Array) -> Array:
    return _simulated(x, _along(scale, op.axis, x.ndim), op.bits)


@rule(quant.QMatMul)
def _q_matmul(node: Node, op: quant.QMatMul, x: Array, w: Array, bias: Array | None = None) -> Array:
    total = (x.astype(np.int64) - op.x_zp) @ (w.astype(np.int64) - op.w_zp)
    total = total if bias is None else total + bias
    return _saturated(np.rint(total * op.mult) + op.out_zp)


@rule(quant.QConv2d)
def _q_conv(node: Node, op: quant.QConv2d, x: Array, w: Array, bias: Array | None = None) -> Array:
    image, weight = x.astype(np.float64) - op.x_zp, w.astype(np.float64) - op.w_zp
    total = convolve(padded(image, op.padding), weight, op.stride, (0, 0), op.dilation, op.groups)
    total = total if bias is None else total + bias[:, None, None]
    return _saturated(np.rint(total * op.mult) + op.out_zp)


def _nibbles(data: Array) -> Array:
    raw = data.view(np.uint8).reshape(-1)
    return np.stack([raw & 15, raw >> 4], 1).reshape(-1)


@rule(dequant.DequantMatMul)
def _dequant_matmul(node: Node, op: dequant.DequantMatMul, x: Array, *rest: Array) -> Array:
    return np.asarray(x @ _weight(op, x.shape[-1], *rest))


def _weight(op: dequant.DequantMatMul, k: int, w: Array, *rest: Array) -> Array:
    if op.scheme in GGUF_FORMATS:
        return dequantize_blocks(op.scheme, w).astype(np.float64).reshape(-1, k).T
    scale = rest[0]
    if op.scheme.startswith("fp8"):
        kind = ml_dtypes.float8_e4m3fn if op.scheme == "fp8_e4m3" else ml_dtypes.float8_e5m2
        values = w.view(kind).astype(np.float64) if w.dtype == np.uint8 else w
        return np.asarray(values * scale)
    if op.scheme == "nvfp4_block":
        codes = _nibbles(np.ascontiguousarray(w)).reshape(k, -1)
        scales = scale.view(ml_dtypes.float8_e4m3fn).astype(np.float64) if scale.dtype == np.uint8 else scale
        return np.asarray(_E2M1[codes] * np.repeat(scales, 16, 0) * float(rest[1].reshape(-1)[0]))
    block, n = op.block or 1, scale.shape[1]
    if op.scheme == "int4_block":
        flat = w.astype(np.float64).reshape(-1) if w.dtype != np.uint8 else _nibbles(w)[: k * n].astype(np.float64)
        codes = flat.reshape(k, n)
    else:
        codes = w.astype(np.float64)
    zero = np.repeat(rest[1], block, 0) if len(rest) > 1 else 0.0
    return np.asarray((codes - zero) * np.repeat(scale, block, 0))


@rule(dequant.DequantMoEWeights)
def _moe_weights(node: Node, op: dequant.DequantMoEWeights, raw: Array) -> Array:
    return dequantize_blocks(op.scheme, raw).astype(np.float64).swapaxes(1, 2)


@rule(dequant.DequantGroupedMatMul)
def _dequant_grouped(node: Node, op: dequant.DequantGroupedMatMul, x: Array, raw: Array, experts: Array) -> Array:
    slabs = dequantize_blocks(op.scheme, raw).astype(np.float64).reshape(raw.shape[0], -1, x.shape[1])
    rows = [slabs[int(expert)] @ row for row, expert in zip(x, experts, strict=True)]
    return sized(node, np.stack(rows) if rows else np.zeros((0, slabs.shape[1])))

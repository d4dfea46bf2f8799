"""Normalisation, convolution, attention, and the blocks made of them."""

from __future__ import annotations

import itertools
import math

import numpy as np

from interpreter.core import RULES, Array, rule, sized
from interpreter.elementwise import activation
from rlx_ort.ir.core import Node
from rlx_ort.ir.ops import attention, blocks, conv, norm

__all__ = ["windows"]


def layer_norm(x: Array, gamma: Array, beta: Array, eps: float, axis: int = -1) -> Array:
    """Return the layer normalisation along one axis."""
    x = np.moveaxis(x, axis, -1)
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    return np.moveaxis(normal * gamma + beta, -1, axis)


def rms_norm(x: Array, gamma: Array, beta: Array, eps: float, axis: int = -1) -> Array:
    """Return the RMS normalisation along one axis."""
    x = np.moveaxis(x, axis, -1)
    return np.moveaxis(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gamma + beta, -1, axis)


def by_channel(vector: Array, rank: int) -> Array:
    """Return a vector as `(C, 1, ...)`, which broadcasts against `(N, C, ...)`."""
    return vector.reshape(-1, *(1 for _ in range(rank - 2)))


@rule(norm.GroupNorm)
def _group_norm(node: Node, op: norm.GroupNorm, x: Array, gamma: Array, beta: Array) -> Array:
    parts = x.reshape(x.shape[0], op.num_groups, -1)
    normal = (parts - parts.mean(-1, keepdims=True)) / np.sqrt(parts.var(-1, keepdims=True) + op.eps)
    return np.asarray(normal.reshape(x.shape) * by_channel(gamma, x.ndim) + by_channel(beta, x.ndim))


@rule(norm.BatchNormInference)
def _batch_norm(
    node: Node, op: norm.BatchNormInference, x: Array, scale: Array, bias: Array, mean: Array, variance: Array
) -> Array:
    s, b, m, v = (by_channel(item, x.ndim) for item in (scale, bias, mean, variance))
    return np.asarray((x - m) / np.sqrt(v + op.eps) * s + b)


@rule(norm.FusedResidualLN)
def _residual_ln(node: Node, op: norm.FusedResidualLN, x: Array, residual: Array, *rest: Array) -> Array:
    return layer_norm(sum(rest[:-2], x + residual), rest[-2], rest[-1], op.eps)


@rule(norm.FusedResidualRmsNorm)
def _residual_rms(node: Node, op: norm.FusedResidualRmsNorm, x: Array, residual: Array, *rest: Array) -> Array:
    return rms_norm(sum(rest[:-2], x + residual), rest[-2], rest[-1], op.eps)


@rule(norm.FusedSwiGLU)
def _swiglu(node: Node, op: norm.FusedSwiGLU, x: Array) -> Array:
    low, high = np.split(x, 2, -1)
    up, gate = (high, low) if op.gate_first else (low, high)
    return sized(node, up * activation("silu", gate))


def windows(x: Array, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Array:
    """Return `(N, C, taps..., places...)` of an `(N, C, ...)` tensor that is already padded."""
    sizes = [
        (size - gap * (taps - 1) - 1) // step + 1
        for size, taps, step, gap in zip(x.shape[2:], kernel, stride, dilation, strict=True)
    ]
    result = np.empty((*x.shape[:2], *kernel, *sizes), x.dtype)
    for tap in itertools.product(*map(range, kernel)):
        places = tuple(
            slice(offset * gap, offset * gap + step * size, step)
            for offset, gap, step, size in zip(tap, dilation, stride, sizes, strict=True)
        )
        result[(slice(None), slice(None), *tap)] = x[(slice(None), slice(None), *places)]
    return result


def padded(x: Array, padding: tuple[int, ...], value: float = 0.0) -> Array:
    """Return an `(N, C, ...)` tensor with elements added on both sides of each spatial axis."""
    return np.pad(x, [(0, 0), (0, 0), *((size, size) for size in padding)], constant_values=value)


def convolve(
    x: Array,
    w: Array,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Array:
    """Return the cross-correlation of `(N, C, ...)` with `(C_out, C / groups, ...)`."""
    found = windows(padded(x, padding), w.shape[2:], stride, dilation)
    axes = tuple(range(1, w.ndim))
    parts = []
    for image, weight in zip(np.split(found, groups, 1), np.split(w, groups, 0), strict=True):
        parts.append(np.moveaxis(np.tensordot(weight, image, (axes, axes)), 0, 1))
    return np.concatenate(parts, 1)


@rule(conv.Conv2d, conv.Conv3d)
def _conv(node: Node, op: conv.Conv2d, x: Array, w: Array, bias: Array | None = None) -> Array:
    result = convolve(x, w, op.stride, op.padding, op.dilation, op.groups)
    return result if bias is None else result + by_channel(bias, x.ndim)


@rule(conv.ConvTranspose2d)
def _conv_transpose(node: Node, op: conv.ConvTranspose2d, x: Array, w: Array, bias: Array | None = None) -> Array:
    sizes = [
        (size - 1) * stride - 2 * cut + dilation * (taps - 1) + extra + 1
        for size, stride, cut, dilation, taps, extra in zip(
            x.shape[2:], op.stride, op.padding, op.dilation, w.shape[2:], op.output_padding, strict=True
        )
    ]
    whole = [size + 2 * cut for size, cut in zip(sizes, op.padding, strict=True)]
    result = np.zeros((x.shape[0], w.shape[1] * op.groups, *whole))
    inner, outer = x.shape[1] // op.groups, w.shape[1]
    for c, o, i, j in itertools.product(range(x.shape[1]), range(outer), *map(range, w.shape[2:])):
        target = c // inner * outer + o
        rows = slice(i * op.dilation[0], i * op.dilation[0] + op.stride[0] * (x.shape[2] - 1) + 1, op.stride[0])
        columns = slice(j * op.dilation[1], j * op.dilation[1] + op.stride[1] * (x.shape[3] - 1) + 1, op.stride[1])
        result[:, target, rows, columns] += x[:, c] * w[c, o, i, j]
    result = result[:, :, op.padding[0] : op.padding[0] + sizes[0], op.padding[1] : op.padding[1] + sizes[1]]
    return result if bias is None else result + by_channel(bias, x.ndim)


@rule(conv.Pool)
def _pool(node: Node, op: conv.Pool, x: Array) -> Array:
    neutral = {"max": -np.inf, "min": np.inf}.get(op.function, 0.0)
    found = windows(padded(x, op.padding, neutral), op.kernel, op.stride, (1, 1))
    reduced = {"max": np.max, "min": np.min, "sum": np.sum, "mean": np.mean}[op.function]
    return np.asarray(reduced(found, axis=(2, 3)))


@rule(conv.Im2Col)
def _im2col(node: Node, op: conv.Im2Col, x: Array) -> Array:
    found = windows(padded(x, op.padding), op.kernel, op.stride, op.dilation)
    return found.reshape(x.shape[0], x.shape[1] * math.prod(op.kernel), -1)


@rule(conv.Interpolate)
def _interpolate(node: Node, op: conv.Interpolate, x: Array) -> Array:
    for axis, size in enumerate(op.sizes, 2):
        x = np.moveaxis(np.moveaxis(x, axis, -1) @ _resampling(x.shape[axis], size, op).T, -1, axis)
    return x


def _resampling(old: int, new: int, op: conv.Interpolate) -> Array:
    """Return the matrix `(new, old)` that resizes one axis."""
    matrix = np.zeros((new, old))
    for i in range(new):
        if op.mode == "nearest":
            matrix[i, i * old // new] = 1
            continue
        ends = (old - 1) / (new - 1) * i if new > 1 else 0.0
        place = ends if op.align_corners else (i + 0.5) * old / new - 0.5
        if op.mode == "linear":
            place = min(max(place, 0.0), old - 1.0)
        first = math.floor(place)
        reach = range(first, first + 2) if op.mode == "linear" else range(first - 1, first + 3)
        for tap in reach:
            distance = abs(place - tap)
            weight = max(1 - distance, 0) if op.mode == "linear" else _cubic(distance)
            matrix[i, min(max(tap, 0), old - 1)] += weight
    return matrix


def _cubic(distance: float, a: float = -0.75) -> float:
    if distance <= 1:
        return (a + 2) * distance**3 - (a + 3) * distance**2 + 1
    return a * distance**3 - 5 * a * distance**2 + 8 * a * distance - 4 * a if distance < 2 else 0.0


def attend(
    q: Array,
    k: Array,
    v: Array,
    kind: str,
    *,
    window: int | None = None,
    mask: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Array:
    """Return attention over `(B, H, S, D)`; a masked score is replaced by -1e9."""
    scores = q @ k.swapaxes(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    queries, keys = scores.shape[-2:]
    place = np.arange(queries)[:, None] + max(keys - queries, 0)
    key = np.arange(keys)[None]
    if kind in {"causal", "sliding"}:
        seen = key <= place
        if window is not None:
            seen &= key >= place - window
        scores = np.where(seen, scores, -1e9)
    elif kind == "custom" and mask is not None:
        scores = np.where(mask[:, None, None, :] < 0.5, -1e9, scores)
    elif kind == "bias" and mask is not None:
        scores = scores + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ v)


def split_heads(x: Array, heads: int, size: int) -> Array:
    """Return `(B, H, S, D)` of any of the layouts."""
    if x.ndim == 4:
        return x if x.shape[1] == heads else x.swapaxes(1, 2)
    batch = x.shape[0] if x.ndim == 3 else 1
    return x.reshape(batch, x.shape[-2], heads, size).swapaxes(1, 2)


def joined_heads(y: Array, like: Array, heads: int) -> Array:
    """Return `(B, H, S, D)` in the layout of q."""
    if like.ndim == 4 and like.shape[1] == heads:
        return y
    return y.swapaxes(1, 2).reshape(like.shape)


@rule(attention.Attention, blocks.GroupedQueryAttention)
def _attention(
    node: Node,
    op: attention.Attention | blocks.GroupedQueryAttention,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
) -> Array:
    shared = op.num_kv_heads if isinstance(op, blocks.GroupedQueryAttention) else op.num_heads
    keys, values = (
        np.repeat(split_heads(item, shared, op.head_dim), op.num_heads // shared, axis=1) for item in (k, v)
    )
    queries = split_heads(q, op.num_heads, op.head_dim)
    mixed = attend(queries, keys, values, op.mask_kind, window=op.window, mask=mask, scale=op.scale, softcap=op.softcap)
    return joined_heads(mixed, q, op.num_heads)


def rotate(x: Array, cos: Array, sin: Array, head_dim: int, n_rot: int, interleaved: bool) -> Array:
    """Return x with the first n_rot of each head turned, pair by pair."""
    y, half = x.copy(), n_rot // 2
    cos, sin = cos[..., : x.shape[-2], :], sin[..., : x.shape[-2], :]
    for head in range(0, x.shape[-1], head_dim):
        for i in range(half):
            first, second = (head + 2 * i, head + 2 * i + 1) if interleaved else (head + i, head + i + half)
            c, s = cos[..., i], sin[..., i]
            y[..., first] = x[..., first] * c - x[..., second] * s
            y[..., second] = x[..., second] * c + x[..., first] * s
    return y


@rule(attention.Rope)
def _rope(node: Node, op: attention.Rope, x: Array, cos: Array, sin: Array) -> Array:
    n_rot = op.head_dim if op.n_rot is None else op.n_rot
    return rotate(x, cos, sin, op.head_dim, n_rot, op.interleaved)


@rule(blocks.AxialRope2d)
def _axial(node: Node, op: blocks.AxialRope2d, x: Array) -> Array:
    y, quarter = x.copy(), op.head_dim // 4
    for token in range(x.shape[-2]):
        place = token // op.repeat_factor
        for head, pair in itertools.product(range(op.num_heads), range(2 * quarter)):
            where = place % op.end_x if pair < quarter else place // op.end_x
            angle = where * op.theta ** (-4 * (pair % quarter) / op.head_dim)
            first = head * op.head_dim + 2 * pair
            a, b = x[..., token, first], x[..., token, first + 1]
            y[..., token, first] = a * math.cos(angle) - b * math.sin(angle)
            y[..., token, first + 1] = b * math.cos(angle) + a * math.sin(angle)
    return y


def attention_block(
    hidden: Array,
    weights: tuple[Array, Array],
    mask: Array,
    heads: int,
    size: int,
    biases: tuple[Array | float, Array | float] = (0.0, 0.0),
    tables: tuple[Array, ...] = (),
) -> Array:
    """Return projection, rotation, attention under a key mask, and projection back."""
    q, k, v = np.split(hidden @ weights[0] + biases[0], 3, -1)
    if tables:
        q, k = (rotate(item, tables[0], tables[1], size, size, False) for item in (q, k))
    mixed = attend(*(split_heads(item, heads, size) for item in (q, k, v)), kind="custom", mask=mask)
    return np.asarray(joined_heads(mixed, q, heads) @ weights[1] + biases[1])


@rule(blocks.FusedAttentionBlock)
def _attention_block(
    node: Node, op: blocks.FusedAttentionBlock, hidden: Array, qkv: Array, out: Array, mask: Array, *rest: Array
) -> Array:
    biases = (rest[0], rest[1]) if op.has_bias else (0.0, 0.0)
    tables = rest[2 * op.has_bias :]
    return attention_block(hidden, (qkv, out), mask, op.num_heads, op.head_dim, biases, tables)


@rule(blocks.FusedTransformerLayer)
def _layer(node: Node, op: blocks.FusedTransformerLayer, hidden: Array, mask: Array, *rest: Array) -> Array:
    qkv, out, gamma1, beta1, up, down, gamma2, beta2 = rest[:8]
    extra: tuple[Array | float, ...] = rest[8:] if op.has_bias else (0.0,) * 4

    def attended(x: Array) -> Array:
        return attention_block(x, (qkv, out), mask, op.num_heads, op.head_dim, (extra[0], extra[1]))

    def fed(x: Array) -> Array:
        return np.asarray(activation(op.activation, x @ up + extra[2]) @ down + extra[3])

    for step, gamma, beta in ((attended, gamma1, beta1), (fed, gamma2, beta2)):
        if op.pre_norm:
            hidden = hidden + step(layer_norm(hidden, gamma, beta, op.eps))
        else:
            hidden = layer_norm(hidden + step(hidden), gamma, beta, op.eps)
    return hidden


@rule(blocks.FusedConvBiasAct)
def _conv_bias_act(node: Node, op: blocks.FusedConvBiasAct, x: Array, w: Array, bias: Array) -> Array:
    result = convolve(x, w, op.stride, op.padding, op.dilation, op.groups) + by_channel(bias, x.ndim)
    return sized(node, activation(op.activation, result))


@rule(blocks.SoftmaxCrossEntropyWithLogits)
def _cross_entropy(node: Node, op: blocks.SoftmaxCrossEntropyWithLogits, logits: Array, labels: Array) -> Array:
    chosen = logits[np.arange(len(logits)), labels.astype(np.int64)]
    return np.asarray(np.logaddexp.reduce(logits, axis=1) - chosen)


RULES.update(
    {
        norm.LayerNorm: lambda node, op, x, gamma, beta: layer_norm(x, gamma, beta, op.eps, op.axis),
        norm.RmsNorm: lambda node, op, x, gamma, beta: rms_norm(x, gamma, beta, op.eps, op.axis),
        norm.LayerNorm2d: lambda node, op, x, gamma, beta: layer_norm(x, gamma, beta, op.eps, 1),
        conv.ResizeNearest2x: lambda node, op, x: x.repeat(2, 2).repeat(2, 3),
        blocks.AdaLayerNorm: lambda node, op, x, scale, shift: layer_norm(x, 1 + scale, shift, op.eps),
        blocks.GatedResidual: lambda node, op, x, gate, y: sized(node, x + gate * y),
    }
)

"""Recurrences, transforms and sampling."""

from __future__ import annotations

import numpy as np
from op_tests.philox import stream

from interpreter.core import Array, rule, sized
from rlx_ort.ir.core import Node
from rlx_ort.ir.ops import norm, sequence, signal

__all__: list[str] = []


@rule(sequence.SelectiveScan)
def _selective_scan(
    node: Node, op: sequence.SelectiveScan, x: Array, delta: Array, a: Array, b: Array, c: Array
) -> Array:
    state, result = np.zeros((x.shape[0], x.shape[2], op.n)), np.zeros(x.shape)
    for t in range(x.shape[1]):
        step = delta[:, t, :, None]
        state = np.exp(step * a) * state + step * b[:, t, None, :] * x[:, t, :, None]
        result[:, t] = (state * c[:, t, None, :]).sum(-1)
    return result


@rule(sequence.GatedDeltaNet)
def _delta_net(
    node: Node, op: sequence.GatedDeltaNet, q: Array, k: Array, v: Array, g: Array, beta: Array, *first: Array
) -> Array | tuple[Array, Array]:
    state = first[0].copy() if first else np.zeros((v.shape[0], v.shape[2], op.n, op.n))
    result = np.zeros(v.shape)
    for t in range(v.shape[1]):
        state = state * np.exp(g[:, t])[..., None, None]
        seen = np.einsum("bhij,bhi->bhj", state, k[:, t])
        change = (v[:, t] - seen) * beta[:, t][..., None]
        state = state + np.einsum("bhi,bhj->bhij", k[:, t], change)
        result[:, t] = np.einsum("bhij,bhi->bhj", state, q[:, t]) / np.sqrt(op.n)
    return (result, state) if first else result


@rule(signal.Fft)
def _fft(node: Node, op: signal.Fft, x: Array) -> Array:
    re, im = np.split(x, 2, -1)
    size = re.shape[-1]
    values = re + 1j * im
    done = np.fft.ifft(values) * size if op.inverse else np.fft.fft(values)
    if op.norm == "ortho":
        done = done / np.sqrt(size)
    elif op.norm == "forward" and op.inverse:
        done = done / size
    return np.concatenate([done.real, done.imag], -1)


@rule(signal.ComplexNormSq)
def _norm_sq(node: Node, op: signal.ComplexNormSq, x: Array) -> Array:
    return np.asarray((x * x).sum(-1))


@rule(signal.Conjugate)
def _conjugate(node: Node, op: signal.Conjugate, x: Array) -> Array:
    return x * np.array([1.0, -1.0])


@rule(norm.Sample)
def _sample(node: Node, op: norm.Sample, logits: Array) -> Array:
    rows = logits.reshape(-1, logits.shape[-1])
    chosen = []
    for row, number in zip(rows, stream(op.seed, len(rows)), strict=True):
        scaled = row / max(op.temperature, 1e-6)
        kept = scaled >= np.sort(scaled)[-op.top_k] if 0 < op.top_k < row.size else np.ones(row.size, bool)
        weights = np.where(kept, np.exp(scaled - scaled.max()), 0)
        weights = weights / weights.sum()
        if op.top_p < 1:
            order = np.argsort(-weights, kind="stable")
            count = int(np.searchsorted(np.cumsum(weights[order]), op.top_p)) + 1
            weights[order[count:]] = 0
        chosen.append(int(np.argmax(np.cumsum(weights / weights.sum()) > number)))
    return sized(node, np.reshape(chosen, logits.shape[:-1]))

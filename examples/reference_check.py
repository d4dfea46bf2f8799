"""What the examples share: parts of float64 references, and how far the answers of devices are from them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.graph_devices import GraphDevices
from rlx_ort.ir.graph import Graph

Array: TypeAlias = npt.NDArray[Any]


def rotation(count: int, head: int, base: float = 10000.0) -> tuple[Array, Array]:
    """Return the cosines and sines of each position and frequency, for heads of a size."""
    angles = np.arange(count)[:, None] * base ** (-np.arange(0, head, 2) / head)
    return np.cos(angles), np.sin(angles)


def causal_attention(q: Array, k: Array, v: Array, tables: tuple[Array, Array]) -> Array:
    """Return causal attention of queries `(batch, seq, width)`, rotated as the keys are; heads may share keys."""
    cos, sin = tables
    count, head = q.shape[1], 2 * cos.shape[-1]

    def heads(x: Array) -> Array:
        split = x.reshape(*x.shape[:2], -1, head).transpose(0, 2, 1, 3)
        return split.repeat(q.shape[-1] // x.shape[-1], axis=1)

    def rotated(x: Array) -> Array:
        first, second = np.split(heads(x), 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    scores = rotated(q) @ rotated(k).transpose(0, 1, 3, 2) / math.sqrt(head)
    weight = np.exp(np.where(np.tri(count, dtype=bool), scores - scores.max(-1, keepdims=True), -np.inf))
    mixed: Array = (weight / weight.sum(-1, keepdims=True) @ heads(v)).transpose(0, 2, 1, 3).reshape(q.shape)
    return mixed


def likeliest_tokens(logits: Callable[[Array], Array], prompt: Array, count: int) -> Array:
    """Return the `count` likeliest tokens after a prompt, `(batch, count)`, each computed from all before it."""
    ids = prompt
    for _ in range(count):
        ids = np.concatenate([ids, logits(ids).argmax(-1)[:, None]], axis=1)
    return ids[:, prompt.shape[1] :]


def relative_error(got: Array, expected: Array) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return float(np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max())


def show(graph: Graph, inputs: Mapping[str, Array], expected: Array) -> None:
    """Run the graph on the devices that the command line names, else on all that take it, and print each error."""
    runner = GraphDevices(graph)
    for device in sys.argv[1:] or [device.label for device in runner.devices()]:
        outputs = runner.run(device, inputs)
        print(f"{graph.name} on {device}: error {relative_error(outputs[0], expected):.1e}")

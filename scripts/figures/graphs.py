"""Graphs with seeded random weights that several families measure."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx_ort.ir.graph import Graph, Value
from rlx_ort.ir.tensor import TensorData


class Maker:
    """Builds a graph whose weights keep the size of the values that they multiply."""

    def __init__(self, name: str) -> None:
        self.graph = Graph(name)
        self._draw = np.random.default_rng(0)

    def weight(self, *shape: int, scale: float | None = None) -> Value:
        """Return a new parameter with data."""
        spread = shape[0] ** -0.5 if scale is None else scale
        data = (self._draw.standard_normal(shape) * spread).astype(np.float32)
        return self.graph.param(f"w{len(self.graph.params)}", list(shape), data=data)

    def dense(self, x: Value, wide: int, narrow: int) -> Value:
        """Return a product with a bias."""
        return x @ self.weight(wide, narrow) + self.weight(narrow, scale=0.1)

    def norm(self, x: Value, width: int) -> Value:
        """Return a layer norm."""
        return self.graph.layer_norm(x, self.weight(width, scale=1.0), self.weight(width, scale=0.1))

    def encoder(self, x: Value, width: int, heads: int, layers: int) -> Value:
        """Return the result of encoder layers with fused attention."""
        g = self.graph
        for _ in range(layers):
            q, k, v = (self.dense(x, width, width) for _ in range(3))
            mixed = g.attention_kind(q, k, v, heads, width // heads, "none")
            x = self.norm(x + self.dense(mixed, width, width), width)
            x = self.norm(x + self.dense(g.gelu(self.dense(x, width, 4 * width)), 4 * width, width), width)
        return x


def chain(layers: int, width: int, data: Any = None) -> Graph:
    """Return products by square matrices; each matrix is a view of `width**2 + layers` numbers."""
    graph = Graph("chain")
    x = graph.input("x", ["rows", width])
    for layer in range(layers):
        x = x @ graph.param(f"w{layer}", [width, width])
        if data is not None:
            square = data[layer : layer + width * width].reshape(width, width)
            graph.weights[f"w{layer}"] = TensorData.from_array(square)
    graph.outputs = [x]
    return graph

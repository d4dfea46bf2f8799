"""Small whole graphs that a calibration measures last, to see how well its rows predict what people run.

Their sizes are 13 times powers of two and 13 itself, which no grid of the probes and hardly any real model has.
Channels are 5 times powers of two from 16 on: models have multiples of 16, and CPUs run others through other kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph, Value
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType

__all__ = ["REFERENCES", "Maker", "ReferenceGraph"]

Built = tuple[Graph, dict[str, Any]]


class ReferenceGraph(NamedTuple):
    """A graph by name; `build` makes it with its inputs."""

    name: str
    build: Callable[[], Built]


class Maker:
    """Builds a graph with weights and inputs of small random values."""

    def __init__(self, name: str) -> None:
        self.graph = Graph(name)
        self.inputs: dict[str, Any] = {}
        self._random = np.random.default_rng(2)

    def weight(self, *shape: int, scale: float = 0.05) -> Value:
        """Add a weight."""
        name = f"w{len(self.graph.weights)}"
        value = self.graph.param(name, list(shape))
        self.graph.weights[name] = TensorData.from_array(self._data(shape, scale))
        return value

    def input(self, *shape: int) -> Value:
        """Add an input."""
        name = f"x{len(self.inputs)}"
        self.inputs[name] = self._data(shape, 1.0)
        return self.graph.input(name, list(shape))

    def indices(self, count: int, below: int) -> Value:
        """Add an input of row numbers."""
        name = f"x{len(self.inputs)}"
        self.inputs[name] = self._random.integers(0, below, count).astype(np.int64)
        return self.graph.input(name, [count], DType.I64)

    def dense(self, x: Value, wide: int, narrow: int) -> Value:
        """Return a product with a weight and a bias."""
        return x @ self.weight(wide, narrow) + self.weight(narrow)

    def norm(self, x: Value, width: int) -> Value:
        """Return a layer norm."""
        return self.graph.layer_norm(x, self.weight(width, scale=1.0), self.weight(width))

    def done(self, *outputs: Value) -> Built:
        """Return the graph and its inputs."""
        self.graph.outputs = list(outputs)
        return self.graph, self.inputs

    def _data(self, shape: tuple[int, ...], scale: float) -> np.ndarray[Any, Any]:
        count = int(np.prod(shape))
        block = self._random.standard_normal(min(count, 1 << 16)).astype(np.float32) * np.float32(scale)
        return np.resize(block, shape)


def _dense(batch: int, width: int, layers: int) -> Built:
    make = Maker("dense")
    x = make.input(batch, width)
    for _ in range(layers):
        x = make.graph.relu(make.dense(x, width, width))
    return make.done(x)


def _product(m: int, k: int, n: int) -> Built:
    make = Maker("product")
    return make.done(make.input(m, k) @ make.weight(k, n))


def _pictures(batch: int, side: int, channels: int, layers: int) -> Built:
    make = Maker("pictures")
    g = make.graph
    x = make.input(batch, channels, side, side)
    for _ in range(layers):
        x = g.relu(g.conv2d(x, make.weight(channels, channels, 3, 3), padding=1))
    return make.done(g.mean(x, [2, 3]))


def _separable(batch: int, side: int, channels: int, layers: int) -> Built:
    make = Maker("separable")
    g = make.graph
    x = make.input(batch, channels, side, side)
    for _ in range(layers):
        x = g.relu(g.conv2d(x, make.weight(channels, 1, 3, 3), padding=1, groups=channels))
        x = g.relu(g.conv2d(x, make.weight(channels, channels, 1, 1)))
    return make.done(g.mean(x, [2, 3]))


def _encoder(batch: int, length: int, width: int) -> Built:
    make = Maker("encoder")
    g, heads = make.graph, 4
    depth = width // heads
    x = make.input(batch, length, width)

    def split(value: Value) -> Value:
        return g.transpose(g.reshape(value, [batch, length, heads, depth]), [0, 2, 1, 3])

    q, k, v = (split(make.dense(x, width, width)) for _ in range(3))
    mixed = g.softmax((q @ g.transpose(k, [0, 1, 3, 2])) * (depth**-0.5)) @ v
    joined = g.reshape(g.transpose(mixed, [0, 2, 1, 3]), [batch, length, width])
    x = make.norm(x + make.dense(joined, width, width), width)
    return make.done(make.norm(x + make.dense(g.gelu(make.dense(x, width, 2 * width)), 2 * width, width), width))


def _elements(count: int, length: int) -> Built:
    make = Maker("elements")
    g = make.graph
    x = make.input(count)
    other = make.weight(count)
    steps: tuple[Callable[[Value], Value], ...] = (lambda x: x * other, g.sigmoid, lambda x: x + other, g.tanh)
    for at in range(length):
        x = steps[at % 4](x)
    return make.done(x)


def _tables(batch: int, count: int, rows: int, width: int) -> Built:
    make = Maker("tables")
    g = make.graph
    looked_up = [g.gather(make.weight(rows, width), make.indices(batch, rows), 0) for _ in range(count)]
    return make.done(make.norm(g.concat(looked_up, 1), count * width))


def _statistics(rows: int, width: int) -> Built:
    make = Maker("statistics")
    g = make.graph
    x = make.input(rows, width)
    centred = x - g.mean(x, [1], True)
    return make.done(g.sum(g.softmax(centred), [0]), g.max(centred * centred, [1]))


def _recurrent(steps: int, batch: int, hidden: int) -> Built:
    make = Maker("recurrent")
    x = make.input(steps, batch, hidden)
    weights = [make.weight(1, 4 * hidden, hidden) for _ in range(2)]
    kind = TensorType(DType.F32, Shape([steps, 1, batch, hidden]))
    (y,) = make.graph.onnx_node("LSTM", [x, *weights], {"hidden_size": hidden}, types=[kind])
    return make.done(make.graph.narrow(y, 0, steps - 1, 1))


def _branches(batch: int, width: int, count: int, size: int) -> Built:
    make = Maker("branches")
    x = make.graph.relu(make.input(batch, width))
    return make.done(*(make.dense(x, width, size) for _ in range(count)))


def _sums(count: int, size: int) -> Built:
    make = Maker("sums")
    total = make.input(size)
    for _ in range(count - 1):
        total = total + make.input(size)
    return make.done(total)


_TABLE: tuple[tuple[Callable[..., Built], tuple[int, ...]], ...] = (
    (_dense, (1, 416, 3)),
    (_encoder, (1, 26, 208)),
    (_pictures, (1, 26, 80, 3)),
    (_elements, (13 << 10, 8)),
    (_tables, (52, 6, 1664, 26)),
    (_dense, (26, 832, 3)),
    (_statistics, (208, 832)),
    (_separable, (1, 26, 160, 3)),
    (_elements, (13 << 16, 8)),
    (_product, (13, 1664, 832)),
    (_encoder, (4, 52, 416)),
    (_pictures, (4, 52, 80, 3)),
    (_branches, (13, 208, 13, 52)),
    (_sums, (13, 13 << 10)),
    (_recurrent, (26, 1, 104)),
    (_dense, (208, 416, 3)),
    (_product, (208, 208, 832)),
    (_tables, (416, 1, 13 << 10, 208)),
    (_recurrent, (13, 13, 208)),
    (_statistics, (1664, 1664)),
)


def _graphs() -> tuple[ReferenceGraph, ...]:
    return tuple(ReferenceGraph(_name(build, sizes), _bound(build, sizes)) for build, sizes in _TABLE)


def _name(build: Callable[..., Built], sizes: tuple[int, ...]) -> str:
    return f"{build.__name__[1:]} {' x '.join(map(str, sizes))}"


def _bound(build: Callable[..., Built], sizes: tuple[int, ...]) -> Callable[[], Built]:
    return lambda: build(*sizes)


REFERENCES = _graphs()
"""The graphs, most telling first: where the time runs out, the last ones are left out."""

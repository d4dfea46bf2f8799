"""The graphs of the regret suite. Calibration never sees one of them; sizes are chosen off its grid on purpose.

Each case is built when it is its turn, with weights of small random values and one set of inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph, Value
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Shape, TensorType

__all__ = ["Built", "Case", "cases"]

Built = tuple[Graph, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One graph of the suite."""

    family: str
    name: str
    build: Callable[[], Built]


class _Maker:
    """Builds a graph and keeps the data of its weights and inputs."""

    def __init__(self, name: str) -> None:
        self.graph = Graph(name)
        self.inputs: dict[str, Any] = {}
        self._random = np.random.default_rng(1)

    def data(self, shape: tuple[int, ...], scale: float) -> np.ndarray[Any, Any]:
        count = int(np.prod(shape))
        block = self._random.standard_normal(min(max(count, 1), 1 << 18)).astype(np.float32) * np.float32(scale)
        return np.resize(block, shape)

    def weight(self, *shape: int, scale: float | None = None) -> Value:
        name = f"w{len(self.graph.weights)}"
        array = self.data(shape, shape[0] ** -0.5 if scale is None else scale)
        value = self.graph.param(name, list(shape))
        self.graph.weights[name] = TensorData.from_array(array)
        return value

    def input(self, *shape: int, scale: float = 1.0) -> Value:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = self.data(shape, scale)
        return self.graph.input(name, list(shape))

    def indices(self, count: tuple[int, ...], below: int) -> Value:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = self._random.integers(0, below, count).astype(np.int64)
        return self.graph.input(name, list(count), DType.I64)

    def dense(self, x: Value, wide: int, narrow: int) -> Value:
        return x @ self.weight(wide, narrow) + self.weight(narrow, scale=0.1)

    def norm(self, x: Value, width: int) -> Value:
        return self.graph.layer_norm(x, self.weight(width, scale=1.0), self.weight(width, scale=0.1))

    def done(self, *outputs: Value) -> Built:
        self.graph.outputs = list(outputs)
        return self.graph, self.inputs


def _mlp(batch: int, width: int, layers: int) -> Built:
    make = _Maker("mlp")
    x = make.input(batch, width)
    for _ in range(layers):
        x = make.graph.relu(make.dense(x, width, width))
    return make.done(x)


def _classifier(batch: int, width: int, hidden: int, classes: int) -> Built:
    make = _Maker("classifier")
    x = make.graph.relu(make.dense(make.input(batch, width), width, hidden))
    return make.done(make.graph.softmax(make.dense(x, hidden, classes)))


def _gemm(m: int, k: int, n: int) -> Built:
    make = _Maker("gemm")
    return make.done(make.input(m, k) @ make.weight(k, n))


def _two_inputs(m: int, k: int, n: int) -> Built:
    make = _Maker("product")
    return make.done(make.input(m, k) @ make.input(k, n, scale=k**-0.5))


def _convnet(batch: int, side: int, width: int, blocks: int) -> Built:
    make = _Maker("convnet")
    g = make.graph
    x = make.input(batch, 3, side, side)
    x = g.relu(g.conv2d(x, make.weight(width, 3, 3, 3, scale=0.2), stride=2, padding=1))
    for block in range(blocks):
        stride = 2 if block % 2 else 1
        grown = width * stride
        x = g.relu(g.conv2d(x, make.weight(grown, width, 3, 3, scale=(9 * width) ** -0.5), stride=stride, padding=1))
        width = grown
    return make.done(make.dense(g.mean(x, [2, 3]), width, 100))


def _residual(batch: int, side: int, width: int, blocks: int) -> Built:
    make = _Maker("residual")
    g = make.graph
    x = make.input(batch, width, side, side)
    for _ in range(blocks):
        y = g.relu(g.conv2d(x, make.weight(width, width, 3, 3, scale=(9 * width) ** -0.5), padding=1))
        y = g.conv2d(y, make.weight(width, width, 3, 3, scale=(9 * width) ** -0.5), padding=1)
        x = g.relu(x + y)
    return make.done(g.mean(x, [2, 3]))


def _mobile(batch: int, side: int, width: int, blocks: int) -> Built:
    make = _Maker("mobile")
    g = make.graph
    x = make.input(batch, width, side, side)
    for _ in range(blocks):
        x = g.relu(g.conv2d(x, make.weight(width, 1, 3, 3, scale=0.3), padding=1, groups=width))
        x = g.relu(g.conv2d(x, make.weight(width, width, 1, 1, scale=width**-0.5)))
    return make.done(g.mean(x, [2, 3]))


def _attend(make: _Maker, x: Value, y: Value, dims: tuple[int, int, int, int]) -> Value:
    batch, queries, keys, width = dims
    heads, g = max(width // 64, 1), make.graph
    depth = width // heads

    def split(value: Value, length: int) -> Value:
        return g.transpose(g.reshape(value, [batch, length, heads, depth]), [0, 2, 1, 3])

    q = split(make.dense(x, width, width), queries)
    k = split(make.dense(y, width, width), keys)
    v = split(make.dense(y, width, width), keys)
    scores = (q @ g.transpose(k, [0, 1, 3, 2])) * (depth**-0.5)
    mixed = g.softmax(scores) @ v
    return make.dense(g.reshape(g.transpose(mixed, [0, 2, 1, 3]), [batch, queries, width]), width, width)


def _encoder(batch: int, length: int, width: int, layers: int) -> Built:
    make = _Maker("encoder")
    g = make.graph
    x = make.input(batch, length, width)
    for _ in range(layers):
        x = make.norm(x + _attend(make, x, x, (batch, length, length, width)), width)
        x = make.norm(x + make.dense(g.gelu(make.dense(x, width, 4 * width)), 4 * width, width), width)
    return make.done(x)


def _fused_encoder(batch: int, length: int, width: int, layers: int) -> Built:
    make = _Maker("fused_encoder")
    g = make.graph
    x = make.input(batch, length, width)
    heads = width // 64
    for _ in range(layers):
        q, k, v = (make.dense(x, width, width) for _ in range(3))
        x = make.norm(x + make.dense(g.attention_kind(q, k, v, heads, 64, "none"), width, width), width)
        x = make.norm(x + make.dense(g.gelu(make.dense(x, width, 4 * width)), 4 * width, width), width)
    return make.done(x)


def _decoder(batch: int, past: int, width: int, layers: int) -> Built:
    """One step of a decoder: one token, and keys and values of the past that come in and go out."""
    make = _Maker("decoder")
    g = make.graph
    heads = width // 64
    x = make.input(batch, 1, width)
    outputs = []
    for _ in range(layers):
        q, k, v = (
            g.transpose(g.reshape(make.dense(x, width, width), [batch, 1, heads, 64]), [0, 2, 1, 3]) for _ in range(3)
        )
        keys = g.concat([make.input(batch, heads, past, 64), k], 2)
        values = g.concat([make.input(batch, heads, past, 64), v], 2)
        scores = g.softmax((q @ g.transpose(keys, [0, 1, 3, 2])) * 0.125)
        mixed = g.reshape(g.transpose(scores @ values, [0, 2, 1, 3]), [batch, 1, width])
        x = make.norm(x + make.dense(mixed, width, width), width)
        x = make.norm(x + make.dense(g.gelu(make.dense(x, width, 4 * width)), 4 * width, width), width)
        outputs += [keys, values]
    return make.done(x, *outputs)


def _chain(count: int, length: int) -> Built:
    make = _Maker("chain")
    g = make.graph
    x = make.input(count)
    other = make.weight(count, scale=0.5)
    for link in range(length):
        x = (g.tanh(x), x * other, g.sigmoid(x), x + other)[link % 4] if link % 4 % 2 else _act(g, x, link)
    return make.done(x)


def _act(g: Graph, x: Value, link: int) -> Value:
    return g.tanh(x) if link % 4 == 0 else g.sigmoid(x)


def _reductions(rows: int, width: int) -> Built:
    make = _Maker("reductions")
    g = make.graph
    x = make.input(rows, width)
    centred = x - g.mean(x, [1], True)
    return make.done(g.sum(centred * centred, [1]), g.max(x, [0]), g.mean(g.exp(centred), [1]))


def _softmax(rows: int, width: int) -> Built:
    make = _Maker("softmax")
    return make.done(make.graph.softmax(make.input(rows, width)))


def _embedding(batch: int, length: int, vocabulary: int, width: int) -> Built:
    make = _Maker("embedding")
    ids = make.indices((batch, length), vocabulary)
    x = make.graph.gather(make.weight(vocabulary, width, scale=1.0), ids, 0)
    return make.done(make.norm(x, width))


def _recommender(batch: int, tables: int, rows: int, width: int) -> Built:
    make = _Maker("recommender")
    g = make.graph
    looked_up = [g.gather(make.weight(rows, width, scale=1.0), make.indices((batch,), rows), 0) for _ in range(tables)]
    x = g.concat(looked_up, 1)
    x = g.relu(make.dense(x, tables * width, 256))
    return make.done(g.sigmoid(make.dense(x, 256, 1)))


def _gathers(rows: int, width: int, count: int) -> Built:
    make = _Maker("gathers")
    g = make.graph
    x = make.input(rows, width)
    order = make.indices((rows,), rows)
    for _ in range(count):
        x = g.gather(x, order, 0) + x
    return make.done(x)


def _lstm(steps: int, batch: int, width: int, hidden: int) -> Built:
    make = _Maker("lstm")
    x = make.input(steps, batch, width)
    weights = [make.weight(1, 4 * hidden, inner, scale=hidden**-0.5) for inner in (width, hidden)]
    kind = TensorType(DType.F32, Shape([steps, 1, batch, hidden]))
    (y,) = make.graph.onnx_node("LSTM", [x, *weights], {"hidden_size": hidden}, types=[kind])
    last = make.graph.narrow(y, 0, steps - 1, 1)
    return make.done(make.dense(make.graph.reshape(last, [batch, hidden]), hidden, 16))


def _fan_out(batch: int, width: int, heads: int, size: int) -> Built:
    make = _Maker("fan_out")
    g = make.graph
    x = g.relu(make.dense(make.input(batch, width), width, width))
    return make.done(*(make.dense(x, width, size) for _ in range(heads)))


def _tiny(nodes: int) -> Built:
    make = _Maker("tiny")
    x = make.input(4, 4)
    for _ in range(nodes):
        x = x * 0.5 + 1.0
    return make.done(x)


def _many_inputs(count: int, size: int) -> Built:
    make = _Maker("many_inputs")
    total = make.input(size)
    for _ in range(count - 1):
        total = total + make.input(size)
    return make.done(total)


_TABLE: tuple[tuple[str, Callable[..., Built], tuple[tuple[int, ...], ...]], ...] = (
    (
        "mlp",
        _mlp,
        ((1, 96, 3), (1, 384, 4), (1, 768, 4), (1, 1536, 4), (4, 640, 6), (16, 320, 4), (16, 768, 4), (48, 192, 8)),
    ),
    ("mlp", _mlp, ((64, 512, 6), (128, 896, 4), (256, 1280, 4), (256, 2816, 3))),
    ("classifier", _classifier, ((1, 784, 128, 10), (32, 784, 300, 10), (256, 2048, 1000, 1000))),
    ("gemv", _gemm, ((1, 512, 512), (1, 1152, 1152), (1, 2304, 2304), (1, 4096, 11008), (2, 3072, 768))),
    ("gemm", _gemm, ((24, 700, 700), (100, 300, 1200), (200, 2000, 500), (1500, 1500, 1500), (3000, 1024, 3000))),
    ("product", _two_inputs, ((96, 96, 96), (384, 384, 384), (900, 900, 900))),
    ("convnet", _convnet, ((1, 32, 16, 2), (1, 64, 24, 4), (1, 224, 32, 6), (8, 96, 32, 4), (32, 32, 32, 4))),
    ("residual", _residual, ((1, 14, 96, 3), (1, 28, 128, 4), (16, 28, 64, 4))),
    ("mobile", _mobile, ((1, 28, 96, 6), (1, 56, 48, 4), (16, 28, 96, 4))),
    ("encoder", _encoder, ((1, 12, 128, 2), (1, 24, 384, 2), (1, 100, 768, 2), (8, 48, 256, 3), (32, 80, 512, 2))),
    ("fused encoder", _fused_encoder, ((1, 20, 256, 2), (4, 60, 512, 2))),
    ("decoder", _decoder, ((1, 24, 256, 2), (1, 200, 512, 3), (1, 900, 1024, 2), (8, 150, 512, 2))),
    ("chain", _chain, ((300, 12), (20_000, 12), (150_000, 12), (3_000_000, 12))),
    ("reductions", _reductions, ((24, 80), (300, 900), (3000, 2500))),
    ("softmax", _softmax, ((48, 100), (500, 1500), (5000, 3000))),
    ("embedding", _embedding, ((1, 20, 30_000, 384), (24, 100, 30_000, 384), (1, 300, 1000, 64))),
    ("recommender", _recommender, ((1, 8, 20_000, 32), (200, 8, 20_000, 32))),
    ("gathers", _gathers, ((60, 60, 6), (3000, 300, 6))),
    ("lstm", _lstm, ((12, 1, 48, 48), (40, 1, 200, 256), (40, 32, 200, 384))),
    ("fan out", _fan_out, ((1, 200, 16, 48), (40, 600, 24, 100), (200, 1000, 40, 300))),
    ("tiny", _tiny, ((1,), (6,), (40,))),
    ("many inputs", _many_inputs, ((40, 16), (24, 40_000))),
)


def cases() -> Iterator[Case]:
    """Yield every case, one graph each: the first of every family, then the second ones, and so on.

    A suite that runs out of time has some of every family then, not all of some and none of the others.
    """
    families = [[(family, build, size) for size in sizes] for family, build, sizes in _TABLE]
    for family, build, size in filter(None, itertools.chain(*itertools.zip_longest(*families))):
        yield Case(family, f"{family} {' x '.join(map(str, size))}", _bound(build, size))


def _bound(build: Callable[..., Built], size: tuple[int, ...]) -> Callable[[], Built]:
    return lambda: build(*size)

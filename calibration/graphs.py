"""The graphs the probes run: a small input becomes a large tensor on the device, then a chain of the op measured.

Nothing large crosses between host and device, so the time is the device's. Sizes are dynamic: one session serves
every size of a probe. `frame` is the same graph without the chain, whose time is subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph, Value
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType

__all__ = [
    "Chain",
    "attention",
    "bmm",
    "conv",
    "elementwise",
    "frame",
    "fused_gemm",
    "gemm",
    "lstm",
    "transfer",
    "transfers",
]

_WEIGHT_BYTES = 48 * 1024**2  # chains use their weights in turn up to here, so that caches help as in real models


class Chain:
    """A probe graph while it is built: `value` is the end of the chain.

    Args:
        name: the graph's name.
        rank: the rank of the large tensor.
        dtype: its element type.
    """

    def __init__(self, name: str, rank: int, dtype: DType = DType.F32) -> None:
        self.graph = Graph(name)
        self.dtype = dtype
        self.weights: dict[str, npt.NDArray[Any]] = {}
        self._random = np.random.default_rng(0)
        seed = self.graph.input("seed", [1], dtype)
        shape = self.graph.input("shape", [rank], DType.I64)
        self.dims: list[int | str] = [f"d{axis}" for axis in range(rank)]
        self.value = self.op("Expand", [seed, shape], self.dims)

    def op(
        self,
        op_type: str,
        inputs: Sequence[Value | None],
        dims: Sequence[int | str],
        attributes: Mapping[str, Any] | None = None,
        *,
        dtype: DType | None = None,
        domain: str = "",
    ) -> Value:
        """Add a node and return its first result."""
        kind = TensorType(dtype or self.dtype, Shape(dims))
        version = 1 if domain else 21
        return self.graph.onnx_node(op_type, inputs, attributes, types=[kind], domain=domain, version=version)[0]

    def weight(self, shape: Sequence[int], scale: float) -> Value:
        """Add a weight of normally distributed values; short ones repeat, which changes no time."""
        name = f"w{len(self.weights)}"
        count = int(np.prod(shape))
        block = self._random.standard_normal(min(count, 1 << 16)).astype(np.float32) * scale
        data = np.resize(block, count).reshape(shape).astype(self.dtype.numpy)
        self.weights[name] = data
        return self.graph.param(name, list(shape), self.dtype)

    def done(self) -> Graph:
        """Close the graph: one element of the chain's end is its output."""
        rank = len(self.dims)
        starts = self.graph.constant(np.zeros(rank, np.int64))
        ends = self.graph.constant(np.ones(rank, np.int64))
        self.graph.outputs = [self.op("Slice", [self.value, starts, ends], [1] * rank)]
        for name, data in self.weights.items():
            self.graph.weights[name] = TensorData.from_array(data, self.dtype)
        return self.graph


def frame(rank: int, dtype: DType = DType.F32) -> Graph:
    """Return the graph around a chain, without one."""
    return Chain("frame", rank, dtype).done()


def gemm(k: int, n: int, links: int, dtype: DType = DType.F32) -> Graph:
    """Return a chain of (m, k) by (k, n) by (n, k) products; `links` counts products and is even unless k is n."""
    chain = Chain("gemm", 2, dtype)
    kept = max(1, min(links, _WEIGHT_BYTES // (k * n * 4)))
    sides = [(k, n), (n, k)] if k != n else [(k, n)]
    weights = [chain.weight(sides[link % len(sides)], sides[link % len(sides)][0] ** -0.5) for link in range(kept)]
    if len(sides) == 2 and kept == 1:
        weights.append(chain.weight(sides[1], n**-0.5))
    period = len(weights) - len(weights) % len(sides)
    for link in range(links):
        weight = weights[link % period]
        chain.value = chain.op("MatMul", [chain.value, weight], ["d0", sides[link % len(sides)][1]])
    return chain.done()


def bmm(links: int, dtype: DType = DType.F32) -> Graph:
    """Return a chain of batched products of two computed values, (b, s, d) by (b, d, s) by (b, s, d)."""
    chain = Chain("bmm", 3, dtype)
    seed = chain.graph.input("key", [1], dtype)
    turned = chain.graph.input("key_shape", [3], DType.I64)
    key = chain.op("Expand", [seed, turned], ["d0", "d2", "d1"])
    value = chain.value
    for _ in range(links // 2):
        scores = chain.op("MatMul", [chain.value, key], ["d0", "d1", "d1"])
        chain.value = chain.op("MatMul", [scores, value], ["d0", "d1", "d2"])
    return chain.done()


def fused_gemm(side: int, links: int, extra: tuple[str, ...]) -> Graph:
    """Return a chain of square products, each with a bias or an activation after it."""
    chain = Chain("fused", 2)
    for _ in range(links):
        chain.value = chain.op("MatMul", [chain.value, chain.weight((side, side), side**-0.5)], ["d0", side])
        if "bias" in extra:
            chain.value = chain.op("Add", [chain.value, chain.weight((side,), 0.1)], ["d0", side])
        if "act" in extra:
            chain.value = chain.op("Relu", [chain.value], ["d0", side])
    return chain.done()


def conv(channels: int, kernel: int, links: int, *, depthwise: bool = False, extra: tuple[str, ...] = ()) -> Graph:
    """Return a chain of convolutions that keep channels and pictures; `extra` adds a sum or an activation to each."""
    chain = Chain("conv", 4)
    first = chain.value
    groups = channels if depthwise else 1
    per_group = channels // groups
    pad = kernel // 2
    attributes = {"pads": (pad,) * 4, "kernel_shape": (kernel, kernel), "group": groups, "strides": (1, 1)}
    for _ in range(links):
        weight = chain.weight((channels, per_group, kernel, kernel), (per_group * kernel * kernel) ** -0.5)
        dims: list[int | str] = ["d0", channels, "d2", "d3"]
        chain.value = chain.op("Conv", [chain.value, weight], dims, attributes)
        if "add" in extra:
            chain.value = chain.op("Add", [chain.value, first], dims)
        if extra:
            chain.value = chain.op("Relu", [chain.value], dims)
    return chain.done()


def attention(heads: int, head_dim: int, links: int, dtype: DType = DType.F32) -> Graph:
    """Return a chain of fused attentions, (batch, sequence, heads * head_dim), each over the chain's first value."""
    chain = Chain("attention", 3, dtype)
    memory = chain.value
    width = heads * head_dim
    for _ in range(links):
        chain.value = chain.op(
            "MultiHeadAttention",
            [chain.value, memory, memory],
            ["d0", "d1", width],
            {"num_heads": heads},
            domain="com.microsoft",
        )
    return chain.done()


def lstm(hidden: int, links: int) -> Graph:
    """Return a chain of LSTM layers over (steps, batch, hidden)."""
    chain = Chain("lstm", 3)
    for _ in range(links):
        wide = [chain.weight((1, 4 * hidden, hidden), hidden**-0.5) for _ in range(2)]
        result = chain.op("LSTM", [chain.value, *wide], ["d0", 1, "d1", hidden], {"hidden_size": hidden})
        axes = chain.graph.constant(np.array([1], np.int64))
        chain.value = chain.op("Squeeze", [result, axes], ["d0", "d1", hidden])
    return chain.done()


def elementwise(op_type: str, links: int, width: int, dtype: DType = DType.F32) -> Graph:
    """Return a chain of an op over (rows, width); `_LINKS` says how each op is chained."""
    chain = Chain(op_type.lower(), 2, dtype)
    first = chain.value
    link = _LINKS.get(op_type)
    for _ in range(links):
        chain.value = _unary(chain, op_type) if link is None else link(chain, first, width)
    return chain.done()


def transfer(*, upload: bool) -> Graph:
    """Return a graph whose large tensor comes from the host, or goes to it."""
    if not upload:
        chain = Chain("readback", 1)
        chain.graph.outputs = [chain.value]
        return chain.graph
    graph = Graph("upload")
    data = graph.input("data", ["d0"])
    start, end = (graph.constant(np.array([number], np.int64)) for number in (0, 1))
    kind = TensorType(DType.F32, Shape([1]))
    graph.outputs = list(graph.onnx_node("Slice", [data, start, end], types=[kind]))
    return graph


def transfers(inputs: int, outputs: int) -> Graph:
    """Return a graph of one tiny op an output, with so many inputs; extra inputs are added to the first op."""
    graph = Graph("transfers")
    values = [graph.input(f"x{index}", [4]) for index in range(inputs)]
    kind = TensorType(DType.F32, Shape([4]))
    total = values[0]
    for value in values[1:]:
        (total,) = graph.onnx_node("Add", [total, value], types=[kind])
    results = []
    for _ in range(outputs):
        (total,) = graph.onnx_node("Neg", [total], types=[kind])
        results.append(total)
    graph.outputs = results
    return graph


def _unary(chain: Chain, op_type: str) -> Value:
    return chain.op(op_type, [chain.value], chain.dims)


def _binary(op_type: str) -> Callable[[Chain, Value, int], Value]:
    return lambda chain, first, width: chain.op(op_type, [chain.value, first], chain.dims)


def _broadcast(chain: Chain, first: Value, width: int) -> Value:
    return chain.op("Add", [chain.value, chain.weight((width,), 0.1)], chain.dims)


def _pow(chain: Chain, first: Value, width: int) -> Value:
    exponent = chain.graph.constant(np.array([1.5], chain.dtype.numpy))
    return chain.op("Pow", [chain.value, exponent], chain.dims)


def _where(chain: Chain, first: Value, width: int) -> Value:
    mask = chain.op("Greater", [chain.value, first], chain.dims, dtype=DType.BOOL)
    return chain.op("Where", [mask, chain.value, first], chain.dims)


def _cast(chain: Chain, first: Value, width: int) -> Value:
    there = chain.op("Cast", [chain.value], chain.dims, {"to": 6}, dtype=DType.I32)
    return chain.op("Cast", [there], chain.dims, {"to": 1})


def _softmax(chain: Chain, first: Value, width: int) -> Value:
    return chain.op("Softmax", [chain.value], chain.dims, {"axis": -1})


def _layer_norm(chain: Chain, first: Value, width: int) -> Value:
    scale, bias = chain.weight((width,), 1.0), chain.weight((width,), 1.0)
    return chain.op("LayerNormalization", [chain.value, scale, bias], chain.dims, {"axis": -1})


def _reduce(chain: Chain, first: Value, width: int) -> Value:
    axes = chain.graph.constant(np.array([-1], np.int64))
    small = chain.op("ReduceMean", [chain.value, axes], ["d0", 1], {"keepdims": 1})
    return chain.op("Add", [chain.value, small], chain.dims)


def _transpose(chain: Chain, first: Value, width: int) -> Value:
    chain.dims.reverse()
    return chain.op("Transpose", [chain.value], chain.dims, {"perm": (1, 0)})


def _gather(chain: Chain, first: Value, width: int) -> Value:
    rows = chain.graph.inputs
    index = next((value for value in rows if value.name == "rows"), None)
    if index is None:
        index = chain.graph.input("rows", ["d0"], DType.I64)
    return chain.op("Gather", [chain.value, index], chain.dims, {"axis": 0})


def _concat(chain: Chain, first: Value, width: int) -> Value:
    half = chain.graph.constant(np.array([width // 2], np.int64))
    zero, end, axis = (chain.graph.constant(np.array([number], np.int64)) for number in (0, width, 1))
    left = chain.op("Slice", [chain.value, zero, half, axis], ["d0", width // 2])
    right = chain.op("Slice", [chain.value, half, end, axis], ["d0", width // 2])
    return chain.op("Concat", [right, left], chain.dims, {"axis": 1})


def _reshape(chain: Chain, first: Value, width: int) -> Value:
    shape = chain.graph.constant(np.array([-1, width], np.int64))
    return chain.op("Reshape", [chain.value, shape], chain.dims)


_LINKS: dict[str, Callable[[Chain, Value, int], Value]] = {
    "Add": _binary("Add"),
    "Mul": _binary("Mul"),
    "Div": _binary("Div"),
    "AddRow": _broadcast,
    "Pow": _pow,
    "Where": _where,
    "Cast": _cast,
    "Softmax": _softmax,
    "LayerNormalization": _layer_norm,
    "ReduceMean": _reduce,
    "Transpose": _transpose,
    "Gather": _gather,
    "Concat": _concat,
    "Reshape": _reshape,
}

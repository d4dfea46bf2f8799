"""The graphs the probes run: a small input becomes a large tensor on the device, then a chain of the op measured.

Nothing large crosses between host and device, so the time is the device's. Sizes are dynamic: one session serves
every size of a probe. `frame` is the same graph without the chain, whose time is subtracted. One core makes the tensor,
so on a CPU `spread` hands it to all of them before the chain begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph, Ref, Value
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType

__all__ = [
    "Chain",
    "attention",
    "bmm",
    "conv",
    "frame",
    "fused_gemm",
    "gemm",
    "lstm",
    "spread",
]


_TURNED = ["d0", "d2", "d1"]


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
        block = (self._random.standard_normal(min(count, 1 << 16)) * scale).astype(self.dtype.numpy)
        data = np.resize(block, shape)
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


def spread(chain: Graph) -> Graph:
    """Return the graph of a chain, or of none, in which all cores have written the large tensor before it is read.

    What one core has made, the others have to fetch from it. That was counted as a part of the first link: on 16 cores
    an addition of a quarter of a million elements came out at 32.8 us as an eighth of a chain of eight, after such a
    pass at 25.2, and takes 23.4 in a longer chain; a mean over a million at 48.8, 31.3 and 24.4.
    """
    graph = Graph(chain.name)
    made: dict[Ref, Value] = {}
    for node in chain.nodes:
        inputs = [None if ref is None else made[ref] for ref in node.inputs]
        values = graph.add_node(node.op, inputs, name=node.name, types=node.types, output_names=node.output_names)
        if isinstance(node.op, OnnxNode) and node.op.op_type == "Expand":
            values = graph.onnx_node("Relu", values, types=node.types, name="handed_out")
        made.update({Ref(node.id, at): value for at, value in enumerate(values)})
    graph.outputs = [made[value.ref] for value in chain.outputs]
    graph.weights.update(chain.weights)
    return graph


def gemm(k: int, n: int, links: int, dtype: DType = DType.F32, kept: int = 1) -> Graph:
    """Return a chain of (m, k) by (k, n) by (n, k) products; `links` counts products and is even unless k is n.

    The chain uses `kept` different weights of each side in turn; with one they stay in the device's caches.
    """
    chain = Chain("gemm", 2, dtype)
    sides = [(k, n), (n, k)] if k != n else [(k, n)]
    weights = [[chain.weight(side, side[0] ** -0.5) for _ in range(kept)] for side in sides]
    for link in range(links):
        at = link % len(sides)
        weight = weights[at][link // len(sides) % kept]
        chain.value = chain.op("MatMul", [chain.value, weight], ["d0", sides[at][1]])
    return chain.done()


def bmm(links: int, dtype: DType = DType.F32, *, turned: bool = False) -> Graph:
    """Return a chain of batched products of two computed values, (b, s, d) by (b, d, s) and (b, s, s) by (b, s, d).

    The key is a view of the first value, which costs nothing. With `turned`, one operand of each product comes out of
    a transpose of its last two axes.
    """
    chain = Chain("bmm", 3, dtype)
    value = chain.value
    swap = {"perm": (0, 2, 1)}
    key = None if turned else chain.op("Reshape", [value, chain.graph.input("key_shape", [3], DType.I64)], _TURNED)
    for _ in range(links // 2):
        # A different value is turned each time, or the engine would turn one once.
        right = chain.op("Transpose", [chain.value], _TURNED, swap) if key is None else key
        scores = chain.op("MatMul", [chain.value, right], ["d0", "d1", "d1"])
        if turned:
            scores = chain.op("Transpose", [scores], ["d0", "d1", "d1"], swap)
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

"""The table of kernels that a calibration measures, and the graphs that measure them.

What `size` counts in the rows of a kernel (elements are counted in units of 4 bytes, time is that of one node):

    run ()                        a whole run of one tiny node, from numpy to numpy
    launch ()                     one more tiny node
    input (), output ()           one more small input, one more small output
    upload (bytes)                a large input beyond a small one
    readback (bytes)              a large output beyond a small one
    MatMul (m, k * n)             (m, k) x (k, n) with k = n and a constant weight
    MatMul:first (m, k * n)       the same as the first node of a run, multiplying a graph input
    BatchedMatMul (flops)         a product of two computed values, batch * s * d * s * 2
    Conv3x3, Conv1x1 (pixels, channels)   pixels of all pictures together
    DepthwiseConv (elements)      3 x 3
    Attention (flops)             4 * batch * heads * s * s * 64, 12 heads of 64
    LSTM (steps, batch, hidden)
    NAME (elements)               an operator over rows of 256
    NAME (elements, width)        an operator whose time depends on the length of a row
    MatMul+Bias, MatMul+Relu, Conv+Relu, Conv+Add+Relu (elements)   what the nodes after the product add to it

`run`, `launch`, `input` and `output` are measured without recorded launches, and as `run:recorded` and so on with them
where the device records launches. All other kernels but transfers are measured the way the device executes them.
Rows whose kernel begins with `?` are single nodes that were measured on demand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph, Value
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType

__all__ = ["KERNELS", "QUICK_PRIORITY", "Kernel", "KernelGraph", "Point", "RandomData"]

Point: TypeAlias = tuple[int, ...]
"""What a kernel's graph is built from; `Kernel.size` makes the size of a row of it."""

QUICK_PRIORITY = 1
"""The points up to this priority make up a quick calibration."""


class RandomData:
    """Tensors that are views of one random buffer for each dtype, so that large ones cost nothing to make.

    Floats are uniform in (0.02, 0.98), inside the domain of nearly every function; integers are 0, a valid index.
    """

    def __init__(self) -> None:
        self._buffers: dict[DType, npt.NDArray[np.uint8]] = {}

    def tensor(self, shape: Sequence[int], dtype: DType) -> TensorData:
        """Return a tensor of a shape; it shares its memory with all others of its dtype."""
        nbytes = dtype.nbytes(math.prod(shape))
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._buffers[dtype] = np.resize(_block(dtype), max(2 * nbytes, 1 << 16))
        return TensorData(dtype, tuple(shape), buffer[:nbytes])


def _block(dtype: DType) -> npt.NDArray[np.uint8]:
    values = np.random.default_rng(0).uniform(0.02, 0.98, 1 << 16)
    if dtype is DType.BOOL:
        values = values > 0.5
    elif not dtype.is_float or dtype.is_packed:
        values = np.zeros_like(values)
    return values.astype(dtype.numpy).view(np.uint8)


class KernelGraph:
    """A graph that measures a kernel.

    Independent copies of a node read the same initializers, and optimisation is off: nothing is folded, fused or
    merged. Where optimisation is needed, or a device compiles whole graphs, the nodes are chained from a run-time value
    and have weights of their own.

    Args:
        data: where initializers come from.
        dtype: the element type.
        chained: whether each node reads the one before it.

    Attributes:
        graph: the graph.
        feeds: the inputs of a run.
        bare: whether it computes nothing, so that all such graphs are alike.
    """

    def __init__(self, data: RandomData, dtype: DType = DType.F32, *, chained: bool = False) -> None:
        self.graph = Graph("kernel")
        self.feeds: dict[str, npt.NDArray[Any]] = {}
        self.dtype = dtype
        self.chained = chained
        self.bare = False
        self._data = data
        self._shared: dict[object, Value] = {}

    def input(self, *shape: int) -> Value:
        """Add an input."""
        value = self.graph.input(f"in{len(self.feeds)}", list(shape), self.dtype)
        self.feeds[value.name] = self._data.tensor(shape, self.dtype).numpy()
        return value

    def weight(self, *shape: int, dtype: DType | None = None, given: TensorData | None = None) -> Value:
        """Return an initializer: one for each shape and dtype, or a new one in a chain or if its data is given."""
        dtype = dtype or self.dtype
        found = None if self.chained or given is not None else self._shared.get((shape, dtype))
        if found is None:
            name = f"w{len(self.graph.weights)}"
            self.graph.weights[name] = self._data.tensor(shape, dtype) if given is None else given
            found = self._shared[shape, dtype] = self.graph.param(name, list(shape), dtype)
        return found

    def constant(self, *numbers: float, dtype: type = np.int64) -> Value:
        """Return a constant vector; equal ones are made once."""
        key = (numbers, dtype)
        if key not in self._shared:
            self._shared[key] = self.graph.constant(np.array(numbers, dtype))
        return self._shared[key]

    def op(
        self,
        op_type: str,
        inputs: Sequence[Value],
        shape: Sequence[int],
        attributes: Mapping[str, Any] | None = None,
        *,
        dtype: DType | None = None,
        domain: str = "",
    ) -> Value:
        """Add a node and return its result."""
        kind = TensorType(dtype or self.dtype, Shape(shape))
        version = 1 if domain else 21
        return self.graph.onnx_node(op_type, inputs, attributes, types=[kind], domain=domain, version=version)[0]

    def end(self, value: Value | None = None, also: Sequence[Value] = ()) -> None:
        """Make one element of a value the output, or of a small initializer; `also` is computed and not read."""
        self.bare = value is None and not also
        value = self.weight(4) if value is None else value
        rank = value.rank
        inputs = [value, self.constant(*[0] * rank), self.constant(*[1] * rank), *also]
        # Only the formal inputs are written to the model. The others keep their nodes from being dropped.
        op = OnnxNode("Slice", formal_inputs=3)
        self.graph.outputs = list(self.graph.add_node(op, inputs, types=[TensorType(self.dtype, Shape([1] * rank))]))


Builder: TypeAlias = Callable[[KernelGraph, Point, int], None]
"""Completes the graph of a point with so many copies of the kernel."""

Link: TypeAlias = Callable[[Value], Value]


@dataclass(frozen=True, slots=True)
class Kernel:
    """What is measured under one name.

    Attributes:
        name: the name of its rows.
        build: builds its graph.
        groups: (priority, points) in any order; points of a group are measured one after the other, least work first.
        size: the size of a point's row.
        work: a number that a node's time is at most proportional to.
        unit: what `work` counts; kernels of one unit have similar rates.
        dtype: the element type, or tf32.
        base: builds what is subtracted; None for the graph with no copies, else it gets as many.
        whole: whether a whole run counts, and nothing is subtracted.
        copies: a fixed number of copies, else it is chosen by their expected time.
        most: copies at most.
        runs: "as executed", "plain" (no recorded launches), or "recorded", where the device records launches.
        chained: whether its nodes are chained and optimised on every device.
        linked: whether its nodes can be chained, which devices that compile whole graphs need.
    """

    name: str
    build: Builder
    groups: tuple[tuple[int, tuple[Point, ...]], ...]
    size: Callable[[Point], Point] = lambda point: point
    work: Callable[[Point], float] = lambda point: math.prod(point)
    unit: str = "elements"
    dtype: str = "f32"
    base: Builder | None = None
    copies: int = 0
    most: int = 64
    runs: str = "as executed"
    chained: bool = False
    linked: bool = True
    whole: bool = False


# --- whole runs and transfers


def _tiny(graph: KernelGraph, point: Point, copies: int, first: int = 1) -> None:
    """Chain tiny nodes, the first of which makes the smallest graph."""
    value = graph.input(4)
    for _ in range(first + copies):
        value = graph.op("Sin", [value], [4])
    graph.graph.outputs = [value]


def _one(graph: KernelGraph, point: Point, copies: int) -> None:
    _tiny(graph, point, 0)


def _more_inputs(inputs: bool) -> Builder:
    def build(graph: KernelGraph, point: Point, copies: int) -> None:
        first = value = graph.input(4)
        for _ in range(copies):
            value = graph.op("Add", [value, graph.input(4) if inputs else first], [4])
        graph.graph.outputs = [value]

    return build


def _more_outputs(outputs: bool) -> Builder:
    def build(graph: KernelGraph, point: Point, copies: int) -> None:
        values = [graph.input(4)]
        for _ in range(1 + copies):
            values.append(graph.op("Neg", [values[-1]], [4]))
        graph.graph.outputs = values[1:] if outputs else values[-1:]

    return build


def _upload(graph: KernelGraph, point: Point, copies: int) -> None:
    graph.end(graph.input(point[0] if copies else 4))


def _readback(whole: bool) -> Builder:
    def build(graph: KernelGraph, point: Point, copies: int) -> None:
        value = graph.op("Neg", [graph.weight(point[0])], point)
        graph.graph.outputs = [value]
        if not whole:
            graph.end(value)

    return build


def _first_product(graph: KernelGraph, point: Point, copies: int) -> None:
    m, side = point
    value = graph.input(m, side)
    graph.end(graph.op("MatMul", [value, graph.weight(side, side)], [m, side]) if copies else value)


# --- nodes


def _nodes(link: Callable[[KernelGraph, Point], tuple[Value, Link]], extra: int = 0) -> Builder:
    """Return a builder of `copies` nodes, or of a chain of `extra` more, from the first value and the node on it."""

    def build(graph: KernelGraph, point: Point, copies: int) -> None:
        first, node = link(graph, point)
        if not graph.chained:
            graph.end(also=[node(first) for _ in range(copies)])
            return
        value = graph.op("Add", [first, graph.input(1)], list(first.shape))
        for _ in range(copies + extra):
            value = node(value)
        graph.end(value)

    return build


def _matmul(graph: KernelGraph, point: Point) -> tuple[Value, Link]:
    m, side = point
    return graph.weight(m, side), lambda x: graph.op("MatMul", [x, graph.weight(side, side)], [m, side])


def _batched(graph: KernelGraph, point: Point) -> tuple[Value, Link]:
    batch, s, d = point
    return graph.weight(batch, s, d), lambda x: graph.op("MatMul", [x, graph.weight(batch, d, s)], [batch, s, s])


def _attention(graph: KernelGraph, point: Point) -> tuple[Value, Link]:
    shape = [*point, 12 * 64]
    memory = graph.weight(*shape)
    attributes = {"num_heads": 12}
    domain = "com.microsoft"
    return memory, lambda x: graph.op("MultiHeadAttention", [x, memory, memory], shape, attributes, domain=domain)


def _lstm(graph: KernelGraph, point: Point) -> tuple[Value, Link]:
    steps, batch, hidden = point
    weights = [graph.weight(1, 4 * hidden, hidden)] * 2
    shape, attributes = [steps, 1, batch, hidden], {"hidden_size": hidden}
    return graph.weight(steps, batch, hidden), lambda x: graph.op("LSTM", [x, *weights], shape, attributes)


def _conv(side: int, extra: tuple[str, ...] = (), *, depthwise: bool = False) -> Any:
    def link(graph: KernelGraph, point: Point) -> tuple[Value, Link]:
        count, pixels, channels = point
        shape, groups = [count, channels, pixels, pixels], channels if depthwise else 1
        attributes = {"pads": (side // 2,) * 4, "kernel_shape": (side, side), "group": groups}
        first = graph.weight(*shape)

        def node(x: Value) -> Value:
            value = graph.op("Conv", [x, graph.weight(channels, channels // groups, side, side)], shape, attributes)
            for op_type in extra:
                value = graph.op(op_type, [value, x] if op_type == "Add" else [value], shape)
            return value

        return first, node

    return link


def _fused_matmul(extra: tuple[str, ...]) -> Any:
    def link(graph: KernelGraph, point: Point) -> tuple[Value, Link]:
        first, product = _matmul(graph, point)

        def node(x: Value) -> Value:
            value = product(x)
            for op_type in extra:
                value = graph.op(op_type, [value, graph.weight(64)] if op_type == "Add" else [value], list(point))
            return value

        return first, node

    return link


# --- operators over (rows, width), by the name of their rows; the others are unary


def _operator(name: str) -> Any:
    def link(graph: KernelGraph, point: Point) -> tuple[Value, Link]:
        elements, width = point
        shape = [max(elements // width, 1), width]
        return graph.weight(*shape), lambda x: _OPERATORS.get(name, _unary)(graph, x, shape, name)

    return link


def _unary(graph: KernelGraph, x: Value, shape: list[int], name: str) -> Value:
    return graph.op(name, [x], shape)


def _binary(graph: KernelGraph, x: Value, shape: list[int], name: str) -> Value:
    return graph.op(name, [x, graph.weight(*shape)], shape)


def _layer_norm(graph: KernelGraph, x: Value, shape: list[int], name: str) -> Value:
    return graph.op(name, [x, graph.weight(shape[1]), graph.weight(shape[1])], shape, {"axis": -1})


def _gather(graph: KernelGraph, x: Value, shape: list[int], name: str) -> Value:
    """Look rows up in a table by random numbers."""
    table = graph.weight(_TABLE_ROWS, shape[1])
    rows = np.random.default_rng(0).integers(0, _TABLE_ROWS, shape[0])
    return graph.op(name, [table, graph.weight(shape[0], dtype=DType.I64, given=TensorData.from_array(rows))], shape)


def _transpose_rows(graph: KernelGraph, x: Value, shape: list[int], name: str) -> Value:
    """Exchange the axes before the last one, as attention does with its heads of 64."""
    sides = (8, max(math.prod(shape) // (8 * 64), 1), 64)
    return graph.op("Transpose", [graph.weight(*sides)], [sides[1], 8, 64], {"perm": (1, 0, 2)})


_TABLE_ROWS = 4096
_OPERATORS: Mapping[str, Callable[[KernelGraph, Value, list[int], str], Value]] = {
    **dict.fromkeys(("Add", "Mul", "Div"), _binary),
    "AddRow": lambda graph, x, shape, name: graph.op("Add", [x, graph.weight(shape[1])], shape),
    "Pow": lambda graph, x, shape, name: graph.op("Pow", [x, graph.constant(1.5, dtype=np.float32)], shape),
    "Where": lambda graph, x, shape, name: graph.op(
        "Where", [graph.weight(*shape, dtype=DType.BOOL), x, graph.weight(*shape)], shape
    ),
    "Cast": lambda graph, x, shape, name: graph.op("Cast", [x], shape, {"to": 6}, dtype=DType.I32),
    "Softmax": lambda graph, x, shape, name: graph.op("Softmax", [x], shape, {"axis": -1}),
    "LayerNormalization": _layer_norm,
    "Gather": _gather,
    "ReduceMean": lambda graph, x, shape, name: graph.op("ReduceMean", [x, graph.constant(1)], [shape[0], 1]),
    "ReduceRows": lambda graph, x, shape, name: graph.op("ReduceSum", [x, graph.constant(0)], [1, shape[1]]),
    "Transpose": lambda graph, x, shape, name: graph.op("Transpose", [x], shape[::-1], {"perm": (1, 0)}),
    "TransposeRows": _transpose_rows,
    "Concat": lambda graph, x, shape, name: graph.op(
        "Concat", [graph.weight(shape[0], shape[1] // 2)] * 2, shape, {"axis": 1}
    ),
    "Reshape": lambda graph, x, shape, name: graph.op("Reshape", [x, graph.constant(-1, shape[1])], shape),
}
_UNLINKED = frozenset({"Gather", "Cast", "ReduceMean", "ReduceRows", "Transpose", "TransposeRows", "Concat"})
_BY_WIDTH = ("Softmax", "LayerNormalization", "ReduceMean", "Gather", "Concat", "ReduceRows")
_CORE = ("Add", "Tanh", *_BY_WIDTH[:2], "Gather", "TransposeRows", "ReduceMean", "Concat", "AddRow", "Transpose")
_MORE = ("Relu", "Mul", "Sigmoid", "Gelu", "Erf", "Exp", "Sin", "Pow", "Where", "Cast", "Div", "Sqrt", "Reshape")


# --- the table


def _over(points: Sequence[int], width: int = 256) -> tuple[Point, ...]:
    return tuple((1 << exponent, width) for exponent in points)


def _operators() -> list[Kernel]:
    found = []
    for at, name in enumerate((*_CORE, "ReduceRows", *_MORE)):
        by_width = name in _BY_WIDTH
        quick = (10, 18, 22) if name == "Add" else (10, 18) if at < 6 else ()
        rest = (10, 14, 16, 18, 20, 22, 24) if name == "Add" else (10, 14, 18, 22) if name in _CORE else (14, 20)
        groups = [(1, _over(quick)), (2 if name in _CORE else 3, _over([at for at in rest if at not in quick]))]
        if by_width:
            wide = 1024 if name in ("Softmax", "LayerNormalization", "ReduceMean") else 2048
            groups += [(3, _over((14, 20), wide)), (4, _over((14, 20), 64 if wide == 1024 else 16))]
        size = (lambda point: point) if by_width else (lambda point: point[:1])
        work = lambda point: float(point[0])  # noqa: E731
        linked = name not in _UNLINKED
        found.append(Kernel(name, _nodes(_operator(name)), tuple(groups), size, work, linked=linked))
    return found


def _products() -> list[Kernel]:
    rows = (1, 4, 8, 32, 128, 512, 4096)
    squares: list[tuple[int, tuple[Point, ...]]] = []
    for side in (64, 512, 2048, 256, 1024, 16, 128, 4096):
        quick = (1, 32, 512) if side in (64, 512, 2048) else ()
        first = (1, 8, 128) if side == 4096 else rows
        priority = 2 if side in (64, 256, 512, 1024, 2048) else 3
        squares += [(1, tuple((m, side) for m in quick)), (priority, tuple((m, side) for m in first if m not in quick))]
    squares.append((4, tuple((m, 4096) for m in rows if m not in (1, 8, 128))))
    other = tuple((4, tuple((m, side) for m in (1, 64, 512, 4096))) for side in (256, 1024, 4096))
    size: Callable[[Point], Point] = lambda point: (point[0], point[1] ** 2)  # noqa: E731
    work: Callable[[Point], float] = lambda point: 2.0 * point[0] * point[1] ** 2  # noqa: E731
    types = (("f32", tuple(squares)), *((dtype, other) for dtype in ("f16", "bf16", "tf32")))
    found = [Kernel("MatMul", _nodes(_matmul), groups, size, work, "flops", dtype) for dtype, groups in types]
    first_groups = ((1, ((1, 256), (32, 1024))), (2, ((32, 256), (512, 256), (1, 1024), (512, 1024))))
    found.append(Kernel("MatMul:first", _first_product, first_groups, size, work, "flops", copies=1))
    batched = ((2, ((8, 16, 64), (8, 128, 64), (96, 128, 64), (96, 512, 64))),)
    flops: Callable[[Point], float] = lambda point: 2.0 * math.prod(point) * point[1]  # noqa: E731
    found.append(Kernel("BatchedMatMul", _nodes(_batched), batched, _whole(flops), flops, "flops", linked=False))
    heads: Callable[[Point], float] = lambda point: 4.0 * point[0] * 12 * point[1] ** 2 * 64  # noqa: E731
    sequences = ((1, ((1, 128),)), (2, ((1, 16), (8, 128), (8, 512))))
    found.append(Kernel("Attention", _nodes(_attention), sequences, _whole(heads), heads, "flops"))
    steps: Callable[[Point], float] = lambda point: 16.0 * point[0] * point[1] * point[2] ** 2  # noqa: E731
    layers = tuple((3, ((16, 1, h), (64, 1, h), (16, 16, h))) for h in (256, 64, 512))
    found.append(Kernel("LSTM", _nodes(_lstm), layers, work=steps, unit="flops", linked=False))
    return found


def _convolutions() -> list[Kernel]:
    found = []
    pictures = ((1, 7), (1, 28), (4, 56), (32, 56))
    size: Callable[[Point], Point] = lambda point: (point[0] * point[1] ** 2, point[2])  # noqa: E731
    for name, side in (("Conv3x3", 3), ("Conv1x1", 1)):
        work = _conv_work(side)
        points = [(*picture, 64) for picture in pictures]
        groups = ((1, tuple(points[:2])), (2, tuple(points[2:])))
        groups += tuple((3, tuple((*picture, c) for picture in pictures[: 4 if c < 64 else 3])) for c in (16, 256))
        build = _nodes(_conv(side), 1)
        found.append(Kernel(name, build, groups, size, work, "flops", most=8, chained=True))
    link = _conv(3, depthwise=True)
    groups = ((2, tuple((*picture, 64) for picture in pictures[:3])),)
    elements: Callable[[Point], float] = lambda point: float(point[0] * point[1] ** 2 * point[2])  # noqa: E731
    build = _nodes(link, 1)
    found.append(Kernel("DepthwiseConv", build, groups, _whole(elements), elements, "windows", most=8, chained=True))
    return found


def _fusions() -> list[Kernel]:
    found = []
    products = ((3, ((8, 64), (128, 64), (1024, 64), (8192, 64))),)
    size: Callable[[Point], Point] = lambda point: (math.prod(point),)  # noqa: E731
    for name, extra in (("MatMul+Bias", ("Add",)), ("MatMul+Relu", ("Add", "Relu"))):
        build, base = _nodes(_fused_matmul(extra)), _nodes(_matmul)
        work: Callable[[Point], float] = lambda point: 128.0 * math.prod(point)  # noqa: E731
        found.append(Kernel(name, build, products, size, work, "flops", base=base, copies=16, chained=True))
    pictures = ((3, ((1, 7, 64), (4, 56, 64))),)
    elements = _whole(lambda point: float(point[0] * point[1] ** 2 * point[2]))
    for name, extra in (("Conv+Relu", ("Relu",)), ("Conv+Add+Relu", ("Add", "Relu"))):
        build, base = _nodes(_conv(1, extra)), _nodes(_conv(1))
        found.append(Kernel(name, build, pictures, elements, _conv_work(1), "flops", base=base, copies=6, chained=True))
    return found


def _conv_work(side: int) -> Callable[[Point], float]:
    return lambda point: 2.0 * side * side * point[0] * point[1] ** 2 * point[2] ** 2


def _whole(count: Callable[[Point], float]) -> Callable[[Point], Point]:
    return lambda point: (int(count(point)),)


def _runs() -> list[Kernel]:
    found = []
    once: tuple[Point, ...] = ((),)
    for runs, tail in (("plain", ""), ("recorded", ":recorded")):
        found += [
            Kernel(f"run{tail}", _one, ((0, once),), unit="", runs=runs, copies=1, whole=True),
            Kernel(f"launch{tail}", _tiny, ((0, once),), unit="", runs=runs, copies=32),
        ]
        for name, build in (("input", _more_inputs), ("output", _more_outputs)):
            found.append(
                Kernel(f"{name}{tail}", build(True), ((1, once),), unit="", runs=runs, base=build(False), copies=7)
            )
    counts = ((1, ((1 << 8,), (1 << 18,))), (2, tuple((1 << at,) for at in (12, 14, 16, 20, 22))))
    nbytes: Callable[[Point], Point] = lambda point: (4 * point[0],)  # noqa: E731
    for name, build, base in (("upload", _upload, None), ("readback", _readback(True), _readback(False))):
        found.append(Kernel(name, build, counts, nbytes, unit="bytes", base=base, copies=1, runs="plain"))
    return found


KERNELS: tuple[Kernel, ...] = (*_runs(), *_products(), *_operators(), *_convolutions(), *_fusions())
"""All kernels; a calibration measures the points of all of them by priority."""

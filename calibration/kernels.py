"""The table of kernels that a calibration measures, and the graphs that measure them.

The meaning of `size` in the rows of a kernel (elements are counted in units of 4 bytes, time is that of one node):

    run ()                        a whole run of one tiny node, from numpy to numpy
    launch ()                     one more tiny node
    input (), output ()           one more small input, one more small output
    upload (bytes)                a large input beyond a small one
    readback (bytes)              a large output beyond a small one
    MatMul (m, k * n)             (m, k) x (k, n) with k = n and a constant weight
    BatchedMatMul (flops)         a product of two computed values, batch * s * d * s * 2
    Conv3x3, Conv1x1 (pixels, channels)   pixels of all pictures together
    DepthwiseConv (elements)      3 x 3
    Attention (flops)             4 * batch * heads * s * s * 64, 12 heads of 64
    LSTM (steps, batch, hidden)
    NAME (elements)               an operator over rows of 256
    NAME (elements, width)        an operator whose time depends on the length of a row

`run`, `launch`, `input` and `output` are measured without recorded launches, and as `run:recorded` and so on with them
where the device records launches. All other kernels but transfers are measured the way the device executes them.
Rows whose kernel begins with `?` are single nodes that were measured on demand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph, Value
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Shape, TensorType

Point: TypeAlias = tuple[int, ...]
"""The parts of a kernel's graph; `Kernel.size` makes the size of a row of it."""

QUICK_PRIORITY = 2
"""The points up to this priority make up a quick calibration; those of 0 and 1, which decide most, come first."""


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
    if not dtype.is_float or dtype.is_packed:
        values = np.round(values) if dtype is DType.BOOL else np.zeros_like(values)
    return values.astype(dtype.numpy).view(np.uint8)


class KernelGraph:
    """A graph that measures a kernel.

    Independent copies of a node read the same initializers, and optimisation is off: nothing is folded, fused or
    merged. Where optimisation is needed, or a device compiles whole graphs, the nodes are chained from a run-time value
    and have weights of their own. With `chained`, each node reads the one before it. `bare` is true if the graph
    computes nothing, so that all such graphs are alike.
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
        value = None if self.chained or given is not None else self._shared.get((shape, dtype))
        if value is None:
            name = f"w{len(self.graph.weights)}"
            self.graph.weights[name] = self._data.tensor(shape, dtype) if given is None else given
            value = self.graph.param(name, list(shape), dtype)
            if given is None:
                self._shared[shape, dtype] = value
        return value

    def constant(self, *numbers: float, dtype: type = np.int64) -> Value:
        """Return a constant vector; equal ones are made once."""
        key = (numbers, dtype)
        if key not in self._shared:
            self._shared[key] = self.graph.constant(np.array(numbers, dtype))
        return self._shared[key]

    def op(self, op_type: str, inputs: Sequence[Value], *shape: int, **given: Any) -> Value:
        """Add a node and return its result; `given` are its attributes, dtype and domain apart."""
        kind = TensorType(given.pop("dtype", self.dtype), Shape(shape))
        domain = given.pop("domain", "")
        version = 1 if domain else 21
        return self.graph.onnx_node(op_type, inputs, given, types=[kind], domain=domain, version=version)[0]

    def indices(self, count: int, limit: int) -> Value:
        """Return random row numbers below a limit; equal ones are made once."""
        key = ("indices", count, limit)
        if key not in self._shared:
            rows = np.random.default_rng(0).integers(0, limit, count)
            self._shared[key] = self.weight(count, dtype=DType.I64, given=TensorData.from_array(rows))
        return self._shared[key]

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

Link: TypeAlias = tuple[Value, Callable[[Value], Value]]
"""The input of the copies of a kernel, and the function that adds a copy."""

Groups: TypeAlias = tuple[tuple[int, tuple[Point, ...]], ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """The measurements under one name.

    `build` makes the graph of a point. `base` makes the graph that is subtracted, with as many copies; None takes the
    kernel's own graph without copies. With `whole`, a whole run counts and nothing is subtracted. `copies` fixes the
    number of copies; 0 chooses it by their expected time, up to `most`.

    `groups` holds (priority, points); the points of a group are measured one after the other, least work first. `size`
    maps a point to the size in its row. A node's time is at most proportional to `work`, which counts `unit`; kernels
    of one unit have similar rates.

    `runs` is "as executed", "plain" (no recorded launches), or "recorded", where the device records launches. `chained`
    nodes are chained and optimised on every device.
    """

    name: str
    build: Builder
    groups: Groups
    size: Callable[[Point], Point] = tuple
    work: Callable[[Point], float] = math.prod
    unit: str = ""
    dtype: str = "f32"
    base: Builder | None = None
    whole: bool = False
    copies: int = 0
    most: int = 64
    runs: str = "as executed"
    chained: bool = False


# --- whole runs and transfers


def _tiny(graph: KernelGraph, point: Point, copies: int) -> None:
    value = graph.input(4)
    for _ in range(1 + copies):
        value = graph.op("Sin", [value], 4)
    graph.graph.outputs = [value]


def _inputs(graph: KernelGraph, point: Point, copies: int, *, several: bool = True) -> None:
    first = value = graph.input(4)
    for _ in range(copies):
        value = graph.op("Add", [value, graph.input(4) if several else first], 4)
    graph.graph.outputs = [value]


def _outputs(graph: KernelGraph, point: Point, copies: int, *, several: bool = True) -> None:
    values = [graph.input(4)]
    for _ in range(1 + copies):
        values.append(graph.op("Neg", values[-1:], 4))
    graph.graph.outputs = values[1 if several else -1 :]


def _upload(graph: KernelGraph, point: Point, copies: int) -> None:
    graph.end(graph.input(point[0] // 4 if copies else 4))


def _readback(graph: KernelGraph, point: Point, copies: int, *, whole: bool = True) -> None:
    value = graph.op("Neg", [graph.weight(point[0] // 4)], point[0] // 4)
    graph.graph.outputs = [value]
    if not whole:
        graph.end(value)


# --- nodes


def _nodes(link: Callable[..., Link], more: int = 0) -> Builder:
    """Return a function that builds `copies` nodes, in a chain `more` of them, whose base is then a shorter chain."""

    def build(graph: KernelGraph, point: Point, copies: int) -> None:
        first, node = link(graph, *point)
        if not graph.chained:
            graph.end(also=[node(first) for _ in range(copies)])
            return
        value = graph.op("Add", [first, graph.input(1)], *first.shape)  # pyright: ignore[reportArgumentType]  # sizes, no names
        for _ in range(copies + more):
            value = node(value)
            if value.type != first.type:
                raise GraphVerifyError("it cannot be chained, which devices that compile whole graphs need")
        graph.end(value)

    return build


def _product(graph: KernelGraph, m: int, side: int) -> Link:
    return graph.weight(m, side), lambda x: graph.op("MatMul", [x, graph.weight(side, side)], m, side)


def _batched(graph: KernelGraph, batch: int, s: int, d: int) -> Link:
    return graph.weight(batch, s, d), lambda x: graph.op("MatMul", [x, graph.weight(batch, d, s)], batch, s, s)


def _attention(graph: KernelGraph, batch: int, s: int) -> Link:
    first = graph.weight(batch, s, 12 * 64)
    given = {"num_heads": 12, "domain": "com.microsoft"}
    return first, lambda x: graph.op("MultiHeadAttention", [x, first, first], batch, s, 12 * 64, **given)


def _lstm(graph: KernelGraph, steps: int, batch: int, hidden: int) -> Link:
    weights = [graph.weight(1, 4 * hidden, hidden)] * 2
    first = graph.weight(steps, batch, hidden)
    return first, lambda x: graph.op("LSTM", [x, *weights], steps, 1, batch, hidden, hidden_size=hidden)


def _conv(graph: KernelGraph, count: int, pixels: int, channels: int, side: int, group: int = 1) -> Link:
    shape = (count, channels, pixels, pixels)
    given = {"pads": (side // 2,) * 4, "kernel_shape": (side, side), "group": group}
    weight = (channels, channels // group, side, side)
    return graph.weight(*shape), lambda x: graph.op("Conv", [x, graph.weight(*weight)], *shape, **given)


def _depthwise(graph: KernelGraph, count: int, pixels: int, channels: int) -> Link:
    return _conv(graph, count, pixels, channels, side=3, group=channels)


def _operator(graph: KernelGraph, elements: int, width: int, *, name: str) -> Link:
    """Return an operator over rows of a width by the name of its rows; it is unary unless it is listed here."""
    g, rows = graph, max(elements // width, 1)
    heads = max(rows // 8, 1)
    first: Sequence[int] = {
        "Gather": (_TABLE_ROWS, width),
        "Concat": (rows, width // 2),
        "TransposeRows": (8, heads, width),
    }.get(name, (rows, width))
    # Built when they are called, since each needs its own weights and constants.
    nodes: Mapping[str, Callable[[Value], Value]] = {
        **{two: lambda x: g.op(name, [x, g.weight(rows, width)], rows, width) for two in ("Add", "Mul", "Div")},
        "AddRow": lambda x: g.op("Add", [x, g.weight(width)], rows, width),
        "Pow": lambda x: g.op("Pow", [x, g.constant(1.5, dtype=np.float32)], rows, width),
        "Where": lambda x: g.op("Where", [g.weight(rows, width, dtype=DType.BOOL), x, x], rows, width),
        "Cast": lambda x: g.op("Cast", [x], rows, width, to=6, dtype=DType.I32),
        "Softmax": lambda x: g.op("Softmax", [x], rows, width, axis=-1),
        "LayerNormalization": lambda x: g.op(name, [x, g.weight(width), g.weight(width)], rows, width, axis=-1),
        "Gather": lambda x: g.op("Gather", [x, g.indices(rows, _TABLE_ROWS)], rows, width),
        "ReduceMean": lambda x: g.op("ReduceMean", [x, g.constant(1)], rows, 1),
        "ReduceRows": lambda x: g.op("ReduceSum", [x, g.constant(0)], 1, width),
        "Transpose": lambda x: g.op("Transpose", [x], width, rows, perm=(1, 0)),
        "TransposeRows": lambda x: g.op("Transpose", [x], heads, 8, width, perm=(1, 0, 2)),
        "Concat": lambda x: g.op("Concat", [x, x], rows, width, axis=1),
        "Reshape": lambda x: g.op("Reshape", [x, g.constant(-1, width)], rows, width),
    }
    return graph.weight(*first), nodes.get(name, lambda x: g.op(name, [x], rows, width))


_TABLE_ROWS = 4096
_QUICK = ("Tanh", "Softmax", "LayerNormalization", "Gather", "TransposeRows", "AddRow")
_CORE = (*_QUICK, "ReduceMean", "Concat", "Transpose")
_MORE = ("Relu", "Mul", "Sigmoid", "Gelu", "Erf", "Exp", "Sin", "Pow", "Where", "Cast", "Div", "Sqrt", "Reshape")
_NARROW, _USUAL = 16, {"TransposeRows": 64}  # elements of a row; of others 256
_WIDTHS = {**dict.fromkeys(("Softmax", "LayerNormalization"), (16, 1024, 64)), "ReduceMean": (1024, 64)}
_WIDTHS |= {**dict.fromkeys(("Gather", "Concat", "ReduceRows"), (2048, 16)), "AddRow": (16,), "TransposeRows": (16,)}
"""Operators whose time depends on the length of a row -> further lengths, the more important one first."""


# --- the table


def _points(*rows: int, side: int) -> tuple[Point, ...]:
    return tuple((m, side) for m in rows)


def _elements(*exponents: int, width: int = 256) -> tuple[Point, ...]:
    return tuple((1 << exponent, width) for exponent in exponents)


def _count(work: Callable[[Point], float]) -> Callable[[Point], Point]:
    return lambda point: (int(work(point)),)


def _pixels(point: Point) -> float:
    return point[0] * point[1] ** 2


def _flops(formula: Callable[..., float]) -> Callable[[Point], float]:
    return lambda point: float(formula(*point))


_MATMUL_FLOPS = _flops(lambda m, side: 2 * m * side**2)
_BATCHED_FLOPS = _flops(lambda batch, s, d: 2 * batch * s * s * d)
_ATTENTION_FLOPS = _flops(lambda batch, s: 4 * batch * 12 * s * s * 64)
_LSTM_FLOPS = _flops(lambda steps, batch, hidden: 16 * steps * batch * hidden**2)
_ALL_ROWS = (1, 4, 8, 32, 128, 512, 4096)
_SQUARES: Groups = (
    *((1, _points(1, 512, side=side)) for side in (64, 512, 2048)),
    (1, _points(4096, side=2048)),
    *((2, _points(32, side=side)) for side in (64, 512, 2048)),
    *((3, _points(8, 128, 4096, side=side)) for side in (64, 512)),
    (3, _points(8, 128, side=2048)),
    (3, _points(1, 32, 512, side=1024)),
    (4, _points(*_ALL_ROWS, side=256)),
    *((4, _points(4, side=side)) for side in (64, 512, 2048)),
    (4, _points(4, 8, 128, 4096, side=1024)),
    (4, _points(1, 8, 128, side=4096)),
    *((5, _points(*_ALL_ROWS, side=side)) for side in (16, 128)),
    (5, _points(4, 32, 512, 4096, side=4096)),
)
_HALF: Groups = ((4, _points(64, 512, side=1024)), *((5, _points(1, 64, 512, 4096, side=side)) for side in (256, 4096)))
_BYTES: Groups = ((1, ((1 << 10,), (1 << 20,))), (3, tuple((1 << at,) for at in (14, 16, 18, 22, 24))))
_PICTURES = ((1, 7), (1, 28), (4, 56), (32, 56))


def _pictures(channels: int, *, count: int = 4) -> tuple[Point, ...]:
    return tuple((*picture, channels) for picture in _PICTURES[:count])


def _runs() -> list[Kernel]:
    kernels = []
    for runs, tail in (("plain", ""), ("recorded", ":recorded")):
        alone = partial(Kernel, groups=((0, ((),)),), runs=runs)
        kernels += [
            alone(f"run{tail}", lambda graph, point, copies: _tiny(graph, point, 0), copies=1, whole=True),
            alone(f"launch{tail}", _tiny, copies=32),
            alone(f"input{tail}", _inputs, copies=7, base=partial(_inputs, several=False)),
            alone(f"output{tail}", _outputs, copies=7, base=partial(_outputs, several=False)),
        ]
    transfer = partial(Kernel, groups=_BYTES, unit="bytes", copies=1, runs="plain")
    return [
        *kernels,
        transfer("upload", _upload),
        transfer("readback", _readback, base=partial(_readback, whole=False)),
    ]


def _products() -> list[Kernel]:
    square = partial(Kernel, size=lambda point: (point[0], point[1] ** 2), work=_MATMUL_FLOPS, unit="flops")
    flops = partial(Kernel, unit="flops")
    batched: Groups = ((3, ((8, 16, 64), (8, 128, 64), (96, 128, 64), (96, 512, 64))),)
    sequences: Groups = ((2, ((1, 128),)), (3, ((1, 16), (8, 128), (8, 512))))
    layers: Groups = (
        (3, ((16, 1, 256), (64, 1, 256), (16, 16, 256))),
        *((4, ((16, 1, hidden), (16, 16, hidden))) for hidden in (64, 512)),
    )
    return [
        square("MatMul", _nodes(_product), _SQUARES),
        square("MatMul", _nodes(_product), _HALF, dtype="f16"),
        flops("BatchedMatMul", _nodes(_batched), batched, _count(_BATCHED_FLOPS), _BATCHED_FLOPS),
        flops("Attention", _nodes(_attention), sequences, _count(_ATTENTION_FLOPS), _ATTENTION_FLOPS),
        flops("LSTM", _nodes(_lstm), layers, work=_LSTM_FLOPS),
    ]


def _operators() -> list[Kernel]:
    quick: dict[str, Groups] = {"Add": ((1, _elements(10, 18, 22, 24)), (3, _elements(14, 16, 20)))}
    for name in _QUICK:
        usual = partial(_elements, width=_USUAL.get(name, 256))
        quick[name] = ((2, usual(10, 18)), (3, usual(14, 22)))
    kernels = []
    for name in ("Add", *_CORE, "ReduceRows", *_MORE):
        plain = ((3, _elements(10, 14, 18, 22)),) if name in _CORE else ((4, _elements(14, 20)),)
        widths: Groups = tuple(
            (2 if name in _QUICK and (width, exponent) == (_NARROW, 14) else 4 + at, _elements(exponent, width=width))
            for at, width in enumerate(_WIDTHS.get(name, ()))
            for exponent in (14, 20)
        )
        size: Callable[[Point], Point] = tuple if widths else _count(lambda point: point[0])
        build, groups = _nodes(partial(_operator, name=name)), (*quick.get(name, plain), *widths)
        kernels.append(Kernel(name, build, groups, size, lambda point: point[0], "elements"))
    return kernels


def _convolutions() -> list[Kernel]:
    """Convolutions are chained, since optimisation lays out their channels; the base is a chain of one."""
    kernels, chain = [], partial(Kernel, unit="flops", most=8, chained=True)
    for name, side in (("Conv3x3", 3), ("Conv1x1", 1)):
        groups: Groups = (
            (1, _pictures(64)[1:3]),
            (2, _pictures(64, count=1)),
            (3, _pictures(64)[3:]),
            (4, _pictures(16)),
            (4, _pictures(256, count=3)),
        )
        work = _flops(
            partial(lambda count, pixels, channels, side: 2 * count * (side * pixels * channels) ** 2, side=side)
        )
        build = _nodes(partial(_conv, side=side), 1)
        kernels.append(chain(name, build, groups, lambda point: (int(_pixels(point)), point[2]), work))
    elements: Callable[[Point], float] = lambda point: _pixels(point) * point[2]  # noqa: E731
    groups = ((3, _pictures(64, count=3)),)
    return [*kernels, chain("DepthwiseConv", _nodes(_depthwise, 1), groups, _count(elements), elements, unit="windows")]


KERNELS: tuple[Kernel, ...] = (*_runs(), *_products(), *_operators(), *_convolutions())
"""All kernels; a calibration measures the points of all of them by priority."""

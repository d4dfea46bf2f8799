"""Random ONNX models with rows on the first axis, for the row proof: a model and its values for every seed.

Nodes are drawn one by one and kept if ONNX Runtime runs them, so that shapes fit. About two thirds of the choices of an
axis leave the rows alone; shapes are often computed from `Shape`. What the output does not need is dropped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper
from row_runs import opened

__all__ = ["ROWS", "Made", "fixed", "made_of", "other_values"]

ROWS = 7
Array = npt.NDArray[Any]
_LARGEST = 3000  # elements
_INEXACT = """\
Exp Sigmoid Tanh Softmax LogSoftmax LayerNormalization ReduceMean Div Sqrt LSTM GRU RNN Resize Conv Attention
InstanceNormalization GlobalAveragePool MultiHeadAttention DequantizeLinear Normalizer Scaler LpNormalization
DynamicQuantizeLinear Erf SkipLayerNormalization BatchNormalization AveragePool ReduceL2 Loop Scan"""
_JUMPY = """\
Floor Sign Greater Less Equal GreaterOrEqual ArgMax ArgMin TopK Cast QuantizeLinear DynamicQuantizeLinear Hardmax
NonZero Mod Unique Where TreeEnsembleRegressor Round Compress If"""


@dataclass
class Made:
    """A model with the values of its inputs for `ROWS` rows.

    Attributes:
        model: a model of one output, named y.
        feeds: name -> values.
        operators: those of its nodes.
    """

    model: onnx.ModelProto
    feeds: dict[str, Array]
    operators: tuple[str, ...]


@dataclass
class _Entry:
    name: str
    array: Array
    exact: bool = True

    @property
    def rank(self) -> int:
        return self.array.ndim

    @property
    def row_axes(self) -> list[int]:
        """The axes that may be those of the rows."""
        return [at for at, size in enumerate(self.array.shape) if size and not size % ROWS]


class _Drawing:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}
        self.pool: list[_Entry] = []
        self.count = 0
        self.inputs: dict[str, Array] = {}
        for place in range(self.rng.integers(1, 4)):
            shape = (ROWS, *(int(each) for each in self.rng.choice([1, 2, 3, 4, 6], self.rng.integers(0, 4))))
            kind = self.rng.choice(["f", "f", "f", "i", "b"])
            name = f"x{place}"
            self.inputs[name] = values_of(self.rng, shape, kind)
            self.pool.append(_Entry(name, self.inputs[name]))

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def one(self, items: Sequence[Any]) -> Any:
        if not len(items):
            raise _ImpossibleError
        return items[int(self.rng.integers(len(items)))]

    def pick(self, kinds: str = "fi", least: int = 0) -> _Entry:
        """Return a value, a late one more often."""
        fitting = [each for each in self.pool if each.array.dtype.kind in kinds and each.rank >= least]
        return self.one(fitting[-4:] if self.chance(0.6) else fitting)

    def axis(self, entry: _Entry) -> int:
        """Return an axis, more often one without rows."""
        free = [at for at in range(entry.rank) if at not in entry.row_axes]
        if free and self.chance(0.75):
            return int(self.one(free))
        return int(self.rng.integers(entry.rank)) if entry.rank else self.one([])

    def const(self, array: Any, dtype: Any = np.int64) -> _Entry:
        self.count += 1
        made = _Entry(f"c{self.count}", np.asarray(array, dtype))
        self.constants[made.name] = made.array
        return made

    def op(self, name: str, *inputs: _Entry | None, outputs: int = 1, domain: str = "", **attributes: Any) -> _Entry:
        return self.ops(name, *inputs, outputs=outputs, domain=domain, **attributes)[0]

    def ops(
        self, name: str, *inputs: _Entry | None, outputs: int = 1, domain: str = "", **attributes: Any
    ) -> list[_Entry]:
        """Return the outputs of a node, once it ran."""
        given = [each for each in inputs if each is not None]
        exact = all(each.exact for each in given)
        if name in _JUMPY.split() and not exact:
            raise _ImpossibleError
        names = []
        for _ in range(outputs):
            self.count += 1
            names.append(f"v{self.count}")
        node = helper.make_node(
            name, [each.name if each else "" for each in inputs], names, domain=domain, **attributes
        )
        node.name = f"{name}_{self.count}"
        feeds = {each.name: each.array for each in given}
        feeds.update({each.name: each.array for each in self.pool} if "body" in attributes or name == "If" else {})
        graph = helper.make_graph(
            [node], "one", [_info(key, value.dtype, value.shape) for key, value in feeds.items()],
            [onnx.ValueInfoProto(name=each) for each in names],
        )  # fmt: skip
        try:
            found = opened(_model(graph)).run(None, feeds)
        except Exception as err:  # the engine refuses the node; its classes are its own
            raise _ImpossibleError from err
        if any(not isinstance(each, np.ndarray) or each.size > _LARGEST or not each.size for each in found):
            raise _ImpossibleError
        if any(each.dtype.kind == "f" and not np.abs(each[np.isfinite(each)]).max(initial=0) < 1e4 for each in found):
            raise _ImpossibleError
        self.nodes.append(node)
        entries = [
            _Entry(key, array, exact and name not in _INEXACT.split()) for key, array in zip(names, found, strict=True)
        ]
        self.pool += entries
        return entries


class _ImpossibleError(Exception):
    """A step does not fit."""


def values_of(rng: np.random.Generator, shape: Sequence[int], kind: str) -> Array:
    """Return small values: floats are eighths, so that sums are exact, integers may be indices."""
    if kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if kind == "i":
        return rng.integers(-1, 2, shape)
    return (rng.integers(-24, 25, shape) / 8).astype(np.float32)


def other_values(rng: np.random.Generator, array: Array, rows: Sequence[int]) -> Array:
    """Return an array with other values in all rows but some: small, large, or none."""
    changed = values_of(rng, array.shape, array.dtype.kind)
    if changed.dtype.kind == "f":
        changed = changed * rng.choice(np.array([1, 100, 1e4, 0, np.inf, np.nan, -1e30], np.float32))
        changed = np.where(rng.random(array.shape) < 0.5, rng.choice(changed.reshape(-1)), changed).astype(array.dtype)
    changed = changed.astype(array.dtype)
    changed[list(rows)] = array[list(rows)]
    return changed


def made_of(seed: int, often: str = "") -> Made | None:
    """Return the model of a seed, or None if no value has rows on its first axis.

    Half of the nodes are those of the step called `often`, if one is.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return _made_of(seed, often)


def _made_of(seed: int, often: str) -> Made | None:
    focus = [step for step in _STEPS if step.__name__ == f"_{often}"] if often else []
    drawing = _Drawing(seed)
    wanted = int(drawing.rng.integers(2, 12))
    for _ in range(3 * wanted):
        if len(drawing.nodes) >= wanted:
            break
        try:
            drawing.one(focus if focus and drawing.chance(0.5) else _STEPS)(drawing)
        except _ImpossibleError:
            continue
    given = len(drawing.inputs)
    fitting = [each for each in drawing.pool[given:] if each.array.shape[:1] == (ROWS,)]
    if not fitting:
        return None
    last = fitting[-1]
    nodes, needed = [], {last.name}
    for node in reversed(drawing.nodes):
        if needed.intersection(node.output):
            nodes.append(node)
            needed.update(node.input)
            needed.update(_outer_names(node))
    nodes = [*reversed(nodes), helper.make_node("Identity", [last.name], ["y"], name="y")]
    inputs = [
        _info(name, array.dtype, ["N", *array.shape[1:]]) for name, array in drawing.inputs.items() if name in needed
    ]
    if not inputs:
        return None
    constants = [numpy_helper.from_array(array, name) for name, array in drawing.constants.items() if name in needed]
    output = _info("y", last.array.dtype, ["N", *[f"y{at}" for at in range(1, last.rank)]])
    model = _model(helper.make_graph(nodes, "drawn", inputs, [output], constants))
    feeds = {value.name: drawing.inputs[value.name] for value in inputs}
    return Made(model, feeds, tuple(node.op_type for node in nodes[:-1]))


def _outer_names(node: onnx.NodeProto) -> set[str]:
    return {
        name
        for attribute in node.attribute
        if attribute.type == onnx.AttributeProto.GRAPH
        for inner in attribute.g.node
        for name in inner.input
    }


def _info(name: str, dtype: Any, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    domains = [("", 23), ("com.microsoft", 1), ("ai.onnx.ml", 3)]
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid(name, version) for name, version in domains], ir_version=10
    )


_Step = Callable[[_Drawing], object]


def _unary(d: _Drawing) -> None:
    d.op(d.one(["Relu", "Neg", "Abs", "Exp", "Sigmoid", "Tanh", "Floor", "Sign", "Identity"]), d.pick("f"))


def _cast(d: _Drawing) -> None:
    d.op("Cast", d.pick("fib"), to=d.one([onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL]))


def _partner(d: _Drawing, entry: _Entry) -> _Entry:
    """Return a value or a constant of the dtype that may be broadcast with another one."""
    same = [each for each in d.pool if each.array.dtype == entry.array.dtype]
    if same and d.chance(0.7):
        return d.one(same)
    sizes = [size if d.chance(0.4) and (size % ROWS or d.chance(0.2)) else 1 for size in entry.array.shape]
    keep = int(d.rng.integers(entry.rank + 1)) if d.chance(0.3) else 0
    return d.const(d.rng.integers(-2, 3, sizes[keep:]), entry.array.dtype)


def _binary(d: _Drawing) -> None:
    entry = d.pick()
    d.op(d.one(["Add", "Sub", "Mul", "Max", "Min", "Mod", "Div"] if entry.array.dtype.kind == "i" else
               ["Add", "Sub", "Mul", "Max", "Min"]), entry, _partner(d, entry))  # fmt: skip


def _compare(d: _Drawing) -> None:
    entry = d.pick()
    d.op(d.one(["Greater", "Less", "Equal", "GreaterOrEqual"]), entry, _partner(d, entry))


def _logic(d: _Drawing) -> None:
    entry = d.pick("b")
    d.op(d.one(["And", "Or", "Xor"]), entry, _partner(d, entry))


def _where(d: _Drawing) -> None:
    entry = d.pick()
    d.op("Where", d.pick("b"), entry, _partner(d, entry))


def _reduce(d: _Drawing) -> None:
    entry, keep = d.pick(least=1), int(d.chance(0.6))
    axes = d.const([d.axis(entry)]) if d.chance(0.9) else None
    d.op(d.one(["ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean", "ReduceL2"]), entry, axes, keepdims=keep)


def _arg(d: _Drawing) -> None:
    entry = d.pick("f", 1)
    d.op(d.one(["ArgMax", "ArgMin"]), entry, axis=d.axis(entry), keepdims=int(d.chance(0.6)))


def _along(d: _Drawing) -> None:
    entry = d.pick("f", 1)
    name = d.one(["Softmax", "LogSoftmax", "Hardmax", "LpNormalization", "CumSum", "TopK"])
    axis = d.axis(entry)
    if name == "CumSum":
        d.op(name, entry, d.const(axis))
    elif name == "TopK":
        d.ops(name, entry, d.const([1]) if d.chance(0.8) else _sizes(d, [ROWS]), outputs=2, axis=axis)
    else:
        d.op(name, entry, axis=axis)


def _normal(d: _Drawing) -> None:
    entry = d.pick("f", 1)
    axis = d.axis(entry)
    d.op("LayerNormalization", entry, d.const(np.ones(entry.array.shape[axis:]), np.float32), axis=axis)


def _transpose(d: _Drawing) -> None:
    entry = d.pick("fib", 2)
    d.op("Transpose", entry, perm=[int(each) for each in d.rng.permutation(entry.rank)])


def _unsqueeze(d: _Drawing) -> None:
    entry = d.pick("fib")
    d.op("Unsqueeze", entry, d.const([int(d.rng.integers(-1, entry.rank + 1))]))


def _squeeze(d: _Drawing) -> None:
    entry = d.pick("fib", 1)
    ones = [at for at, size in enumerate(entry.array.shape) if size == 1]
    d.op("Squeeze", entry, d.const([d.one(ones)]) if d.chance(0.9) else None)


def _reshape(d: _Drawing) -> None:
    entry = d.pick("fib", 1)
    sizes = list(entry.array.shape)
    for _ in range(d.rng.integers(1, 3)):
        at = int(d.rng.integers(len(sizes)))
        if d.chance(0.5) and len(sizes) > 1:
            at = min(at, len(sizes) - 2)
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
        elif factors := [each for each in (2, 3, ROWS) if sizes[at] % each == 0]:
            factor = d.one(factors)
            sizes[at : at + 1] = d.one([[factor, sizes[at] // factor], [sizes[at] // factor, factor]])
    _reshaped(d, entry, sizes)


def _reshaped(d: _Drawing, entry: _Entry, sizes: Sequence[int]) -> None:
    """Reshape to sizes, of which those of rows are open, or computed from a shape, or the numbers they are."""
    way = d.rng.random()
    if way < 0.45:
        open_at = [at for at, size in enumerate(sizes) if size % ROWS == 0] or range(len(sizes))
        at = d.one(list(open_at)) if d.chance(0.8) else int(d.rng.integers(len(sizes)))
        d.op("Reshape", entry, d.const([-1 if each == at else size for each, size in enumerate(sizes)]))
    elif way < 0.55:
        other = d.one([each for each in d.pool if each.array.size == entry.array.size])
        d.op("Reshape", entry, d.op("Shape", other))
    elif way < 0.62:
        d.op("Reshape", entry, d.const(sizes))
    else:
        d.op("Reshape", entry, _sizes(d, sizes))


def _refilled(d: _Drawing) -> None:
    """Put the elements of transposed axes into the shape that they had."""
    entry = d.pick("fib", 2)
    turned = d.op("Transpose", entry, perm=[int(each) for each in d.rng.permutation(entry.rank)])
    d.op("Reshape", turned, d.op("Shape", entry))


def _sizes(d: _Drawing, sizes: Sequence[int]) -> _Entry:
    """Return the sizes as a value, those of rows from the number of rows."""
    parts = []
    for size in sizes:
        if (size % ROWS or not size) and not (size == 1 and d.chance(0.05)):
            parts.append(d.const([size]))
            continue
        part = d.op("Gather", d.op("Shape", d.one(d.pool[: len(d.inputs)])), d.const([0]))
        size = max(size, ROWS)
        parts.append(part if size == ROWS else d.op("Mul", part, d.const([size // ROWS])))
    if d.chance(0.3) and len(parts) > 1:
        at = int(d.rng.integers(len(parts)))
        parts[at] = d.const([-1])
    return d.op("Concat", *parts, axis=0)


def _count(d: _Drawing) -> _Entry:
    return d.op("Squeeze", _sizes(d, [ROWS]))


def _expand(d: _Drawing) -> None:
    entry = d.pick("fib")
    other = d.pick("fib", 1)
    target = d.op("Shape", other) if d.chance(0.6) else _sizes(d, other.array.shape)
    d.op(
        "Expand",
        entry if d.chance(0.6) else d.const(d.rng.integers(0, 3, d.one([[], [1], [2], [1, 3]])), np.float32),
        target,
    )


def _from_sizes(d: _Drawing) -> None:
    """Compute with sizes: their number as an element, counts over them, values of their shape."""
    entry = d.pick("fib", 1)
    shape = d.op("Shape", entry)
    part = d.op("Gather", shape, d.const(d.one([0, -1, [0], [0, 0]])))
    way = d.rng.integers(7)
    if way == 0:
        d.op("Cast", part, to=onnx.TensorProto.FLOAT)
    elif way == 1:
        d.op("Range", d.const(0), d.op("Gather", shape, d.const(0)), d.const(1))
    elif way == 2:
        value = helper.make_tensor("v", onnx.TensorProto.FLOAT, [1], [2.0])
        d.op("ConstantOfShape", shape, value=value)
    elif way == 3:
        d.op(d.one(["Add", "Sub", "Mul", "Div", "Mod"]), part, d.const([d.one([1, 2, 3])]))
    elif way == 4:
        d.op(d.one(["Tile", "Expand"]), part, d.const([2]))
    elif way == 5:
        d.op(d.one(["Equal", "Less"]), part, d.const([d.one([-1, 1, 2, ROWS])]))
    else:
        d.op("Size", entry)


def _measured(d: _Drawing) -> None:
    """Compute with the number of rows, or another size, as an element."""
    entry = d.pick("f", 1)
    size = d.op("Gather", d.op("Shape", entry), d.const(d.axis(entry) if d.chance(0.5) else 0))
    d.op("Mul", entry, d.op("Cast", size, to=onnx.TensorProto.FLOAT))


def _counted(d: _Drawing) -> None:
    """Take elements by the row's number, as exported models do with flattened masks."""
    entry = d.pick("fib", 2)
    if entry.array.shape[0] != ROWS:
        raise _ImpossibleError
    flat = d.op("Reshape", entry, d.const([-1, *entry.array.shape[2:]]))
    count = d.op("Gather", d.op("Shape", entry), d.const(0))
    number = d.op("Unsqueeze", d.op("Range", d.const(0), count, d.const(1)), d.const([1]))
    width = entry.array.shape[1]
    stride = d.one([width, width, width, width - 1, width + 1, 1])
    start = d.op("Mul", number, d.const(stride))
    index = d.op("Add", start, d.const(d.rng.integers(0, width + int(d.chance(0.2)), d.rng.integers(1, 4))))
    d.op("Gather", flat, index)


def _slice(d: _Drawing) -> None:
    entry = d.pick("fib", 1)
    axis = d.axis(entry)
    start, end, step = d.one([(0, 1, 1), (0, -1, 1), (1, 99, 1), (0, 99, 1), (-1, -99, -1), (0, 99, 2), (-2, 99, 1)])
    stop = d.const([end])
    if d.chance(0.2):
        stop = d.op("Gather", d.op("Shape", d.pick("fib", 1)), d.const([0]))
    d.op("Slice", entry, d.const([start]), stop, d.const([axis]), d.const([step]))


def _split(d: _Drawing) -> None:
    entry = d.pick("fib", 1)
    axis = d.axis(entry)
    size = entry.array.shape[axis]
    d.ops("Split", entry, d.const([size // 2, size - size // 2]), outputs=2, axis=axis)


def _concat(d: _Drawing) -> None:
    entry = d.pick("fib", 1)
    d.op("Concat", entry, entry if d.chance(0.5) else _partner(d, entry), axis=d.axis(entry))


def _pad(d: _Drawing) -> None:
    entry = d.pick("f", 1)
    pads = np.zeros(2 * entry.rank, int)
    pads[d.axis(entry) + entry.rank * int(d.chance(0.5))] = d.one([1, -1, 2])
    d.op("Pad", entry, d.const(pads), mode=d.one(["constant", "edge", "wrap"]))


def _tile(d: _Drawing) -> None:
    entry = d.pick("fib", 1)
    repeats = np.ones(entry.rank, int)
    repeats[d.axis(entry)] = 2
    d.op("Tile", entry, d.const(repeats))


def _gather(d: _Drawing) -> None:
    entry = d.pick("fib", 1)
    index = d.const(d.one([0, [0], [0, -1], [[0], [0]]])) if d.chance(0.4) else d.pick("i")
    d.op("Gather", entry, index, axis=d.axis(entry))


def _table(d: _Drawing) -> None:
    d.op("Gather", d.const(d.rng.integers(-9, 9, (3, 2)), np.float32), d.pick("i"))


def _gather_elements(d: _Drawing) -> None:
    entry, index = d.pick("fib", 1), d.pick("i", 1)
    axis = d.axis(entry)
    if d.chance(0.3):
        d.op("ScatterElements", entry, index, d.op("Cast", index, to=onnx.TensorProto.FLOAT), axis=axis)
    else:
        d.op("GatherElements", entry, index, axis=axis)


def _gather_nd(d: _Drawing) -> None:
    d.op("GatherND", d.pick("fib", 1), d.pick("i", 1), batch_dims=d.one([0, 1, 1, 2]))


def _one_hot(d: _Drawing) -> None:
    depth = d.const(3) if d.chance(0.8) else _count(d)
    d.op("OneHot", d.pick("i"), depth, d.const([0, 1], np.float32), axis=d.one([-1, 0, 1]))


def _trilu(d: _Drawing) -> None:
    d.op("Trilu", d.pick("fi", 2))


def _of_rows(d: _Drawing) -> None:
    name = d.one(["NonZero", "Unique", "Compress"])
    entry = d.pick("fi", 1)
    if name == "Compress":
        axis = d.axis(entry)
        d.op(name, entry, d.const(d.rng.integers(0, 2, entry.array.shape[axis]), bool), axis=axis)
    else:
        d.op(name, entry)


def _matmul(d: _Drawing) -> None:
    entry = d.pick("f", 1)
    way = d.rng.integers(4)
    if way == 0:
        d.op("MatMul", entry, d.const(d.rng.integers(-2, 3, (entry.array.shape[-1], 3)), np.float32))
    elif way == 1:
        d.op(
            "MatMul", d.const(d.rng.integers(-2, 3, (2, entry.array.shape[max(entry.rank - 2, 0)])), np.float32), entry
        )
    elif way == 2 and entry.rank > 1:
        order = [*range(entry.rank - 2), entry.rank - 1, entry.rank - 2]
        d.op("MatMul", entry, d.op("Transpose", entry, perm=order))
    else:
        other = d.one([each for each in d.pool if each.array.dtype.kind == "f" and each.rank])
        d.op("MatMul", entry, other)


def _gemm(d: _Drawing) -> None:
    entry, turned = d.pick("f", 2), int(d.chance(0.4))
    width = entry.array.shape[1 - turned]
    bias = d.const(d.rng.integers(-2, 3, d.one([[3], [1], [1, 3], [ROWS, 1]])), np.float32)
    d.op("Gemm", entry, d.const(d.rng.integers(-2, 3, (width, 3)), np.float32), bias, transA=turned)


def _einsum(d: _Drawing) -> None:
    entry, other = d.pick("f", 1), d.pick("f", 1)
    letters = "abcde"
    one = letters[: entry.rank]
    two = "".join(d.one(list(letters[: entry.rank + 1])) for _ in range(other.rank))
    free = sorted(set(one + two))
    kept = "".join(letter for letter in d.rng.permutation(free) if d.chance(0.75))
    d.op("Einsum", entry, other, equation=f"{one},{two}" + (f"->{kept}" if d.chance(0.8) else ""))


def _images(d: _Drawing) -> None:
    entry = d.pick("f", 3)
    channels = entry.array.shape[1]
    name = d.one(["Conv", "GlobalAveragePool", "InstanceNormalization", "MaxPool", "Resize", "BatchNormalization"])
    ones = d.const(np.ones(channels), np.float32)
    if name == "Conv":
        d.op(name, entry, d.const(d.rng.integers(-1, 2, (2, channels, *[1] * (entry.rank - 2))), np.float32))
    elif name == "InstanceNormalization":
        d.op(name, entry, ones, ones)
    elif name == "BatchNormalization":
        d.op(name, entry, ones, ones, ones, ones)
    elif name == "MaxPool":
        d.ops(name, entry, outputs=d.one([1, 2]), kernel_shape=[1] * (entry.rank - 2))
    elif name == "Resize" and d.chance(0.5):
        sizes = list(entry.array.shape)
        sizes[d.axis(entry)] = d.one([2, 5, ROWS])
        d.op(name, entry, None, None, _sizes(d, sizes), mode=d.one(["nearest", "linear"]))
    elif name == "Resize":
        scales = np.ones(entry.rank)
        scales[d.axis(entry)] = 2
        d.op(name, entry, None, d.const(scales, np.float32), mode=d.one(["nearest", "linear"]))
    else:
        d.op(name, entry)


def _recurrent(d: _Drawing) -> None:
    entry = d.pick("f", 3)
    if d.chance(0.7):
        entry = d.op("Transpose", entry, perm=[1, 0, 2])
    name, gates = d.one([("RNN", 1), ("GRU", 3), ("LSTM", 4)])
    w, r = ((d.rng.integers(-2, 3, (1, 2 * gates, size)) / 4) for size in (entry.array.shape[-1], 2))
    d.ops(name, entry, d.const(w, np.float32), d.const(r, np.float32), outputs=2, hidden_size=2)


def _attention(d: _Drawing) -> None:
    entry = d.pick("f", 3)
    other = entry if d.chance(0.7) else d.pick("f", 3)
    if d.chance(0.5):
        d.op("MultiHeadAttention", entry, other, other, domain="com.microsoft", num_heads=d.one([1, 2]))
    else:
        heads = {"q_num_heads": 1, "kv_num_heads": 1} if entry.rank == 3 else {}
        d.op("Attention", entry, other, other, **heads)


def _quantised(d: _Drawing) -> None:
    entry = d.pick("f", 1)
    scale, zero = d.const(0.25, np.float32), d.const(3, np.uint8)
    if d.chance(0.4):
        first, size, zero = d.ops("DynamicQuantizeLinear", entry, outputs=3)
        d.op("DequantizeLinear", first, size, zero)
    elif d.chance(0.5):
        d.op("DequantizeLinear", d.op("QuantizeLinear", entry, scale, zero), scale, zero)
    else:
        first = d.op("QuantizeLinear", entry, scale, zero)
        weight = d.const(d.rng.integers(0, 9, (entry.array.shape[-1], 2)), np.uint8)
        if d.chance(0.5):
            d.op("Cast", d.op("MatMulInteger", first, weight, zero), to=onnx.TensorProto.FLOAT)
        else:
            d.op("QLinearMatMul", first, scale, zero, weight, scale, zero, scale, zero)


def _features(d: _Drawing) -> None:
    entry = d.pick("f", 2)
    if entry.rank != 2:
        raise _ImpossibleError
    name = d.one(["Scaler", "Normalizer", "TreeEnsembleRegressor"])
    if name == "Scaler":
        d.op(name, entry, domain="ai.onnx.ml", offset=[0.5], scale=[2.0])
    elif name == "Normalizer":
        d.op(name, entry, domain="ai.onnx.ml", norm=d.one(["MAX", "L1", "L2"]))
    else:
        d.op(
            name, entry, domain="ai.onnx.ml", n_targets=1, nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2],
            nodes_featureids=[0, 0, 0], nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_values=[0.5, 0.0, 0.0],
            nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0], target_treeids=[0, 0], target_nodeids=[1, 2],
            target_ids=[0, 0], target_weights=[1.0, 2.0],
        )  # fmt: skip


def _inner(name: str, inputs: Sequence[str], *nodes: onnx.NodeProto, gives: Sequence[str]) -> onnx.GraphProto:
    infos = [onnx.ValueInfoProto(name=each) for each in inputs]
    return helper.make_graph(list(nodes), name, infos, [onnx.ValueInfoProto(name=each) for each in gives])


def _body_nodes(d: _Drawing, entry: _Entry, state: str, result: str) -> list[onnx.NodeProto]:
    """Return nodes from a state to a result of its shape, some of which read a value outside, or other rows."""
    way = d.rng.integers(4)
    if way == 0:
        return [helper.make_node("Tanh", [state], [result])]
    if way == 1:
        axes = d.const([d.axis(entry)])
        return [
            helper.make_node("ReduceMax", [state, axes.name], [f"{state}_m"]),
            helper.make_node("Sub", [state, f"{state}_m"], [result]),
        ]
    other = d.one([each for each in d.pool if each.array.dtype == entry.array.dtype])
    return [helper.make_node("Max" if way == 2 else "Mul", [state, other.name], [result])]


def _if(d: _Drawing) -> None:
    entry = d.pick("f", 1)
    test = d.one([each for each in d.pool if each.array.dtype == bool and each.array.size == 1] + [d.const(True, bool)])
    d.count += 1
    branches = []
    for side in ("a", "b"):
        result = f"{side}{d.count}"
        branches.append(_inner(side, [], *_body_nodes(d, entry, entry.name, result), gives=[result]))
    d.pool += [_Entry(each, array) for each, array in d.constants.items() if each not in {e.name for e in d.pool}][-2:]
    d.op("If", test, then_branch=branches[0], else_branch=branches[1])


def _loop(d: _Drawing) -> None:
    entry = d.pick("f", 1)
    d.count += 1
    state, result = f"s{d.count}", f"e{d.count}"
    nodes = _body_nodes(d, entry, state, result)
    d.pool += [_Entry(each, array) for each, array in d.constants.items() if each not in {e.name for e in d.pool}][-1:]
    going = [helper.make_node("Identity", [f"go{d.count}"], [f"on{d.count}"])]
    body = helper.make_graph(
        [*nodes, *going], "body",
        [_info(f"i{d.count}", np.int64, []), _info(f"go{d.count}", bool, []), _shapeless(state, entry)],
        [_info(f"on{d.count}", bool, []), _shapeless(result, entry)],
    )  # fmt: skip
    d.op("Loop", d.const(2), d.const(True, bool), entry, body=body)


def _shapeless(name: str, entry: _Entry) -> onnx.ValueInfoProto:
    kind = onnx.TypeProto()
    kind.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(entry.array.dtype)
    return onnx.ValueInfoProto(name=name, type=kind)


_STEPS: list[_Step] = [
    *[_unary, _binary, _binary, _reshape, _reshape, _transpose, _matmul, _from_sizes, _slice, _gather] * 2,
    *[_cast, _compare, _logic, _where, _reduce, _arg, _along, _normal, _unsqueeze, _squeeze, _expand, _counted, _split],
    *[_concat, _pad, _tile, _table, _gather_elements, _gather_nd, _one_hot, _trilu, _of_rows, _gemm, _einsum, _images],
    *[_recurrent, _attention, _quantised, _features, _if, _loop],
    *[_images, _counted, _expand, _refilled, _measured],
]


def fixed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model for `ROWS` rows only."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for value in made.graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = ROWS
    made.graph.output[0].type.tensor_type.shape.Clear()
    for dim in model.graph.output[0].type.tensor_type.shape.dim:
        made.graph.output[0].type.tensor_type.shape.dim.add().dim_param = f"any_{dim.dim_param}"
    return made

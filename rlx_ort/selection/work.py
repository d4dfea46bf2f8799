"""`Work`: the kind and the sizes of what one node does, told from its operator and the types it reads and writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlx_ort.selection.op_classes import CLASSES, COPIES, VIEWS, OpClass

__all__ = ["OF_GIVEN", "Fact", "Work", "work_of"]

OF_GIVEN: Mapping[str, str] = {"Gather": "Lookup", "MaxColumns": "MaxOfGiven", "SumColumns": "SumOfGiven"}
"""What stands for a node that reads a weight or an input, where another operator stands for one that reads a result."""

_BROADCASTING = frozenset({"Add", "Sub", "Mul", "Div"})
_REDUCING = ("Reduce", "Arg")  # what names of operators that reduce begin with
_SUMS = frozenset({"ReduceSum", "ReduceMean"})
_UNLISTED = OpClass("op", "Add", 2.0)


class Work(NamedTuple):
    """One piece of work. Equal pieces cost the same.

    Attributes:
        kind: what it is, which says what `size` counts: `gemm` (m, k, n); `bmm` (batch, m, k, n); `conv`,
            `pointwise`, `depthwise` (pixels, channels); `attention` (batch * heads, queries, keys, head_dim);
            `rnn` (steps, batch, inputs, hidden, directions); `op` (elements), or (elements, row) where the length of
            a row tells on the time; `fused` (elements); `view` ().
        like: the operator whose measurements stand for it; for `fused`, how it is fused: `bias`, `gemm_act`,
            `conv_act`, `conv_add`, `folded`, or `turned` for a transpose before a product.
        size: the sizes. Elements are counted in units of four bytes.
        flops: floating-point operations.
        nbytes: bytes read and written.
        dtype: the element type of its result.
        times: how often it runs.
        resident: bytes of all weights that the graph's products read, rounded up to four binary digits; 0 when it is
            not known. What fits into caches is read faster.
        first: what the first product of a run multiplies, `input` or `node`, the result of one; empty for other work.
    """

    kind: str
    like: str
    size: tuple[int, ...] = ()
    flops: float = 0.0
    nbytes: float = 0.0
    dtype: str = "f32"
    times: int = 1
    resident: int = 0
    first: str = ""


class Fact(NamedTuple):
    """What pricing needs of a type: its sizes, its element type, and how much it is."""

    shape: tuple[int, ...] = ()
    dtype: str = "f32"
    elements: int = 0
    nbytes: int = 0


_NOTHING = Fact()


def work_of(op_type: str, inputs: Sequence[Fact], outputs: Sequence[Fact], shared: bool) -> Work:
    """Return the work of a node; `shared` says that every batch multiplies with the same second operand."""
    out = outputs[0] if outputs else _NOTHING
    if op_type in VIEWS:
        return Work("view", "Reshape", dtype=out.dtype)
    how = CLASSES.get(op_type, _UNLISTED)
    if how.kind == "op":
        return _by_elements(op_type, how, inputs, outputs)
    moved = float(sum([fact.nbytes for fact in (*inputs, *outputs)]))
    shapes = [fact.shape for fact in inputs]
    if how.kind == "gemm" and shapes and shapes[0] and out.shape:
        return _product(op_type, shapes, out, moved, shared)
    if how.kind == "conv" and len(shapes) > 1 and len(shapes[1]) > 2 and len(out.shape) > 2:
        return _conv(op_type, shapes, out, moved)
    if how.kind == "attention" and shapes and len(shapes[0]) >= 3:
        return _attention(shapes, out, moved)
    if how.kind == "rnn" and len(shapes) > 2 and len(shapes[0]) == 3 and len(shapes[2]) == 3:
        return _recurrent(op_type, shapes, out, moved)
    return _by_elements(op_type, how, inputs, outputs)


def _product(op_type: str, shapes: list[tuple[int, ...]], out: Fact, moved: float, shared: bool) -> Work:
    n = out.shape[-1]
    batch = 1 if shared or len(shapes) < 2 or len(shapes[1]) <= 2 else math.prod(out.shape[:-2])
    rows = max(out.elements // max(n * batch, 1), 1)
    left = math.prod(shapes[0])
    if op_type in ("Gemm", "FusedGemm"):
        k = max(left // max(out.shape[0], 1), 1)
    else:
        # The left operand may have fewer batches than the result, so its own rows are what its depth is told from.
        own_rows = math.prod(shapes[0][:-2]) * rows if batch > 1 else rows
        k = max(left // max(own_rows, 1), 1)
    flops = 2.0 * batch * rows * k * n
    if batch > 1:
        return Work("bmm", "MatMul", (batch, rows, k, n), flops, moved, out.dtype)
    return Work("gemm", "MatMul", (rows, k, n), flops, moved, out.dtype)


def _conv(op_type: str, shapes: list[tuple[int, ...]], out: Fact, moved: float) -> Work:
    kernel = math.prod(shapes[1][2:])
    grid = shapes[0] if op_type == "ConvTranspose" else out.shape
    pixels = max(grid[0] * math.prod(grid[2:]), 1)
    each = math.prod(shapes[1])  # multiplications a pixel
    flops = 2.0 * pixels * each
    if shapes[1][1] == 1 and shapes[0][1] > 1:
        return Work("depthwise", "Conv", (pixels, max(round(each / 9), 1)), flops, moved, out.dtype)
    if kernel == 1:
        return Work("pointwise", "Conv", (pixels, max(round(math.sqrt(each)), 1)), flops, moved, out.dtype)
    return Work("conv", "Conv", (pixels, max(round(math.sqrt(each / 9)), 1)), flops, moved, out.dtype)


def _attention(shapes: list[tuple[int, ...]], out: Fact, moved: float) -> Work:
    query = shapes[0]
    key = shapes[1] if len(shapes) > 1 and len(shapes[1]) >= 3 else query
    past = next((shape[2] for shape in shapes[3:] if len(shape) == 4), 0)
    if len(query) == 4:
        batch, heads, queries, depth = query
    else:
        batch, queries, width = query
        depth = 64 if width % 64 == 0 else width
        heads = max(width // depth, 1)
    keys = (key[2] if len(key) == 4 else key[1]) + past
    flops = 4.0 * batch * heads * queries * keys * depth
    return Work("attention", "Attention", (batch * heads, queries, keys, depth), flops, moved, out.dtype)


def _recurrent(op_type: str, shapes: list[tuple[int, ...]], out: Fact, moved: float) -> Work:
    steps, batch, width = shapes[0]
    directions, gates, hidden = shapes[2]  # the recurrent weights, all gates in one
    flops = 2.0 * steps * batch * directions * gates * (width + hidden)
    return Work("rnn", op_type, (steps, batch, width, hidden, directions), flops, moved, out.dtype)


def _by_elements(op_type: str, how: OpClass, inputs: Sequence[Fact], outputs: Sequence[Fact]) -> Work:
    elements = moved = 0
    for fact in outputs:
        moved += fact.nbytes
        elements = max(elements, fact.elements)
    for fact in inputs:
        moved += fact.nbytes
        if op_type not in COPIES:
            elements = max(elements, fact.elements)
    like = how.like if how.kind == "op" else "Add"
    if like == "Transpose" and len(inputs) > 0 and outputs and len(inputs[0].shape) > 2:
        # The last axis of most transposes of attention stays where it is, so that whole rows are moved.
        like = "TransposeRows" if inputs[0].shape[-1:] == outputs[0].shape[-1:] else like
    if op_type in _BROADCASTING and len(inputs) == 2 and 1 < min(inputs[0].elements, inputs[1].elements) < elements:
        like = "AddRow"
    out = outputs[0] if outputs else _NOTHING
    if like == "ReduceMean" and op_type.startswith(_REDUCING) and inputs and _keeps_last(inputs[0].shape, out.shape):
        like = "SumColumns" if op_type in _SUMS else "MaxColumns"
    width = out.nbytes / out.elements if out.elements else 4.0
    count = max(round(elements * how.factor * width / 4), 1)
    row = round(_row_length(op_type, like, inputs, out) * width / 4)
    return Work("op", like, (count, row) if 0 < row <= count else (count,), float(elements), float(moved), out.dtype)


def _keeps_last(data: tuple[int, ...], out: tuple[int, ...]) -> bool:
    """Return whether a reduction goes over axes before the last one, as far as the shapes tell."""
    if len(data) < 2 or not out or out[-1] != data[-1] or math.prod(out) == math.prod(data):
        return False
    return len(out) == len(data) or out != data[: len(out)]


def _kept(data: tuple[int, ...], out: tuple[int, ...]) -> int:
    """Return the product of the last sizes that both shapes have, those behind the axes that are reduced."""
    length = 1
    for before, after in zip(reversed(data), reversed(out), strict=False):
        if before != after:
            break
        length *= after
    return length


def _row_length(op_type: str, like: str, inputs: Sequence[Fact], out: Fact) -> int:
    """Return the elements that are normalised or reduced together, copied in one piece, or kept of what is reduced.

    0 where it does not tell.

    The axis is not known here: normalisations are taken to be over the last one.
    """
    if not inputs or not inputs[0].shape or not out.elements:
        return 0
    data = inputs[0].shape
    if like == "Softmax" or op_type.endswith(("LayerNormalization", "RMSNormalization")):
        return data[-1]
    if like in ("MaxColumns", "SumColumns"):
        return _kept(data, out.shape)
    if like == "ReduceMean" and op_type.startswith(("Reduce", "Global")):
        return inputs[0].elements // out.elements
    if op_type == "Gather" and len(inputs) == 2:
        indices = inputs[1].shape
        for axis in range(len(data)):
            if out.shape == (*data[:axis], *indices, *data[axis + 1 :]):
                return math.prod(data[axis + 1 :])
    if op_type == "Concat" and len(data) == len(out.shape):
        axis = next((at for at, pair in enumerate(zip(data, out.shape, strict=True)) if pair[0] != pair[1]), 0)
        return 2 * math.prod(out.shape[axis:]) // len(inputs)  # as the probe's pieces, which are half a row
    return 0

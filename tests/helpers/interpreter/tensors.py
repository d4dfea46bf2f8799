"""Products, reductions, and ops that move or look up data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from interpreter.core import RULES, Array, rule, sized
from interpreter.elementwise import activation
from rlx_ort.ir.core import Node
from rlx_ort.ir.ops import dequant, linalg, norm, shape

__all__: list[str] = []


@rule(linalg.DotGeneral)
def _dot_general(node: Node, op: linalg.DotGeneral, a: Array, b: Array) -> Array:
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    left, right = [""] * a.ndim, [""] * b.ndim
    for i, j in zip((*op.lhs_batch, *op.lhs_contracting), (*op.rhs_batch, *op.rhs_contracting), strict=True):
        left[i] = right[j] = next(letters)
    left, right = [name or next(letters) for name in left], [name or next(letters) for name in right]
    batch = [left[i] for i in op.lhs_batch]
    free = [name for name in (*left, *right) if (name in left) != (name in right)]
    return np.einsum(f"{''.join(left)},{''.join(right)}->{''.join(batch + free)}", a, b)


@rule(dequant.GroupedMatMul)
def _grouped(node: Node, op: dequant.GroupedMatMul, x: Array, w: Array, experts: Array) -> Array:
    rows = [row @ w[int(expert)] for row, expert in zip(x, experts, strict=True)]
    return np.stack(rows) if rows else np.zeros((0, w.shape[2]), x.dtype)


@rule(dequant.ScatterAdd)
def _scatter_add(node: Node, op: dequant.ScatterAdd, updates: Array, indices: Array) -> Array:
    assert isinstance(op.rows, int)
    result = np.zeros((op.rows, *updates.shape[1:]), updates.dtype)
    for row, place in zip(updates, indices, strict=True):
        result[int(place)] += row
    return result


@rule(linalg.DenseSolve, linalg.BatchedDenseSolve)
def _solve(node: Node, op: linalg.DenseSolve, a: Array, b: Array) -> Array:
    vector = b.ndim == a.ndim - 1
    result = np.linalg.solve(a, b[..., None] if vector else b)
    return result[..., 0] if vector else result


_REDUCE: dict[str, Callable[..., Array]] = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "prod": np.prod,
}


@rule(norm.Reduce)
def _reduce(node: Node, op: norm.Reduce, x: Array) -> Array:
    if not op.axes:
        return x
    exact = {} if op.function in {"mean", "max", "min"} else {"dtype": x.dtype}
    result = _REDUCE[op.function](x, axis=tuple(op.axes), keepdims=op.keep_dim, **exact)
    return sized(node, np.trunc(result) if x.dtype.kind in "iu" else result)


@rule(norm.Softmax)
def _softmax(node: Node, op: norm.Softmax, x: Array) -> Array:
    if not x.size:
        return x
    weights = np.exp(x - x.max(op.axis, keepdims=True))
    return np.asarray(weights / weights.sum(op.axis, keepdims=True))


@rule(norm.Cumsum)
def _cumsum(node: Node, op: norm.Cumsum, x: Array) -> Array:
    turned = np.flip(x, op.axis) if op.reverse else x
    total = np.cumsum(turned, op.axis, dtype=x.dtype)
    if op.exclusive:  # each is the sum before it; taking the element off again would give NaN for one that is NaN
        total = np.roll(total, 1, op.axis)
        np.moveaxis(total, op.axis, 0)[:1] = 0
    return np.flip(total, op.axis) if op.reverse else total


def _order(x: Array, axis: int, descending: bool) -> Array:
    """Return the places in order; equal elements stay in order of place."""
    keys = x.astype(np.float64) if x.dtype.kind == "f" else x.astype(object)
    return np.argsort(-keys if descending else keys, axis=axis, kind="stable")


@rule(shape.GatherNd)
def _gather_nd(node: Node, op: shape.GatherNd, x: Array, indices: Array) -> Array:
    places = indices.astype(np.int64)
    lead = places.shape[: op.batch_dims]
    found = np.empty((*places.shape[:-1], *x.shape[op.batch_dims + places.shape[-1] :]), x.dtype)
    for where in np.ndindex(*places.shape[:-1]):
        found[where] = x[(*where[: len(lead)], *places[where])]
    return found


_COMBINE: dict[str, Callable[[Array, Array], Array]] = {
    "set": lambda old, new: new,
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


@rule(shape.ScatterElements)
def _scatter_elements(node: Node, op: shape.ScatterElements, x: Array, indices: Array, updates: Array) -> Array:
    result = x.copy()
    for where in np.ndindex(*indices.shape):
        place = list(where)
        place[op.axis] = int(indices[where])
        result[tuple(place)] = _COMBINE[op.mode](result[tuple(place)], updates[where])
    return result


@rule(shape.ScatterNd)
def _scatter_nd(node: Node, op: shape.ScatterNd, x: Array, indices: Array, updates: Array) -> Array:
    result = x.copy()
    for where in np.ndindex(*indices.shape[:-1]):
        place = tuple(int(index) for index in indices[where])
        result[place] = _COMBINE[op.mode](result[place], updates[where])
    return result


@rule(shape.Reshape)
def _reshape(node: Node, op: shape.Reshape, x: Array) -> Array:
    sizes = [dim for dim in op.dims if isinstance(dim, int)]
    assert len(sizes) == len(op.dims), "bind the graph's dims first"
    return x.reshape(sizes)


@rule(shape.Expand)
def _expand(node: Node, op: shape.Expand, x: Array) -> Array:
    padded = (*(1 for _ in range(len(op.dims) - x.ndim)), *x.shape)
    return np.broadcast_to(x, [own if dim == -1 else dim for own, dim in zip(padded, op.dims, strict=True)])  # type: ignore[misc]  # named dims are bound


@rule(shape.Slice)
def _slice(node: Node, op: shape.Slice, x: Array) -> Array:
    taken = [slice(None)] * x.ndim
    for axis, start, end, step in zip(op.axes, op.starts, op.ends, op.steps, strict=True):
        taken[axis] = slice(start, end, step)
    return x[tuple(taken)]


@rule(shape.Pad)
def _pad(node: Node, op: shape.Pad, x: Array) -> Array:
    widths = [*zip(op.before, op.after, strict=True)]
    if op.mode == "constant":
        return np.pad(x, widths, constant_values=op.value)
    return np.pad(x, widths, mode="reflect" if op.mode == "reflect" else "edge")


RULES.update(
    {
        linalg.MatMul: lambda node, op, a, b: a @ b,
        linalg.FusedMatMulBiasAct: lambda node, op, x, w, bias: sized(node, activation(op.activation, x @ w + bias)),
        linalg.LoraMatMul: lambda node, op, x, w, a, b: sized(node, x @ w + op.scale * ((x @ a) @ b)),
        norm.TopK: lambda node, op, x: sized(node, _order(x, -1, descending=True)[..., : op.k]),
        norm.ArgMax: lambda node, op, x: np.argmax(x, op.axis, keepdims=op.keep_dim),
        norm.ArgMin: lambda node, op, x: np.argmin(x, op.axis, keepdims=op.keep_dim),
        shape.Sort: lambda node, op, x: np.take_along_axis(x, _order(x, op.axis, op.descending), op.axis),
        shape.ArgSort: lambda node, op, x: _order(x, op.axis, op.descending),
        shape.CumProd: lambda node, op, x: np.cumprod(x, op.axis, dtype=x.dtype),
        shape.CumMax: lambda node, op, x: np.maximum.accumulate(x, op.axis),
        shape.Reverse: lambda node, op, x: np.flip(x, op.axes),
        shape.Trilu: lambda node, op, x: np.triu(x, op.diagonal) if op.upper else np.tril(x, op.diagonal),
        shape.GatherElements: lambda node, op, x, indices: np.take_along_axis(x, indices.astype(np.int64), op.axis),
        shape.Transpose: lambda node, op, x: x.transpose(op.perm),
        shape.Concat: lambda node, op, *parts: np.concatenate(parts, op.axis),
        shape.Narrow: lambda node, op, x: np.take(x, range(op.start, op.start + op.length), op.axis),
        shape.Gather: lambda node, op, table, indices: np.take(table, np.trunc(indices).astype(np.int64), op.axis),
        shape.Tile: lambda node, op, x: np.tile(x, op.repeats),
    }
)

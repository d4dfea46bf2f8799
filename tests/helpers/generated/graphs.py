"""A graph and its inputs for every seed: small, of many ops and dtypes, and the same for the same seed everywhere.

Half of the graphs are chains of a few ops with named dims (also of size 0), loops and branches, several outputs in any
order, and, in some, elements at the limits of their dtypes. A quarter are the cases of `op_tests`, which have every op,
and a quarter are changed models of the ONNX backend suite. Each step draws
from a generator of its own, so a step that is left out changes no other, which is how failing graphs are shrunk.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from interpreter import Array, evaluate
from op_tests.cases import CASES, DTYPES, Case, X, built

from generated.mutants import mutant_of
from rlx_ort import DType, Graph, GraphError, Value
from rlx_ort.ir.core import format_graph

__all__ = ["STEPS_AT_MOST", "Made", "made_of", "quiet"]

STEPS_AT_MOST = 9
_CALM = ("relu", "sigmoid", "tanh", "silu", "gelu", "sin", "cos", "neg", "abs", "erf", "softplus", "elu", "atan")
_JUMPY = ("round", "floor", "ceil", "sign")
_DTYPES = (DType.F32, DType.F32, DType.F16, DType.F64, DType.I64, DType.I32, DType.U64, DType.U64, DType.U8, DType.BOOL)
_LARGEST = 100.0
_NAMED = tuple(CASES.values())
_Reference = Callable[[dict[str, Array]], "list[Array] | None"]


@dataclass
class Entry:
    """A value of a graph under construction.

    Attributes:
        value: the value.
        size: the largest magnitude that its elements can have.
        exact: whether rounding has not touched the elements, so that ops which jump may read them.
    """

    value: Value
    size: float
    exact: bool


@dataclass
class Made:
    """A graph with the inputs to run it on.

    Attributes:
        graph: the graph; its weights come from `sources`.
        feeds: the number of a call -> one array for each input; calls of odd numbers have other sizes.
        loose: factor of the bounds of the device.
        size: the largest magnitude of intermediate values, to which rounding is relative.
        sources: the arrays that parameters and constants were made from.
        reference: inputs -> the outputs to expect, or None where there is no reference, as for shapes that do not fit.
        second: the same of another reference, which is asked where results differ from the first.
        origin: what the graph was made of, where its text does not say it.
    """

    graph: Graph
    feeds: Callable[[int], dict[str, Array]]
    loose: float = 1.0
    size: float = 0.0
    sources: list[Array] = field(default_factory=list)
    reference: _Reference | None = None
    second: _Reference | None = None
    origin: str = ""

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.origin, format_graph(self.graph)]))

    def expected(self, call: int) -> list[Array] | None:
        """Return the outputs of a call to expect; None where there is no reference."""
        if self.reference is not None:
            return self.reference(self.feeds(call))
        try:
            return evaluate(self.graph, self.feeds(call))
        except (ValueError, IndexError, ZeroDivisionError):
            return None

    def spoil_sources(self) -> None:
        """Overwrite the arrays that the graph was made from, as a caller does who reuses a buffer."""
        for source in self.sources:
            source[...] = np.zeros((), source.dtype) if source.dtype == bool else np.asarray(77).astype(source.dtype)


def made_of(seed: int, skip: Iterable[int] = (), outputs: Iterable[int] | None = None) -> Made:
    """Return the graph of a seed without the steps to skip, and with only some of its outputs."""
    if seed % 2 == 0:
        made = _of_steps(seed, frozenset(skip))
    else:
        made = _of_case(seed) if seed % 4 == 1 else _of_mutant(seed, frozenset(skip))
    if outputs is not None:
        kept = [index for index in outputs if index < len(made.graph.outputs)]
        made.graph.outputs = [made.graph.outputs[index] for index in kept or [0]]
    return made


def _of_case(seed: int) -> Made:
    rng = np.random.default_rng([seed, 0])
    while True:
        case = _NAMED[rng.integers(len(_NAMED))]
        dtype = DTYPES[rng.integers(len(DTYPES))] if case.has_dtype else DType.F32
        try:
            graph, _ = built(case, dtype)
        except GraphError:
            continue
        return Made(graph, partial(_feeds_of, case, dtype), loose=case.loose)


def _feeds_of(case: Case, dtype: DType, call: int) -> dict[str, Array]:
    """Return the inputs of a case in a call: those that follow the dtype are others in each."""
    return {
        f"x{index}": item.array(dtype, index + 17 * call) if isinstance(item, X) else item.copy()
        for index, item in enumerate(case.inputs)
    }


def _of_mutant(seed: int, skip: frozenset[int]) -> Made:
    mutant = mutant_of(seed, skip)
    return Made(mutant.graph, mutant.feeds, 50.0, 0.0, [], mutant.expected, mutant.second, mutant.origin)


_Body = Callable[[Graph, Value], Value]
_Step = Callable[[np.random.Generator, "_Drawing", Entry], "Entry | None"]


class _Drawing:
    """A graph of steps under construction."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = np.random.default_rng([seed, 0])
        # Elements at the limits of their dtypes, nan among them, and rows of one batch in every input and output.
        self.limits = bool(self.rng.random() < 0.35)
        self.nan = bool(self.rng.random() < 0.25)
        self.rows = bool(self.rng.random() < 0.25)
        self.graph = Graph(f"generated {seed}")
        self.sources: list[Array] = []
        self.pool: list[Entry] = []
        sizes = [0, 1, 2, 3, 4, 5]
        self.sizes = [{name: int(self.rng.choice(sizes, p=_ODDS)) for name in ("n", "m")} for _ in range(2)]

    def inputs(self) -> None:
        for index in range(self.rng.integers(1, 4)):
            dtype = _DTYPES[self.rng.integers(len(_DTYPES))]
            dims: list[str | int] = ["n", "m", 1, 2, 3, 4]
            shape = [dims[i] for i in self.rng.choice(6, self.rng.integers(1, 4), p=[0.3, 0.1, 0.1, 0.2, 0.2, 0.1])]
            if self.rows:
                shape = ["n", *(dim for dim in shape[1:] if isinstance(dim, int))]
            value = self.graph.input(f"x{index}", shape, dtype)
            self.pool.append(Entry(value, 4.0, True))

    def partner(self, rng: np.random.Generator, entry: Entry) -> Entry:
        """Return a value of the dtype of another one."""
        fitting = [other for other in self.pool if other.value.dtype is entry.value.dtype]
        return fitting[rng.integers(len(fitting))]

    def leaf(self, rng: np.random.Generator, array: Array, *, param: bool) -> Value:
        """Return a parameter or constant made from an array that is kept."""
        self.sources.append(array)
        if param:
            name = f"w{len(self.sources)}"
            return self.graph.param(name, array.shape, DType.from_numpy(array.dtype), data=array)
        return self.graph.constant(array)

    def array(self, rng: np.random.Generator, shape: Iterable[int], dtype: DType) -> Array:
        shape = tuple(shape)
        if dtype is DType.BOOL:
            return rng.integers(0, 2, shape).astype(bool)
        if dtype.is_float:
            values = (rng.integers(-16, 17, shape) / 8).astype(dtype.numpy)
            if self.limits:
                top = np.finfo(dtype.numpy).max
                special = np.array([np.inf, -np.inf, -0.0, top, -top, np.nan if self.nan else 0.0]).astype(dtype.numpy)
                return np.where(rng.random(shape) < 0.3, rng.choice(special, shape), values).astype(dtype.numpy)
            return values
        unsigned = dtype.value.startswith("u")
        values = rng.integers(0 if unsigned else -4, 5, shape).astype(dtype.numpy)
        if self.limits:
            info = np.iinfo(dtype.numpy)
            near = [info.min, info.max, min(2**32 - 2, info.max - 1), info.max // 2 + 1, min(2**53 + 1, info.max)]
            return np.where(rng.random(shape) < 0.5, rng.choice(np.array(near, dtype.numpy), shape), values)
        return values

    def feeds(self, call: int) -> dict[str, Array]:
        rng, sizes = np.random.default_rng([self.seed, 2, call]), self.sizes[call % 2]
        return {
            value.name: self.array(rng, [sizes.get(dim, dim) for dim in value.shape], value.dtype)
            for value in self.graph.inputs
        }


_ODDS = (0.08, 0.2, 0.2, 0.2, 0.2, 0.12)


def _of_steps(seed: int, skip: frozenset[int]) -> Made:
    drawing = _Drawing(seed)
    drawing.inputs()
    given = len(drawing.pool)
    for index in range(int(drawing.rng.integers(1, STEPS_AT_MOST + 1))):
        rng = np.random.default_rng([seed, 1, index])
        entry = drawing.pool[rng.integers(len(drawing.pool))]
        step = _STEPS[rng.integers(len(_STEPS))]
        if index in skip:
            continue
        try:
            found = step(rng, drawing, entry)
        except GraphError:
            continue  # the builder says why the step is not possible
        if found is not None and found.size > _LARGEST and found.value.dtype.is_float and not drawing.limits:
            found = Entry(drawing.graph.tanh(found.value), 1.0, False)
        if found is not None:
            drawing.pool.append(found)
    rng = np.random.default_rng([seed, 3])
    computed = drawing.pool[given:] or [Entry(drawing.graph.stop_gradient(drawing.pool[0].value), 4.0, True)]
    chosen = [computed[-1], *(drawing.pool[i] for i in rng.integers(len(drawing.pool), size=rng.integers(0, 4)))]
    if drawing.rows:
        chosen = [entry for entry in chosen if [*entry.value.shape][:1] == ["n"]] or chosen
    results = [chosen[i].value for i in rng.permutation(len(chosen))]
    drawing.graph.set_outputs(results, [f"result {index}" for index in range(len(results))])
    size = 0.0 if drawing.limits else max(entry.size for entry in drawing.pool)
    return Made(drawing.graph, drawing.feeds, 20.0, size, drawing.sources)


def _activation(rng: np.random.Generator, d: _Drawing, a: Entry) -> Entry | None:
    if not a.value.dtype.is_float or (d.limits and not a.exact):
        return None
    if a.exact and not d.limits and rng.random() < 0.2:
        return Entry(d.graph.activation(str(rng.choice(_JUMPY)), a.value), a.size + 1, True)
    kinds = ("relu", "neg", "abs") if d.limits else _CALM
    return Entry(d.graph.activation(str(rng.choice(kinds)), a.value), a.size + 1, False)


def _binary(rng: np.random.Generator, d: _Drawing, a: Entry) -> Entry | None:
    b = d.partner(rng, a)
    floats, kind = a.value.dtype.is_float, str(rng.choice(["add", "sub", "mul", "max", "min"]))
    if a.value.dtype is DType.BOOL or (floats and d.limits and not (a.exact and b.exact)):
        return None
    if floats and d.limits and d.nan and kind in ("max", "min"):
        return None
    size = a.size * b.size if kind == "mul" else a.size + b.size
    return Entry(d.graph.binary(kind, a.value, b.value), size, not floats)


def _leaf(rng: np.random.Generator, d: _Drawing, a: Entry) -> Entry | None:
    if a.value.dtype is DType.BOOL or (d.limits and not a.exact):
        return None
    kind, floats = str(rng.choice(["add", "mul"])), a.value.dtype.is_float
    shape = [dim if isinstance(dim, int) and dim and rng.random() < 0.7 else 1 for dim in a.value.shape]
    array = np.asarray(rng.integers(1, 4, shape)).astype(a.value.dtype.numpy)
    leaf = d.leaf(rng, array, param=bool(rng.random() < 0.5))
    return Entry(d.graph.binary(kind, a.value, leaf), a.size * 3 + 3, not floats)


def _matmul(rng: np.random.Generator, d: _Drawing, a: Entry) -> Entry | None:
    inner = a.value.shape[-1] if a.value.rank > 1 else "n"
    if not a.value.dtype.is_float or not isinstance(inner, int) or d.limits:
        return None
    array = (rng.integers(-8, 9, (inner, int(rng.integers(1, 5)))) / 8).astype(a.value.dtype.numpy)
    return Entry(a.value @ d.leaf(rng, array, param=bool(rng.random() < 0.7)), a.size * max(1, inner), False)


def _compare(rng: np.random.Generator, d: _Drawing, a: Entry) -> Entry | None:
    b = d.partner(rng, a)
    if not (a.exact and b.exact) or a.value.dtype is DType.BOOL:
        return None
    return Entry(d.graph.compare(str(rng.choice(["lt", "le", "gt", "ge", "eq", "ne"])), a.value, b.value), 1.0, True)


def _where(rng: np.random.Generator, d: _Drawing, a: Entry) -> Entry | None:
    conditions = [entry.value for entry in d.pool if entry.value.dtype is DType.BOOL]
    b = d.partner(rng, a)
    if not conditions:
        return None
    condition = conditions[rng.integers(len(conditions))]
    return Entry(d.graph.where_(condition, a.value, b.value), max(a.size, b.size), a.exact and b.exact)


def _reduce(rng: np.random.Generator, d: _Drawing, a: Entry) -> Entry | None:
    if not a.value.rank or a.value.dtype is DType.BOOL or (a.value.dtype.is_float and d.limits):
        return None
    floats = a.value.dtype.is_float
    kind, axis = str(rng.choice(["sum", "max", "min", "mean"][: 4 if floats else 3])), int(rng.integers(a.value.rank))
    found = d.graph.reduce(a.value, kind, [axis], bool(rng.random() < 0.5))
    return Entry(found, a.size * 5, not floats)


def _along(rng: np.random.Generator, d: _Drawing, a: Entry) -> Entry | None:
    if not a.value.rank or a.value.dtype is DType.BOOL or (a.value.dtype.is_float and d.limits):
        return None
    axis, floats = int(rng.integers(a.value.rank)), a.value.dtype.is_float
    if floats and rng.random() < 0.4:
        return Entry(d.graph.softmax(a.value, axis), 1.0, False)
    return Entry(
        d.graph.cumsum(a.value, axis, bool(rng.random() < 0.3), bool(rng.random() < 0.3)), a.size * 5, not floats
    )


def _norm(rng: np.random.Generator, d: _Drawing, a: Entry) -> Entry | None:
    if not a.value.rank or not a.value.dtype.is_float or d.limits or not isinstance(a.value.shape[-1], int):
        return None
    dtype, x, graph = a.value.dtype.numpy, a.value, d.graph
    gamma, eps = np.linspace(0.5, 1.5, x.shape[-1]).astype(dtype), float(rng.choice([1.0, 0.25, 4.0]))
    if rng.random() < 0.5:
        return Entry(graph.layer_norm(x, gamma, gamma, eps=eps), a.size * 3, False)
    if rng.random() < 0.5:  # in basic operators, which ONNX Runtime fuses
        x = x - graph.mean(x, [-1], keep_dim=True)
    squares = graph.mean(graph.pow(x, np.array(2, dtype)), [-1], keep_dim=True)
    return Entry(x / graph.sqrt(squares + np.array(eps, dtype)) * gamma, a.size * 3, False)


def _order(rng: np.random.Generator, d: _Drawing, a: Entry) -> Entry | None:
    if not a.value.rank or not a.exact or a.value.dtype is DType.BOOL:
        return None
    if d.limits and d.nan and a.value.dtype.is_float:
        return None
    kind, axis = str(rng.choice(["sort", "argsort", "argmax", "argmin"])), int(rng.integers(a.value.rank))
    if kind == "sort":
        return Entry(d.graph.sort(a.value, axis, bool(rng.random() < 0.5)), a.size, True)
    if kind == "argsort":
        return Entry(d.graph.argsort(a.value, axis, bool(rng.random() < 0.5)), 5.0, True)
    return Entry(getattr(d.graph, kind)(a.value, axis, bool(rng.random() < 0.5)), 5.0, True)


def _cast(rng: np.random.Generator, d: _Drawing, a: Entry) -> Entry | None:
    to = _DTYPES[rng.integers(len(_DTYPES))]
    source = a.value.dtype
    if d.limits and source.is_float and not to.is_float:
        return None  # undefined out of range
    if d.limits and to.is_float and not source.is_float:
        return None  # rounding of large integers is tested by the cases
    if source.is_float and not to.is_float and (not a.exact or to in (DType.U64, DType.U8)):
        return None
    if d.limits and source.is_float and to is not source and not a.exact:
        return None
    return Entry(d.graph.cast(a.value, to), a.size, a.exact and not (d.limits and to.is_float))


def _move(rng: np.random.Generator, d: _Drawing, a: Entry) -> Entry | None:
    g, x = d.graph, a.value
    if not x.rank:
        return Entry(g.reshape(x, [1]), a.size, a.exact)
    axis = int(rng.integers(x.rank))
    kind = str(
        rng.choice(["transpose", "reshape", "reverse", "slice", "slice", "concat", "tile", "pad", "gather", "narrow"])
    )
    if kind == "transpose":
        found = g.transpose(x, [int(i) for i in rng.permutation(x.rank)])
    elif kind == "reshape":
        found = g.reshape(x, [[-1], [1, -1], [-1, 1]][rng.integers(3)])
    elif kind == "reverse":
        found = g.reverse(x, [axis])
    elif kind == "slice":
        start, end = (int(i) if rng.random() < 0.7 else None for i in rng.integers(-6, 7, 2))
        found = g.slice(x, [axis], [start], [end], [int(rng.choice([1, 1, 1, 2, -1, -2]))])
    elif kind == "concat":
        found = g.concat([x, d.partner(rng, a).value], axis)
        return Entry(found, _LARGEST, all(entry.exact for entry in d.pool))
    elif kind == "tile":
        found = g.tile(x, [2 if i == axis else 1 for i in range(x.rank)])
    elif kind == "pad":
        found = g.pad(x, [1] * x.rank, [0] * x.rank)
    elif kind == "gather":
        size = x.shape[axis]
        if not isinstance(size, int) or not size:
            return None
        found = g.gather(x, d.leaf(rng, rng.integers(0, size, int(rng.integers(1, 4))), param=False), axis)
    else:
        size = x.shape[axis]
        if not isinstance(size, int) or not size:
            return None
        start = int(rng.integers(size))
        found = g.narrow(x, axis, start, int(rng.integers(1, size - start + 1)))
    return Entry(found, a.size, a.exact)


def _body(rng: np.random.Generator, d: _Drawing, a: Entry, times: int) -> tuple[_Body, float, bool]:
    """Return what a subgraph does to a value, how large its elements can be after some times, and if it is exact."""
    floats, rank = a.value.dtype.is_float, a.value.rank
    kinds = ["double", "negate"] if not a.value.dtype.value.startswith("u") else ["double"]
    kinds += ["reverse", "cumsum"] if rank and not (floats and d.limits) else []
    kinds += ["tanh", "softmax"] if floats and not d.limits and rank else []
    kind, axis = str(rng.choice(kinds)), int(rng.integers(max(rank, 1)))
    if kind == "double":
        return (lambda g, x: g.binary("add", x, x)), a.size * 2**times, not floats
    if kind == "negate":
        return (lambda g, x: g.activation("neg", x)), a.size, a.exact
    if kind == "reverse":
        return (lambda g, x: g.reverse(x, [axis])), a.size, a.exact
    if kind == "cumsum":
        return (lambda g, x: g.cumsum(x, axis)), a.size * 5**times, not floats
    if kind == "tanh":
        return (lambda g, x: g.tanh(x)), a.size + 1, False
    return (lambda g, x: g.softmax(x, axis)), a.size + 1, False


def _branch(rng: np.random.Generator, d: _Drawing, a: Entry) -> Entry | None:
    if a.value.dtype is DType.BOOL or (d.limits and not a.exact):
        return None
    (yes, size, exact), (no, other_size, other_exact) = _body(rng, d, a, 1), _body(rng, d, a, 1)
    whole = [entry.value for entry in d.pool if entry.exact and not entry.value.dtype.is_float and entry.value.rank]
    if whole and not d.limits and rng.random() < 0.5:  # a condition of the inputs
        g, value = d.graph, whole[rng.integers(len(whole))]
        total = g.reduce(g.cast(value, DType.I64), "sum", [*range(value.rank)], False)
        flag = g.compare("gt", total, d.leaf(rng, np.asarray(0), param=False))
    else:
        flag = d.leaf(rng, np.asarray(bool(rng.random() < 0.5)), param=bool(rng.random() < 0.5))
    if rng.random() < 0.3:  # a branch in a branch
        inner, plain = yes, no
        yes = lambda g, x: g.if_(g.constant(np.asarray(True)), inner, plain, [x])  # noqa: E731  # of one line
    found = d.graph.if_(flag, yes, no, [a.value])
    return Entry(found, max(size, other_size), exact and other_exact)


def _loop(rng: np.random.Generator, d: _Drawing, a: Entry) -> Entry | None:
    if a.value.dtype is DType.BOOL or (d.limits and not a.exact):
        return None
    times, least = int(rng.integers(0, 4)), np.asarray(0)
    body, size, exact = _body(rng, d, a, times)
    if rng.random() < 0.5:  # the number of turns is a parameter
        limit, most = d.leaf(rng, np.asarray(times), param=True), None
    else:
        limit, most = d.leaf(rng, np.asarray(9), param=False), times
    found = d.graph.while_(
        [d.leaf(rng, least, param=False), a.value],
        lambda g, i, x, end: g.compare("lt", i, end),
        lambda g, i, x, end: (g.binary("add", i, g.constant(np.asarray(1))), body(g, x)),
        [limit],
        most,
    )
    return Entry(found[1], max(size, a.size), a.exact and (exact or not times))


def _scan(rng: np.random.Generator, d: _Drawing, a: Entry) -> Entry | None:
    if a.value.dtype is DType.BOOL or (d.limits and not a.exact):
        return None
    g, length = d.graph, int(rng.integers(1, 4))
    body, size, exact = _body(rng, d, a, length)
    kind = str(rng.choice(["last", "all", "some", "rows", "function"]))
    if kind == "function":
        return Entry(g.custom_fn([a.value], body), size, a.exact and exact)
    if kind == "rows" and a.value.dtype.is_float and d.limits:
        return None
    if kind == "rows":
        rows = np.asarray(rng.integers(1, 4, (length, *[1] * a.value.rank))).astype(a.value.dtype.numpy)
        leaf = d.leaf(rng, rows, param=bool(rng.random() < 0.5))
        found = g.scan_with_xs(a.value, [leaf], lambda g, x, row: g.binary("add", x, row), length, rng.random() < 0.5)
        return Entry(found, a.size + 3 * length, not a.value.dtype.is_float)
    if kind == "last":
        found = g.scan(a.value, body, length)
    elif kind == "all":
        found = g.scan_trajectory(a.value, body, length)
    else:
        found = g.scan_checkpointed(a.value, body, length, int(rng.integers(1, length + 1)))
    return Entry(found, size, a.exact and exact)


_STEPS: tuple[_Step, ...] = (
    _activation, _binary, _binary, _leaf, _leaf, _matmul, _compare, _where, _reduce, _along, _order, _cast, _move,
    _move, _move, _branch, _loop, _scan, _norm, _norm, _norm,
)  # fmt: skip


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence numpy about overflow, which the graphs provoke, until the block ends."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield

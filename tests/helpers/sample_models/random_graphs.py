"""Random graphs for property tests: 5 to 50 ops of every smooth family, small, and with values of moderate size.

Left out are ops that jump (rounding, sorting, comparing computed values): the last bit of an f32 would decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rlx_ort.ir.graph import Graph, Value

__all__ = ["RandomGraph", "random_graphs"]

_CALM = ("relu", "sigmoid", "tanh", "silu", "gelu", "gelu_approx", "sin", "cos", "neg", "abs", "softsign", "erf",
         "hard_sigmoid", "hard_swish", "softplus", "elu", "atan", "mish", "log_sigmoid")  # fmt: skip
_LIMIT = 100.0


@dataclass
class RandomGraph:
    """A graph with the inputs to run it on.

    Attributes:
        graph: the graph.
        feeds: one array for each input.
        size: an upper bound of every element of every value, by the value's node.
    """

    graph: Graph
    feeds: dict[str, Any] = field(default_factory=dict)
    size: dict[int, float] = field(default_factory=dict)

    def keep(self, value: Value, size: float) -> Value:
        """Remember how large a value can be."""
        self.size[value.ref.node] = size
        return value


_Step = Callable[[Any, RandomGraph, Value, Value], "tuple[Value, float] | None"]


def _activation(draw: Any, made: RandomGraph, a: Value, b: Value) -> tuple[Value, float]:
    return made.graph.activation(draw(st.sampled_from(_CALM)), a), made.size[a.ref.node] + 1


def _binary(draw: Any, made: RandomGraph, a: Value, b: Value) -> tuple[Value, float] | None:
    try:
        np.broadcast_shapes(a.shape.static(), b.shape.static())
    except ValueError:
        return None
    name = draw(st.sampled_from(["add", "sub", "mul", "max", "min"]))
    left, right = made.size[a.ref.node], made.size[b.ref.node]
    return made.graph.binary(name, a, b), left * right if name == "mul" else left + right


def _scalar(draw: Any, made: RandomGraph, a: Value, b: Value) -> tuple[Value, float]:
    number = draw(st.sampled_from([-1.5, 0.5, 2.0]))
    return a * number, made.size[a.ref.node] * abs(number)


def _matmul(draw: Any, made: RandomGraph, a: Value, b: Value) -> tuple[Value, float] | None:
    if a.rank < 2:
        return None
    columns = draw(st.integers(1, 3))
    inner = a.shape.static()[-1]
    weight = np.random.default_rng(columns).normal(size=(inner, columns)).astype(np.float32)
    name = f"w{len(made.graph.nodes)}"
    value = made.graph.param(name, weight.shape, data=weight)
    return a @ value, made.size[a.ref.node] * float(np.abs(weight).sum(0).max(initial=0))


def _reduce(draw: Any, made: RandomGraph, a: Value, b: Value) -> tuple[Value, float] | None:
    if not a.rank:
        return None
    name, axis = draw(st.sampled_from(["sum", "mean", "max", "min"])), draw(st.integers(-a.rank, a.rank - 1))
    count = a.shape.static()[axis] if name == "sum" else 1
    return made.graph.reduce(a, name, [axis], draw(st.booleans())), made.size[a.ref.node] * count


def _along(draw: Any, made: RandomGraph, a: Value, b: Value) -> tuple[Value, float] | None:
    if not a.rank:
        return None
    axis = draw(st.integers(-a.rank, a.rank - 1))
    if draw(st.booleans()):
        return made.graph.softmax(a, axis), 1.0
    grown = made.graph.cumsum(a, axis, draw(st.booleans()), draw(st.booleans()))
    return grown, made.size[a.ref.node] * a.shape.static()[axis]


def _norm(draw: Any, made: RandomGraph, a: Value, b: Value) -> tuple[Value, float] | None:
    if not a.rank:
        return None
    width = a.shape.static()[-1]
    gamma = np.linspace(0.5, 1.5, width).astype(np.float32)
    if draw(st.booleans()):
        return made.graph.layer_norm(a, gamma, gamma, eps=1.0), made.size[a.ref.node] * 3 + 2
    return made.graph.rms_norm(a, gamma, eps=1.0), made.size[a.ref.node] * 2


def _move(draw: Any, made: RandomGraph, a: Value, b: Value) -> tuple[Value, float] | None:
    g, size, shape = made.graph, made.size[a.ref.node], a.shape.static()
    if not a.rank:
        return g.reshape(a, [1]), size
    kind = draw(st.sampled_from(["transpose", "reshape", "narrow", "reverse", "pad", "concat", "tile", "expand"]))
    axis = draw(st.integers(0, a.rank - 1))
    if kind == "transpose":
        return g.transpose(a, draw(st.permutations(range(a.rank)))), size
    if kind == "reshape":
        return g.reshape(a, draw(st.sampled_from([[-1], [1, *shape][:3] + [-1] * (a.rank > 2), [*shape]]))), size
    if kind == "narrow":
        start = draw(st.integers(0, shape[axis] - 1))
        return g.narrow(a, axis, start, draw(st.integers(1, shape[axis] - start))), size
    if kind == "reverse":
        return g.reverse(a, [axis]), size
    if np.prod(shape) > 64 or a.rank > 3:
        return None
    if kind == "pad":
        return g.pad(a, [1] * a.rank, [0] * a.rank, value=0.5), max(size, 0.5)
    if kind == "concat":
        return g.concat([a, -a], axis), size
    if kind == "tile":
        return g.tile(a, [2 if place == axis else 1 for place in range(a.rank)]), size
    return g.expand(a, [2, *shape]), size


def _select(draw: Any, made: RandomGraph, a: Value, b: Value) -> tuple[Value, float] | None:
    g, shape = made.graph, a.shape.static()
    if not a.rank or not shape[0]:
        return None
    if draw(st.booleans()):
        places = np.arange(3, dtype=np.int64) % shape[0]
        return g.gather(a, places), made.size[a.ref.node]
    condition = np.arange(shape[-1]) % 2 == 0
    return g.where_(condition, a, 0.25), max(made.size[a.ref.node], 0.25)


def _attention(draw: Any, made: RandomGraph, a: Value, b: Value) -> tuple[Value, float] | None:
    if a.rank != 3 or a.shape.static()[-1] % 2:
        return None
    kind = draw(st.sampled_from(["none", "causal", "sliding:1"]))
    calm = made.graph.tanh(a)
    return made.graph.attention_kind(calm, calm, a, 2, a.shape.static()[-1] // 2, kind), made.size[a.ref.node]


_STEPS: tuple[_Step, ...] = (
    _activation, _binary, _binary, _scalar, _matmul, _reduce, _along, _norm, _move, _move, _select, _attention,
)  # fmt: skip


@st.composite
def random_graphs(draw: Any) -> RandomGraph:
    """Draw a graph of 5 to 50 ops with one to three inputs and up to three outputs."""
    made = RandomGraph(Graph("random"))
    pool: list[Value] = []
    for index in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        array = np.random.default_rng([index, *shape]).uniform(-2, 2, shape).astype(np.float32)
        made.feeds[f"x{index}"] = array
        pool.append(made.keep(made.graph.input(f"x{index}", shape), 2.0))
    wanted = draw(st.integers(5, 50))
    for _ in range(wanted):
        a, b = draw(st.sampled_from(pool[-6:])), draw(st.sampled_from(pool))
        found = draw(st.sampled_from(_STEPS))(draw, made, a, b)
        value, size = found or (made.graph.tanh(a), 1.0)
        if size > _LIMIT:
            value, size = made.graph.tanh(made.keep(value, size)), 1.0
        pool.append(made.keep(value, size))
    computed = pool[len(made.feeds) :]
    made.graph.outputs = [computed[-1], *computed[-9:-3:3]]
    return made

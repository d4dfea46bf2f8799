"""One small graph or more for every op: what the tests over dtypes and providers, and the audit, are run on.

A case builds its graph from inputs that follow the dtype under test (`X`) and from fixed ones (arrays). The expected
results come from `interpreter`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rlx_ort import DType, Graph, GraphVerifyError, Value
from rlx_ort.ir.gguf_blocks import GGUF_FORMATS
from rlx_ort.ir.op import op_class, op_kinds
from rlx_ort.ir.ops.blocks import FusedTransformerLayer
from rlx_ort.ir.ops.elementwise import ACTIVATIONS, BINARIES, COMPARISONS
from rlx_ort.ir.ops.norm import REDUCTIONS
from rlx_ort.ir.ops.onnx import Refused
from rlx_ort.ir.ops.shape import SCATTER_MODES

__all__ = ["CASES", "DTYPES", "Case", "X", "built", "graphs_of", "kind_of", "kinds_of", "plain", "runnable_kinds"]

Array: TypeAlias = npt.NDArray[Any]
DTYPES = (
    DType.F32, DType.F16, DType.BF16, DType.F64, DType.I8, DType.I16, DType.I32, DType.I64, DType.U8, DType.U16,
    DType.U32, DType.U64, DType.BOOL,
)  # fmt: skip
"""What an op may be asked to compute in."""


@dataclass(frozen=True)
class X:
    """An input of the dtype under test: eighths from -3 to 3, integers from -4 to 5, or from 1 up if `positive`.

    They are exact in f16 and bf16, so every dtype gets the same numbers.
    """

    shape: tuple[int, ...]
    positive: bool = False
    scale: float = 1.0

    def array(self, dtype: DType, seed: int) -> Array:
        """Return the elements."""
        rng = np.random.default_rng([seed, *self.shape])
        if dtype.is_float:
            eighths = rng.integers(-24, 25, self.shape) / 8
            return np.asarray((np.abs(eighths) + 0.125 if self.positive else eighths) * self.scale).astype(dtype.numpy)
        if dtype is DType.BOOL:
            return rng.integers(0, 2, self.shape).astype(bool)
        low = 1 if self.positive else 0 if dtype.value.startswith("u") else -4
        return rng.integers(low, 6, self.shape).astype(dtype.numpy)


@dataclass(frozen=True)
class Case:
    """A graph with one op of interest.

    Attributes:
        name: what the test is called.
        build: `(graph, *inputs)` -> the results.
        inputs: one `X` or array for each input.
        loose: factor of the bounds where the arithmetic amplifies rounding; `why` says how.
        why: the reason of `loose`.
        of: the kind of the op of interest where that is not the op of the first output.
    """

    name: str
    build: Callable[..., Any]
    inputs: Sequence[X | Array] = ()
    loose: float = 1.0
    why: str = ""
    of: str = ""

    @property
    def has_dtype(self) -> bool:
        """Whether any input follows the dtype under test."""
        return any(isinstance(item, X) for item in self.inputs)


def built(case: Case, dtype: DType) -> tuple[Graph, dict[str, Array]]:
    """Return the graph and its inputs; raises what a builder raises when the op does not take the dtype."""
    graph = Graph(case.name)
    feeds: dict[str, Array] = {}
    values = []
    for index, item in enumerate(case.inputs):
        array = item.array(dtype, index) if isinstance(item, X) else item
        feeds[f"x{index}"] = array
        values.append(graph.input(f"x{index}", array.shape, DType.from_numpy(array.dtype)))
    made = case.build(graph, *values)
    graph.outputs = [made] if isinstance(made, Value) else list(made)
    return graph, feeds


def graphs_of(case: Case) -> Iterator[tuple[DType, Graph]]:
    """Yield the graph of a case in each dtype that the op takes; once where no input follows the dtype."""
    for dtype in DTYPES if case.has_dtype else DTYPES[:1]:
        with contextlib.suppress(GraphVerifyError):
            yield dtype, built(case, dtype)[0]


def plain(case: Case) -> tuple[Graph, dict[str, Array]]:
    """Return the case in f32, or in i32 where the op takes integers only."""
    try:
        return built(case, DType.F32)
    except GraphVerifyError:
        return built(case, DType.I32)


def kind_of(case: Case) -> str:
    """Return the kind of the op that a case is about."""
    return case.of or plain(case)[0].outputs[0].node.op.kind


def kinds_of(graph: Graph) -> set[str]:
    """Return the kinds of the ops of a graph and of its bodies."""
    found = {node.op.kind for node in graph.nodes}
    return found.union(*(kinds_of(body) for node in graph.nodes for body in node.op.bodies()))


def runnable_kinds() -> tuple[str, ...]:
    """Return every kind that a user can put into a graph and run: no base class and none that is refused."""
    ours = (kind for kind in op_kinds() if op_class(kind).__module__.startswith("rlx_ort."))
    return tuple(kind for kind in ours if not issubclass(op_class(kind), Refused))


def ints(*values: Any, dtype: type = np.int64) -> Array:
    return np.asarray(values, dtype)


_LOG = {"log", "sqrt", "rsqrt", "recip"}
_GGUF = np.load(Path(__file__).parents[2] / "data" / "gguf_blocks.npz")


def _i8(*shape: int) -> Array:
    return np.random.default_rng([*shape]).integers(-128, 128, shape).astype(np.int8)


def _f32(*shape: int) -> Array:
    return (np.random.default_rng([1, *shape]).integers(1, 17, shape) / 16).astype(np.float32)


def _elementwise() -> list[Case]:
    one, two = X((3, 4)), [X((3, 1)), X((4,), positive=True)]
    cases = [
        Case(
            name,
            lambda g, x, name=name: g.activation(name, x),
            [X((3, 4), positive=name in _LOG)],
            *((10.0, "near its poles tan multiplies the rounding of its argument") if name == "tan" else ()),
        )
        for name in ACTIVATIONS
    ]
    for name in BINARIES:
        powers = [X((3, 1), positive=True, scale=0.5), X((4,), positive=True, scale=0.5)]
        build = lambda g, a, b, name=name: g.binary(name, a, b)  # noqa: E731
        cases.append(Case(name, build, powers if name == "pow" else two))
    cases += [Case(name, lambda g, a, b, name=name: g.compare(name, a, b), [one, X((4,))]) for name in COMPARISONS]
    cases += [Case(f"cast to {to.value}", partial(_cast, to), [X((3, 4), positive=True)], of="Cast") for to in DTYPES]
    condition = np.array([True, False, True, False])
    cases += [
        Case("where", lambda g, c, a, b: g.where_(c, a, b), [condition, one, X((4,))]),
        Case("clamp", lambda g, x: g.clamp(x, 1, 2), [one]),
        Case("clamp from below", lambda g, x: g.clamp(x, 1), [one]),
        Case("fma", lambda g, a, b, c: g.fma(a, b, c), [one, X((4,)), X(())]),
        Case("stop_gradient", lambda g, x: g.stop_gradient(x), [one]),
        Case("add nothing", lambda g, x: g.binary("add", x, x), [X((0, 3))]),
    ]
    return cases


def _cast(to: DType, g: Graph, x: Value) -> Value:
    # An Identity stands for a cast that changes nothing, which the builder leaves out.
    return g.stop_gradient(g.cast(x, to))


def _products() -> list[Case]:
    chosen = ints(2, 0, 2)
    return [
        Case("matmul", lambda g, a, b: g.matmul(a, b), [X((2, 1, 3, 4)), X((3, 4, 2))]),
        Case("matmul of nothing", lambda g, a, b: g.matmul(a, b), [X((0, 4)), X((4, 2))]),
        Case("dot_general", lambda g, a, b: g.dot_general(a, b, [2], [1], [0], [2]), [X((2, 3, 4)), X((3, 4, 2))]),
        *(
            Case(
                f"matmul + bias + {name}",
                lambda g, x, w, b, name=name: g.fused_matmul_bias_act(x, w, b, activation=name),
                [X((3, 4), scale=0.5), X((4, 5), scale=0.5), X((5,))],
            )
            for name in (None, "relu", "gelu", "silu")
        ),
        Case(
            "lora_matmul",
            lambda g, x, w, a, b: g.lora_matmul(x, w, a, b, 0.5),
            [X((3, 4)), X((4, 5)), X((4, 2)), X((2, 5))],
        ),
        Case("grouped_matmul", lambda g, x, w, e: g.grouped_matmul(x, w, e), [X((3, 4)), X((3, 4, 2)), chosen]),
        Case("scatter_add", lambda g, u, i: g.scatter_add(u, i, 4), [X((3, 2)), chosen]),
        Case(
            "dense_solve",
            lambda g, a, b: g.dense_solve(a * np.eye(3) + 8 * np.eye(3) + a * 0.1, b),
            [X((3, 3)), X((3,))],
            8,
            "elimination adds up the rounding of N steps",
        ),
        Case(
            "batched_dense_solve",
            lambda g, a, b: g.batched_dense_solve(a * 0.25 + g.constant(4 * np.eye(3), a.dtype), b),
            [X((2, 3, 3)), X((2, 3, 2))],
            8,
            "elimination adds up the rounding of N steps",
        ),
    ]


def _reductions() -> list[Case]:
    ties = X((3, 6))
    cases = []
    for name in REDUCTIONS:
        cases.append(Case(f"reduce {name}", partial(_reduce, name, [1], False), [X((2, 3, 4), scale=0.5)]))
        cases.append(Case(f"reduce {name} keep", partial(_reduce, name, [0, -1], True), [X((2, 3, 4), scale=0.5)]))
        cases.append(Case(f"reduce {name} no axes", partial(_reduce, name, [], False), [X((2, 3))]))
    return [
        *cases,
        Case("softmax", lambda g, x: g.softmax(x, 1), [X((2, 3, 4))]),
        Case("softmax of nothing", lambda g, x: g.softmax(x), [X((0, 4))]),
        Case("cumsum", lambda g, x: g.cumsum(x, 1), [X((2, 5))]),
        Case("cumsum exclusive reverse", lambda g, x: g.cumsum(x, 0, True, True), [X((4, 2))]),
        Case("topk with ties", lambda g, x: g.topk(x, 4), [ties]),
        Case("topk of all as i32", lambda g, x: g.topk(x, 6, "i32"), [ties]),
        Case("argmax with ties", lambda g, x: g.argmax(x, 1), [ties]),
        Case("argmin with ties", lambda g, x: g.argmin(x, 0, True), [ties]),
        Case("sort", lambda g, x: g.sort(x, 0), [ties]),
        Case("sort descending", lambda g, x: g.sort(x, -1, True), [ties]),
        Case("argsort", lambda g, x: g.argsort(x, -1), [ties]),
        Case("argsort descending", lambda g, x: g.argsort(x, -1, True), [ties]),
        Case("cumprod", lambda g, x: g.cumprod(x), [X((2, 5), positive=True, scale=0.5)]),
        Case("cummax", lambda g, x: g.cummax(x, 0), [X((5, 2))]),
    ]


def _reduce(name: str, axes: list[int], keep: bool, g: Graph, x: Value) -> Value:
    return g.reduce(x, name, axes, keep)


def _movement() -> list[Case]:
    x, rows = X((2, 3, 4)), ints([0, 2, 1], [1, 0, 0])
    return [
        Case("reshape", lambda g, x: g.reshape(x, [4, -1]), [x]),
        Case("reshape to zero", lambda g, x: g.reshape(x, [3, 0]), [X((0, 2))]),
        Case("transpose", lambda g, x: g.transpose(x, [2, 0, 1]), [x]),
        Case("expand", lambda g, x: g.expand(x, [2, -1, 4]), [X((3, 1))]),
        Case("concat", lambda g, a, b: g.concat([a, b, a], 1), [X((2, 3)), X((2, 1))]),
        Case("narrow", lambda g, x: g.narrow(x, 1, 1, 2), [x]),
        Case("narrow of nothing", lambda g, x: g.narrow(x, 1, 1, 0), [x]),
        Case("slice", lambda g, x: g.slice(x, [0, 2], [None, -1], [1, None], [1, -2]), [x]),
        Case("gather", lambda g, t, i: g.gather(t, i, 1), [x, ints([0, -1], [2, 0])]),
        Case("pad", lambda g, x: g.pad(x, [1, 0], [0, 2], value=1), [X((2, 3))]),
        Case("pad reflect", lambda g, x: g.pad(x, [1, 2], [0, 1], "reflect"), [X((2, 3))]),
        Case("pad edge", lambda g, x: g.pad(x, [1, 2], [0, 1], "edge"), [X((2, 3))]),
        Case("tile", lambda g, x: g.tile(x, [2, 3]), [X((2, 3))]),
        Case("reverse", lambda g, x: g.reverse(x, [0, 2]), [x]),
        Case("trilu", lambda g, x: g.trilu(x, True, 1), [x]),
        Case("tril", lambda g, x: g.trilu(x, False, -1), [x]),
        Case("gather_elements", lambda g, x, i: g.gather_elements(x, i, 0), [X((3, 3)), rows]),
        Case("gather_nd", lambda g, x, i: g.gather_nd(x, i), [X((3, 3, 2)), rows[:, :2]]),
        Case("gather_nd in a batch", lambda g, x, i: g.gather_nd(x, i, 1), [X((2, 3, 2)), rows[:, :1]]),
        *(
            Case(
                f"scatter_elements {mode}",
                lambda g, x, i, u, mode=mode: g.scatter_elements(x, i, u, 1, mode),
                [X((2, 4)), rows if mode != "set" else ints([0, 2, 1], [1, 0, 3]), X((2, 3))],
            )
            for mode in SCATTER_MODES
        ),
        *(
            Case(
                f"scatter_nd {mode}",
                lambda g, x, i, u, mode=mode: g.scatter_nd(x, i, u, mode),
                [X((4, 2)), ints([2], [0]) if mode == "set" else ints([2], [2]), X((2, 2))],
            )
            for mode in SCATTER_MODES
        ),
    ]


def _norms() -> list[Case]:
    x, vector = X((2, 3, 4)), X((4,))
    image, channel, positive = X((2, 6, 3, 2)), X((6,)), X((6,), positive=True)
    return [
        Case("layer_norm", lambda g, x, a, b: g.layer_norm(x, a, b, eps=1e-3), [x, vector, vector]),
        Case("layer_norm of axis 1", lambda g, x, a, b: g.layer_norm(x, a, b, 1, 1e-3), [x, X((3,)), X((3,))]),
        Case("rms_norm", lambda g, x, a, b: g.rms_norm(x, a, b, 1e-3), [x, vector, vector]),
        Case("layer_norm2d", lambda g, x, a, b: g.layer_norm2d(x, a, b, 1e-3), [image, channel, channel]),
        *(
            Case(
                f"group_norm {groups}",
                lambda g, x, a, b, groups=groups: g.group_norm(x, a, b, groups, 1e-3),
                [image, channel, channel],
            )
            for groups in (1, 3, 6)
        ),
        Case(
            "batch_norm_inference",
            lambda g, x, s, b, m, v: g.batch_norm_inference(x, s, b, m, v, 1e-3),
            [image, channel, channel, channel, positive],
        ),
        Case(
            "fused_residual_ln",
            lambda g, x, r, c, a, b: g.fused_residual_ln(x, r, c, a, b, 1e-3),
            [x, x, vector, vector, vector],
        ),
        Case(
            "fused_residual_rms_norm",
            lambda g, x, r, a, b: g.fused_residual_rms_norm(x, r, None, a, b, 1e-3),
            [x, x, vector, vector],
        ),
        Case("fused_swiglu", lambda g, x: g.fused_swiglu(x), [X((3, 8))]),
        Case("fused_swiglu gate first", lambda g, x: g.fused_swiglu(x, True), [X((3, 8))]),
    ]


def _images() -> list[Case]:
    x, w = X((1, 6, 5, 4)), X((6, 2, 3, 2), scale=0.5)
    cases = [
        Case(
            "conv2d",
            lambda g, x, w: g.conv2d(x, w, None, [2, 1], [1, 0], [1, 2]),
            [X((1, 5, 5, 4)), X((4, 5, 3, 2), scale=0.5)],
        ),
        Case("conv2d of 6 channels", lambda g, x, w: g.conv2d(x, w), [x, X((4, 6, 3, 2), scale=0.5)]),
        Case("conv2d in 3 groups", lambda g, x, w, b: g.conv2d(x, w, b, groups=3), [x, w, X((6,))]),
        Case("conv2d depthwise", lambda g, x, w: g.conv2d(x, w, None, padding=1, groups=6), [x, X((6, 1, 3, 3))]),
        Case(
            "conv_transpose2d",
            lambda g, x, w, b: g.conv_transpose2d(x, w, b, [2, 1], [1, 0], [1, 0], groups=3),
            [X((1, 6, 3, 2)), X((6, 2, 3, 2), scale=0.5), X((6,))],
        ),
        Case(
            "conv3d",
            lambda g, x, w, b: g.conv3d(x, w, b, [1, 2, 1], 1),
            [X((1, 2, 3, 4, 3)), X((2, 2, 2, 3, 3), scale=0.5), X((2,))],
        ),
        Case(
            "conv3d in 2 groups",
            lambda g, x, w, b: g.conv3d(x, w, b, [1, 2, 1], 1, groups=2),
            [X((1, 4, 3, 4, 3)), X((2, 2, 2, 3, 3), scale=0.5), X((2,))],
        ),
        Case("im2col", lambda g, x: g.im2col(x, [3, 2], [2, 1], [1, 0]), [x]),
        Case("resize_nearest_2x", lambda g, x: g.resize_nearest_2x(x), [X((1, 2, 2, 3))]),
    ]
    cases += [
        Case(f"pool {kind}", lambda g, x, kind=kind: g.pool(kind, x, [3, 2], [2, 1], [1, 0]), [x])
        for kind in ("max", "mean", "sum", "min")
    ]
    for mode, corners in (("nearest", False), ("linear", False), ("linear", True), ("cubic", False), ("cubic", True)):
        cases.append(
            Case(
                f"interpolate {mode}{' corners' if corners else ''}",
                lambda g, x, mode=mode, corners=corners: g.interpolate(x, [5, 3], mode, corners),
                [X((1, 2, 3, 4))],
            )
        )
    return cases


def _attention() -> list[Case]:
    def qkv(queries: int, keys: int) -> list[X | Array]:
        return [X((2, queries, 8), scale=0.5), X((2, keys, 8), scale=0.5), X((2, keys, 8))]

    cases = [
        Case(
            f"attention {kind} {queries} of {keys}",
            lambda g, q, k, v, kind=kind: g.attention_kind(q, k, v, 2, 4, kind),
            qkv(queries, keys),
        )
        for kind in ("none", "causal", "sliding:1")
        for queries, keys in ((4, 4), (2, 5), (5, 2))
    ]
    masked = np.array([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0]], np.float32)
    tables: list[X | Array] = [X((3, 4), scale=0.25), X((3, 4), scale=0.25)]
    hidden, mask = X((2, 3, 8), scale=0.5), np.array([[1, 1, 0], [0, 0, 0]], np.float32)
    vectors = [X((8,), scale=0.5)] * 2
    block: list[X | Array] = [hidden, X((8, 24), scale=0.25), X((8, 8), scale=0.25), mask]
    layer: list[X | Array] = [
        hidden, mask, X((8, 24), scale=0.25), X((8, 8), scale=0.25), *vectors,
        X((8, 6), scale=0.25), X((6, 8), scale=0.25), *vectors,
    ]  # fmt: skip
    deep = (3.0, "several products follow each other and their rounding adds up")
    return [
        *cases,
        Case("attention, rows masked whole", lambda g, q, k, v, m: g.attention(q, k, v, m, 2, 4), [*qkv(3, 5), masked]),
        Case(
            "attention with bias",
            lambda g, q, k, v, b: g.attention_bias(q, k, v, b, 2, 4, scale=0.5, softcap=2.0),
            [*qkv(3, 5), X((2, 2, 3, 5))],
        ),
        Case(
            "attention, heads first",
            lambda g, q, k, v: g.attention_kind(q, k, v, 2, 4, "causal"),
            [X((1, 2, 3, 4)), X((1, 2, 5, 4)), X((1, 2, 5, 4))],
        ),
        *(
            Case(
                f"gqa {kind}",
                lambda g, q, k, v, kind=kind: g.gqa(q, k, v, 6, 2, 2, kind),
                [X((1, 3, 12)), X((1, 5, 4)), X((1, 5, 4))],
            )
            for kind in ("none", "causal", "sliding:1")
        ),
        Case("rope", lambda g, x, c, s: g.rope(x, c, s, 8), [X((2, 3, 16)), *tables]),
        Case("rope of half a head", lambda g, x, c, s: g.rope_n(x, c, s, 8, 4), [X((2, 3, 16)), *tables]),
        Case("rope interleaved", lambda g, x, c, s: g.rope(x, c, s, 8, interleaved=True), [X((3, 16)), *tables]),
        Case("axial_rope2d", lambda g, x: g.axial_rope2d(x, 2, 2, 4, 2, 100.0), [X((1, 4, 8))]),
        Case("axial_rope2d repeated", lambda g, x: g.axial_rope2d(x, 2, 1, 8, 1, 10.0, 2), [X((4, 8))]),
        Case("fused_attention_block", lambda g, *v: g.fused_attention_block(*v, 2, 4), block, *deep),
        Case(
            "fused_attention_block with all",
            lambda g, h, w, o, m, a, b, c, s: g.fused_attention_block(h, w, o, m, 1, 8, a, b, c, s),
            [*block, X((24,)), X((8,)), *tables],
            *deep,
        ),
        Case("transformer layer", lambda g, *v: g.append(FusedTransformerLayer(2, 4, eps=1e-2), *v), layer, *deep),
        Case(
            "transformer layer, pre-norm",
            lambda g, *v: g.append(FusedTransformerLayer(2, 4, True, True, "silu", 1e-2), *v),
            [*layer, X((24,)), X((8,)), X((6,)), X((8,))],
            *deep,
        ),
    ]


def _sequences() -> list[Case]:
    cases = []
    for length in (0, 1, 3):
        vector, gate = X((1, length, 2, 3), scale=0.25), X((1, length, 2), scale=-0.25, positive=True)
        cases += [
            Case(
                f"selective_scan of {length}",
                lambda g, *v: g.selective_scan(*v),
                [X((1, length, 2)), X((1, length, 2), True, 0.25), X((2, 3), True, -0.25)]
                + [X((1, length, 3), scale=0.5)] * 2,
            ),
            Case(f"gated_delta_net of {length}", lambda g, *v: g.gated_delta_net(*v), [vector] * 3 + [gate] * 2),
            Case(
                f"gated_delta_net_carry of {length}",
                lambda g, *v: g.gated_delta_net_carry(*v),
                [*([vector] * 3), gate, gate, X((1, 2, 3, 3))],
            ),
            Case(f"scan of {length}", lambda g, x, n=length: g.scan(x, lambda b, c: c + c, n), [X((3,))]),
            Case(
                f"scan trajectory of {length}",
                lambda g, x, w, xs, n=length: g.scan_with_bcasts_and_xs(
                    x, [w], [xs], lambda b, c, w, row: c * w + row, n, True
                ),
                [X((3,)), X((3,), scale=0.25), X((length, 3))],
            ),
        ]
    return [
        *cases,
        Case("scan checkpoints", lambda g, x: g.scan_checkpointed(x, lambda b, c: c + 1, 5, 2), [X((3,))]),
        Case(
            "while",
            lambda g, x: g.while_([x, 0.0], lambda b, v, n: b.lt_(n, 3.0), lambda b, v, n: (v + v, n + 1)),
            [X((3,))],
        ),
        Case("if", lambda g, p, x: g.if_(p, lambda b, v: v + v, lambda b, v: v * v, [x]), [np.array(True), X((3,))]),
        Case(
            "if of each element",
            lambda g, p, x: g.if_(p, lambda b, v: v + v, lambda b, v: v * v, [x]),
            [np.array([True, False, True]), X((3,))],
        ),
        Case("custom_fn", lambda g, x, y: g.custom_fn([x, y], lambda b, u, v: u * v + u), [X((3,)), X((3,))]),
        Case("fft", lambda g, x: g.fft(x), [X((2, 12))]),
        Case("fft inverse forward", lambda g, x: g.fft_norm(x, True, "forward"), [X((2, 10))]),
        Case("fft of a prime, ortho", lambda g, x: g.fft_norm(x, False, "ortho"), [X((1, 14))]),
        Case("complex_norm_sq", lambda g, x: g.complex_norm_sq(x), [X((3, 2))]),
        Case("conjugate", lambda g, x: g.conjugate(x), [X((3, 2))]),
        Case("sample", lambda g, x: g.sample(x, 4, 0.9, 0.8, 7), [X((5, 8))]),
        Case("sample at temperature 0", lambda g, x: g.sample(x, temperature=0.0, seed=3), [np.eye(4, 6, dtype="f4")]),
    ]


def _quantised() -> list[Case]:
    raw = _GGUF["q4_k_raw"]
    k = _GGUF["q4_k_values"].shape[1]
    scale, zero = _f32(2, 4), np.full((2, 4), 3, np.float32)
    codes = np.random.default_rng(3).integers(0, 256, (32 * 4) // 2).astype(np.uint8)
    ten = np.array([0.25], np.float32)
    x32 = X((2, 32), scale=0.25)
    cases = [
        Case("quantize", lambda g, x: g.quantize(x, 0.25, 3), [X((3, 4))]),
        Case(
            "quantize_per_channel",
            lambda g, x: g.quantize_per_channel(x, 0, [0.25, 0.5], [1, -2]),
            [X((2, 4))],
        ),
        Case("dequantize", lambda g, q: g.dequantize(q, 0.5, 3), [_i8(3, 4)]),
        Case(
            "dequantize_per_channel",
            lambda g, q: g.dequantize_per_channel(q, 1, [0.5, 0.25], [3, -1]),
            [_i8(3, 2)],
        ),
        *(
            Case(f"fake_quantize {bits}", lambda g, x, bits=bits: g.fake_quantize(x, bits, state=0.25), [X((3, 4))])
            for bits in (8, 4, 2)
        ),
        Case("fake_quantize per batch", lambda g, x: g.fake_quantize(g.activation("sin", x), 8), [X((3, 4))]),
        Case("fake_quantize by row", lambda g, x, s: g.fake_quantize(x, 4, 0, s), [X((3, 4)), X((3,), True)]),
        Case("fake_quantize_lsq", lambda g, x, s: g.fake_quantize_lsq(x, s, 8, 1), [X((3, 4)), X((4,), True)]),
        Case(
            "q_matmul",
            lambda g, x, w, b: g.q_matmul(x, w, b, 3, -2, 5, 0.001),
            [_i8(3, 6), _i8(6, 4), ints(100, -200, 0, 3000, dtype=np.int32)],
        ),
        Case(
            "q_conv2d",
            lambda g, x, w: g.q_conv2d(x, w, None, 3, -2, 5, 0.002, 1, 1, 1, 2),
            [_i8(1, 4, 4, 3), _i8(2, 2, 3, 3)],
        ),
        Case("int8_block", lambda g, x: g.dequant_matmul(x, _i8(32, 4), scale, None, "int8_block", 16), [x32]),
        Case(
            "int8_block_asym", lambda g, x: g.dequant_matmul(x, _i8(32, 4), scale, zero, "int8_block_asym", 16), [x32]
        ),
        Case("int4_block", lambda g, x: g.dequant_matmul(x, codes, scale, zero, "int4_block", 16), [x32]),
        Case(
            "int4_block packed",
            lambda g, x: g.dequant_matmul(x, codes, scale, zero, "int4_block", 16, packed=True),
            [x32],
        ),
        *(
            Case(
                name,
                lambda g, x, name=name, kind=kind: g.dequant_matmul(
                    x, _f32(32, 4).astype(kind).view(np.uint8), _f32(4), None, name
                ),
                [x32],
            )
            for name, kind in (("fp8_e4m3", ml_dtypes.float8_e4m3fn), ("fp8_e5m2", ml_dtypes.float8_e5m2))
        ),
        Case(
            "nvfp4_block",
            lambda g, x: g.dequant_matmul_nvfp4(
                x, codes.reshape(32, 2), _f32(2, 4).astype(ml_dtypes.float8_e4m3fn).view(np.uint8), ten
            ),
            [x32],
        ),
        Case("dequant_moe_weights", lambda g, w: g.dequant_moe_weights(w, "q4_k"), [raw[None]]),
        Case(
            "dequant_grouped_matmul",
            lambda g, x, e: g.dequant_grouped_matmul(x, np.stack([raw, raw[::-1]]), e, "q4_k"),
            [X((2, k), scale=0.25), ints(1, 0)],
        ),
    ]
    packed = {name: _GGUF[f"{name}_raw"] for name in ("q4_0", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")}
    packed["q8_k"] = np.concatenate([_f32(2, 1).view(np.uint8), _i8(2, 256).view(np.uint8), np.zeros((2, 32), "u1")], 1)
    for name, data in packed.items():
        width = data.shape[1] // GGUF_FORMATS[name].bytes * GGUF_FORMATS[name].elements
        cases.append(
            Case(
                name,
                lambda g, x, name=name, data=data: g.dequant_matmul_packed(x, data, name),
                [X((2, width), scale=0.25)],
            )
        )
    return cases


def _fused() -> list[Case]:
    return [
        Case(
            "fused_conv_bias_act",
            lambda g, x, w, b: g.fused_conv_bias_act(x, w, b, "silu", 2, 1),
            [X((1, 2, 5, 4)), X((4, 2, 3, 3), scale=0.5), X((4,))],
        ),
        Case(
            "ada_layer_norm",
            lambda g, x, s, b: g.ada_layer_norm(x, s, b, 1e-2),
            [X((2, 3, 4)), X((2, 1, 4)), X((2, 1, 4))],
        ),
        Case("gated_residual", lambda g, x, a, y: g.gated_residual(x, a, y), [X((2, 3)), X((3,)), X((2, 3))]),
        Case(
            "softmax_cross_entropy_with_logits",
            lambda g, x, i: g.softmax_cross_entropy_with_logits(x, i),
            [X((3, 5)), ints(4, 0, 2)],
        ),
    ]


CASES: dict[str, Case] = {}
"""Name -> case."""
for _case in (
    *_elementwise(),
    *_products(),
    *_reductions(),
    *_movement(),
    *_norms(),
    *_images(),
    *_attention(),
    *_sequences(),
    *_quantised(),
    *_fused(),
):
    assert _case.name not in CASES, _case.name
    CASES[_case.name] = _case

"""Applies a precision policy: graph -> graph in which f32 values are f16 or bf16 where the policy asks for it.

Integers, bools and f64 are never touched, nor shape arithmetic, sines of positions and RMS norms. Each value is cast
to a dtype at most once. A parameter that is only read in one low precision is stored in it; constants are rounded here.

Ops that no class lists stay f32, on purpose: sorting and sampling (near values would change places), Fourier
transforms, linear solvers, recurrences and loops (errors grow with each step), quantised products (they choose their
own types), and casts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from rlx_ort.converters.attention_patterns import Matcher
from rlx_ort.converters.onnx_types import schema_of
from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Node, Ref, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.op import Op
from rlx_ort.ir.ops.elementwise import Cast
from rlx_ort.ir.ops.leaf import Capture, Constant, Input, Param
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.tensor import narrowed, overflows
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.options.precision import OpClass, PrecisionPolicy

if TYPE_CHECKING:
    import onnx

_ANGLE_OPS = frozenset(
    {
        *("Add", "Cast", "Concat", "Div", "Expand", "Identity", "MatMul", "Mul", "Neg", "Reshape", "Slice"),
        *("Squeeze", "Sub", "Transpose", "Unsqueeze"),
    }
)
"""Operators between positions and their angles."""
_ONNX_TEXT = {DType.F16: "tensor(float16)", DType.BF16: "tensor(bfloat16)"}


def _table(rows: dict[OpClass, str]) -> dict[str, OpClass]:
    return {name: op_class for op_class, names in rows.items() for name in names.split()}


KIND_CLASSES = _table(
    {
        OpClass.COMPUTE: """Attention Conv2d Conv3d ConvTranspose2d DotGeneral FusedMatMulBiasAct GroupedMatMul
            GroupedQueryAttention LoraMatMul MatMul""",
        OpClass.REDUCTION: """BatchNormInference Cumsum FusedResidualLN FusedResidualRmsNorm GroupNorm LayerNorm
            LayerNorm2d Pool Reduce RmsNorm Softmax""",
        OpClass.ELEMENTWISE: """Activation AxialRope2d Binary Clamp Compare Fma FusedSwiGLU Rope StopGradient
            Where""",
        OpClass.DATA_MOVEMENT: """Concat Expand Gather GatherElements GatherNd Im2Col Narrow Pad Reshape
            ResizeNearest2x Reverse Slice Tile Transpose Trilu""",
    }
)
"""Kind of op -> its class."""

ONNX_CLASSES = _table(
    {
        OpClass.COMPUTE: "Conv ConvTranspose Einsum Gemm MatMul",
        OpClass.REDUCTION: """AveragePool BatchNormalization CumSum GlobalAveragePool GlobalMaxPool GroupNormalization
            InstanceNormalization LayerNormalization LogSoftmax LpNormalization MaxPool Mean ReduceL1 ReduceL2
            ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
            RMSNormalization Softmax Sum""",
        OpClass.ELEMENTWISE: """Abs Add Atan Ceil Celu Clip Cos Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual
            HardSigmoid HardSwish LeakyRelu Less LessOrEqual Log Max Min Mish Mul Neg Pow PRelu Reciprocal Relu Round
            Selu Sigmoid Sign Sin Softplus Softsign Sqrt Sub Swish Tan Tanh ThresholdedRelu Where""",
        OpClass.DATA_MOVEMENT: """Concat DepthToSpace Expand Flatten Gather GatherElements GatherND Identity Pad
            Reshape Resize ScatterElements ScatterND Slice SpaceToDepth Split Squeeze Tile Transpose Trilu
            Unsqueeze""",
    }
)
"""Operator of ai.onnx -> its class."""


def class_of(op: Op) -> OpClass | None:
    """Return the class of an op, or None for one that stays f32; ops with bodies and foreign operators do."""
    if op.bodies():
        return None
    if isinstance(op, OnnxNode):
        return ONNX_CLASSES.get(op.op_type) if op.domain == "" and not op.overload else None
    return KIND_CLASSES.get(op.kind)


class Narrowed(NamedTuple):
    """A graph after a precision policy; the old graph where nothing changes.

    `origins` maps the id of each new node to that of the old one; a cast has that of the node that needed it first.
    `stored_as` has the parameters that are stored in another dtype than the declared one. `kept` maps the id of each
    old node that still computes on f32 values to the reason.
    """

    graph: Graph
    origins: Mapping[int, int]
    stored_as: Mapping[str, DType]
    kept: Mapping[int, str]


def apply_precision(graph: Graph, policy: PrecisionPolicy, keep: Mapping[int, str] | None = None) -> Narrowed:
    """Return the graph with the policy applied; names, and the dtypes the policy leaves alone, stay.

    `keep` names nodes that stay f32 under any policy: id -> the reason to report.
    """
    return Narrowed(graph, {}, {}, {}) if policy.is_f32 else _Pass(graph, policy, keep or {}).run()


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a node changes: the dtype of each f32 input, None for other inputs, and the result types."""

    inputs: tuple[DType | None, ...]
    types: tuple[ValueType, ...]


@dataclass(slots=True)
class _Pass:
    """One run over one graph."""

    old: Graph
    policy: PrecisionPolicy
    keep: Mapping[int, str]
    new: Graph = field(init=False)
    plans: list[_Plan] = field(default_factory=list)
    values: dict[Ref, Value] = field(default_factory=dict)
    casts: dict[tuple[Ref, DType], Value] = field(default_factory=dict)
    origins: dict[int, int] = field(default_factory=dict)
    stored_as: dict[str, DType] = field(default_factory=dict)
    kept: dict[int, str] = field(default_factory=dict)

    def run(self) -> Narrowed:
        """Plan every node, choose how parameters are stored, then write the new graph."""
        self.new = Graph(self.old.name, metadata=dict(self.old.metadata), doc=self.old.doc)
        kept = dict.fromkeys(_angles(self.old), "it computes sines of positions")
        kept |= dict.fromkeys(_mean_squares(self.old), "it is a part of an RMS norm")
        kept |= dict.fromkeys(_beyond(self.old, self.policy), "a vector that it reads has numbers beyond the type")
        self.keep = kept | dict.fromkeys(_from_sizes(self.old), "it computes sizes or scales") | dict(self.keep)
        self.plans = [self._plan(node) for node in self.old.nodes]
        self._store_params()
        for node in self.old.nodes:
            self._write(node)
        outputs = [self._output(value.ref) for value in self.old.outputs]
        self.new.set_outputs(outputs, self.old.output_names)
        return Narrowed(self.new, self.origins, self.stored_as, self.kept)

    def _plan(self, node: Node) -> _Plan:
        kinds = [None if ref is None else self.old.nodes[ref.node].types[ref.output] for ref in node.inputs]
        keep = _Plan(tuple(DType.F32 if _is_f32(kind) else None for kind in kinds), node.types)
        if isinstance(node.op, Input) and _is_f32(node.types[0]):
            return _Plan((), (_in_dtype(node.types[0], self.policy.boundary),))
        if _reads_shape(node):  # of a value in any precision
            return _Plan((None,), node.types)
        op_class = class_of(node.op)
        dtype = DType.F32 if op_class is None else self.policy.of(op_class)
        plan = None
        if node.id in self.keep:
            reason = self.keep[node.id]
        elif op_class is None:
            reason = "it has a body" if node.op.bodies() else "operators of this type are never narrowed"
        elif dtype is DType.F32:
            reason = f"the policy keeps {op_class.value} ops"
        else:
            reason = f"it does not take {dtype.value}"
            plan = (_onnx_plan if isinstance(node.op, OnnxNode) else _op_plan)(node, kinds, dtype)
        if plan is None and not node.op.is_leaf and any(_is_f32(kind) for kind in (*kinds, *node.types)):
            self.kept[node.id] = reason
        return plan or keep

    def _store_params(self) -> None:
        """Store a parameter in the low precision that all its readers use, if it is the same for all."""
        wanted: dict[int, set[DType]] = {}
        for node, plan in zip(self.old.nodes, self.plans, strict=True):
            for ref, dtype in zip(node.inputs, plan.inputs, strict=True):
                if ref is not None and dtype is not None:
                    wanted.setdefault(ref.node, set()).add(dtype)
        for value in self.old.outputs:
            wanted.setdefault(value.ref.node, set()).add(self.policy.boundary)
        for node in self.old.nodes:
            dtypes = wanted.get(node.id, set())
            if isinstance(node.op, Param) and _is_f32(node.op.type) and len(dtypes) == 1:
                (dtype,) = dtypes
                if dtype is not DType.F32:
                    self.stored_as[node.op.name] = dtype
                    self.plans[node.id] = _Plan((), (_in_dtype(node.op.type, dtype),))

    def _write(self, node: Node) -> None:
        plan, op = self.plans[node.id], node.op
        if isinstance(op, (Input, Param)):
            op = replace(op, type=plan.types[0])  # type: ignore[arg-type]  # of a tensor when it was one
        inputs = [
            None if ref is None else self.values[ref] if dtype is None else self._cast(ref, dtype, node.id)
            for ref, dtype in zip(node.inputs, plan.inputs, strict=True)
        ]
        results = self.new.add_node(op, inputs, name=node.name, types=plan.types, output_names=node.output_names)
        for index, value in enumerate(results):
            self.values[Ref(node.id, index)] = value
            self.origins[value.ref.node] = node.id

    def _cast(self, ref: Ref, dtype: DType, reader: int) -> Value:
        """Return a value in a dtype, cast or rounded where it is in another."""
        value = self.values[ref]
        if value.dtype is dtype:
            return value
        if (ref, dtype) not in self.casts:
            op = value.node.op
            name = f"{value.name}/{dtype.value}"
            narrow = isinstance(op, Constant) and dtype is not DType.F32
            if isinstance(op, Constant) and narrow:
                made = self.new.constant(narrowed(op.data, dtype), name=name)
            else:
                (made,) = self.new.add_node(Cast(dtype), [value], name=name, types=[_in_dtype(value.type, dtype)])
            self.origins[made.ref.node] = reader
            self.casts[ref, dtype] = made
        return self.casts[ref, dtype]

    def _output(self, ref: Ref) -> Value:
        if not _is_f32(self.old.nodes[ref.node].types[ref.output]):
            return self.values[ref]
        return self._cast(ref, self.policy.boundary, ref.node)


def _op_plan(node: Node, kinds: Sequence[ValueType | None], dtype: DType) -> _Plan | None:
    """Return the plan of an op of the IR, or None where it demands f32."""
    try:
        inferred = node.op.infer([_in_dtype(kind, dtype) if _is_f32(kind) else kind for kind in kinds])
    except GraphVerifyError:
        return None
    types = tuple(
        _in_dtype(old, new.dtype) if _is_f32(old) and isinstance(new, TensorType) else old
        for old, new in zip(node.types, inferred, strict=True)
    )
    return _Plan(tuple(dtype if _is_f32(kind) else None for kind in kinds), types)


def _onnx_plan(node: Node, kinds: Sequence[ValueType | None], dtype: DType) -> _Plan | None:
    """Return the plan of a raw ONNX node, or None when its schema does not take the dtype."""
    schema = schema_of(node.op.op_type, node.op.version) if isinstance(node.op, OnnxNode) else None
    if schema is None:
        return None
    allowed = {item.type_param_str for item in schema.type_constraints if _ONNX_TEXT[dtype] in item.allowed_type_strs}
    ins = [*zip(_type_params(schema.inputs, len(kinds)), kinds, strict=True)]
    outs = [*zip(_type_params(schema.outputs, len(node.types)), node.types, strict=True)]
    # A type parameter changes as a whole, so every value that has it must be f32 before.
    lowered = allowed - {name for name, kind in (*ins, *outs) if kind is not None and not _is_f32(kind)}
    inputs = tuple((dtype if name in lowered else DType.F32) if _is_f32(kind) else None for name, kind in ins)
    if dtype not in inputs:
        return None  # their types then depend on attributes
    lowered &= {name for name, kind in ins if _is_f32(kind)}
    return _Plan(inputs, tuple(_in_dtype(kind, dtype) if name in lowered else kind for name, kind in outs))


def _type_params(formals: Sequence[onnx.defs.OpSchema.FormalParameter], count: int) -> list[str]:
    """Return the type parameters of that many values; the last formal may be variadic."""
    return [str(formals[min(index, len(formals) - 1)].type_str) if formals else "" for index in range(count)]


def _from_sizes(graph: Graph) -> set[int]:
    """Return the nodes whose results are of rank 0 or 1 and depend on no floating-point input or parameter.

    Such nodes compute sizes and scales; rounding there would give other shapes.
    """
    sized: set[int] = set()
    fed: set[int] = set()
    for node in graph.nodes:
        if (
            isinstance(node.op, (Param, Capture))
            or (isinstance(node.op, Input) and not _is_whole(node.types[0]))
            or (not _reads_shape(node) and any(ref is not None and ref.node in fed for ref in node.inputs))
        ):
            fed.add(node.id)
        elif not node.op.is_leaf and all(map(_is_short, node.types)):
            sized.add(node.id)
    return sized


def _angles(graph: Graph) -> set[int]:
    """Return imported sines and cosines of positions, and the nodes that compute the angles.

    16 bits have no place for the angles of thousands of positions: in f16 the neighbour of 2048 is 2050. Positions are
    integers, or an input such as the time of a diffusion; angles of activations stay as the policy says.
    """
    plain: set[int] = set()
    for node in graph.nodes:
        cheap = _operator(node) in _ANGLE_OPS and all(ref is None or ref.node in plain for ref in node.inputs)
        if cheap or isinstance(node.op, (Constant, Input, Param)) or all(map(_is_whole, node.types)):
            plain.add(node.id)
    found: set[int] = set()
    for node in reversed(graph.nodes):
        starts = _operator(node) in ("Cos", "Sin") and all(ref is not None and ref.node in plain for ref in node.inputs)
        if starts or node.id in found:
            found.add(node.id)
            found.update(ref.node for ref in node.inputs if ref is not None and not graph.nodes[ref.node].op.is_leaf)
    return found


def _beyond(graph: Graph, policy: PrecisionPolicy) -> set[int]:
    """Return the products and reductions that read a known vector with finite numbers beyond their type.

    Such are variances of batch norms: 9.8e7 in the text detector of PP-OCRv4, which is no f16. Numbers beside tensors
    of elements are masks, which are clamped. Matrices are not looked at: that would read every weight.
    """
    found: set[int] = set()
    for node in graph.nodes:
        op_class = class_of(node.op)
        dtype = DType.F32 if op_class is None else policy.of(op_class)
        if dtype is DType.F32 or op_class not in (OpClass.COMPUTE, OpClass.REDUCTION):
            continue
        leaves = [graph.nodes[ref.node].op for ref in node.inputs if ref is not None]
        known = [op.data for op in leaves if isinstance(op, Constant)]
        known += [graph.weights[op.name] for op in leaves if isinstance(op, Param) and op.name in graph.weights]
        if any(len(data.shape) == 1 and data.dtype is DType.F32 and overflows(data, dtype) for data in known):
            found.add(node.id)
    return found


def _mean_squares(graph: Graph) -> set[int]:
    """Return the nodes of imported RMS norms but their scales: squares, their mean, its root, and x over the root.

    The squares of f16 end at 256. ONNX Runtime, which fuses such a norm, takes 1e-5 for an epsilon that is not an f32.
    """
    matcher, found = Matcher(graph, {}), set[int]()

    def made(node: Node | None, *operators: str) -> Node | None:
        """Return the node of one of some operators that makes an input of a node."""
        makers = (matcher.made(ref, *operators) for ref in (() if node is None else node.inputs))
        return next(filter(None, makers), None)

    for root in graph.nodes:
        total = made(root, "Add") if _operator(root) == "Sqrt" else None
        mean = made(total, "ReduceMean")
        square = made(mean, "Pow", "Mul")
        if total is None or mean is None or square is None or made(square, "Sub") is not None:  # of a layer norm
            continue
        x = square.inputs[0]
        if _operator(square) == "Mul" and square.inputs[1] != x:
            continue
        found |= {square.id, mean.id, total.id, root.id}
        over = list(matcher.users.get(Ref(root.id), ()))
        inverses = [node for node in over if _operator(node) == "Reciprocal"]
        found |= {node.id for node in inverses}
        over += [user for node in inverses for user in matcher.users.get(Ref(node.id), ())]
        found |= {node.id for node in over if _operator(node) in ("Div", "Mul") and x in node.inputs}
    return found


def _operator(node: Node) -> str:
    return node.op.op_type if isinstance(node.op, OnnxNode) and node.op.domain == "" and not node.op.overload else ""


def _reads_shape(node: Node) -> bool:
    return isinstance(node.op, OnnxNode) and node.op.domain == "" and node.op.op_type in {"Shape", "Size"}


def _is_whole(kind: ValueType) -> bool:
    return isinstance(kind, TensorType) and (kind.dtype.is_integer or kind.dtype is DType.BOOL)


def _is_short(kind: ValueType) -> bool:
    return isinstance(kind, TensorType) and kind.shape is not None and kind.shape.rank < 2


def _is_f32(kind: ValueType | None) -> bool:
    return isinstance(kind, TensorType) and kind.dtype is DType.F32


def _in_dtype(kind: ValueType | None, dtype: DType) -> TensorType:
    assert isinstance(kind, TensorType)  # noqa: S101  # asked of f32 tensors only
    return TensorType(dtype, kind.shape)

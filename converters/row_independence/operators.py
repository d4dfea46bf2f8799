"""Rules of operators that compute: they take rows on an axis and give them there, or are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from rlx_ort.converters.row_independence.facts import (
    ONE,
    RefusedError,
    Size,
    Value,
    axis_at,
    product,
    refuse_if,
    refuse_places,
)
from rlx_ort.converters.row_independence.proof import Node, Proof, Rule, elementwise, reshaped


def _first_only(proof: Proof, node: Node) -> list[Value]:
    """An elementwise operator whose other inputs are settings, the same for all rows."""
    node.same_for_all(*range(1, len(node.inputs)))
    return [Value(node.need(0).shape, node.need(0).axis)] * len(node.proto.output)


def _dropout(proof: Proof, node: Node) -> list[Value]:
    training = node.get(2)
    if training is not None and (training.data is None or bool(training.data.any())):
        raise RefusedError("may drop elements at random")
    return [replace(node.need(0), content=None, data=None)] * 2


def _at_least(proof: Proof, node: Node) -> list[Value]:
    """A comparison of the row's number with its least value, or an elementwise operator."""
    one, other = node.need(0), node.need(1)
    if (one.places or other.places) and not (
        one.row_number and other.axis is None and other.data is not None and other.data.size and other.data.max() <= 0
    ):
        raise RefusedError("computes with the row's number")
    return elementwise(proof, node)


def _gather_elements(proof: Proof, node: Node) -> list[Value]:
    values = [value for value in node.inputs if value is not None]
    first = values[0]
    axis = axis_at(node.attributes.get("axis", 0), first.rank)
    rows = next(value for value in values if value.axis is not None)
    refuse_if(rows.axis == axis, "takes elements along the axis of rows")
    if any(not proof.has_rows(value, rows.axis or 0, rows.rows) for value in values):
        raise RefusedError("rows lie on different axes")
    shaped = first if node.proto.op_type == "ScatterElements" else values[1]
    return [Value(shaped.shape, rows.axis)]


def _gather_nd(proof: Proof, node: Node) -> list[Value]:
    given, index, batch = node.need(0), node.need(1), node.attributes.get("batch_dims", 0)
    depth = index.dims[-1].whole
    refuse_places(given)
    if index.axis is None or index.axis == index.rank - 1 or depth is None:
        raise RefusedError("takes elements by number, the same for all rows")
    shape = (*index.dims[:-1], *given.dims[batch + depth :])
    if given.axis is None:
        refuse_if(batch or index.places, "takes elements of a value without rows by the row's number")
    elif batch:
        if index.places or given.axis != index.axis or given.axis >= batch or given.rows != index.rows:
            raise RefusedError("takes elements of other rows")
    elif index.places != (given.axis,) or given.rows != proof.one_batch or index.rows != given.rows:
        raise RefusedError("takes elements of other rows")
    return [Value(shape, index.axis)]


def _pad(proof: Proof, node: Node) -> list[Value]:
    given = node.need(0)
    node.same_for_all(1, 2, 3)
    assert given.axis is not None  # noqa: S101  # nothing else has rows
    amounts = node.get(1)
    pads = amounts.content if amounts is not None else tuple(map(Size, node.attributes["pads"]))
    if pads is None:
        raise RefusedError("its pads are not known")
    axes = node.numbers(3, "axes")
    places = [axis_at(axis, given.rank) for axis in (range(given.rank) if axes is None else axes)]
    if given.axis in places:
        at = places.index(given.axis)
        refuse_if(pads[at] != Size(0) or pads[at + len(places)] != Size(0), "may add rows")
    result = proof.rows(node, 0, given.axis, given.rows, given.rank)
    same = {axis for axis in range(given.rank) if axis not in places}
    same |= {axis for at, axis in enumerate(places) if pads[at] == Size(0) == pads[at + len(places)]}
    kept = [given.dims[axis] if axis in same else size for axis, size in enumerate(result.dims)]
    return [Value(tuple(kept), given.axis)]


def _reduced(proof: Proof, node: Node) -> list[Value]:
    given = node.need(0)
    if node.proto.op_type in ("ArgMax", "ArgMin"):
        axes: list[int] | None = [node.attributes.get("axis", 0)]
    else:
        node.same_for_all(1)
        axes = node.numbers(1, "axes")
    if not axes and node.attributes.get("noop_with_empty_axes", 0):
        return [Value(given.shape, given.axis)]
    gone = {axis_at(axis, given.rank) for axis in axes} if axes else set(range(given.rank))
    refuse_if(given.axis in gone, "reduces over the rows")
    keeps = node.attributes.get("keepdims", 1)
    shape = [ONE if at in gone else size for at, size in enumerate(given.dims) if keeps or at not in gone]
    if given.axis is None or keeps:
        return [Value(tuple(shape), given.axis)]
    return [Value(tuple(shape), given.axis - sum(at < given.axis for at in gone))]


def _along(default: int, *, after: bool = False, place: int | None = None) -> Rule:
    """Return the rule of an operator that mixes elements along an axis, or from it on."""

    def rule(proof: Proof, node: Node) -> list[Value]:
        given = node.need(0)
        node.same_for_all(*range(1, len(node.inputs)))
        if given.axis is None:
            return [Value(given.shape) if at == 0 else proof.typed(name) for at, name in enumerate(node.proto.output)]
        first = default
        flat = node.proto.op_type in ("Softmax", "LogSoftmax", "Hardmax") and node.version < 13
        if flat:
            first = 1
        number = node.attributes.get("axis", first)
        if place is not None:
            numbers = node.numbers(place, "axis")
            number = numbers[0] if numbers else first
        axis = axis_at(number, given.rank)
        refuse_if(given.axis == axis or ((after or flat) and given.axis > axis), "mixes the rows along their axis")
        if node.proto.op_type == "TopK":
            return [proof.rows(node, at, given.axis, given.rows, given.rank) for at in range(2)]
        outputs = [replace(given, content=None)]
        for _ in range(1, len(node.proto.output)):
            outputs.append(Value((*given.dims[:axis], *[ONE] * (given.rank - axis)), given.axis))
        return outputs

    return rule


def _by_row(*with_rows: int, rank: int = 1) -> Rule:
    """Return the rule of an operator that takes rows on the first axis of some inputs, and gives them there."""

    def rule(proof: Proof, node: Node) -> list[Value]:
        first, places = node.need(0), (0, *with_rows)
        node.same_for_all(*(at for at in range(len(node.inputs)) if at not in places))
        if any(value is not None and value.rank < rank for value in map(node.get, places)):
            raise RefusedError(f"its inputs have less than {rank} axes")
        proof.need_rows(node, places, 0, first.rows)
        ranks = [first.rank] + [None] * (len(node.proto.output) - 1)
        return [proof.rows(node, at, 0, first.rows, each) for at, each in enumerate(ranks)]

    return rule


def _scored(*names: str) -> Rule:
    """Return the rule of a model of ai.onnx.ml that gives each row scores, as many as an attribute says, or has.

    A classifier gives a label before; its number of scores is not followed.
    """

    def rule(proof: Proof, node: Node) -> list[Value]:
        given = node.need(0)
        node.same_for_all(*range(1, len(node.inputs)))
        refuse_if(given.axis != 0 or given.rank != 2, "input 0 does not have its rows on axis 0")
        counts = [node.attributes[name] for name in names if name in node.attributes]
        count = Size(int(counts[0])) if counts else proof.unknown()
        scores = Value((given.rows, count), 0)
        return [scores] if len(node.proto.output) == 1 and names else [Value((given.rows,), 0), scores]

    return rule


def _features(proof: Proof, node: Node) -> list[Value]:
    """An operator of ai.onnx.ml that gives each row as many elements as it gets."""
    given = node.need(0)
    refuse_if(given.axis != 0 or given.rank != 2, "input 0 does not have its rows on axis 0")
    return [Value(given.shape, 0)]


def _compress(proof: Proof, node: Node) -> list[Value]:
    given = node.need(0)
    node.same_for_all(1)
    axis = node.attributes.get("axis")
    if given.axis is None or axis is None or axis_at(axis, given.rank) == given.axis:
        raise RefusedError("takes some of the rows")
    place = axis_at(axis, given.rank)
    return [Value((*given.dims[:place], proof.unknown(), *given.dims[place + 1 :]), given.axis)]


def _max_pool(proof: Proof, node: Node) -> list[Value]:
    refuse_if(len([name for name in node.proto.output if name]) > 1, "its indices count over all rows")
    return _by_row(rank=2)(proof, node)


def _one_hot_encoded(proof: Proof, node: Node) -> list[Value]:
    """OneHotEncoder of ai.onnx.ml, which adds an axis of categories."""
    given = node.need(0)
    refuse_if(given.axis is None, "computes with the number of rows")
    return [Value((*given.dims, proof.unknown()), given.axis)]


def _normalised_mean(proof: Proof, node: Node) -> list[Value]:
    given = node.need(0)
    if given.axis in [axis_at(axis, given.rank) for axis in node.attributes.get("axes", (0, 2, 3))]:
        raise RefusedError("takes mean and variance over the rows")
    return [Value(given.shape, given.axis)]


def _vectors(proof: Proof, node: Node) -> list[Value]:
    """An operator of one vector for each row, made from one or several inputs of a vector for each row."""
    first = node.need(0)
    for value in node.inputs:
        if value is None or value.axis != 0 or value.rank != 2 or value.rows != first.rows:
            raise RefusedError("an input does not have its rows on axis 0")
    return [Value((first.rows, proof.unknown()), 0)]


def _quantised_pair(proof: Proof, node: Node) -> list[Value]:
    """QLinearAdd and QLinearMul: each operand with scale and zero point, then those of the result."""
    node.same_for_all(1, 2, 4, 5, 6, 7)
    return [proof.broadcast([node.need(0), node.need(3)])]


def _rotary_by_offset(proof: Proof, node: Node) -> list[Value]:
    """RotaryEmbedding of com.microsoft: data, the first position or those of each row, cosines and sines."""
    first, positions = node.need(0), node.need(1)
    node.same_for_all(2, 3)
    refuse_if(node.attributes.get("is_packed_batching", 0), "packs the rows")
    if first.axis != 0 or (positions.axis is not None and not proof.has_rows(positions, 0, first.rows)):
        raise RefusedError("data or positions do not have their rows on axis 0")
    return [Value(first.shape, 0)]


def _extracted(proof: Proof, node: Node) -> list[Value]:
    """ArrayFeatureExtractor, which takes elements along the last axis."""
    given, index = node.need(0), node.need(1)
    if given.axis is None and index.axis is not None and product(index.dims[: index.axis]) == ONE:
        shape = (*(given.dims[:-1] or (ONE,)), product(index.dims))
        return [Value(shape, len(shape) - 1)]
    if given.axis is None or index.axis is not None or given.axis == given.rank - 1:
        raise RefusedError("takes elements along the axis of rows")
    return [Value((*given.dims[:-1], proof.unknown()), given.axis)]


def _batch_norm(proof: Proof, node: Node) -> list[Value]:
    if node.attributes.get("training_mode", 0) or len([name for name in node.proto.output if name]) > 1:
        raise RefusedError("takes mean and variance over the rows")
    return _by_row()(proof, node)


def _matmul(proof: Proof, node: Node) -> list[Value]:
    name = node.proto.op_type
    left, right = 0, 1
    if name == "QLinearMatMul":
        left, right = 0, 3
    node.same_for_all(*(at for at in range(len(node.inputs)) if at not in (left, right)))
    one, other = node.need(left), node.need(right)
    if name == "FusedMatMul" and any(node.attributes.get(each) for each in ("transA", "transBatchA", "transBatchB")):
        raise RefusedError("transposes in a product")
    if name == "FusedMatMul" and node.attributes.get("transB"):
        swapped = {None: None, other.rank - 1: other.rank - 2, other.rank - 2: other.rank - 1}
        other = replace(
            other,
            shape=(*other.dims[:-2], other.dims[-1], other.dims[-2]),
            axis=swapped.get(other.axis, other.axis),
        )
    return [_product_of(proof, one, other)]


def _product_of(proof: Proof, one: Value, other: Value) -> Value:
    if one.axis == one.rank - 1 or (other.axis is not None and other.axis == max(other.rank - 2, 0)):
        raise RefusedError("sums over the rows")
    if one.rank == 1 or other.rank == 1:
        if one.axis is not None and other.axis is None:
            return Value(one.dims[:-1], one.axis)
        if one.rank == 1 and other.axis is not None:
            axis = other.axis if other.axis < other.rank - 2 else other.axis - 1
            return Value((*other.dims[:-2], other.dims[-1]), axis)
        raise RefusedError("multiplies vectors")
    inside = (one.axis == one.rank - 2, other.axis == other.rank - 1)
    refuse_if(any(inside) and one.axis is not None and other.axis is not None, "multiplies rows with rows")
    stacks = [
        Value(value.dims[:-2], None if within else value.axis)
        for value, within in zip((one, other), inside, strict=True)
    ]
    stack = proof.broadcast(stacks)
    shape = (*stack.dims, one.dims[-2], other.dims[-1])
    return Value(shape, len(shape) - 2 if inside[0] else len(shape) - 1 if inside[1] else stack.axis)


def _gemm(proof: Proof, node: Node) -> list[Value]:
    one, other, bias = node.need(0), node.need(1), node.get(2)
    if other.axis is not None or one.axis != (1 if node.attributes.get("transA") else 0):
        raise RefusedError("does not have its rows on the rows of A")
    width = other.dims[0 if node.attributes.get("transB") else 1]
    product = Value((one.rows, width), 0)
    return [product if bias is None else replace(proof.broadcast([product, bias]), axis=0)]


def _recurrent(proof: Proof, node: Node) -> list[Value]:
    first, layout = node.need(0), node.attributes.get("layout", 0)
    axis = 0 if layout else 1
    node.same_for_all(1, 2, 3, 7)
    proof.need_rows(node, (4,), 0, first.rows)
    proof.need_rows(node, (0, 5, 6), axis, first.rows)
    return [proof.rows(node, 0, 0 if layout else 2, first.rows, 4)] + [
        proof.rows(node, at, axis, first.rows, 3) for at in (1, 2)
    ]


def _quantised(proof: Proof, node: Node) -> list[Value]:
    given = node.need(0)
    node.same_for_all(1, 2)
    if given.axis is None:
        return [Value(given.shape)]
    refuse_if(node.need(1).rank > 1, "has scales in blocks")
    per_axis = node.need(1).rank == 1 and node.need(1).dims != (ONE,)
    refuse_if(
        per_axis and axis_at(node.attributes.get("axis", 1), given.rank) == given.axis, "has a scale for each row"
    )
    return [replace(given, content=None)]


def _dynamic_scale(proof: Proof, node: Node) -> list[Value]:
    raise RefusedError("takes one scale for all rows")


def _one_hot(proof: Proof, node: Node) -> list[Value]:
    index = node.need(0)
    node.same_for_all(1, 2)
    if index.axis is None:
        raise RefusedError("computes with the number of rows")
    place = axis_at(node.attributes.get("axis", -1), index.rank + 1)
    shape = (*index.dims[:place], proof.unknown(), *index.dims[place:])
    return [Value(shape, index.axis + (place <= index.axis))]


def _trilu(proof: Proof, node: Node) -> list[Value]:
    given = node.need(0)
    node.same_for_all(1)
    refuse_if(given.axis is None or given.axis >= given.rank - 2, "the rows are on an axis of the triangle")
    return [given]


def _einsum(proof: Proof, node: Node) -> list[Value]:
    reads, arrow, writes = node.attributes["equation"].decode().replace(" ", "").partition("->")
    values = [value for value in node.inputs if value is not None]
    operands = [_subscripts(letters, value.rank) for letters, value in zip(reads.split(","), values, strict=True)]
    if not arrow:
        count = Counter(label for labels in operands for label in labels)
        named = sorted(label for label, times in count.items() if times == 1 and label.isalpha())
        result = [*sorted((label for label in count if not label.isalpha()), key=int), *named]
    else:
        pairs = zip(operands, reads.split(","), strict=True)
        dots = max((len(labels) - len(text) + 3 for labels, text in pairs if "..." in text), default=0)
        result = _subscripts(writes, len(writes) - 3 + dots if "..." in writes else len(writes))
    rows_on = {labels[value.axis] for labels, value in zip(operands, values, strict=True) if value.axis is not None}
    rows = {value.rows for value in values if value.axis is not None}
    if len(rows_on) != 1 or result.count(label := rows_on.pop()) != 1:
        raise RefusedError("sums over the rows")
    for labels, value in zip(operands, values, strict=True):
        alone = value.axis is None and all(value.dims[at] == ONE for at, each in enumerate(labels) if each == label)
        if len(rows) > 1 or (value.axis is None and not alone) or (value.axis is not None and labels.count(label) > 1):
            raise RefusedError("rows meet an axis of another size")
    sizes: dict[str, Size] = {}
    for labels, value in zip(operands, values, strict=True):
        sizes.update(
            (each, size) for each, size in zip(labels, value.dims, strict=True) if size != ONE or each not in sizes
        )
    sizes[label] = rows.pop()
    return [Value(tuple([sizes[each] for each in result]), result.index(label))]


def _subscripts(text: str, rank: int) -> list[str]:
    """Return a label for each axis; those of an ellipsis are numbers, -1 the last of them."""
    before, dots, after = text.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    labels = [*before, *map(str, range(-hidden, 0)), *after]
    refuse_if(len(labels) != rank, "its equation has other axes than its inputs")
    return labels


def _attending(
    *with_rows: int, bias: int, rank: int | None = None, refused: Callable[[Node], str] = lambda _: ""
) -> Rule:
    """Return the rule of an attention, which has its rows first in some inputs and in all outputs.

    The input `bias`, or a mask, is added to the scores. `rank` is that of the first output, if not that of input 0;
    the others are keys and values, of rank 4. `refused` returns why a form of the node is not proved.
    """

    def rule(proof: Proof, node: Node) -> list[Value]:
        first = node.need(0)
        node.same_for_all(*(at for at in range(len(node.inputs)) if at not in (0, bias, *with_rows)))
        proof.need_rows(node, (0, *with_rows), 0, first.rows)
        if reason := refused(node):
            raise RefusedError(reason)
        if (added := node.get(bias)) is not None:
            proof.broadcast([Value((first.rows, proof.unknown(), proof.unknown(), proof.unknown()), 0), added])
        ranks = [rank or first.rank] + [4] * (len(node.proto.output) - 1)
        return [proof.rows(node, at, 0, first.rows, each) for at, each in enumerate(ranks)]

    return rule


def _packs_states(node: Node) -> str:
    with_states = node.get(4) is not None or len([name for name in node.proto.output if name]) > 1
    return "keeps keys and values in one tensor, with the rows inside" if with_states else ""


def _rotary(proof: Proof, node: Node) -> list[Value]:
    """RotaryEmbedding of ONNX: data, cosines, sines and positions; with positions the tables are the same for all."""
    first = node.need(0)
    refuse_if(first.axis != 0, "input 0 does not have its rows on axis 0")
    with_rows = (3,) if node.get(3) is not None else (1, 2)
    node.same_for_all(*(at for at in (1, 2, 3) if at not in with_rows))
    proof.need_rows(node, with_rows, 0, first.rows)
    return [replace(first, content=None)]


def _skip_norm(proof: Proof, node: Node) -> list[Value]:
    node.same_for_all(*range(2, len(node.inputs)))
    total = proof.broadcast([node.need(0), node.need(1)])
    refuse_if(total.axis is None or total.axis == total.rank - 1, "mixes the rows along their axis")
    few = Value((*total.dims[:-1], ONE), total.axis)
    return [total, few, few, total]


def _flatten(proof: Proof, node: Node) -> list[Value]:
    given = node.need(0)
    axis = node.attributes.get("axis", 1)
    axis = axis + given.rank if axis < 0 else axis
    return [reshaped(proof, given, [product(given.dims[:axis]), product(given.dims[axis:])])]


_ELEMENTWISE = """\
Abs Acos Acosh And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Celu
Cos Cosh Elu Erf Exp Floor Gelu Greater HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less
LessOrEqual Log Max Mean Min Mish Mod Neg Not Or PRelu Pow Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh
Softplus Softsign Sqrt Sum Swish Tan Tanh ThresholdedRelu Xor"""
_REDUCING = "ArgMax ArgMin " + " ".join(
    f"Reduce{kind}" for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
)
_SPATIAL = """AveragePool Conv ConvInteger ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool
GroupNormalization InstanceNormalization LRN LpPool QLinearConv SpaceToDepth"""
RULES: dict[tuple[str, str], Rule] = {
    **{("", name): elementwise for name in _ELEMENTWISE.split()},
    **{("", name): _reduced for name in _REDUCING.split()},
    **{("", name): _by_row(rank=2) for name in _SPATIAL.split()},
    **{("", name): _along(-1) for name in ("Softmax", "LogSoftmax", "Hardmax", "LpNormalization", "TopK")},
    **{("", name): _along(-1, after=True) for name in ("LayerNormalization", "RMSNormalization")},
    **{("", name): _along(0, place=1) for name in ("CumSum", "CumProd")},
    **{("", name): _matmul for name in ("MatMul", "MatMulInteger", "QLinearMatMul")},
    **{("", name): _recurrent for name in ("RNN", "LSTM", "GRU")},
    ("", "DynamicQuantizeLinear"): _dynamic_scale,
    **{("", name): _quantised for name in ("QuantizeLinear", "DequantizeLinear")},
    **{("", name): _first_only for name in ("CastLike", "Clip", "StringConcat", "RegexFullMatch")},
    ("", "GreaterOrEqual"): _at_least,
    ("", "MaxPool"): _max_pool,
    **{("", name): _gather_elements for name in ("GatherElements", "ScatterElements")},
    ("", "Attention"): _attending(1, 2, 4, 5, 6, bias=3),
    ("", "BatchNormalization"): _batch_norm,
    ("", "Compress"): _compress,
    ("", "Dropout"): _dropout,
    ("", "Einsum"): _einsum,
    ("", "Flatten"): _flatten,
    ("", "GatherND"): _gather_nd,
    ("", "Gemm"): _gemm,
    ("", "GridSample"): _by_row(1, rank=4),
    ("", "OneHot"): _one_hot,
    ("", "Pad"): _pad,
    ("", "RotaryEmbedding"): _rotary,
    ("", "Trilu"): _trilu,
    **{("ai.onnx.ml", name): _features for name in ("Imputer", "Normalizer", "Scaler")},
    **{("ai.onnx.ml", f"{name}Classifier"): _scored() for name in ("Linear", "SVM", "TreeEnsemble")},
    **{("ai.onnx.ml", f"{name}Regressor"): _scored("targets", "n_targets") for name in ("Linear", "TreeEnsemble")},
    ("ai.onnx.ml", "SVMRegressor"): _scored("n_targets"),
    ("ai.onnx.ml", "TreeEnsemble"): _scored("n_targets"),
    ("ai.onnx.ml", "OneHotEncoder"): _one_hot_encoded,
    **{("ai.onnx.ml", name): _first_only for name in ("Binarizer", "CategoryMapper", "LabelEncoder")},
    **{("com.microsoft", name): elementwise for name in ("BiasGelu", "FastGelu", "Gelu", "QuickGelu")},
    **{("com.microsoft", name): _quantised for name in ("QuantizeLinear", "DequantizeLinear")},
    **{("com.microsoft", name): _skip_norm for name in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")},
    ("ai.onnx.ml", "ArrayFeatureExtractor"): _extracted,
    ("ai.onnx.ml", "FeatureVectorizer"): _vectors,
    ("", "MeanVarianceNormalization"): _normalised_mean,
    ("", "TfIdfVectorizer"): _vectors,
    **{("com.microsoft", f"QLinear{name}"): _quantised_pair for name in ("Add", "Mul")},
    **{("com.microsoft", f"QLinear{name}"): _first_only for name in ("LeakyRelu", "Sigmoid")},
    **{("com.microsoft", f"QLinear{name}"): _by_row(rank=2) for name in ("AveragePool", "GlobalAveragePool")},
    **{("com.microsoft", f"DynamicQuantize{name}"): _dynamic_scale for name in ("LSTM", "MatMul")},
    ("com.microsoft", "FusedConv"): _by_row(3, rank=2),
    ("com.microsoft", "RotaryEmbedding"): _rotary_by_offset,
    ("com.microsoft", "Attention"): _attending(3, bias=5, rank=3, refused=_packs_states),
    ("com.microsoft", "FusedMatMul"): _matmul,
    ("com.microsoft", "MatMulNBits"): _by_row(rank=2),
    ("com.microsoft", "MultiHeadAttention"): _attending(1, 2, 4, 6, 7, bias=5, rank=3),
    ("", "SimplifiedLayerNormalization"): _along(-1, after=True),
}
_SHAPED_TOO = """Clip CumSum DequantizeLinear Dropout GreaterOrEqual Hardmax LayerNormalization LogSoftmax
LpNormalization MatMul MatMulInteger QuantizeLinear RMSNormalization Softmax"""
SHAPED = frozenset(("", name) for name in (*_ELEMENTWISE.split(), *_REDUCING.split(), *_SHAPED_TOO.split()))
"""Operators whose rules give the shape of values without rows."""

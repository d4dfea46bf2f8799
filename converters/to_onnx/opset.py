"""Chooses the opset of an exported model: the lowest that expresses every node, 21 unless a node needs another.

A node that was written for one opset version may be stamped with another only if its operator means the same there:
the schemas agree on everything the node uses, and no silent change of meaning (`BREAKS`) lies between. What lowerings
write is for opset 21, so most graphs need none of ONNX's schemas, whose registry takes 7 MB once one is looked up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlx_ort.converters.onnx_types import schema_of, type_proto_text
from rlx_ort.converters.to_onnx.emitter import DEFAULT_OPSET
from rlx_ort.converters.to_onnx.model import ModelWriter, types_of
from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType, elements

if TYPE_CHECKING:
    import onnx

    from rlx_ort.converters.to_onnx.model import ExportedNode, ModelNode

_RENAMED = frozenset({("BatchNormalization", "mean", "input_mean"), ("BatchNormalization", "var", "input_var")})
"""(operator, old, new): inputs that only got another name."""
_BROADCASTING = {"Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor"}
MAX_OPSET = 28
"""The newest ai.onnx opset that a version of ONNX Runtime loads: 1.32. Older versions refuse models that need it."""
_ENGINE_OPS = frozenset({"SimplifiedLayerNormalization"})
"""Operators that ONNX Runtime adds to ai.onnx; they are the same in every opset."""
# IR version -> the element types it brought: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto, `Version`.
_IR_VERSION = 10
_NEWER_TYPES = {DType.F4E2M1: 11, DType.F8E8M0: 12, DType.I2: 13, DType.U2: 13}


@dataclass(frozen=True, slots=True)
class NodeForm:
    """The facts that moving a node of ai.onnx between opset versions depends on; types of absent values are None."""

    op_type: str
    attributes: Mapping[str, Any]
    inputs: Sequence[ValueType | None]
    outputs: Sequence[ValueType | None]


@dataclass(frozen=True, slots=True)
class _Break:
    """A node of the operator must not move across the version at which its meaning changed.

    Attributes:
        version: the first version with the new meaning.
        reason: the change, from the operator's changelog: https://onnx.ai/onnx/operators/
        attributes: the change matters only for nodes that set one of these; empty means for all nodes.
        values: the change matters only when such an attribute has one of these values; empty means any value.
        fewer_inputs: the change matters only for nodes with fewer inputs than this; 0 means for all nodes.
        unless: an attribute and the value with which the meaning is the same on both sides.
        floats: the change matters only where the first input is not known to be of integers.
        wider: the change matters only where the second input is known to be wider than the first.
        defines: the newer version defines a case that the older one left open, so that nodes may move up.
    """

    version: int
    reason: str
    attributes: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    fewer_inputs: int = 0
    unless: tuple[str, int] | None = None
    floats: bool = False
    wider: bool = False
    defines: bool = False


_FLATTENS = _Break(13, "before 13 the input was flattened to two dimensions at the axis")
_RECURRENT = _Break(7, "activations and the direction of the output sequence were defined differently before 7")

_ONE_SIDED = _Break(
    7, "before 7 the second input was broadcast to the shape of the first, never vice versa", wider=True
)
_ALIKE = _Break(8, "before 8 all inputs had the shape of the first", wider=True)

BREAKS: dict[str, tuple[_Break, ...]] = {
    **dict.fromkeys(_BROADCASTING, (_ONE_SIDED,)),
    **dict.fromkeys(("Max", "Mean", "Min", "Sum"), (_ALIKE,)),
    "Attention": (_Break(24, "the order of masking and soft capping in the intermediate output changed"),),
    "AveragePool": (_Break(7, "padding was counted differently before 7", ("pads", "auto_pad")),),
    "BatchNormalization": (
        _Break(7, "is_test was off by default before 7: the node trained", unless=("is_test", 1)),
        _Break(9, "statistics were not per channel when spatial was 0", ("spatial",)),
    ),
    "BitShift": (_Break(28, "shifts by the number of bits and more are defined, as 0, from 28 on only", defines=True),),
    "Cast": (_Break(6, "the target type was a string before 6"),),
    "ConvTranspose": (
        _Break(11, "output_shape and SAME padding split the padding differently", ("auto_pad", "output_shape")),
    ),
    "DFT": (_Break(20, "the axis is an input from 20 on and its default moved from 1 to -2"),),
    "Dropout": (_Break(7, "is_test was off by default before 7: the node trained", unless=("is_test", 1)),),
    "GRU": (_RECURRENT,),
    "GridSample": (_Break(20, "the modes were renamed: bilinear to linear, bicubic to cubic"),),
    "GroupNormalization": (_Break(21, "scale and bias are per channel from 21 on, per group before"),),
    "Hardmax": (_FLATTENS,),
    "LSTM": (_RECURRENT,),
    "LogSoftmax": (_FLATTENS,),
    "Loop": (_Break(11, "the condition may be absent from 11 on, with another meaning of the first iteration"),),
    "Mod": (_Break(28, "floats may have fmod=0, which floors, from 28 on", unless=("fmod", 1), floats=True),),
    "PRelu": (_Break(7, "a slope vector was per channel before 7 and broadcasts from the right since"),),
    "RNN": (_RECURRENT,),
    "Resize": (
        _Break(11, "the default coordinate transformation moved from asymmetric to half_pixel"),
        _Break(13, "tf_half_pixel_for_nn is gone", ("coordinate_transformation_mode",), ("tf_half_pixel_for_nn",)),
    ),
    "RoiAlign": (_Break(16, "the default coordinate transformation became half_pixel"),),
    "Scan": (_Break(9, "the batch dimension went away"),),
    "Softmax": (_FLATTENS,),
    "Split": (_Break(18, "without split sizes, num_outputs must be given", (), (), 2),),
    "Upsample": (_Break(9, "scales became an input; deprecated from 10 on"),),
}
"""Operator of ai.onnx -> where its meaning changed."""


def _is_redundant(node: NodeForm, name: str) -> bool:
    """Return whether an attribute that later versions lack asks for their own behaviour.

    `consumed_inputs` was a hint about memory; `is_test=1` is the later default; broadcasting by attribute is
    numpy's broadcasting when the second input lines up with the last axes of the first.
    """
    if name == "consumed_inputs":
        return True
    if name == "is_test":
        return bool(node.attributes[name] == 1)
    if node.op_type == "Gemm" and name == "broadcast":
        return True
    if node.op_type not in _BROADCASTING or name not in ("axis", "broadcast"):
        return False
    if node.attributes.get("broadcast", 0) == 0 or "axis" not in node.attributes:
        return True
    ranks = [kind.shape.rank for kind in node.inputs if isinstance(kind, TensorType) and kind.shape is not None]
    return len(ranks) == 2 and bool(node.attributes["axis"] % max(ranks[0], 1) + ranks[1] == ranks[0])


def choose_imports(writer: ModelWriter, wanted: int | None = None) -> dict[str, int]:
    """Return domain -> opset version for a model, and take attributes off that the version does not know.

    Candidates, best first: 21, the versions above it, the version an imported model had, the versions below 21. When
    none takes all nodes and the whole model was imported at one version, it stays there, for the engine to judge.
    `wanted` leaves that version as the only candidate.

    Raises:
        ConversionError: no version takes every node; the message names the nodes.
    """
    imports: dict[str, int] = {}
    standard = []
    for record in writer.records:
        pattern = record.pattern
        if pattern.domain == "":
            standard.append(record)
        else:
            imports[pattern.domain] = max(imports.get(pattern.domain, 1), pattern.written)
    if wanted is not None and not 1 <= wanted <= MAX_OPSET:
        raise ConversionError(f"opset {wanted} was asked for; ONNX Runtime loads 1 to {MAX_OPSET}")
    firsts = [record for record in standard if not record.name]  # those written like them differ by names and sizes
    target = _choose(writer, firsts) if wanted is None else wanted
    if wanted is not None:
        refused = {pattern: _obstacle(writer, pattern, wanted) for pattern in {record.pattern for record in standard}}
        reasons = {f"{record.source}: {refused[record.pattern]}" for record in standard if refused[record.pattern]}
        listed = "\n  ".join(sorted(reasons))
        if reasons:
            raise ConversionError(f"the graph cannot be written for opset {wanted}:\n  {listed}\nask for a newer opset")
    for node in (record.pattern for record in firsts):
        for name in obsolete_attributes(node.op_type, node.attributes, node.written, target):
            del node.attributes[name]
    return {"": target, **imports}


def ir_version(types: Iterable[ValueType]) -> int:
    """Return the lowest IR version that has every element type, 10 at least; ONNX Runtime 1.24 reads 10."""
    dtypes = {dtype for kind in types for dtype in ((kind.dtype,) if type(kind) is TensorType else elements(kind))}
    return max((_NEWER_TYPES.get(dtype, _IR_VERSION) for dtype in dtypes), default=_IR_VERSION)


def obstacle(node: NodeForm, written: int, target: int) -> str:
    """Return why a node of ai.onnx written for one opset version must not be stamped with another; empty if it may."""
    if written == target:
        return ""
    import onnx

    if target > onnx.defs.onnx_opset_version():
        return f"onnx {onnx.__version__} does not know opset {target}"
    old, new = schema_of(node.op_type, written), schema_of(node.op_type, target)
    if old is None:
        return "" if node.op_type in _ENGINE_OPS else f"ai.onnx has no {node.op_type} in opset {written}"
    if new is not None and old.since_version == new.since_version:
        return ""
    if new is None or new.deprecated:
        return f"ai.onnx has no {node.op_type} in opset {target}"
    return (
        meaning_change(node, written, target) or _attribute_obstacle(node, old, new) or _value_obstacle(node, old, new)
    )


def meaning_change(node: NodeForm, written: int, target: int) -> str:
    """Return how a node of the same form means another thing in another opset version; empty where it does not."""
    for change in BREAKS.get(node.op_type, ()):
        crossed = min(written, target) < change.version <= max(written, target)
        if crossed and not (change.defines and written < target) and _concerns(change, node):
            return f"{node.op_type} changed in opset {change.version}: {change.reason}"
    return ""


def obsolete_attributes(op_type: str, names: Iterable[str], written: int, target: int) -> list[str]:
    """Return the attributes that the target version lacks; `obstacle` made sure that nothing is lost with them."""
    new = None if written == target else schema_of(op_type, target)
    return [] if new is None else [name for name in names if name not in new.attributes and not _is_note(name)]


def _obstacle(writer: ModelWriter, node: ModelNode, target: int) -> str:
    if node.written == target:
        return ""  # whatever its form is
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    inputs, outputs = types_of(node.reads, writer.types), types_of(node.writes, writer.types)
    return obstacle(NodeForm(node.op_type, attributes, inputs, outputs), node.written, target)


def _choose(writer: ModelWriter, firsts: Collection[ExportedNode]) -> int:
    """Return the best version for all nodes; `firsts` has the first of those that were written alike."""
    patterns = [record.pattern for record in firsts]
    own: list[int] = sorted({pattern.written for pattern in patterns if pattern.imported}, reverse=True)
    above, below = range(DEFAULT_OPSET, MAX_OPSET + 1), range(DEFAULT_OPSET - 1, 0, -1)
    candidates: list[int] = [*above, *(version for version in own if version <= MAX_OPSET), *below]
    reasons = set()
    for target in dict.fromkeys(candidates):
        for record in firsts:
            if reason := _obstacle(writer, record.pattern, target):
                reasons.add(f"{record.source}: {reason}")
                break
        else:
            return target
    if len(own) == 1 and all(pattern.imported for pattern in patterns):
        return own[0]
    listed = "\n  ".join(sorted(reasons))
    raise ConversionError(f"no opset takes every node of the graph:\n  {listed}\nreplace one of these nodes")


def _concerns(change: _Break, node: NodeForm) -> bool:
    if change.fewer_inputs and len(node.inputs) >= change.fewer_inputs:
        return False
    if change.floats and isinstance(first := node.inputs[0], TensorType) and first.dtype.is_integer:
        return False
    if change.wider and not _is_wider(node.inputs):
        return False
    if change.unless is not None:
        name, value = change.unless
        if node.attributes.get(name) == value:
            return False
    if not change.attributes:
        return True
    given = [node.attributes[name] for name in change.attributes if name in node.attributes]
    given = [value for value in given if not isinstance(value, tuple) or any(value)]  # all zeros is no padding
    return bool(given) and (not change.values or any(value in change.values for value in given))


def _is_wider(inputs: Sequence[ValueType | None]) -> bool:
    """Return whether numpy's broadcasting is known to give another shape than that of the first of two inputs."""
    shapes = [kind.shape for kind in inputs[:2] if isinstance(kind, TensorType) and kind.shape is not None]
    if len(shapes) < 2 or shapes[1].rank > shapes[0].rank:
        return len(shapes) == 2
    pairs = zip(reversed([*shapes[0]]), reversed([*shapes[1]]), strict=False)
    return any(first == 1 and isinstance(second, int) and second != 1 for first, second in pairs)


def _attribute_obstacle(node: NodeForm, old: onnx.defs.OpSchema, new: onnx.defs.OpSchema) -> str:
    for name in node.attributes:
        if name in new.attributes:
            known = old.attributes.get(name)
            if known is not None and known.type != new.attributes[name].type:
                return f"attribute {name} of {node.op_type} is of another kind in opset {new.since_version}"
        elif not _is_note(name) and not _is_default(node, name, old) and not _is_redundant(node, name):
            return f"{node.op_type} has no attribute {name} in opset {new.since_version}"
    for name, attribute in new.attributes.items():
        if name in node.attributes:
            continue
        if attribute.required:
            return f"{node.op_type} needs attribute {name} in opset {new.since_version}"
        before = old.attributes.get(name)
        if before is not None and before.default_value != attribute.default_value:
            return f"attribute {name} of {node.op_type} has another default in opset {new.since_version}"
    return ""


def _is_note(name: str) -> bool:
    """Return whether an attribute is none of the operator's: whoever wrote the model may add such."""
    return name.startswith("__")


def _is_default(node: NodeForm, name: str, schema: onnx.defs.OpSchema) -> bool:
    import onnx

    known = schema.attributes.get(name)
    if known is None or not known.default_value.type:
        return False
    default: object = onnx.helper.get_attribute_value(known.default_value)
    value = node.attributes[name]
    if isinstance(value, str):
        value = value.encode("utf-8")
    return isinstance(value, int | float | bytes) and value == default


def _value_obstacle(node: NodeForm, old: onnx.defs.OpSchema, new: onnx.defs.OpSchema) -> str:
    for kinds, before, after in ((node.inputs, old.inputs, new.inputs), (node.outputs, old.outputs, new.outputs)):
        for index, kind in enumerate(kinds):
            was, now = _formal(before, index), _formal(after, index)
            if kind is None or was is None:
                continue
            if now is None or (was.name != now.name and (node.op_type, was.name, now.name) not in _RENAMED):
                return f"{node.op_type} has no {was.name} in opset {new.since_version}"
            allowed, known = _allowed(new, now), type_proto_text(kind)
            if known not in allowed and not (_allowed(old, was) <= allowed):
                return f"{node.op_type} does not take {known or 'an unknown type'} in opset {new.since_version}"
    for formal in new.inputs[len(node.inputs) :]:
        if _option(formal) == "Single":
            return f"{node.op_type} needs input {formal.name} in opset {new.since_version}"
    return ""


def _formal(
    formals: Sequence[onnx.defs.OpSchema.FormalParameter], index: int
) -> onnx.defs.OpSchema.FormalParameter | None:
    if index < len(formals):
        return formals[index]
    return formals[-1] if formals and _option(formals[-1]) == "Variadic" else None


def _option(formal: onnx.defs.OpSchema.FormalParameter) -> str:
    return str(formal.option).rpartition(".")[2]  # FormalParameterOption.Single, Optional or Variadic


def _allowed(schema: onnx.defs.OpSchema, formal: onnx.defs.OpSchema.FormalParameter) -> frozenset[str]:
    for constraint in schema.type_constraints:
        if constraint.type_param_str == formal.type_str:
            return frozenset(constraint.allowed_type_strs)
    return frozenset({formal.type_str})

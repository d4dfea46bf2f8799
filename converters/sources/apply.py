"""`apply_weights`: replaces the weights of a model by the tensors of a file, all or none. `bake`: also its inputs."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import onnx

from rlx_ort.converters.bundle import FREE_INITIALIZERS, ModelBundle, external_tensors, location_of, placed
from rlx_ort.converters.onnx_types import dtype_of, known_type_of, tensor_proto, tensor_type
from rlx_ort.converters.protos import copied, set_items
from rlx_ort.converters.sources.weights import Rename, Renames, WeightEntry, WeightFile
from rlx_ort.converters.to_onnx.model import INLINE_BYTES, UniqueNames
from rlx_ort.converters.transforms.scope import dims_text
from rlx_ort.errors import ConversionError, GraphVerifyError, advice, near_names
from rlx_ort.ir.core import Node
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.op import Op
from rlx_ort.ir.ops.dequant import DequantMatMul
from rlx_ort.ir.ops.leaf import Param
from rlx_ort.ir.ops.linalg import MatMul
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.ops.shape import Transpose
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Shape, TensorType, ValueType, fits

Model = TypeVar("Model", ModelBundle, Graph)
_MOST_NAMED, _MOST_SHOWN = 5, 8


@dataclass(frozen=True, slots=True)
class WeightReport(Generic[Model]):
    """The result of `apply_weights`.

    Attributes:
        model: the model with its new weights: another bundle, or the graph that was given.
        loaded: weight of the model -> tensor of the file it came from.
        missing: weights of the model that the file lacks; they are not changed.
        unused: tensors of the file that are no weight of the model.
        left_out: tensors of the file that the renames leave out.
        packed: weights that stayed packed; the products with them are `DequantMatMul` now.
    """

    model: Model
    loaded: Mapping[str, str]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    left_out: tuple[str, ...]
    packed: tuple[str, ...] = ()


def apply_weights(
    model: Model,
    weights: Mapping[str, TensorData],
    renames: Renames | Callable[[str], Rename] | None = None,
    *,
    required: Iterable[str] = (),
    strict: bool = False,
    cast: bool = False,
    keep_packed: bool = False,
) -> WeightReport[Model]:
    """Give a model the tensors of a file as its weights.

    Everything is checked before the first tensor is read, and nothing is changed unless all fits. A bundle gives a new
    bundle; a graph is changed itself. Tensors that the file can map stay mapped; transposed, cast and dequantised ones
    are in memory afterwards.

    Args:
        model: the model.
        weights: the tensors, of `read_weights` or any mapping.
        renames: names of the tensors in the model; None takes their own names.
        required: weights that must be in the file, by name or with wildcards: `*` for all. Parameters of a graph
            without data are always required.
        strict: whether a tensor that is no weight of the model is an error too.
        cast: whether floats may be converted to the model's float type.
        keep_packed: whether quantised weights of a graph stay packed where all that reads them is `x @ w` or
            `x @ transpose(w)`; the others are dequantised. A bundle becomes a graph by `graph_from_bundle`.

    Raises:
        ConversionError: a required weight is missing, a tensor has another dtype or shape than its weight, two tensors
            have one name, or the file is damaged. The model is as it was.
    """
    declared, unset = _weights_of(model)
    file = weights if isinstance(weights, WeightFile) else WeightFile.of("the weights", weights)
    plan, unused, left_out = _plan(file, renames or Renames(), declared)
    missing = tuple(name for name in declared if name not in plan)
    patterns = tuple(required)
    lacking = [name for name in missing if name in unset or any(fnmatch.fnmatchcase(name, text) for text in patterns)]
    lacking += [text for text in patterns if text not in declared and not any(mark in text for mark in "*?[")]
    if lacking or (strict and unused):
        raise ConversionError(_complaint(file, lacking, unused if strict else [], declared))
    _check(file, plan, declared, cast=cast)
    packed: dict[str, _PackedProduct] = {}
    if keep_packed:
        if not isinstance(model, Graph):
            raise ConversionError("weights stay packed in a graph only; make one of the bundle with graph_from_bundle")
        for name, (tensor, rename) in plan.items():
            if (product := _packable(model, name, file.entries[tensor], rename)) is not None:
                packed[name] = product
    made = {name: source for name, source in plan.items() if name not in packed}
    data = {name: _made(file, tensor, rename, declared[name].dtype) for name, (tensor, rename) in made.items()}
    result = _with(model, data)
    if isinstance(result, Graph):
        _pack(result, packed)
    loaded = {name: tensor for name, (tensor, _) in plan.items()}
    return WeightReport(result, loaded, missing, tuple(unused), tuple(left_out), tuple(packed))


def _weights_of(model: ModelBundle | Graph) -> tuple[dict[str, TensorType], set[str]]:
    """Return the type of each weight, and which have no data yet."""
    if isinstance(model, Graph):
        kinds = ((value.name, value.type) for value in model.params)
        types = {name: kind for name, kind in kinds if isinstance(kind, TensorType) and kind.shape is not None}
        return types, set(types) - set(model.weights)
    types = {name: TensorType(data.dtype, Shape(data.shape)) for name, data in model.weights.items()}
    types.update((tensor.name, tensor_type(tensor)) for tensor in _small(model.proto))
    return types, set()


def _small(proto: onnx.ModelProto) -> Iterable[onnx.TensorProto]:
    """Yield the initializers inside the model that are weights: floats; small integers are shapes and indices."""
    for tensor in proto.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL and dtype_of(tensor.data_type).is_float:
            yield tensor


def _plan(
    file: WeightFile, renames: Callable[[str], Rename], declared: Mapping[str, TensorType]
) -> tuple[dict[str, tuple[str, Rename]], list[str], list[str]]:
    plan: dict[str, tuple[str, Rename]] = {}
    unused, left_out = [], []
    for tensor in file:
        rename = renames(tensor)
        if not rename.to:
            left_out.append(tensor)
        elif rename.to not in declared:
            unused.append(tensor if rename.to == tensor else f"{tensor} (renamed to {rename.to})")
        elif rename.to in plan:
            other = plan[rename.to][0]
            raise ConversionError(f"{file.origin}: tensors {other!r} and {tensor!r} are both weight {rename.to!r}")
        else:
            plan[rename.to] = (tensor, rename)
    return plan, unused, left_out


def _check(
    file: WeightFile, plan: Mapping[str, tuple[str, Rename]], declared: Mapping[str, TensorType], *, cast: bool
) -> None:
    problems = []
    for name, (tensor, rename) in plan.items():
        dtype, shape, entry = declared[name].dtype, tuple(declared[name].shape or ()), file.entries[tensor]
        stored_shape = entry.shape[::-1] if rename.transpose else entry.shape
        hint = ""
        if rename.transpose and (len(entry.shape) != 2 or entry.dtype.is_packed):
            hint = "; only a matrix of whole bytes can be transposed"
        elif stored_shape != shape:
            hint = "; its rename needs transpose = true" if stored_shape[::-1] == shape and len(shape) == 2 else "; "
        elif entry.dtype is not dtype and not (cast and entry.dtype.is_float and dtype.is_float):
            converts = f"; {advice('cast=True', '--cast')} converts floats"
            hint = converts if entry.dtype.is_float and dtype.is_float else "; "
        if hint:
            stored = f" ({entry.stored_as})" if entry.stored_as else ""
            found_text, wanted = f"{entry.dtype.value}{list(entry.shape)}{stored}", f"{dtype.value}{list(shape)}"
            problems.append(f"  {tensor!r} is {found_text}, weight {name!r} is {wanted}{hint.rstrip('; ')}")
    if problems:
        more = f" and {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
        lines = "\n".join(problems[:_MOST_SHOWN])
        raise ConversionError(f"{file.origin} does not fit the model:\n{lines}{more}")


def _made(file: WeightFile, tensor: str, rename: Rename, dtype: DType) -> TensorData:
    data = file[tensor]
    if data.dtype is not dtype:
        with np.errstate(over="ignore"):  # numbers too large for the model's type become infinite, as in any cast
            data = TensorData.from_array(data.numpy().astype(dtype.numpy))
    if rename.transpose:
        data = TensorData.from_array(data.numpy().T, dtype)
    return data


def _with(model: Model, data: Mapping[str, TensorData]) -> Model:
    if isinstance(model, Graph):
        model.weights.update(data)
        return model
    proto = copied(model.proto)
    for tensor in _small(proto):
        if tensor.name in data:
            tensor.CopyFrom(tensor_proto(data[tensor.name], tensor.name))
    large = {name: tensor for name, tensor in data.items() if tensor.nbytes >= INLINE_BYTES}
    return ModelBundle(proto, {**model.weights, **large}, model.origin)


def _complaint(file: WeightFile, lacking: list[str], unused: list[str], declared: Iterable[str]) -> str:
    parts = []
    for strangers, text, known, whose in (
        (lacking, "it has no tensors for the weights", list(file), "its "),
        (unused, "its tensors match no weight of the model:", list(declared), ""),
    ):
        if strangers:
            parts.append(f"{text} {listed(strangers)}")
            close = difflib.get_close_matches(strangers[0], known, n=1)
            parts += [f"did you mean {whose}{close[0]!r} by {strangers[0]!r}? renames map names"] if close else []
    return f"{file.origin}: {'; '.join(parts)}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return names as messages list them: the first ones, and how many there are more."""
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


@dataclass(frozen=True, slots=True)
class _PackedProduct:
    """A parameter whose every use is a product that takes it packed.

    `data` has its packed rows, u8 `(N, row bytes)`. The nodes that multiply by it, `products`, become `op`. They read
    it through the transposition `between`; nothing reads that afterwards.
    """

    param: Node
    data: TensorData
    op: DequantMatMul
    products: list[Node]
    between: Node | None


def _packable(graph: Graph, name: str, entry: WeightEntry, rename: Rename) -> _PackedProduct | None:
    """Return how a parameter can stay packed, None where it cannot.

    Rows of blocks run along K, so they fit `x @ w` with w `(K, N)` if the file has `(N, K)`, its transpose, and
    `x @ transpose(w)` with w `(N, K)` if the file has the same.
    """
    data = entry.blocks
    if data is None or len(data.shape) != 2:
        return None
    op = DequantMatMul(entry.stored_as.lower())
    outputs = {value.ref.node for value in graph.outputs}
    leaf = next((node for node in graph.nodes if isinstance(node.op, Param) and node.op.name == name), None)
    if leaf is None or leaf.id in outputs:
        return None
    source = leaf
    if not rename.transpose:
        users = _users(graph, leaf)
        if len(users) != 1 or not _swaps(users[0].op) or users[0].id in outputs:
            return None
        source = users[0]
    products = _users(graph, source)
    for node in products:
        ref = node.inputs[1] if _is_product(node.op) else None
        x = node.inputs[0] if ref is not None and ref.node == source.id else None
        if x is None or x.node == source.id:
            return None
        try:
            (result,) = op.infer([graph.nodes[x.node].types[x.output], TensorType(DType.U8, Shape(data.shape))])
        except GraphVerifyError:
            return None  # x has no known K, or is no matrix of floats
        if result != node.types[0]:
            return None
    return _PackedProduct(leaf, data, op, products, None if source is leaf else source) if products else None


def _pack(graph: Graph, plans: Mapping[str, _PackedProduct]) -> None:
    """Change the graph so that parameters are packed and their products take them so."""
    for name, plan in plans.items():
        kind = TensorType(DType.U8, Shape(plan.data.shape))
        plan.param.op = Param(name, kind)
        plan.param.types = (kind,)
        graph.weights[name] = plan.data
        if plan.between is not None:
            plan.between.types = (TensorType(DType.U8, Shape(reversed(plan.data.shape))),)
        for node in plan.products:
            node.op = plan.op
            node.inputs = (node.inputs[0], graph.value(plan.param.id).ref)
    if plans:
        graph.revision += 1


def _is_product(op: Op) -> bool:
    return isinstance(op, MatMul) or (isinstance(op, OnnxNode) and (op.domain, op.op_type) == ("", "MatMul"))


def _swaps(op: Op) -> bool:
    """Return whether an op transposes a matrix."""
    if isinstance(op, OnnxNode):
        return (op.domain, op.op_type) == ("", "Transpose") and op.attributes.get("perm", (1, 0)) == (1, 0)
    return op == Transpose((1, 0))


def _users(graph: Graph, node: Node) -> list[Node]:
    return graph.users(graph.value(node.id).ref)


@dataclass(frozen=True, slots=True)
class ParamsReport:
    """Result of `bake`: weights with new data, inputs that are weights now, weights as they were, and unknown names."""

    replaced: tuple[str, ...]
    promoted: tuple[str, ...]
    unchanged: tuple[str, ...]
    unused: tuple[str, ...]


def bake(bundle: ModelBundle, tensors: Mapping[str, TensorData]) -> tuple[ModelBundle, ParamsReport]:
    """Return the model with tensors in it, by name, as weights or in place of its inputs; shares their memory.

    Raises:
        ConversionError: a tensor lacks the dtype or shape that the model declares, or none has a name of the model.
    """
    proto = copied(bundle.proto)
    graph = proto.graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    declared: dict[str, ValueType] = {value.name: known_type_of(value.type) for value in graph.input}
    declared |= {name: tensor_type(tensor) for name, tensor in initializers.items()}
    unused = [name for name in tensors if name not in declared]
    if len(unused) == len(tensors):
        hint = near_names(unused[0], declared) if unused else "the file is empty"
        raise ConversionError(
            f"none of the {len(tensors)} tensors given is a weight or input of {bundle.origin}, such as "
            f"{listed(unused, _MOST_NAMED) or 'none'}; {hint}"
        )
    wrong = [
        line for name, data in tensors.items() if name in declared and (line := _misfit(name, data, declared[name]))
    ]
    if wrong:
        lines = "\n  ".join(wrong[:_MOST_NAMED]) + ("\n  ..." if len(wrong) > _MOST_NAMED else "")
        raise ConversionError(f"the tensors given do not fit {bundle.origin}:\n  {lines}")

    weights = dict(bundle.weights)
    locations = UniqueNames(location_of(tensor) for tensor in external_tensors(proto))
    replaced = [name for name in tensors if name in initializers]
    promoted = [name for name in tensors if name in declared and name not in initializers]
    for name in (*replaced, *promoted):
        tensor = initializers[name] if name in initializers else graph.initializer.add()
        tensor.CopyFrom(placed(name, tensors[name], weights, location_of(tensor) or locations.unique(name)))
    if promoted and proto.ir_version >= FREE_INITIALIZERS:  # before, weights are inputs as well
        set_items(graph.input, [value for value in graph.input if value.name not in promoted])
    unchanged = tuple(name for name in initializers if name not in tensors)
    report = ParamsReport(tuple(replaced), tuple(promoted), unchanged, tuple(unused))
    return ModelBundle(bundle.proto, weights, bundle.origin).with_proto(proto), report


def _misfit(name: str, data: TensorData, declared: ValueType) -> str:
    given = f"{data.dtype.value}{list(data.shape)}"
    if not isinstance(declared, TensorType):
        return f"{name!r} is not a tensor in the model, given is {given}"
    if declared.dtype is data.dtype and (declared.shape is None or fits(Shape(data.shape), declared.shape)):
        return ""
    shape = "" if declared.shape is None else dims_text(declared.shape)
    return f"{name!r} is {declared.dtype.value}{shape} in the model, given is {given}"

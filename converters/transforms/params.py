"""Puts tensors into a model: as new data of its weights, or as weights in place of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlx_ort.converters.bundle import ModelBundle, external_tensors, location_of, placed
from rlx_ort.converters.onnx_types import dtype_of, type_of
from rlx_ort.converters.protos import copied, set_items
from rlx_ort.converters.to_onnx.model import UniqueNames
from rlx_ort.converters.transforms.scope import dims_text, near_names
from rlx_ort.errors import ConversionError
from rlx_ort.ir.shape import Shape, fits
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType, ValueType

if TYPE_CHECKING:
    import onnx

__all__ = ["ParamsReport", "bake"]

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class ParamsReport:
    """What `bake` did.

    Attributes:
        replaced: weights that have the data of the file now.
        promoted: inputs that are weights now.
        unchanged: weights the file has nothing for.
        unused: names in the file that the model has neither as weight nor as input.
    """

    replaced: tuple[str, ...]
    promoted: tuple[str, ...]
    unchanged: tuple[str, ...]
    unused: tuple[str, ...]


def bake(bundle: ModelBundle, tensors: Mapping[str, TensorData]) -> tuple[ModelBundle, ParamsReport]:
    """Return the model with tensors in it, by name; shares their memory.

    Raises:
        ConversionError: a tensor lacks the dtype or shape that the model declares, or none has a name of the model.
    """
    proto = copied(bundle.proto)
    graph = proto.graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    inputs = {value.name: value for value in graph.input if value.name not in initializers}
    replaced = [name for name in tensors if name in initializers]
    promoted = [name for name in tensors if name in inputs]
    unused = [name for name in tensors if name not in initializers and name not in inputs]
    if not replaced and not promoted:
        raise ConversionError(
            f"none of the {len(tensors)} tensors given is a weight or input of {bundle.origin}, such as "
            f"{', '.join(map(repr, unused[:_MOST_NAMED])) or 'none'}; {_hint(unused, [*initializers, *inputs])}"
        )
    wrong = [_misfit(name, tensors[name], _declared(initializers[name])) for name in replaced]
    wrong += [_misfit(name, tensors[name], type_of(inputs[name].type)) for name in promoted]
    wrong = [line for line in wrong if line]
    if wrong:
        listed = "\n  ".join(wrong[:_MOST_NAMED]) + ("\n  ..." if len(wrong) > _MOST_NAMED else "")
        raise ConversionError(f"the tensors given do not fit {bundle.origin}:\n  {listed}")

    weights = dict(bundle.weights)
    locations = UniqueNames(location_of(tensor) for tensor in external_tensors(proto))
    for name in replaced:
        location = location_of(initializers[name]) or locations.unique(name)
        initializers[name].CopyFrom(placed(name, tensors[name], weights, location))
    for name in promoted:
        graph.initializer.append(placed(name, tensors[name], weights, locations.unique(name)))
    if promoted and proto.ir_version >= 4:  # before, weights are inputs as well
        set_items(graph.input, [value for value in graph.input if value.name not in promoted])
    unchanged = tuple(name for name in initializers if name not in tensors)
    report = ParamsReport(tuple(replaced), tuple(promoted), unchanged, tuple(unused))
    return ModelBundle(bundle.proto, weights, bundle.origin).with_proto(proto), report


def _declared(tensor: onnx.TensorProto) -> ValueType:
    return TensorType(dtype_of(tensor.data_type), Shape(tensor.dims))


def _misfit(name: str, data: TensorData, declared: ValueType) -> str:
    found = f"{data.dtype.value}{list(data.shape)}"
    if not isinstance(declared, TensorType):
        return f"{name!r} is no tensor in the model, given is {found}"
    if declared.dtype is data.dtype and (declared.shape is None or fits(Shape(data.shape), declared.shape)):
        return ""
    shape = "" if declared.shape is None else dims_text(declared.shape)
    return f"{name!r} is {declared.dtype.value}{shape} in the model, given is {found}"


def _hint(unused: list[str], known: list[str]) -> str:
    return near_names(unused[0], known) if unused else "the file is empty"

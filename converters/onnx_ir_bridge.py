"""Bundles as models of onnx-ir and back; the tensors of both are over the same memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.bundle import INLINE_BYTES, ModelBundle, external_tensors, location_of
from rlx_ort.converters.extras import optional_module
from rlx_ort.converters.onnx_types import dtype_of
from rlx_ort.converters.to_onnx.model import UniqueNames
from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData

if TYPE_CHECKING:
    import onnx_ir

__all__ = ["bundle_from_ir", "bundle_to_ir"]


def bundle_to_ir(bundle: ModelBundle) -> onnx_ir.Model:
    """Return a bundle as a model of onnx-ir, without copying a weight.

    Raises:
        ConversionError: onnx-ir is not installed, or it does not take the model.
    """
    ir = _onnx_ir()
    from rlx_ort.converters.onnx_ir_tensor import WeightTensor

    where = {(tensor.name, location_of(tensor)) for tensor in external_tensors(bundle.proto)}
    lacking = sorted(location for _, location in where if location not in bundle.weights)
    if lacking:
        raise ConversionError(f"{bundle.origin}: the model refers to weights it does not have: {', '.join(lacking)}")
    with _as_conversion_error(bundle.origin, "read"):
        model: onnx_ir.Model = ir.serde.deserialize_model(bundle.proto)
        for value in _initializers(model):
            tensor: Any = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                value.const_value = WeightTensor(bundle.weights[str(tensor.location)], tensor.name, tensor.doc_string)
    return model


def bundle_from_ir(model: onnx_ir.Model, origin: str = "the model") -> ModelBundle:
    """Return a model of onnx-ir as a bundle; shares the memory of tensors that have theirs in ONNX's storage form.

    Raises:
        ConversionError: a tensor has no element type here, or onnx-ir cannot serialize the model.
    """
    ir = _onnx_ir()
    names = UniqueNames()
    weights: dict[str, TensorData] = {}
    replaced: list[tuple[onnx_ir.Value, onnx_ir.TensorProtocol]] = []
    with _as_conversion_error(origin, "serialize"):
        try:
            for value in _initializers(model):
                tensor = value.const_value
                if tensor is None or tensor.dtype == ir.DataType.STRING or tensor.nbytes < INLINE_BYTES:
                    continue
                data = _data(tensor)
                location = names.unique(str(value.name))
                weights[location] = data
                replaced.append((value, tensor))
                value.const_value = ir.ExternalTensor(
                    location, None, None, tensor.dtype, shape=ir.Shape(data.shape), name=str(value.name)
                )
            proto = ir.serde.serialize_model(model)
        finally:
            for value, tensor in replaced:
                value.const_value = tensor
    return ModelBundle(proto, weights, origin)


def _initializers(model: onnx_ir.Model) -> Iterator[onnx_ir.Value]:
    """Yield the initializers of the main graph, of every body, and of bodies in functions."""
    for graph in (*model.graphs(), *(body for function in model.functions.values() for body in function.subgraphs())):
        yield from graph.initializers.values()


def _data(tensor: Any) -> TensorData:
    from rlx_ort.converters.onnx_ir_tensor import WeightTensor

    if isinstance(tensor, WeightTensor):
        return tensor.data
    dtype = dtype_of(int(tensor.dtype))
    if dtype.is_packed:  # onnx-ir gives them unpacked; the bytes are packed as ONNX has them
        return TensorData(dtype, tuple(tensor.shape.numpy()), np.frombuffer(tensor.tobytes(), np.uint8))
    return TensorData.from_array(_native(tensor.numpy(), dtype), dtype)


def _native(array: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Return the array in the numpy type of a dtype; onnx-ir may hold 16-bit floats as plain bits."""
    same_bits = array.dtype.kind in "uV" and array.itemsize == dtype.numpy.itemsize
    return array.view(dtype.numpy) if same_bits and array.dtype != dtype.numpy else array


@contextlib.contextmanager
def _as_conversion_error(origin: str, verb: str) -> Iterator[None]:
    try:
        yield
    except ConversionError:
        raise
    except Exception as err:  # onnx-ir lets errors of any kind through
        raise ConversionError(f"{origin}: onnx-ir cannot {verb} the model: {type(err).__name__}: {err}") from err


def _onnx_ir() -> Any:
    optional_module("onnx_ir.serde", "convert", "this conversion")
    return optional_module("onnx_ir", "convert", "this conversion")

"""Optional packages, and bundles as models of one of them, onnx-ir, and back, over the same memory."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx_ort.converters.bundle import ModelBundle
from rlx_ort.converters.onnx_types import dtype_of, elem_type
from rlx_ort.converters.protos import copied, graphs_of
from rlx_ort.converters.to_onnx.model import INLINE_BYTES, UniqueNames
from rlx_ort.errors import ConversionError, MissingExtraError, as_cause, install_command, let_go
from rlx_ort.ir.tensor import TensorData

if TYPE_CHECKING:
    import onnx
    import onnx_ir

_DATA = "rlx_ort.data"
"""Where a tensor of onnx-ir keeps the `TensorData` that it was made of."""
_TYPES = "rlx_ort.types"
"""Where a model of onnx-ir keeps the types that onnx-ir lacks, those of maps, by the name of the value."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MAX_CAUSES = 3


def optional_module(name: str, extra: str, purpose: str) -> Any:
    """Return a module of an optional package, or raise with the command that installs the extra which brings it.

    `purpose` is the subject of the message: "reading GGUF files".
    """
    try:
        return importlib.import_module(name)
    except Exception as err:  # a package with native parts fails in many ways
        package = name.partition(".")[0]
        if isinstance(err, ModuleNotFoundError) and err.name == package:
            raise MissingExtraError(
                f"{purpose} needs {package}, which is not installed\n  {install_command(extra)}"
            ) from err
        raise MissingExtraError(
            f"{purpose} needs {package}, which is installed and cannot be imported: {type(err).__name__}: {err}\n"
            f"  {install_command(extra, '--force-reinstall')}"
        ) from err


@contextlib.contextmanager
def foreign_errors(what: str, hint: str = "") -> Iterator[None]:
    """Make a `ConversionError` of whatever another package raises: onnx-ir, PyTorch and ORT let anything through.

    The message has `what` failed, the first line of the error and of up to two errors that caused it, and the hint:
    the messages of PyTorch have pages, and colours for a terminal.
    """
    try:
        yield
    except ConversionError:
        raise
    except Exception as err:
        causes: list[str] = []
        link: BaseException | None = err
        while link is not None and len(causes) < _MAX_CAUSES:
            lines = [line.strip() for line in _COLOURS.sub("", str(link)).splitlines()]
            causes.append(f"{type(link).__name__}: {next(filter(None, lines), 'no message')}")
            link = link.__cause__
        let_go(err)
        raise ConversionError(f"{what}: {'; caused by '.join(causes)}{hint}") from as_cause(err)


def bundle_to_ir(bundle: ModelBundle) -> onnx_ir.Model:
    """Return a bundle as a model of onnx-ir; no weight is read or copied before its values are asked for.

    Raises:
        ConversionError: onnx-ir is not installed, or it does not take the model.
    """
    ir = _onnx_ir()
    bundle = bundle.with_proto(bundle.proto)  # which checks that no weight is lacking

    def lazy(data: TensorData, tensor: Any) -> Any:
        kind = ir.DataType(elem_type(data.dtype))
        made = ir.LazyTensor(
            lambda: ir.Tensor(data.numpy(), kind),
            kind,
            ir.Shape(data.shape),
            name=tensor.name,
            doc_string=tensor.doc_string,
        )
        made.meta[_DATA] = data
        return made

    proto, lacking = _without_maps(bundle.proto)
    with foreign_errors(f"{bundle.origin}: onnx-ir cannot read the model"):
        model: onnx_ir.Model = ir.serde.deserialize_model(proto)
        model.meta[_TYPES] = lacking
        for value in _initializers(model):
            tensor: Any = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                value.const_value = lazy(bundle.weights[str(tensor.location)], tensor)
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
    with foreign_errors(f"{origin}: onnx-ir cannot serialize the model"):
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
    lacking = model.meta.get(_TYPES, {})
    for value in (*proto.graph.input, *proto.graph.output):
        if value.name in lacking:
            value.type.CopyFrom(lacking[value.name])
    return ModelBundle(proto, weights, origin)


def _without_maps(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, onnx.TypeProto]]:
    """Return the model without the types that have a map in them, and those of the main graph by name."""
    if not any(_has_map(value.type) for graph in _scopes(proto) for value in _declared(graph)):
        return proto, {}
    proto = copied(proto)
    ends = (*proto.graph.input, *proto.graph.output)
    lacking = {value.name: copied(value.type) for value in ends if _has_map(value.type)}
    for graph in _scopes(proto):
        for value in _declared(graph):
            if _has_map(value.type):
                value.ClearField("type")
    return proto, lacking


def _scopes(proto: onnx.ModelProto) -> tuple[Any, ...]:
    return (*graphs_of(proto), *proto.functions)


def _declared(graph: Any) -> Iterator[onnx.ValueInfoProto]:
    yield from graph.value_info
    if hasattr(graph, "initializer"):  # those of a function are names
        yield from (*graph.input, *graph.output)


def _has_map(kind: onnx.TypeProto) -> bool:
    inner = kind.WhichOneof("value")
    if inner in ("sequence_type", "optional_type"):
        return _has_map(getattr(kind, inner).elem_type)
    return bool(inner == "map_type")


def _initializers(model: onnx_ir.Model) -> Iterator[onnx_ir.Value]:
    """Yield the initializers of the main graph, of every body, and of bodies in functions."""
    for graph in (*model.graphs(), *(body for function in model.functions.values() for body in function.subgraphs())):
        yield from graph.initializers.values()


def _data(tensor: Any) -> TensorData:
    if (data := tensor.meta.get(_DATA)) is not None:
        return data  # type: ignore[no-any-return]  # `bundle_to_ir` put it there
    dtype = dtype_of(int(tensor.dtype))
    if dtype.is_packed:  # onnx-ir gives them unpacked; the bytes are packed as ONNX has them
        return TensorData(dtype, tuple(tensor.shape.numpy()), np.frombuffer(tensor.tobytes(), np.uint8))
    array = tensor.numpy()
    if array.dtype.kind in "uV" and array.itemsize == dtype.numpy.itemsize:  # 16-bit floats may be plain bits there
        array = array.view(dtype.numpy)
    return TensorData.from_array(array, dtype)


def _onnx_ir() -> Any:
    optional_module("onnx_ir.serde", "convert", "this conversion")
    return optional_module("onnx_ir", "convert", "this conversion")

"""Quantises weights, and for int8 activations too, by `onnxruntime.quantization`.

The tools are handed in (`rlx_ort.providers.engine.runtime.quantization()`), since converters know no engine.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from rlx_ort.converters.bundle import ModelBundle, bundle_of, location_of, placed
from rlx_ort.converters.files import save_bundle
from rlx_ort.converters.from_onnx.tensor_files import ExternalFiles
from rlx_ort.converters.from_onnx.tensors import tensor_data
from rlx_ort.converters.onnx_ir_bridge import foreign_errors
from rlx_ort.converters.protos import bodies_of, copied, nodes_of, set_items
from rlx_ort.converters.sources.npz import read_npz
from rlx_ort.converters.to_onnx.model import UniqueNames
from rlx_ort.converters.transforms.opset import to_opset
from rlx_ort.converters.transforms.scope import all_value_names, dims_text, label_of, read_names, selected, typed_model
from rlx_ort.errors import ConversionError, near_names
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Shape, TensorType, fits
from rlx_ort.storage import temporary_folder

QuantizeKind: TypeAlias = Literal["int8-dynamic", "int8-static", "int4-weights"]
"""The ways to quantise."""

_log = logging.getLogger(__name__)
_LOWEST_OPSET, _NORMAL_OPSET = 13, 21  # QuantizeLinear takes an axis from 13 on
_QUANTIZED_OPS = {
    "ConvInteger", "DequantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeLinear", "DynamicQuantizeMatMul",
    "MatMulInteger", "MatMulNBits", "QAttention", "QLinearConv", "QLinearMatMul", "QuantizeLinear",
}  # fmt: skip
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
Samples: TypeAlias = "Mapping[str, npt.NDArray[Any] | Sequence[npt.NDArray[Any]]]"


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """How to quantise; the defaults lose the least accuracy on most models.

    Attributes:
        exclude: nodes that are not quantised: names, patterns of names as `head*`, or operators.
        per_channel: whether int8 weights get a scale for each output channel instead of one for the tensor.
        reduce_range: whether int8 weights use 7 bits. Needed where pairs of products overflow 16 bits: x86 processors
            without VNNI. Costs accuracy everywhere else.
        block_size: rows that share a scale in int4 weights; a power of two, 16 at least.
        symmetric: whether int4 weights have no zero points, which makes them 3 % smaller and less exact.
    """

    exclude: tuple[str, ...] = ()
    per_channel: bool = True
    reduce_range: bool = False
    block_size: int = 32
    symmetric: bool = False


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """The result of `quantize`; bytes are those of the weights and the model together.

    Attributes:
        quantized_ops: quantised operator -> how many nodes of it there are now and were not before.
        samples: calibration samples that were run; 0 without calibration.
    """

    kind: QuantizeKind
    bytes_before: int
    bytes_after: int
    quantized_ops: Mapping[str, int]
    samples: int = 0


def quantize(
    bundle: ModelBundle,
    kind: QuantizeKind,
    tools: Any,
    options: QuantizeOptions | None = None,
    calibration: Samples | str | os.PathLike[str] | None = None,
) -> tuple[ModelBundle, QuantizeReport]:
    """Return the model quantised.

    `int8-dynamic` quantises the weights of products and recurrences symmetrically to int8, and activations to uint8
    at run time. `int8-static` writes QuantizeLinear and DequantizeLinear pairs around nodes that run in 8 bits: weights
    symmetric int8, activations uint8 with ranges from calibration (minimum and maximum seen); convolutions and batch
    norms are fused before. Both write the model to a folder for temporary files and need several times its size in
    memory, as ONNX Runtime's tools do. `int4-weights` makes MatMulNBits of products with a constant matrix, one
    weight after another.

    Args:
        bundle: the model; below opset 13 it goes to 21 first.
        kind: which of the three.
        tools: the module `onnxruntime.quantization`.
        options: how, see `QuantizeOptions`.
        calibration: for `int8-static`: input -> array of samples along a new first axis or along the batch axis, or a
            list of arrays; or the path of an npz file with such arrays.

    Raises:
        ConversionError: calibration data is lacking, too much or does not fit, an excluded node is not there, nothing
            in the model can be quantised, or ONNX Runtime's tools fail.
    """
    options = options or QuantizeOptions()
    _check(kind, options, calibration)
    source = bundle
    if bundle.opset < _LOWEST_OPSET:
        bundle, _ = to_opset(bundle, _NORMAL_OPSET)
    nodes = {node.name: node.op_type for node in nodes_of(bundle.proto) if node.name}
    options = replace(options, exclude=tuple(sorted(selected(options.exclude, nodes, "the nodes to leave out"))))
    samples: list[dict[str, Any]] = []
    if kind == "int4-weights":
        with _quiet():
            made = _to_int4(bundle, tools, options)
    else:
        if calibration:
            samples = _calibration_samples(bundle, calibration)
        made = _in_files(bundle, kind, tools, options, samples)
    new, old = (Counter(node.op_type for node in nodes_of(model.proto)) for model in (made, source))
    new_ops = {op_type: count for op_type, count in (new - old).items() if op_type in _QUANTIZED_OPS}
    if not new_ops:
        raise ConversionError(
            f"{kind} finds nothing to quantise in {bundle.origin}: no operator with a constant weight that it can take"
        )
    return made, QuantizeReport(kind, source.nbytes, made.nbytes, new_ops, len(samples))


def _check(kind: str, options: QuantizeOptions, calibration: object) -> None:
    kinds = ("int8-dynamic", "int8-static", "int4-weights")
    if kind not in kinds:
        raise ConversionError(f"quantisation {kind!r} is not known; give one of {', '.join(kinds)}")
    if kind == "int8-static" and not calibration:
        raise ConversionError("int8-static needs calibration data: a sample of each input")
    if kind != "int8-static" and calibration:
        raise ConversionError(f"{kind} takes no calibration data; leave it out or use int8-static")
    if kind == "int4-weights" and (options.block_size < 16 or options.block_size & (options.block_size - 1)):
        raise ConversionError(f"block size {options.block_size} was asked for; it is a power of two, 16 at least")


def _to_int4(bundle: ModelBundle, tools: Any, options: QuantizeOptions) -> ModelBundle:
    """Return the model with MatMulNBits of 4 bits in place of products, those in bodies included.

    A product is taken when its second input is an f32, f16 or bf16 initializer of two dims that has at least one whole
    block of rows; a matrix that several products share is quantised once. ONNX Runtime's tool loads whole models into
    memory, so it gets one product at a time: at most one matrix is in memory in full precision.
    """
    proto = copied(bundle.proto)
    maker = _Int4Maker(bundle, tools, options, UniqueNames(all_value_names(proto)))
    maker.graph(proto.graph, {})
    if not maker.weights:
        return bundle
    if not any(entry.domain == "com.microsoft" for entry in proto.opset_import):
        proto.opset_import.add(domain="com.microsoft", version=1)
    return ModelBundle(proto, {**bundle.weights, **maker.weights}, bundle.origin).with_proto(proto)


@dataclass(slots=True)
class _Int4Maker:
    bundle: ModelBundle
    tools: Any
    options: QuantizeOptions
    names: UniqueNames
    weights: dict[str, TensorData] = field(default_factory=dict)
    made: dict[str, tuple[onnx.NodeProto, list[onnx.TensorProto]]] = field(default_factory=dict)
    """Location of a matrix -> a product with it, quantised, and its quantised tensors."""

    def graph(self, graph: onnx.GraphProto, outer: Mapping[str, onnx.TensorProto]) -> None:
        """Rewrite one graph and its bodies; quantised matrices go into the graph of the product."""
        overridable = {value.name for value in graph.input}
        own = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in overridable}
        hidden = overridable | {name for node in graph.node for name in node.output}
        seen = {name: tensor for name, tensor in outer.items() if name not in hidden} | own
        quantized: set[str] = set()
        for node in graph.node:
            for body in bodies_of(node):
                self.graph(body, seen)
            matrix = seen.get(node.input[1]) if node.op_type == "MatMul" and len(node.input) == 2 else None
            if matrix is None or node.domain or node.name in self.options.exclude:
                continue
            fits = len(matrix.dims) == 2 and matrix.dims[0] >= self.options.block_size
            if fits and matrix.data_type in _FLOATS:
                quantized.add(node.input[1])
                self._replace(node, matrix, graph)
        unused = (quantized & own.keys()) - read_names(graph)
        if unused:
            set_items(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in unused])

    def _replace(self, node: onnx.NodeProto, matrix: onnx.TensorProto, graph: onnx.GraphProto) -> None:
        """Make a MatMulNBits of a MatMul, with the name and the metadata that it has."""
        key = location_of(matrix) or matrix.name
        if key not in self.made:
            self.made[key] = self._quantized(node, matrix)
        made, tensors = self.made[key]
        node.domain, node.op_type = made.domain, made.op_type
        set_items(node.attribute, made.attribute)
        node.input[1:] = [tensor.name for tensor in tensors]
        known = {tensor.name for tensor in graph.initializer}
        graph.initializer.extend(tensor for tensor in tensors if tensor.name not in known)

    def _quantized(
        self, node: onnx.NodeProto, matrix: onnx.TensorProto
    ) -> tuple[onnx.NodeProto, list[onnx.TensorProto]]:
        """Return the MatMulNBits for a MatMul, and its tensors, whose data is beside the model."""
        data = self.bundle.weights.get(location_of(matrix))
        held = matrix
        if data is not None:  # read from the file: pages of a map would stay in memory
            raw = b"".join(map(bytes, data.pieces()))
            held = onnx.TensorProto(name=matrix.name, data_type=matrix.data_type, dims=matrix.dims, raw_data=raw)
        ends = [
            onnx.helper.make_tensor_value_info(name, matrix.data_type, None) for name in (node.input[0], node.output[0])
        ]
        model = onnx.helper.make_model(
            onnx.helper.make_graph([node], "product", ends[:1], ends[1:], initializer=[held]),
            opset_imports=[onnx.helper.make_opsetid("", self.bundle.opset)],
            ir_version=max(self.bundle.proto.ir_version, 10),
        )
        with foreign_errors(f"{label_of(node)} cannot be quantised"):
            tool = self.tools.matmul_nbits_quantizer.MatMulNBitsQuantizer(
                model, bits=4, block_size=self.options.block_size, is_symmetric=self.options.symmetric
            )
            tool.process()
        result = tool.model.model.graph
        if len(result.node) != 1 or result.node[0].op_type != "MatMulNBits":
            raise ConversionError(f"{label_of(node)} cannot be quantised: the tool leaves it as it is")
        by_name = {tensor.name: tensor_data(tensor, ExternalFiles(None)) for tensor in result.initializer}
        names = result.node[0].input[1:]
        return result.node[0], [placed(self.names.unique(name), by_name[name], self.weights) for name in names]


def _in_files(
    bundle: ModelBundle, kind: str, tools: Any, options: QuantizeOptions, samples: Sequence[Mapping[str, Any]]
) -> ModelBundle:
    """Quantise through temporary files, which the tools read and write."""
    with temporary_folder() as folder:
        given, ready, made = (folder / f"{part}.onnx" for part in ("given", "ready", "made"))
        large = sum(data.nbytes for data in bundle.weights.values()) > 1 << 30
        save_bundle(_typed(bundle), given, external_data=large)
        common = {
            "per_channel": options.per_channel,
            "reduce_range": options.reduce_range,
            "weight_type": tools.QuantType.QInt8,
            "nodes_to_exclude": list(options.exclude),
            "use_external_data_format": large,
        }
        with foreign_errors(f"{bundle.origin} cannot be quantised to {kind}"), _quiet():
            # Symbolic inference would need sympy; ONNX's own was run above.
            tools.shape_inference.quant_pre_process(
                given,
                ready,
                skip_symbolic_shape=True,
                skip_optimization=kind != "int8-static" or large,
                save_as_external_data=large,
            )
            if kind == "int8-static":
                tools.quantize_static(
                    ready,
                    made,
                    SimpleNamespace(get_next=partial(next, iter(samples), None)),  # all that the tool asks of a reader
                    quant_format=tools.QuantFormat.QDQ,
                    activation_type=tools.QuantType.QUInt8,
                    **common,
                )
            else:
                tools.quantize_dynamic(ready, made, **common)
            return bundle_of(onnx.load(made), str(folder), bundle.origin)


def _typed(bundle: ModelBundle) -> ModelBundle:
    """Return the model with a name for each node, the types that ONNX infers, and each opset imported once.

    Weights get no entry: the tools transpose those of a Gemm and leave the entry of the old shape.
    """
    proto = copied(bundle.proto)
    weights = {tensor.name for tensor in proto.graph.initializer}
    typed = typed_model(bundle).graph.value_info
    set_items(proto.graph.value_info, [info for info in typed if info.name not in weights])
    # The tools want exactly one ai.onnx opset. skl2onnx imports it twice, and a model of other domains not at all.
    imports = {entry.domain: entry for entry in proto.opset_import if entry.domain not in ("", "ai.onnx")}
    standard = onnx.helper.make_opsetid("", bundle.opset or _NORMAL_OPSET)
    set_items(proto.opset_import, [standard, *imports.values()])
    names = UniqueNames(node.name for node in proto.graph.node)
    for index, node in enumerate(proto.graph.node):
        if not node.name:
            node.name = names.unique(f"{node.op_type}_{index}")
    return bundle.with_proto(proto)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Redirect the output and the log of the tools to this module's log."""
    output = io.StringIO()
    root = logging.getLogger()
    handler = logging.StreamHandler(output)
    before, level = [*root.handlers], root.level
    root.handlers[:] = [handler]
    try:
        with contextlib.redirect_stdout(output), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        for line in output.getvalue().splitlines():
            _log.debug("onnxruntime.quantization: %s", line)


def _calibration_samples(
    bundle: ModelBundle, given: Samples | str | os.PathLike[str]
) -> list[dict[str, npt.NDArray[Any]]]:
    """Return one feed a sample, each value of the dtype and shape that the model declares.

    An array with one axis more than the input is cut along that first axis. One of the input's rank is cut along the
    batch axis, into pieces of the size that the model declares there, or of one. Items of a list are fed as they are.
    """
    if not isinstance(given, Mapping):
        given = {name: data.numpy() for name, data in read_npz(Path(given)).items()}
    declared = bundle.input_types()
    for name in given:
        if name not in declared:
            hint = near_names(name, declared)
            raise ConversionError(f"calibration data {name!r} is not an input of {bundle.origin}; {hint}")
    lacking = [name for name in declared if name not in given]
    if lacking:
        raise ConversionError(f"calibration data lacks the input {' and '.join(map(repr, lacking))}")
    cut = {name: _cut(name, kind, given[name]) for name, kind in declared.items()}
    counts = {name: len(items) for name, items in cut.items()}
    if len({*counts.values()}) > 1 or not min(counts.values(), default=0):
        listed = ", ".join(f"{name!r} {count}" for name, count in counts.items())
        raise ConversionError(f"calibration needs the same number of samples of each input, one at least; got {listed}")
    return [dict(zip(cut, items, strict=True)) for items in zip(*cut.values(), strict=True)]


def _cut(name: str, kind: Any, given: npt.NDArray[Any] | Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    if not isinstance(kind, TensorType) or kind.shape is None:
        raise ConversionError(f"calibration cannot feed input {name!r}, which is {kind}; its rank must be known")
    dims = tuple(kind.shape)
    if isinstance(given, np.ndarray):
        if given.dtype.hasobject:
            raise ConversionError(f"calibration data {name!r} holds Python objects; save plain arrays")
        if given.ndim == len(dims) + 1:
            items = [*given]
        elif dims and given.ndim == len(dims):
            size = dims[0] if isinstance(dims[0], int) else 1
            if size < 1 or len(given) % size:
                raise ConversionError(f"calibration data {name!r} has {len(given)} rows, no multiple of {size}")
            items = [given[start : start + size] for start in range(0, len(given), size)]
        else:
            expected = f"{len(dims)} axes, or {len(dims) + 1} with the samples first"
            raise ConversionError(f"calibration data {name!r} has shape {list(given.shape)}; it needs {expected}")
    else:
        items = [np.asarray(item) for item in given]
    for item in items:
        if not fits(Shape(item.shape), kind.shape):
            wanted = dims_text(dims)
            raise ConversionError(f"a calibration sample of {name!r} has shape {list(item.shape)}, it takes {wanted}")
        if not np.can_cast(item.dtype, kind.dtype.numpy, "same_kind"):
            raise ConversionError(f"calibration data {name!r} is {item.dtype}, the input is {kind.dtype.value}")
    return [np.ascontiguousarray(item, dtype=kind.dtype.numpy) for item in items]

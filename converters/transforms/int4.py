"""Products with a constant matrix as MatMulNBits with 4 bits a weight.

ONNX Runtime's tool loads whole models into memory. Here it gets one product at a time, so that at most one matrix is in
memory in full precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlx_ort.converters.bundle import ModelBundle, location_of, placed
from rlx_ort.converters.from_onnx.tensor_files import ExternalFiles
from rlx_ort.converters.from_onnx.tensors import tensor_data
from rlx_ort.converters.protos import bodies_of, copied, read_names, set_items
from rlx_ort.converters.to_onnx.model import UniqueNames
from rlx_ort.converters.transforms.scope import all_value_names, label_of, typed_model
from rlx_ort.errors import ConversionError
from rlx_ort.ir.tensor import TensorData

if TYPE_CHECKING:
    import onnx

__all__ = ["to_int4"]

_FLOATS = (1, 10, 16)  # TensorProto.FLOAT, FLOAT16, BFLOAT16


def to_int4(bundle: ModelBundle, tools: Any, block_size: int, symmetric: bool, exclude: frozenset[str]) -> ModelBundle:
    """Return the model with MatMulNBits in place of products, those in bodies included.

    A product is taken when its second input is an f32, f16 or bf16 initializer of two dims that has at least one whole
    block of rows; a matrix that several products share is quantised once.

    Raises:
        ConversionError: ONNX Runtime's tool fails on a product.
    """
    proto = copied(bundle.proto)
    typed = typed_model(bundle)
    maker = _Maker(bundle, tools, block_size, symmetric, exclude, UniqueNames(all_value_names(proto)))
    maker.graph(proto.graph, typed.graph, {})
    if not maker.weights:
        return bundle
    if not any(entry.domain == "com.microsoft" for entry in proto.opset_import):
        proto.opset_import.add(domain="com.microsoft", version=1)
    return ModelBundle(proto, {**bundle.weights, **maker.weights}, bundle.origin).with_proto(proto)


@dataclass(slots=True)
class _Maker:
    bundle: ModelBundle
    tools: Any
    block_size: int
    symmetric: bool
    exclude: frozenset[str]
    names: UniqueNames
    weights: dict[str, TensorData] = field(default_factory=dict)
    made: dict[str, list[onnx.TensorProto]] = field(default_factory=dict)
    """Location of a matrix -> its quantised tensors."""

    def graph(self, graph: onnx.GraphProto, main: onnx.GraphProto, outer: Mapping[str, onnx.TensorProto]) -> None:
        """Rewrite one graph and its bodies; quantised matrices go where the matrix was."""
        overridable = {value.name for value in graph.input}
        own = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in overridable}
        hidden = overridable | {name for node in graph.node for name in node.output}
        seen = {name: tensor for name, tensor in outer.items() if name not in hidden} | own
        quantized: set[str] = set()
        for node in graph.node:
            for body in bodies_of(node):
                self.graph(body, main, seen)
            matrix = seen.get(node.input[1]) if node.op_type == "MatMul" and len(node.input) == 2 else None
            if matrix is None or not self._fits(matrix) or node.domain or node.name in self.exclude:
                continue
            quantized.add(node.input[1])
            self._replace(node, matrix, graph)
        unused = (quantized & own.keys()) - read_names(graph)
        if unused:
            set_items(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in unused])

    def _fits(self, matrix: onnx.TensorProto) -> bool:
        return matrix.data_type in _FLOATS and len(matrix.dims) == 2 and matrix.dims[0] >= self.block_size

    def _replace(self, node: onnx.NodeProto, matrix: onnx.TensorProto, graph: onnx.GraphProto) -> None:
        lone = copied(node)
        made = self._quantized(lone, matrix)
        node.CopyFrom(made)
        node.name = lone.name
        node.doc_string = lone.doc_string
        node.metadata_props.extend(lone.metadata_props)
        del node.input[:]
        node.input.extend([lone.input[0], *(tensor.name for tensor in self.made[self._key(matrix)])])
        known = {tensor.name for tensor in graph.initializer}
        graph.initializer.extend(t for t in self.made[self._key(matrix)] if t.name not in known)

    def _key(self, matrix: onnx.TensorProto) -> str:
        return location_of(matrix) or matrix.name

    def _quantized(self, node: onnx.NodeProto, matrix: onnx.TensorProto) -> onnx.NodeProto:
        """Return the MatMulNBits for a MatMul; its tensors are stored under the matrix."""
        import onnx

        key = self._key(matrix)
        data = self.bundle.weights.get(location_of(matrix))
        held = matrix if data is None else _inside(matrix, data)
        kind = matrix.data_type
        inputs = [onnx.helper.make_tensor_value_info(node.input[0], kind, None)]
        outputs = [onnx.helper.make_tensor_value_info(node.output[0], kind, None)]
        model = onnx.helper.make_model(
            onnx.helper.make_graph([node], "product", inputs, outputs, initializer=[held]),
            opset_imports=[onnx.helper.make_opsetid("", self.bundle.opset)],
            ir_version=max(self.bundle.proto.ir_version, 10),
        )
        try:
            tool = self.tools.matmul_nbits_quantizer.MatMulNBitsQuantizer(
                model, bits=4, block_size=self.block_size, is_symmetric=self.symmetric
            )
            tool.process()
        except Exception as err:  # the tool lets anything through
            raise ConversionError(f"{label_of(node)} cannot be quantised: {type(err).__name__}: {err}") from err
        result = tool.model.model.graph
        if len(result.node) != 1 or result.node[0].op_type != "MatMulNBits":
            raise ConversionError(f"{label_of(node)} cannot be quantised: the tool leaves it as it is")
        if key not in self.made:
            by_name = {tensor.name: tensor for tensor in result.initializer}
            self.made[key] = [self._kept(by_name[name]) for name in result.node[0].input[1:]]
        made: onnx.NodeProto = result.node[0]
        return made

    def _kept(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        """Keep the data of a tensor beside the model, under a name that is free in it."""
        data = tensor_data(tensor, ExternalFiles(None))
        name = self.names.unique(tensor.name)
        return placed(name, TensorData(data.dtype, data.shape, data.buffer), self.weights)


def _inside(matrix: onnx.TensorProto, data: TensorData) -> onnx.TensorProto:
    """Return a reference as a tensor with its data, read from the file: pages of a map would stay in memory."""
    import onnx

    return onnx.TensorProto(
        name=matrix.name, data_type=matrix.data_type, dims=matrix.dims, raw_data=b"".join(map(bytes, data.pieces()))
    )

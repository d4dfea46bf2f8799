"""`ModelWriter`: what the graphs of one exported model share: names, weights, constants and the record of nodes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlx_ort.converters.onnx_types import elem_type, set_type, tensor_value
from rlx_ort.converters.to_onnx.dispatch import Dispatcher
from rlx_ort.ir.core import Node
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.ops.leaf import Param
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType, ValueType

if TYPE_CHECKING:
    import onnx_ir

__all__ = ["INLINE_BYTES", "ModelWriter", "NodeRecord", "UniqueNames"]

INLINE_BYTES = 128
"""Tensors below this size are kept inside the model: ONNX Runtime copies them anyway."""


class UniqueNames:
    """Hands out names that differ from each other and from the reserved ones."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._taken = set(reserved)
        self._counters: dict[str, int] = {}

    def reserve(self, name: str) -> None:
        """Take a name out of the game."""
        self._taken.add(name)

    def unique(self, wanted: str) -> str:
        """Return `wanted`, or `wanted_2`, `wanted_3`... when it is taken."""
        name = wanted
        number = self._counters.get(wanted, 1)
        while name in self._taken:
            number += 1
            name = f"{wanted}_{number}"
        self._counters[wanted] = number
        self._taken.add(name)
        return name


@dataclass(slots=True)
class NodeRecord:
    """A node as it was written, with what choosing an opset and reporting need to know.

    Attributes:
        node: the node.
        origin: id of the top-level node of the user's graph that it stands for.
        written: the opset version its form belongs to.
        label: the user's node, as messages name it.
        imported: whether it came from a model, so that its form belongs to exactly that version.
        body: whether it stands in a subgraph.
    """

    node: onnx_ir.Node
    origin: int
    written: int
    label: str
    imported: bool
    body: bool


@dataclass(slots=True)
class ModelWriter:
    """The state that the emitters of a model and its bodies share.

    Attributes:
        value_names: names of values, unique over all graphs of the model.
        node_names: names of nodes, likewise.
        initializers: name -> value, all in the main graph.
        params: names of the parameters in use.
        constants: name -> data of the constants that stay outside the model.
        records: the nodes, in the order they were finished.
        types: type of each value, where it is known.
        origin: id of the top-level node that is being lowered.
        origin_label: that node, as messages name it.
        dispatcher: chooses between the forms of ops that have two.
        origins: id of a node of the graph that is written -> id of the user's node, where they differ.
    """

    value_names: UniqueNames
    node_names: UniqueNames = field(default_factory=UniqueNames)
    initializers: dict[str, onnx_ir.Value] = field(default_factory=dict)
    params: list[str] = field(default_factory=list)
    constants: dict[str, TensorData] = field(default_factory=dict)
    records: list[NodeRecord] = field(default_factory=list)
    types: dict[onnx_ir.Value, ValueType] = field(default_factory=dict)
    origin: int = 0
    origin_label: str = ""
    dispatcher: Dispatcher = field(default_factory=Dispatcher)
    origins: Mapping[int, int] = field(default_factory=dict)
    _by_content: dict[tuple[DType, tuple[int, ...], bytes], onnx_ir.Value] = field(default_factory=dict)

    def set_type(self, value: onnx_ir.Value, kind: ValueType) -> None:
        """Declare the type of a value."""
        self.types[value] = kind
        set_type(value, kind)

    def input(self, leaf: Node) -> onnx_ir.Value:
        """Return a new value for an `Input` leaf of a body."""
        import onnx_ir

        value = onnx_ir.Value(name=self.value_names.unique(leaf.output_names[0]))
        self.set_type(value, leaf.types[0])
        return value

    def param(self, op: Param) -> onnx_ir.Value:
        """Return the initializer of a parameter, declared on first use; bodies share it with the main graph."""
        if op.name not in self.initializers:
            self.params.append(op.name)
            self._declare(op.name, op.type, _external(op.name, op.type))
        return self.initializers[op.name]

    def constant(self, data: TensorData, name: str) -> onnx_ir.Value:
        """Return the initializer of a constant, one for equal data."""
        content = "\0".join(map(str, data.buffer)).encode() if data.dtype is DType.STRING else data.buffer.data
        key = (data.dtype, data.shape, hashlib.blake2b(content, digest_size=16).digest())
        if key not in self._by_content:
            kind = TensorType(data.dtype, Shape(data.shape))
            name = self.value_names.unique(name or "constant")
            if data.nbytes < INLINE_BYTES:
                tensor = tensor_value(data, name)
            else:
                self.constants[name] = data
                tensor = _external(name, kind)
            self._by_content[key] = self._declare(name, kind, tensor)
        return self._by_content[key]

    def _declare(self, name: str, kind: TensorType, tensor: onnx_ir.TensorProtocol) -> onnx_ir.Value:
        import onnx_ir

        value = onnx_ir.Value(name=name, const_value=tensor)
        self.set_type(value, kind)
        self.initializers[name] = value
        return value


def _external(name: str, kind: TensorType) -> onnx_ir.ExternalTensor:
    """Return a tensor whose data is found under its own name, wherever the session gets its weights."""
    import onnx_ir

    sizes = (kind.shape or Shape()).static()
    length = kind.dtype.nbytes(math.prod(sizes))
    return onnx_ir.ExternalTensor(
        name, 0, length, onnx_ir.DataType(elem_type(kind.dtype)), shape=onnx_ir.Shape(sizes), name=name
    )

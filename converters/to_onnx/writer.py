"""`ModelWriter`: what the graphs of one exported model share: names, weights, constants and the record of nodes."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlx_ort.converters.to_onnx.dispatch import Dispatcher
from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.converters.to_onnx.model import INLINE_BYTES, ExternalWeight, ModelValue
from rlx_ort.ir.core import Node
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.ops.leaf import Param
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType, ValueType

__all__ = ["ModelWriter", "UniqueNames"]


class UniqueNames:
    """Hands out names that differ from each other and from the reserved ones."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._taken = set(reserved)
        self._counters: dict[str, int] = {}

    def unique(self, wanted: str) -> str:
        """Return `wanted`, or `wanted_2`, `wanted_3`... when it is taken."""
        taken = self._taken
        if wanted not in taken:
            taken.add(wanted)
            return wanted
        name, number = wanted, self._counters.get(wanted, 1)
        while name in taken:
            number += 1
            name = f"{wanted}_{number}"
        self._counters[wanted] = number
        taken.add(name)
        return name


@dataclass(slots=True)
class ModelWriter:
    """The state that the emitters of a model and its bodies share.

    Attributes:
        value_names: names of values, unique over all graphs of the model.
        node_names: names of nodes, likewise.
        initializers: name -> value, all in the main graph.
        tensors: name -> data of the small ones, or where the data of the others is.
        params: names of the parameters in use.
        constants: name -> data of the constants that stay outside the model.
        records: the nodes, in the order they were finished.
        types: type of each value, where it is known.
        origin: id of the top-level node that is being lowered.
        source: the node that is being lowered.
        dispatcher: chooses between the forms of ops that have two.
        origins: id of a node of the graph that is written -> id of the user's node, where they differ.
    """

    value_names: UniqueNames
    node_names: UniqueNames = field(default_factory=UniqueNames)
    initializers: dict[str, ModelValue] = field(default_factory=dict)
    tensors: dict[str, TensorData | ExternalWeight] = field(default_factory=dict)
    params: list[str] = field(default_factory=list)
    constants: dict[str, TensorData] = field(default_factory=dict)
    records: list[ExportedNode] = field(default_factory=list)
    types: dict[ModelValue, ValueType] = field(default_factory=dict)
    origin: int = 0
    source: Node | None = None
    dispatcher: Dispatcher = field(default_factory=Dispatcher)
    origins: Mapping[int, int] = field(default_factory=dict)
    _by_content: dict[tuple[DType, tuple[int, ...], int], list[tuple[TensorData, ModelValue]]] = field(
        default_factory=dict
    )

    def input(self, leaf: Node) -> ModelValue:
        """Return a new value for an `Input` leaf of a body."""
        value = ModelValue(name=self.value_names.unique(leaf.output_names[0]))
        self.types[value] = leaf.types[0]
        return value

    def param(self, op: Param) -> ModelValue:
        """Return the initializer of a parameter, declared on first use; bodies share it with the main graph."""
        name, kind = op.name, op.type
        value = self.initializers.get(name)
        if value is None:
            self.params.append(name)
            value = self._declare(name, kind, ExternalWeight(kind))
        return value

    def constant(self, data: TensorData, name: str) -> ModelValue:
        """Return the initializer of a constant, one for equal data."""
        content = "\0".join(map(str, data.buffer)).encode() if data.dtype is DType.STRING else data.buffer.data
        # A checksum finds the candidates; a hash that needs no comparison would load OpenSSL, 3.5 MB.
        alike = self._by_content.setdefault((data.dtype, data.shape, zlib.crc32(content)), [])
        for known, value in alike:
            if known == data:
                return value
        kind = TensorType(data.dtype, Shape(data.shape))
        name = self.value_names.unique(name or "constant")
        small = data.nbytes < INLINE_BYTES
        if not small:
            self.constants[name] = data
        value = self._declare(name, kind, data if small else ExternalWeight(kind))
        alike.append((data, value))
        return value

    def _declare(self, name: str, kind: TensorType, tensor: TensorData | ExternalWeight) -> ModelValue:
        value = ModelValue(name)
        self.types[value] = kind
        self.initializers[name] = value
        self.tensors[name] = tensor
        return value

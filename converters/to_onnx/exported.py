"""`ExportedModel`: an ONNX model in normal form, without its weights, and the way back to the user's nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from rlx_ort.ir.types import ValueType

if TYPE_CHECKING:
    import onnx_ir

__all__ = ["ExportedModel", "ExportedNode"]


@dataclass(frozen=True, slots=True)
class ExportedNode:
    """One node of the exported model: what support checks, placement and cost need to know about it.

    Attributes:
        name: the node's name in the model, unique, bodies included.
        domain: operator domain, empty for ai.onnx.
        op_type: operator.
        version: opset version of the domain in the model.
        origin: id of the user's node, at the top level of the user's graph.
        inputs: types of its inputs, None for absent ones.
        outputs: types of its outputs, None for absent ones.
        input_names: names of the values it reads, empty for absent ones.
        output_names: names of the values it writes.
        shape_only: whether it only computes shapes: integer values of rank 0 or 1 that no float result reads
            except as a shape, axis or index. ONNX Runtime keeps such nodes on the CPU by design.
        body: whether it stands in a subgraph.
    """

    name: str
    domain: str
    op_type: str
    version: int
    origin: int
    inputs: tuple[ValueType | None, ...]
    outputs: tuple[ValueType | None, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    shape_only: bool = False
    body: bool = False


@dataclass(frozen=True)
class ExportedModel:
    """A model in the normal form every provider gets (ARCHITECTURE.md, "Normal form").

    Attributes:
        model: the model; each weight is an external initializer whose location is the parameter's name.
        params: names of the parameters it needs as external initializers.
        nodes: every node, bodies included, in topological order.
        origin_names: id of a user's node -> its name.
        input_types: name -> type, in order.
        output_types: name -> type, in order.
    """

    model: onnx_ir.Model
    params: tuple[str, ...]
    nodes: tuple[ExportedNode, ...]
    origin_names: Mapping[int, str]
    input_types: Mapping[str, ValueType]
    output_types: Mapping[str, ValueType] = field(default_factory=dict)

    @cached_property
    def skeleton(self) -> bytes:
        """The serialized model; weights are references, so this is small. Computed once."""
        import onnx_ir

        return onnx_ir.to_proto(self.model).SerializeToString(deterministic=True)

    @cached_property
    def sha256(self) -> str:
        """The hash of the skeleton, hexadecimal: the same graph gives the same hash; weights do not count."""
        import hashlib

        return hashlib.sha256(self.skeleton).hexdigest()

    def origin_of(self, session_node: str) -> str:
        """Return the name of the user's node behind a node name of an open session, or an empty string.

        ONNX Runtime renames nodes it rewrites by adding to the name (`mm/MatMulAddFusion`, `conv_token_1`), so the
        longest exported name that is a prefix is the origin.
        """
        by_name = self._by_name
        name = session_node
        while name:
            if name in by_name:
                return self.origin_names.get(by_name[name].origin, "")
            name = name[:-1]
        return ""

    @cached_property
    def _by_name(self) -> dict[str, ExportedNode]:
        return {node.name: node for node in self.nodes}

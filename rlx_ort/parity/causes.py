"""What differs in two nodes that should be the same: their operator, an attribute, a weight or a constant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.parity.metrics import difference

if TYPE_CHECKING:
    import onnx

    from rlx_ort.converters.bundle import ModelBundle

__all__ = ["Producer", "causes", "producers"]

_MOST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Producer:
    """The node behind a value.

    Attributes:
        node: the node.
        label: its name, or its first output's where it has none.
    """

    node: onnx.NodeProto
    label: str


def producers(graph: onnx.GraphProto) -> dict[str, Producer]:
    """Return value -> the node of the main graph that computes it."""
    return {
        name: Producer(node, node.name or next(filter(None, node.output), ""))
        for node in graph.node
        for name in node.output
        if name
    }


def causes(a: ModelBundle, mine: Producer, b: ModelBundle, theirs: Producer) -> tuple[str, ...]:
    """Return sentences that say what differs in two nodes; reads the weights of both."""
    if (mine.node.domain, mine.node.op_type) != (theirs.node.domain, theirs.node.op_type):
        return (f"the operator is {mine.node.op_type} in one and {theirs.node.op_type} in the other",)
    return (*_attributes(mine.node, theirs.node), *_weights(a, mine.node, b, theirs.node))


def _attributes(mine: onnx.NodeProto, theirs: onnx.NodeProto) -> Iterator[str]:
    left, right = _by_name(mine), _by_name(theirs)
    defaults = _defaults(mine)
    for name in sorted(left.keys() | right.keys()):
        one, other = left.get(name, defaults.get(name)), right.get(name, defaults.get(name))
        if one is None or other is None or _plain(one) != _plain(other):
            yield f"attribute {name!r} is {_shown(one)} in one and {_shown(other)} in the other"


def _by_name(node: onnx.NodeProto) -> dict[str, onnx.AttributeProto]:
    return {attribute.name: attribute for attribute in node.attribute}


def _defaults(node: onnx.NodeProto) -> dict[str, onnx.AttributeProto]:
    """Return what attributes are that a node does not give; by the newest schema, since defaults hardly ever change."""
    import onnx

    try:
        schema = onnx.defs.get_schema(node.op_type, domain=node.domain)
    except onnx.defs.SchemaError:
        return {}
    found = {name: attribute.default_value for name, attribute in schema.attributes.items()}
    return {name: value for name, value in found.items() if value.type}


def _plain(attribute: onnx.AttributeProto) -> bytes:
    """Return the value of an attribute without its documentation."""
    from onnx import AttributeProto

    copy = AttributeProto()
    copy.CopyFrom(attribute)
    copy.ClearField("doc_string")
    data: bytes = copy.SerializeToString(deterministic=True)
    return data


def _shown(attribute: onnx.AttributeProto | None) -> str:
    if attribute is None:
        return "not given"
    import onnx

    if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS, onnx.AttributeProto.TENSOR):
        return "another value"
    text = str(onnx.helper.get_attribute_value(attribute))
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _weights(a: ModelBundle, mine: onnx.NodeProto, b: ModelBundle, theirs: onnx.NodeProto) -> Iterator[str]:
    left, right = _constants(a), _constants(b)
    for one, other in zip(mine.input, theirs.input, strict=False):
        if one not in left or other not in right:
            continue
        x, y = _array(a, left[one]), _array(b, right[other])
        if x.shape != y.shape:
            yield f"weight {one!r} has the shape {list(x.shape)} in one and {list(y.shape)} in the other"
        elif not np.array_equal(x, y):
            count = int(np.count_nonzero(x != y))
            gap = difference(x, y).max_abs
            yield f"weight {one!r} differs in {count} of {x.size} elements, by {gap:.3g} at most"
    if len(mine.input) != len(theirs.input):
        yield f"it has {len(mine.input)} inputs in one and {len(theirs.input)} in the other"


def _constants(model: ModelBundle) -> Mapping[str, onnx.TensorProto]:
    found = {tensor.name: tensor for tensor in model.proto.graph.initializer}
    for node in model.proto.graph.node:
        if node.op_type == "Constant":
            found.update((node.output[0], item.t) for item in node.attribute if item.name == "value")
    return found


def _array(model: ModelBundle, tensor: onnx.TensorProto) -> npt.NDArray[Any]:
    import onnx

    from rlx_ort.converters.bundle import location_of

    data = model.weights.get(location_of(tensor))
    if data is not None and tensor.data_location == onnx.TensorProto.EXTERNAL:
        return data.numpy()
    array: npt.NDArray[Any] = onnx.numpy_helper.to_array(tensor)
    return array

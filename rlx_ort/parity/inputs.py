"""Random inputs of a model whose integers stay within the tables that they index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx

from rlx_ort import made_up
from rlx_ort.converters.bundle import ModelBundle

# Operators that pass the values of their first input on, so that an index stays an index.
_CARRIERS = {"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Slice", "Expand", "Tile"}
# (operator, input with the indices) -> input with the table; EmbedLayerNormalization has token and segment ids.
_TABLES = {
    ("Gather", 1): 0, ("GatherElements", 1): 0, ("GatherBlockQuantized", 1): 0,
    ("EmbedLayerNormalization", 0): 2, ("EmbedLayerNormalization", 1): 4,
}  # fmt: skip


def random_inputs(
    model: ModelBundle,
    sizes: Mapping[str, int] | None = None,
    *,
    seed: int = made_up.SEED,
    assume: tuple[int, int, int] = made_up.SIZE_CHOICES[0],
) -> made_up.MadeInputs:
    """Return random inputs for a model, see `made_up.random_inputs`; integers that index a table are in its range.

    Raises:
        InputError: an input is no tensor, or its rank is unknown.
        GraphVerifyError: no input has a dim that `sizes` names.
    """
    types = model.input_types()
    bounds = _index_bounds(model.proto.graph, types)
    return made_up.random_inputs(types, sizes, seed=seed, assume=assume, bounds=bounds)


def _index_bounds(graph: onnx.GraphProto, inputs: Iterable[str]) -> dict[str, int]:
    """Return input -> length of the shortest table that its values index, for inputs that index one."""
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    carried = {name: {name} for name in inputs}  # value -> the inputs whose values it has
    bounds: dict[str, int] = {}
    for node in graph.node:
        for index, name in enumerate(node.input):
            starts = carried.get(name, set())
            if starts and (rows := _table_rows(node, index, shapes)) is not None:
                bounds.update({start: min(rows, bounds.get(start, rows)) for start in starts})
            if starts and ((node.op_type in _CARRIERS and index == 0) or node.op_type == "Concat"):
                carried.setdefault(node.output[0], set()).update(starts)
    return bounds


def _table_rows(node: onnx.NodeProto, index: int, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """Return the length of the table that input `index` of a node indexes, None without a table."""
    place = _TABLES.get((node.op_type, index))
    shape = shapes.get(node.input[place]) if place is not None and place < len(node.input) else None
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
    return shape[axis] if shape and -len(shape) <= axis < len(shape) else None

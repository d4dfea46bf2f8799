"""Sizes of made-up inputs for which every convolution and pooling of a model has room."""

from __future__ import annotations

from collections.abc import Mapping

from rlx_ort import made_up
from rlx_ort.converters.to_onnx.exporter import drafted
from rlx_ort.errors import InputError, RlxError
from rlx_ort.ir.graph import Graph
from rlx_ort.providers.kernel_limits import attributes_of, is_below_window
from rlx_ort.selection.folding import sized_outline
from rlx_ort.selection.predict import dims_of

_WINDOWS = frozenset({"AveragePool", "Conv", "LpPool", "MaxPool"})
_SCALES = tuple(2**power for power in range(14))
_MOST_PIXELS = 1024


def fitting_sizes(graph: Graph, given: Mapping[str, int]) -> tuple[int, int, int]:
    """Return `assume` of `made_up.random_inputs`: its default, or longer inputs and larger images where needed.

    Args:
        graph: the graph.
        given: the sizes by dim that stay as they are.

    Raises:
        InputError: no size is large enough, or a given one is too small.
        GraphVerifyError: no input has a dim that `given` names.
    """
    batch, length, pixels = made_up.SIZE_CHOICES[0]
    for scale in _SCALES:
        assume = batch, length * scale, min(pixels * scale, _MOST_PIXELS)
        dims = dims_of(graph, made_up.shaped_inputs(graph.input_types, given, assume).arrays)
        small = _outgrown_window(graph, dims)
        if not small:
            return assume
    raise InputError(
        f"no inputs can be generated: node {small!r} needs larger sizes than "
        f"{', '.join(f'{name}={size}' for name, size in dims.items())}; give larger sizes with --dim"
    )


def _outgrown_window(graph: Graph, dims: Mapping[str, int]) -> str:
    """Return the first convolution or pooling whose window is longer than its input; empty if there is none.

    ONNX's inference rounds the negative number of steps to 0, so that the size of the result does not show it.
    """
    try:
        draft = drafted(graph)
        if 0 in dims.values() or not any(node.op_type in _WINDOWS for node in draft.outline.nodes):
            return ""
        nodes = sized_outline(draft, graph.weights, dims).nodes
    except RlxError:
        return ""  # whoever runs the graph raises the error
    windows = (node for node in nodes if node.op_type in _WINDOWS)
    return next((node.name for node in windows if is_below_window(node, attributes_of(node), dims)), "")

"""`SizeChecks`: refuses runs by the sizes of their inputs, before a kernel that lacks the check sees them.

A check looks at the nodes of operators that have limits in the provider's file, with the types that ONNX infers for the
sizes of named dims. Sizes that were judged are kept, so that the same ones cost a lookup.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlx_ort.converters.protos import LONGEST_VECTOR, infer_proto
from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode, Outline
from rlx_ort.device import Device
from rlx_ort.errors import EngineError, InputError
from rlx_ort.execution.inputs import sizes_of
from rlx_ort.faults import CANNOT_RUN
from rlx_ort.ir.types import Dim, Shape, TensorType, ValueType
from rlx_ort.providers.kernel_limits import input_dims, limited_nodes
from rlx_ort.providers.registry import provider_of

if TYPE_CHECKING:
    import onnx

    from rlx_ort.execution.interface import Outputs
    from rlx_ort.providers.base import Provider

_MOST_JUDGED = 1024  # sizes that are known to fit
_MOST_ROOMY = 16  # of these, those that no others are as large as
_CONCAT = ("", "Concat")


@dataclass(eq=False, repr=False)
class SizeChecks:
    """The checks of a graph on a device.

    Args:
        provider: whose kernels run it.
        device: the device.
        exported: the model.
        input_types: name -> type of the inputs of the user's graph.
        named: has the placement of the session opened last.
    """

    provider: Provider
    device: Device
    exported: ExportedModel
    input_types: Mapping[str, ValueType]
    named: type[Outputs]

    def __post_init__(self) -> None:
        self._judged: set[frozenset[tuple[str, int]]] = set()
        self._roomy: list[Mapping[str, int]] = []  # sizes that had room for every node, none as large as another
        self._vectors: tuple[Mapping[str, int], int] | None = None  # sizes, and the length of the longest vector there

    def check(self, sizes: Mapping[str, int], empty: bool) -> None:
        """Refuse a run whose sizes do not fit, or which a kernel of the device cannot take, judged by named dims.

        These are checks that kernels lack: rows of a table of rotations; tensors without elements, which come of inputs
        without elements (`empty`) and of nodes that cut a part out; windows that do not fit into their inputs. Dims
        that values decide are not judged.

        Raises:
            InputError: the sizes do not fit.
            EngineError: the kernel of a node fails, is wrong or ends the process with these sizes.
        """
        for name, length, rows in self._rotations:
            if sizes.get(length, 0) > rows:
                raise InputError(
                    f"node {name!r} rotates {sizes[length]} places ({length!r}), and its table has {rows} rows; feed "
                    "fewer, or make the table longer"
                )
        small = self._has_least and not self._are_roomy(sizes)
        if not (empty or self._unsized or small):
            return
        given = frozenset(sizes.items())
        if given in self._judged:
            return
        bound = self._bound_nodes(sizes)
        nodes = [_sized(node, sizes) for node in bound]
        for node in nodes:
            _check_joined(node)
        for device, node, why in self.limited(nodes):
            shapes = ", ".join(map(str, node.inputs))
            raise EngineError(
                f"{device.display} {CANNOT_RUN} {node.name!r} ({node.pattern.op_type}) on {shapes}: {why}. "
                f"Run these inputs on {another(self.device)}."
            )
        if not self._judged and self._unsized and len(self._without_elements(bound)) == self._unsized:
            self._unsized = 0  # values decide, and not sizes
        if small:
            self._roomy = [known for known in self._roomy if not _as_large(known, sizes)][: _MOST_ROOMY - 1]
            self._roomy.append(dict(sizes))
        if len(self._judged) == _MOST_JUDGED:
            self._judged.clear()
        self._judged.add(given)

    def output_shapes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the outputs that follow from those of the inputs by named dims, as ONNX infers them.

        Infers the types of the whole model: 50 ms for a DistilBERT (two cores of an AMD EPYC).
        """
        sizes = sizes_of(self.input_types, shapes) if open_dims(self.input_types) else {}
        types = infer_proto(self._bound_model(sizes))
        known = {value.name: types.get(value.name) for value in self.exported.model.graph.output}
        return {
            name: kind.shape.static()
            for name, kind in known.items()
            if isinstance(kind, TensorType) and kind.shape is not None and kind.shape.is_static
        }

    @functools.cached_property
    def _unsized(self) -> int:
        """How many nodes the device could not take without elements, which named dims alone do not rule out."""
        return len(self._without_elements(self.exported.nodes))

    @functools.cached_property
    def _has_least(self) -> bool:
        """Whether a node of the device may lack room at some sizes: its window is open, or does not fit into ones."""
        named = dict.fromkeys(open_dims(self.input_types), 1)
        nodes = [_sized(node, named, 1) for node in self._nodes_under(self.exported.nodes, "small")]
        return self._windows_vary or any(True for _ in self.limited(nodes, only="small"))

    @functools.cached_property
    def _windows_vary(self) -> bool:
        """Whether a window or its channels have no size of their own, so that larger sizes do not say that it fits."""
        windowed = [node for node in self._nodes_under(self.exported.nodes, "small") if len(node.inputs) > 1]
        shapes = [(input_dims(node, 0), input_dims(node, 1)) for node in windowed]
        return any(x is None or window is None or not Shape((*x[1:2], *window)).is_static for x, window in shapes)

    def _are_roomy(self, sizes: Mapping[str, int]) -> bool:
        """Return whether smaller sizes were judged, and had room for every node."""
        return not self._windows_vary and any(_as_large(sizes, known) for known in self._roomy)

    def _nodes_under(
        self, nodes: Sequence[ExportedNode], only: str = "", *others: tuple[str, str]
    ) -> list[ExportedNode]:
        """Return the nodes of operators that have limits, of one kind (`empty` or `small`) or of any, and of others."""
        limits = [limit for each in (self.provider, self._helper) for limit in each.limits]
        limited = {(limit.domain, limit.op_type) for limit in limits if not only or getattr(limit, only)}
        operators = limited | {*others}
        given = [node for node in nodes if not node.shape_only]
        return [node for node in given if (node.pattern.domain, node.pattern.op_type) in operators]

    def _without_elements(self, nodes: Sequence[ExportedNode]) -> list[tuple[Device, ExportedNode, str]]:
        """Return the nodes that no kernel takes if each dim that no input names is 0, with their device and why."""
        named = dict.fromkeys(open_dims(self.input_types), 1)
        under = self._nodes_under(nodes, "empty")
        hidden = [node for node in under if _sized(node, named, 0).inputs != _sized(node, named).inputs]
        return [*self.limited([_sized(node, named, 0) for node in hidden], only="empty")]

    @functools.cached_property
    def _helper(self) -> Provider:
        """The provider of the CPU, on which nodes run that the device does not take."""
        found = provider_of(Device.CPU)
        assert found is not None  # noqa: S101  # it is always there
        return found

    def limited(self, nodes: Sequence[ExportedNode], *, only: str = "") -> Iterator[tuple[Device, ExportedNode, str]]:
        """Yield the nodes that a kernel is known to fail on or to get wrong, with their device and the reason.

        With `only`, `empty` or `small`, other limits do not count.
        """
        placement = self.named.placement
        sites = {} if placement is None else placement.sites
        beside = {name for name, ep in sites.items() if placement is not None and ep != placement.requested}
        for device, provider, helps in ((self.device, self.provider, False), (Device.CPU, self._helper, True)):
            limits = [limit for limit in provider.limits if not only or getattr(limit, only)]
            there = [node for node in nodes if (node.name in beside) == helps]
            yield from ((device, *each) for each in limited_nodes(there, limits, self.exported.known))

    def _bound_nodes(self, sizes: Mapping[str, int]) -> Sequence[ExportedNode]:
        """Return the nodes that have limits or join, with the types that ONNX infers for these sizes.

        Takes 1.4 ms for the 38 nodes of a text recogniser (two cores of an AMD EPYC), the first time twice as long.
        """
        outline, others, _ = self._judged_nodes
        if not outline.nodes or sizes.keys().isdisjoint(open_dims(self.input_types)):
            return outline.nodes
        bound = self._bound_model(sizes)
        if self._vectors is None:
            types = infer_proto(bound)
            shapes = [kind.shape for kind in types.values() if isinstance(kind, TensorType) and kind.shape is not None]
            lengths = [shape[0] for shape in shapes if len(shape) == 1 and isinstance(shape[0], int)]
            self._vectors = sizes, max(lengths, default=0)
        else:
            known, longest = self._vectors
            growth = math.prod(max(1.0, size / max(1, known.get(dim, 1))) for dim, size in sizes.items())
            types = infer_proto(bound, others, few_elements=longest * growth <= LONGEST_VECTOR)
        return outline.with_types(types).nodes

    def _bound_model(self, sizes: Mapping[str, int]) -> onnx.ModelProto:
        """Return the model without types but its inputs', which have these sizes."""
        *_, untyped = self._judged_nodes
        bound = type(untyped)()
        bound.CopyFrom(untyped)
        for dim in (dim for value in bound.graph.input for dim in value.type.tensor_type.shape.dim):
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
        return bound

    @functools.cached_property
    def _judged_nodes(self) -> tuple[Outline, Collection[str], onnx.ModelProto]:
        """The nodes that have limits or join, the values of others, and the model without types but its inputs'."""
        nodes = self._nodes_under(self.exported.nodes, "", _CONCAT)
        theirs = {name for node in nodes for name in (*node.input_names, *node.output_names)}
        others = {name for node in self.exported.nodes for name in node.output_names} - theirs
        model = copy.deepcopy(self.exported.model)
        del model.graph.value_info[:]
        for value in model.graph.output:
            value.type.tensor_type.ClearField("shape")
        return replace(Outline.of_model(self.exported), nodes=nodes), others, model

    @functools.cached_property
    def _rotations(self) -> list[tuple[str, str, int]]:
        """The nodes that rotate from a known place on: name, the dim of how many places, and rows that are left."""
        nodes = [node for node in self.exported.nodes if node.pattern.op_type == "RotaryEmbedding"]
        nodes = [node for node in nodes if node.pattern.domain]  # that of ai.onnx takes tables of the places themselves
        if not nodes:
            return []
        known, rotations = self.exported.known, []
        for node in nodes:
            x, table, first = input_dims(node, 0), input_dims(node, 2), known.get(node.input_names[1])
            if x is None or table is None or first is None or math.prod(first.shape) != 1:
                continue  # places that are fed or computed are not known
            length, rows = x[-2], table[0]
            if isinstance(length, str) and isinstance(rows, int):
                rotations.append((node.name, length, rows - int(first.numpy().item())))
        return rotations


def another(device: Device) -> str:
    """Return words for another device than this one."""
    return "another device" if device == Device.CPU else "another device, such as the CPU"


def open_dims(types: Mapping[str, ValueType]) -> dict[str, list[tuple[str, int]]]:
    """Return the inputs and axes of each named dim; nothing if a dim has neither a name nor a size."""
    places: dict[str, list[tuple[str, int]]] = {}
    for name, kind in types.items():
        if not isinstance(kind, TensorType) or kind.shape is None or None in kind.shape:
            return {}
        for axis, dim in enumerate(kind.shape):
            if isinstance(dim, str):
                places.setdefault(dim, []).append((name, axis))
    return places


def _sized(node: ExportedNode, sizes: Mapping[str, int], other: int | None = None) -> ExportedNode:
    """Return a node whose input types have the sizes of named dims, and `other` for the rest if it is given."""

    def size_of(dim: Dim) -> Dim:
        if isinstance(dim, int):
            return dim
        return sizes.get(dim, dim if other is None else other) if isinstance(dim, str) else other

    inputs = tuple(
        TensorType(kind.dtype, Shape(map(size_of, kind.shape)))
        if isinstance(kind, TensorType) and kind.shape is not None
        else kind
        for kind in node.inputs
    )
    pattern = node.pattern.alike(inputs, node.outputs, shape_only=node.shape_only)
    return node._replace(pattern=pattern)


def _as_large(sizes: Mapping[str, int], least: Mapping[str, int]) -> bool:
    """Return whether no size is below another one of the same dim."""
    return all(sizes.get(dim, 0) >= size for dim, size in least.items())


def _check_joined(node: ExportedNode) -> None:
    """Refuse a `Concat` of sizes that do not fit.

    ONNX Runtime's kernels leave inputs without elements out of that check, but not out of the output, whose part is
    then memory that nothing has written. An input of size 0 along the axis has no part in it.

    Raises:
        InputError: the dims beside the axis differ.
    """
    if (node.pattern.domain, node.pattern.op_type) != _CONCAT:
        return
    shapes = [kind.shape for kind in node.inputs if isinstance(kind, TensorType) and kind.shape is not None]
    axis = node.pattern.attributes["axis"].value
    parts = [tuple(shape) for shape in shapes if -len(shape) <= axis < len(shape) and shape[axis] != 0]
    for place in range(max(map(len, parts), default=0)):
        sizes = {dims[place] for dims in parts if place < len(dims) and place != axis % len(dims)}
        if len({size for size in sizes if isinstance(size, int)}) > 1:
            joined = ", ".join(map(str, node.inputs))
            raise InputError(
                f"node {node.name!r} joins {joined} along axis {axis}, and their dims {place} differ; feed inputs that "
                "agree in every other dim"
            )
